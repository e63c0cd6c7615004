"""Nodes that stay up for many tests and have imported torch, so that a job of theirs costs a fork."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from conftest import Cli, leftovers

from support.faults import OPTIONS


def of_each_engine(make: Callable[[str], "Ready"]) -> Iterator[Callable[[str], "Ready"]]:
    """Nodes of each engine that stay up, made when they are asked for; for a fixture of the whole session."""
    made: dict[str, Ready] = {}
    yield lambda engine: made.get(engine) or made.setdefault(engine, make(engine))
    for nodes in made.values():
        nodes.down()


class Ready(Cli):
    """Four nodes, and the folder whose jobs use them; jobs that ask for other ones get their own."""

    options: tuple[str, ...] = ("--trainers", "3", *OPTIONS)

    def __init__(self, folder: Path, engine: str) -> None:
        super().__init__(folder)
        self.engine, self.cluster = engine, ""

    def up(self) -> None:
        """Have the nodes up, in a folder without jobs."""
        (self.folder / "enough").unlink(missing_ok=True)
        for run in self.folder.glob("runs/*"):
            if run.name != self.cluster:
                shutil.rmtree(run)
        if not self.cluster:
            done = self("up", "--engine", self.engine, *self.options)
            assert done.returncode == 0, done.stderr
            self.cluster = done.stdout.strip()

    def settle(self) -> None:
        """After a test: start anew where it has left a job, for it has failed."""
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
