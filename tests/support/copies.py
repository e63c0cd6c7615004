"""The copies that a job makes in a folder, without a job."""

from pathlib import Path

import pytest

from orchestrate import clock as clocks
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder
from orchestrate.record.report import Copied
from orchestrate.spec.spec import JobSpec
from orchestrate.storage.store import open_store
from orchestrate.supervise.checkpoint_copies import StoreCopies
from support.object_stores import Saved


class Copies:
    """The copies that the job in `run` makes of its checkpoints, and of its `output`; `stops` are requests to stop."""

    def __init__(self, folder: Path, output: bool = False, stops: int = 0, clock: clocks.Clock = clocks.SYSTEM) -> None:
        self.job, self.stops = Saved(folder / "run"), stops
        spec = JobSpec(checkpoints=f"file://{folder}/store", output=f"file://{folder}/output" if output else "")
        self.emit = Recorder(folder / "events.jsonl", clock=clock)
        self.stored = StoreCopies(spec, JobPaths(folder / "run"), lambda: self.stops, self.emit)

    def end(self, refused: str = "") -> list[Copied]:
        copies = self.stored.end(refused)
        self.emit.close()
        return copies


@pytest.fixture
def earlier(tmp_path) -> None:
    """Checkpoints of an earlier run in the store."""
    saved = Saved(tmp_path / "before")
    saved.write("last.pt", b"weights")
    saved.copy(open_store(f"file://{tmp_path}/store"))
