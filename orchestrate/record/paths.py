"""The files of a job or cluster."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from orchestrate.dataclass import dataclass
from orchestrate.files.folder import Folder
from orchestrate.files.paths import CHECKPOINTS, JOB, LOGS, METRICS, NAME, NODES, PAGE, WORK, log
from orchestrate.host import records
from orchestrate.node.ranks import FENCE


@dataclass(frozen=True)
class JobPaths:
    """The files of a job or cluster in `runs/<name>/`, which nodes cannot see.

    Nodes see the folder `job` in it, or `nodes` of a cluster; for a job on a cluster, `job` is a link to
    `../CLUSTER/nodes/JOB`. Links next to `job` are for users and scripts; our code opens files of nodes by `folder`.
    """

    root: Path

    @property
    def spec(self) -> Path:
        """The resolved job without the values of secrets; `run` accepts it as a job file."""
        return self.root / "job.yaml"

    @property
    def plan(self) -> Path:
        """Nodes and workers with their environment variables."""
        return self.root / "plan.json"

    @property
    def events(self) -> Path:
        """Events, one per line."""
        return self.root / "events.jsonl"

    @property
    def report(self) -> Path:
        """The report of the job."""
        return self.root / "report.json"

    @property
    def reserve(self) -> Path:
        """Space for the last events and the report."""
        return self.root / ".reserve"

    @property
    def metrics(self) -> Path:
        """Metrics that the script writes, one line each."""
        return self.root / METRICS

    @property
    def checkpoints(self) -> Path:
        """The folder of the script's checkpoints."""
        return self.root / CHECKPOINTS

    @property
    def work(self) -> Path:
        """The working directory of the workers, if that is a copy of the code folder."""
        return self.root / WORK

    @property
    def page(self) -> Path:
        """The page about the job, once it has ended."""
        return self.root / PAGE

    @property
    def copied(self) -> Path:
        """The files that were copied to `work`, as JSON: size and modification time by path."""
        return self.root / "copied.json"

    @property
    def logs(self) -> Path:
        """The folder of the workers' logs."""
        return self.root / LOGS

    @property
    def written_metrics(self) -> Path:
        """How many bytes of the script's metrics are in TensorBoard's events."""
        return self.root / ".metrics"

    @property
    def times(self) -> Path:
        """When the lines of the logs were read, as JSON lines: how many bytes of which log."""
        return self.root / "times.jsonl"

    @property
    def patch(self) -> Path:
        """What differs in the code folder from its Git commit, if anything does."""
        return self.root / "changes.patch"

    @property
    def usage(self) -> Path:
        """What the workers use, as JSON, while another process asks for it."""
        return self.root / "usage.json"

    @property
    def usage_asked(self) -> Path:
        """The file by which another process asks for `usage`: the time of its last change counts."""
        return self.root / "usage.asked"

    @property
    def stacks(self) -> Path:
        """Stacks of the workers, as JSON, for another process."""
        return self.root / "stacks.json"

    @property
    def stacks_asked(self) -> Path:
        """The file by which another process asks for `stacks`."""
        return self.root / "stacks.asked"

    @property
    def debugged(self) -> Path:
        """The file that is locked while a worker is being debugged."""
        return self.root / "debugged"

    @property
    def fence(self) -> Path:
        """The fence: the generation whose workers may save, and start unless it is `over`."""
        return self.shared / FENCE

    @property
    def orchestrate_log(self) -> Path:
        """The log of the orchestrator for the job."""
        return self.root / "orchestrate.log"

    @property
    def services_log(self) -> Path:
        """The last output of the job's services."""
        return self.root / "services.log"

    @property
    def supervisor_log(self) -> Path:
        """The output of a detached supervisor."""
        return self.root / "supervisor.log"

    @property
    def lock(self) -> Path:
        """The lock file that the job's supervisor holds while it runs."""
        return self.root / "supervisor.lock"

    @property
    def batch(self) -> Path:
        """The number of the job of Slurm that supervises the job, if there is one."""
        return self.root / "slurm-job"

    @property
    def script(self) -> Path:
        """The batch script that was submitted to Slurm."""
        return self.root / "slurm.sh"

    @property
    def stop_asked(self) -> Path:
        """The file by which another machine asks the supervisor to stop: a signal may also be that of a scheduler."""
        return self.root / "stop.asked"

    @property
    def addresses(self) -> Path:
        """The folder in which nodes on other machines, which share it, write where they listen."""
        return self.root / "addresses"

    @property
    def shared(self) -> Path:
        """The job folder, which nodes see as `$JOB_DIR`."""
        return self.root / JOB

    @property
    def sockets(self) -> Path:
        """The folder of sockets of containers on this machine, writable by nodes; it exists as long as they do."""
        return self.root / "sockets"

    @property
    def nodes(self) -> Path:
        """The folder that a cluster's nodes see, with a folder for each job."""
        return self.root / NODES

    @property
    def private(self) -> Path:
        """The file that marks a cluster which only the program uses that has started it."""
        return self.root / "private"

    @property
    def cluster(self) -> str:
        """The cluster whose nodes the job uses; empty if the job has its own."""
        try:
            link = os.readlink(self.shared)
        except OSError:  # no link
            return ""
        match = re.fullmatch(rf"\.\./({NAME.pattern})/{NODES}/{re.escape(self.root.name)}", link)
        return match[1] if match else ""

    @property
    def folder(self) -> Folder:
        """The job folder, for safe access to files of nodes."""
        if cluster := self.cluster:
            there = self.root.parent / cluster
            return Folder(there, f"{NODES}/{self.root.name}", records.inode(there))
        return Folder(self.root, JOB, records.inode(self.root))

    def log(self, rank: int) -> Path:
        """Return the path of a worker's log."""
        return self.root / log(rank)

    def create(
        self,
        cluster: str = "",
        owner: tuple[int, int] | None = None,
        hidden: Mapping[str, str] | None = None,
        work: bool = False,
    ) -> None:
        """Create the folders: private ones, and the nodes' folder for the user and group ids `owner`.

        `work` is whether the job has its own working directory. The record contains the values of secrets, `hidden`,
        and a key for the job's own nodes. Raises FileExistsError if the run directory exists, OSError or UsageError if
        it cannot be created.
        """
        self._create_root(b"" if cluster else secrets.token_bytes(32), hidden)
        if cluster:
            self.shared.symlink_to(f"../{cluster}/{NODES}/{self.root.name}")
        folders = (LOGS, CHECKPOINTS, *([WORK] if work else []))
        self.folder.make(*folders, owner=owner)
        for name in (*folders, METRICS):
            (self.root / name).symlink_to(f"{JOB}/{name}")

    def create_cluster(self, owner: tuple[int, int] | None = None, hidden: Mapping[str, str] | None = None) -> None:
        """Create the folders of a cluster, and its record; raises like `create`."""
        self._create_root(secrets.token_bytes(32), hidden)
        Folder(self.root, NODES).make(owner=owner)

    def _create_root(self, key: bytes, hidden: Mapping[str, str] | None) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self.root.mkdir(0o700)
        records.make(self.root, key, hidden)
