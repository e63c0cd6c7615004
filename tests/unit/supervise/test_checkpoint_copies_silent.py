"""A store that answers no request must keep no job from starting or ending."""

import itertools
import threading
from collections.abc import Iterator

import pytest
from support.copies import Copies
from support.scripted import Clock

from orchestrate.errors import StorageError
from orchestrate.storage.local import Local
from orchestrate.supervise.checkpoint_copies import NO_PROGRESS


class Ticking(Clock):
    """A clock that advances by ten seconds each time it is read."""

    def monotonic(self) -> float:
        self.now += 10.0
        return self.now


@pytest.fixture
def silent(monkeypatch) -> Iterator[None]:
    """A store that answers no request until the end of the test."""
    gate = threading.Event()
    for name in ("put", "read"):
        monkeypatch.setattr(Local, name, lambda *_: gate.wait())
    yield
    gate.set()


@pytest.mark.usefixtures("silent")
def test_the_end_of_a_job_must_not_wait_long_for_one_request(tmp_path):
    copies = Copies(tmp_path, output=True, clock=Ticking())
    copies.job.write("last.pt", b"weights")
    (copied,) = copies.end()
    assert (copied.files, copied.error) == (0, "copying was stopped")
    assert copies.emit.seconds() > NO_PROGRESS
    copies.stored.paths.report.write_text("{}")
    with pytest.raises(StorageError, match="has not stored all of the record in time"):
        copies.stored.publish()


@pytest.mark.usefixtures("earlier", "silent")
def test_a_job_that_is_stopped_while_it_fetches_checkpoints_must_not_wait_for_the_request(tmp_path):
    copies, asked = Copies(tmp_path), itertools.count()
    copies.stored.begin(lambda: next(asked) > 3)
    assert not copies.emit.events and not copies.job.files()
    copies.end("nodes may still write")
