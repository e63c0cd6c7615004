"""Every file of a job has its name here, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
NODE = PACKAGE / "node"


def project() -> Path:
    """The folder that holds docker-compose.yml, Dockerfile and app/: the checkout, or the installed package's copy."""
    installed = PACKAGE / "project"
    return installed if installed.is_dir() else PACKAGE.parent


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
    def lock(self) -> Path:
        """Held by the job's supervisor as long as it lives; contains its process id."""
        return self.root / "supervisor.lock"

    def log(self, rank: int) -> Path:
        """All that one worker wrote."""
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        """Make the folders; raises FileExistsError where the job has some already, OSError where it cannot."""
        self.root.mkdir(parents=True)
        self.logs.mkdir()
        self.checkpoints.mkdir()
