"""Nodes that stay up for many tests and have imported torch, so that a job costs only a fork."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from support.cli import Cli
from support.faults import OPTIONS
from support.leftovers import leftovers


def of_each_engine(make: Callable[[str], "Ready"]) -> Iterator[Callable[[str], "Ready"]]:
    """Nodes of each engine that stay up, created on first use, for a session-scoped fixture."""
    clusters: dict[str, Ready] = {}
    yield lambda engine: clusters.get(engine) or clusters.setdefault(engine, make(engine))
    for nodes in clusters.values():
        nodes.down()


class Ready(Cli):
    """Four nodes, and the folder whose jobs use them; a job with other options gets its own nodes."""

    options: tuple[str, ...] = ("--trainers", "3", *OPTIONS)

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder)
        self.engine, self.cluster = engine, ""

    def up(self) -> None:
        """Bring up the nodes if they are not, and clear the folder of jobs."""
        for run in self.folder.glob("runs/*"):
            if run.name != self.cluster:
                shutil.rmtree(run)
        if not self.cluster:
            done = self("up", "--engine", self.engine, *self.options)
            assert done.returncode == 0, done.stderr
            self.cluster = done.stdout.strip()

    def settle(self) -> None:
        """Clean up after a test: if it has failed and left a job, remove the cluster as well."""
        if any(process.returncode is None for process in self.started):
            self.clean()
            shutil.rmtree(self.folder / "runs")
            self.cluster = ""
        self.started.clear()

    def down(self) -> None:
        if self.cluster:
            done = self("down", self.cluster)
            assert done.returncode == 0, done.stderr
        assert leftovers(self.folder) == {}
