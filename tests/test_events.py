"""The events of a job, which another supervisor goes on with."""

from __future__ import annotations

import resource

from orchestrate.events import Recorder, objects


def test_an_event_of_which_the_disk_took_a_part_must_be_whole_once_there_is_room(tmp_path):
    path = tmp_path / "events.jsonl"
    emit = Recorder(path)
    emit("first")
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        emit("second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    emit("third")
    assert path.read_text().count("\n") == 3
    assert list(objects(path)) == emit.events
    emit.close()
