"""Every file of a job has its name here, and nowhere else."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrate.files import records
from orchestrate.files.folder import Folder
from orchestrate.node.ranks import FENCE

PACKAGE = Path(__file__).resolve().parents[1]
NODE = PACKAGE / "node"


SHIPPED = PACKAGE / "project"  # in a wheel alone
PROJECT = SHIPPED if SHIPPED.is_dir() else PACKAGE.parent  # with docker-compose.yml, Dockerfile and app/


def hidden() -> bool:
    """Whether the current folder has an `app` of its own, which hides ours."""
    return Path.cwd() != PROJECT and any(Path(name).exists() for name in ("app", "app.py"))


def code_folder(command: tuple[str, ...]) -> Path:
    """The folder in which a command runs: the current one, but for our own app where that has none of this name."""
    ours = command[0] == "-m" and command[1].split(".")[0] == "app"
    return PROJECT if ours and not any(Path(name).exists() for name in ("app", "app.py")) else Path.cwd()


def is_text(value: str) -> bool:
    """Whether a path or an argument, which can be any bytes, is text that a file in UTF-8 can hold."""
    return "\0" not in value and value.encode(errors="replace").decode() == value


NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,60}")  # a job's or a cluster's, as `store.new_id` makes them
JOB, NODES = "job", "nodes"  # the folders that nodes see: of a job, and of a cluster
LOGS, CHECKPOINTS, METRICS = "logs", "checkpoints", "metrics.jsonl"  # what is in that of a job


@dataclass(frozen=True)
class JobPaths:
    """The files of one job, or of a cluster, below `runs/<name>/`, which no node sees.

    Nodes see the folder `job` in it, or `nodes` in that of a cluster; while a job is on a cluster, its `job` is a link
    to `../CLUSTER/nodes/JOB`. What nodes write has links beside `job`, for people and scripts; we open it by `folder`.
    """

    root: Path

    @property
    def spec(self) -> Path:
        """The job as resolved from file and flags, without the values of secrets; `run` takes it as a job file."""
        return self.root / "job.yaml"

    @property
    def plan(self) -> Path:
        """Nodes and workers with their environment."""
        return self.root / "plan.json"

    @property
    def events(self) -> Path:
        """What happened, a line each."""
        return self.root / "events.jsonl"

    @property
    def report(self) -> Path:
        """How it ended."""
        return self.root / "report.json"

    @property
    def metrics(self) -> Path:
        """What the script measured, a line each; the script writes it."""
        return self.root / METRICS

    @property
    def checkpoints(self) -> Path:
        """What the script saved."""
        return self.root / CHECKPOINTS

    @property
    def logs(self) -> Path:
        """The folder of the workers' output."""
        return self.root / LOGS

    @property
    def fence(self) -> Path:
        """The generation whose workers may save; and start, unless it is `over`."""
        return self.shared / FENCE

    @property
    def orchestrate_log(self) -> Path:
        """What the orchestrator did for the job, in detail."""
        return self.root / "orchestrate.log"

    @property
    def supervisor_log(self) -> Path:
        """What a detached supervisor has to say."""
        return self.root / "supervisor.log"

    @property
    def lock(self) -> Path:
        """Held by the job's supervisor as long as it lives."""
        return self.root / "supervisor.lock"

    @property
    def shared(self) -> Path:
        """What a job's nodes see as `$JOB_DIR`."""
        return self.root / JOB

    @property
    def sockets(self) -> Path:
        """Where nodes in containers of this machine listen; they can write in it. It is there while they are."""
        return self.root / "sockets"

    @property
    def nodes(self) -> Path:
        """What a cluster's nodes see, with a folder for each job on it."""
        return self.root / NODES

    @property
    def cluster(self) -> str:
        """The cluster whose nodes the job uses; empty where it has its own."""
        try:
            link = os.readlink(self.shared)
        except OSError:  # no link
            return ""
        match = re.fullmatch(rf"\.\./({NAME.pattern})/{NODES}/{re.escape(self.root.name)}", link)
        return match[1] if match else ""

    @property
    def folder(self) -> Folder:
        """What nodes have written."""
        if cluster := self.cluster:
            return Folder(self.root.parent / cluster / NODES, self.root.name)
        return Folder(self.root, JOB)

    def log(self, rank: int) -> Path:
        """All that one worker wrote."""
        return self.root / log(rank)

    def create(
        self, cluster: str = "", owner: tuple[int, int] | None = None, hidden: Mapping[str, str] | None = None
    ) -> None:
        """Make the folders, ours for us alone, and that of the nodes for the user and group ids `owner`.

        Their record has the values of secrets, `hidden`, and a key for the job's own nodes. Raises FileExistsError
        where the job has some already, OSError or UsageError where it cannot.
        """
        self._make(b"" if cluster else secrets.token_bytes(32), hidden)
        if cluster:
            self.shared.symlink_to(f"../{cluster}/{NODES}/{self.root.name}")
        self.folder.make(LOGS, CHECKPOINTS, owner=owner)
        for name in (LOGS, CHECKPOINTS, METRICS):
            (self.root / name).symlink_to(f"{JOB}/{name}")

    def create_cluster(self, owner: tuple[int, int] | None = None, hidden: Mapping[str, str] | None = None) -> None:
        """Make the folders of a cluster, and its record; raises as `create` does."""
        self._make(secrets.token_bytes(32), hidden)
        Folder(self.root, NODES).make(owner=owner)

    def _make(self, key: bytes, hidden: Mapping[str, str] | None) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(0o700)
        records.make(self.root, key, hidden)


def log(rank: int) -> str:
    """The log of a worker, in a job's folder."""
    return f"{LOGS}/rank-{rank}.log"
