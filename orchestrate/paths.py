"""Every file of a job has its name here, and nowhere else."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from orchestrate.node.ranks import FENCE

PACKAGE = Path(__file__).resolve().parent
NODE = PACKAGE / "node"


PROJECT = PACKAGE.parent  # the checkout, with docker-compose.yml, Dockerfile and app/


def code_folder(command: tuple[str, ...]) -> Path:
    """The folder in which a command runs: the current one, but for our own app where that has none of this name."""
    ours = command[0] == "-m" and command[1].split(".")[0] == "app"
    return PROJECT if ours and not any(Path(name).exists() for name in ("app", "app.py")) else Path.cwd()


def open_regular(path: Path) -> BinaryIO:
    """Open a file that a job wrote; raises OSError for a link or a pipe, with which it could make us read or wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def write_whole(path: Path, text: str) -> None:
    """Write a file of ours, whole or not at all, through no link that a job may have put in its place."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that nobody else can read; raises OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)


@dataclass(frozen=True)
class JobPaths:
    """The files of one job, below `runs/<job_id>/`."""

    root: Path

    @property
    def spec(self) -> Path:
        """The job as resolved from file and flags; `run` takes it as a job file."""
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
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """What the script saved."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of the workers' output."""
        return self.root / "logs"

    @property
    def fence(self) -> Path:
        """The generation whose workers may save; and start, unless it is `over`."""
        return self.root / FENCE

    @property
    def supervisor_log(self) -> Path:
        """What a detached supervisor has to say."""
        return self.root / "supervisor.log"

    @property
    def lock(self) -> Path:
        """Held by the job's supervisor as long as it lives."""
        return self.root / "supervisor.lock"

    @property
    def key(self) -> Path:
        """What whoever talks to the nodes must know, where those are on other machines."""
        return self.root / ".key"

    def log(self, rank: int) -> Path:
        """All that one worker wrote."""
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        """Make the folders; raises FileExistsError where the job has some already, OSError where it cannot."""
        self.root.mkdir(parents=True)
        self.logs.mkdir()
        self.checkpoints.mkdir()
