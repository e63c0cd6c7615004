"""Events must be kept in order and whole, and say of a job what a second supervisor has to know."""

import json
import os
import resource

import pytest
from support.scripted import Clock

from orchestrate.job.events import History, Recorder, objects
from orchestrate.job.outcomes import Cause, GenerationResult


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("orchestrate.job.events.time", made)
    return made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def kept(path) -> list[dict]:
    """The events that are in the file."""
    return objects(path.read_bytes().splitlines())


def test_an_event_must_be_in_the_file_in_memory_and_shown_at_once(path, clock):
    shown = []
    emit = Recorder(path, shown.append)
    clock.sleep(1.5)
    emit("hang", after=20.0, states={"0": "S"})
    first = {"event": "hang", "time": 1_000_001.5, "seconds": 1.5, "after": 20.0, "states": {"0": "S"}}
    assert kept(path) == emit.events == shown == [first]  # it is read while the recorder is still open
    emit("engine_back")
    emit.close()
    assert [event["event"] for event in kept(path)] == ["hang", "engine_back"]


def test_a_second_recorder_must_go_on_with_the_seconds_of_the_job(path, clock):
    first = Recorder(path)
    first("one")
    clock.sleep(10)
    first("two")
    first.close()
    clock.sleep(60)
    second = Recorder(path)
    clock.sleep(5)
    second("three")
    second.close()
    assert [event["seconds"] for event in kept(path)] == [0.0, 10.0, 75.0]
    assert second.events == kept(path)


def test_a_clock_that_was_set_back_must_not_make_time_negative(path, clock):
    path.write_text(json.dumps({"event": "one", "time": clock.now + 3600, "seconds": 0.0}) + "\n")
    assert Recorder(path).seconds() == 0.0


def test_half_a_line_of_a_process_that_was_killed_must_not_spoil_the_next_event(path):
    path.write_text('{"event": "one", "time": 1.0, "seconds": 0.0}\n{"event": "tw')
    emit = Recorder(path)
    emit("three")
    emit.close()
    assert [event["event"] for event in kept(path)] == ["one", "three"]


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
    assert kept(path) == emit.events
    emit.close()


def test_events_must_be_written_in_order_and_once_when_the_disk_has_room_again(path, monkeypatch):
    emit, write, full = Recorder(path), os.write, [True]

    def full_disk(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full_disk)
    emit("one")
    emit("two")
    assert kept(path) == [] and [event["event"] for event in emit.events] == ["one", "two"]
    full[0] = False
    emit("three")
    emit("four")
    assert [event["event"] for event in kept(path)] == ["one", "two", "three", "four"]


def test_a_recorder_must_leave_no_file_open(path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        emit = Recorder(path)
        emit("one")
        emit.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_is_no_event_must_not_count_as_one(path):
    path.write_text(
        '{"event": "one", "time": 1.0, "seconds": 0.0}\n[1]\n"two"\n{"event": 3}\n{"other": 1}\nnull\n'
        + "[" * 100_000
        + "\n"
    )
    assert [event["event"] for event in Recorder(path).events] == ["one"]
    assert objects([b'{"a": 1}', b"7", b"\xff", b'{"b": 2}']) == [{"a": 1}, {"b": 2}]


# --- whose they are

KEY = bytes(range(32))


def lines(path, *names: str, key: bytes = KEY) -> list[str]:
    """The lines of a file, after events of these names."""
    emit = Recorder(path, key=key)
    for name in names:
        emit(name)
    emit.close()
    return path.read_text().splitlines()


def test_events_must_be_read_with_the_key_that_has_written_them(path):
    lines(path, "one", "two")
    with path.open("a") as file:
        file.write('{"event": "ha')
    lines(path, "three")
    assert [event["event"] for event in kept(path)] == ["one", "two", "three"]
    emit = Recorder(path, key=KEY)
    emit.close()
    assert emit.events == [{name: event[name] for name in event if name != "mac"} for event in kept(path)]


@pytest.mark.parametrize(
    "change",
    [
        lambda had: [had[0].replace("one", "won"), *had[1:]],
        lambda had: had[1:],
        lambda had: [had[0], *had[2:]],
        lambda had: [*had, had[-1]],
        lambda had: [*had, json.dumps({"event": "one", "time": 1.0, "seconds": 0.0})],
        lambda had: [json.dumps({"event": "one", "time": 1.0, "seconds": 0.0, "mac": "0" * 32})],
    ],
    ids=["changed", "first left out", "left out", "twice", "added", "replaced"],
)
def test_events_that_another_hand_has_changed_must_be_refused(path, change):
    path.write_text("".join(f"{line}\n" for line in change(lines(path, "one", "two", "three"))))
    with pytest.raises(ValueError, match="was not written by this job"):
        Recorder(path, key=KEY)


def test_events_that_were_written_with_no_key_or_another_one_must_be_refused(path):
    for key in (b"", KEY[::-1]):
        lines(path, "one", key=key)
        with pytest.raises(ValueError, match="event 1, 'one', was not written by this job"):
            Recorder(path, key=KEY)
        path.unlink()


# --- what they say of a job


def starting(generation: int) -> dict:
    return {"event": "generation_starting", "generation": generation}


EXIT = {"event": "worker_ended", "known": "", "rank": 1, "exit_code": 137}
ENDED = {"event": "generation_ended", "generation": 0, "word": "failed", "why": "a worker failed", "time": 7.0}
ENDED |= {"lasted": 2.5, "step": 30, "progress": True}
CAUSE = {
    "log": "",
    "last_lines": [],
    "rank": 1,
    "node": "trainer-1",
    "exit_code": 137,
    "cause": "killed",
    "summary": "s",
    "hint": "h",
}


def stopping(why: str) -> dict:
    return {"event": "workers_stopping", "why": why}


def test_a_job_of_which_nothing_was_started_must_have_no_history():
    history = History([{"event": "supervisor_started"}, {"event": "nodes_starting"}])
    assert (history.running, history.ended, history.exits) == (-1, [], [])
    assert (history.stopping, history.outcome) == ("", None)


def test_the_generation_that_was_started_last_must_be_the_one_that_runs():
    history = History([starting(0), EXIT])
    assert (history.running, history.exits) == (0, [EXIT])
    history = History([starting(0), EXIT, stopping("a worker failed"), {**ENDED, "cause": CAUSE}, starting(1)])
    assert (history.running, history.exits, history.stopping) == (1, [], "")


def test_why_workers_were_asked_first_to_end_must_be_the_reason():
    assert History([starting(0), stopping("max_run is over"), stopping("stopped by the user")]).stopping == (
        "max_run is over"
    )


@pytest.mark.parametrize("cause", [CAUSE, None])
def test_a_generation_that_is_over_must_be_known_with_all_that_is_known_of_it(cause):
    history = History([starting(0), {**ENDED, "cause": cause, "seconds": 3.0}])
    facts = {"time": 7.0, "lasted": 2.5, "step": 30, "progress": True}
    assert history.ended == [
        GenerationResult(generation=0, word="failed", why="a worker failed", cause=cause and Cause(**cause), **facts)
    ]
    assert history.running == -1


def test_an_outcome_that_was_decided_must_stand():
    history = History([starting(0), {"event": "outcome", "outcome": "failed", "reason": "max_restarts is 0"}])
    assert history.outcome == ("failed", "max_restarts is 0")
