"""Events must be kept in order and whole, and say of a job what a second supervisor has to know."""

import dataclasses
import json
import os
import resource
import typing
from dataclasses import replace

import pytest
from support.scripted import Clock

from orchestrate.job import events
from orchestrate.job.history import History
from orchestrate.job.outcomes import Cause, JobResult, Outcome, Reason
from orchestrate.job.recorder import Recorder, objects


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("orchestrate.job.recorder.time", made)
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
    emit(events.HangFound({0: "S"}, 20.0))
    first = {"event": "hang_found", "time": 1_000_001.5, "seconds": 1.5, "after": 20.0, "states": {"0": "S"}}
    assert kept(path) == [first]  # it is read while the recorder is still open
    assert emit.events == shown == [events.HangFound({0: "S"}, 20.0, time=1_000_001.5, seconds=1.5)]
    emit(events.EngineBack())
    emit.close()
    assert [line["event"] for line in kept(path)] == ["hang_found", "engine_back"]


def test_a_second_recorder_must_go_on_with_the_seconds_of_the_job(path, clock):
    first = Recorder(path)
    first(events.EngineBack())
    clock.sleep(10)
    first(events.NodesDown())
    first.close()
    clock.sleep(60)
    second = Recorder(path)
    clock.sleep(5)
    second(events.NodeBack())
    second.close()
    assert [event["seconds"] for event in kept(path)] == [0.0, 10.0, 75.0]
    assert [*map(events.to_line, second.events)] == kept(path)


def test_a_clock_that_was_set_back_must_not_make_time_negative(path, clock):
    path.write_text(json.dumps({"event": "engine_back", "time": clock.now + 3600, "seconds": 0.0}) + "\n")
    assert Recorder(path).seconds() == 0.0


def test_half_a_line_of_a_process_that_was_killed_must_not_spoil_the_next_event(path):
    path.write_text('{"event": "engine_back", "time": 1.0, "seconds": 0.0}\n{"event": "tw')
    emit = Recorder(path)
    emit(events.NodeBack())
    emit.close()
    assert [event["event"] for event in kept(path)] == ["engine_back", "node_back"]


def test_an_event_of_which_the_disk_took_a_part_must_be_whole_once_there_is_room(tmp_path):
    path = tmp_path / "events.jsonl"
    emit = Recorder(path)
    emit(events.EngineBack())
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        emit(events.NodesDown())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    emit(events.NodeBack())
    assert path.read_text().count("\n") == 3
    assert kept(path) == [*map(events.to_line, emit.events)]
    emit.close()


def test_events_must_be_written_in_order_and_once_when_the_disk_has_room_again(path, monkeypatch):
    emit, write, full = Recorder(path), os.write, [True]

    def full_disk(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full_disk)
    emit(events.EngineBack())
    emit(events.NodesDown())
    assert kept(path) == [] and [events.name(type(event)) for event in emit.events] == ["engine_back", "nodes_down"]
    full[0] = False
    emit(events.NodeBack())
    emit(events.WorkersStarted())
    assert [event["event"] for event in kept(path)] == ["engine_back", "nodes_down", "node_back", "workers_started"]


def test_a_recorder_must_leave_no_file_open(path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        emit = Recorder(path)
        emit(events.EngineBack())
        emit.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_is_no_event_must_not_count_as_one(path):
    path.write_text(
        '{"event": "engine_back", "time": 1.0, "seconds": 0.0}\n[1]\n"two"\n{"event": 3}\n{"other": 1}\nnull\n'
        + "[" * 100_000
        + "\n"
    )
    assert [events.name(type(event)) for event in Recorder(path).events] == ["engine_back"]
    assert objects([b'{"a": 1}', b"7", b"\xff", b'{"b": 2}']) == [{"a": 1}, {"b": 2}]


# --- whose they are

KEY = bytes(range(32))


ONE, TWO, THREE = events.EngineBack(), events.NodesDown(), events.NodeBack()


def lines(path, *happened: events.Event, key: bytes = KEY) -> list[str]:
    """The lines of a file, after these events."""
    emit = Recorder(path, key=key)
    for event in happened:
        emit(event)
    emit.close()
    return path.read_text().splitlines()


def test_events_must_be_read_with_the_key_that_has_written_them(path):
    lines(path, ONE, TWO)
    with path.open("a") as file:
        file.write('{"event": "ha')
    lines(path, THREE)
    assert [event["event"] for event in kept(path)] == ["engine_back", "nodes_down", "node_back"]
    emit = Recorder(path, key=KEY)
    emit.close()
    assert [event.seconds for event in emit.events] == [line["seconds"] for line in kept(path)]


@pytest.mark.parametrize(
    "change",
    [
        lambda had: [had[0].replace("engine_back", "engine_lost"), *had[1:]],
        lambda had: had[1:],
        lambda had: [had[0], *had[2:]],
        lambda had: [*had, had[-1]],
        lambda had: [*had, json.dumps({"event": "engine_back", "time": 1.0, "seconds": 0.0})],
        lambda had: [json.dumps({"event": "engine_back", "time": 1.0, "seconds": 0.0, "mac": "0" * 32})],
    ],
    ids=["changed", "first left out", "left out", "twice", "added", "replaced"],
)
def test_events_that_another_hand_has_changed_must_be_refused(path, change):
    path.write_text("".join(f"{line}\n" for line in change(lines(path, ONE, TWO, THREE))))
    with pytest.raises(ValueError, match="was not written by this job"):
        Recorder(path, key=KEY)


def test_events_that_were_written_with_no_key_or_another_one_must_be_refused(path):
    for key in (b"", KEY[::-1]):
        lines(path, ONE, key=key)
        with pytest.raises(ValueError, match="event 1, 'engine_back', was not written by this job"):
            Recorder(path, key=KEY)
        path.unlink()


# --- their form


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for name, kind in events.KINDS.items()])
def test_an_event_must_be_read_as_it_was_written(kind, name):
    hints = typing.get_type_hints(kind)
    event = kind(**{field.name: VALUES[hints[field.name]] for field in dataclasses.fields(kind)})
    line = json.loads(json.dumps(events.to_line(event)))
    assert line["event"] == name and events.from_line(line) == event
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    for field in required:
        with pytest.raises(ValueError, match=f"^{field} is missing$"):
            events.from_line({key: line[key] for key in line if key != field})


FAILURE = Cause(rank=1, node="trainer-1", exit_code=137, cause=Reason.KILLED, summary="s", hint="h", last_lines=["a"])
VALUES = {float: 1.5, int: 7, str: "x", bool: True, tuple[str, ...]: ("a", "b"), dict[str, str]: {"a": "b"}}
VALUES |= {dict[int, str]: {3: "S"}, Outcome: Outcome.FAILED, Reason | None: Reason.KILLED, Cause | None: FAILURE}
VALUES |= {tuple[int, ...]: (1, 2)}


@pytest.mark.parametrize(
    ("name", "facts", "why"),
    [
        ("worker_ended", {"rank": -1}, "rank must be a whole number from 0"),
        ("worker_ended", {"rank": True}, "rank must be a whole number from 0"),
        ("worker_ended", {"node": 7}, "node must not be 7"),
        ("worker_ended", {"known": "bad luck"}, "known must not be 'bad luck'"),
        ("worker_ended", {"stopping": 1}, "stopping must not be 1"),
        ("worker_ended", {"time": float("nan")}, "time must be a number of seconds"),
        ("hang_found", {"states": {"x": "S"}}, "states must have numbers as names"),
        ("hang_found", {"states": {"1": 2}}, "states of '1' must not be 2"),
        ("hang_found", {"states": ["S"]}, "states must not be \\['S'\\]"),
        ("nodes_up", {"nodes": "master"}, "nodes must not be 'master'"),
        ("nodes_up", {"nodes": [None]}, "nodes must not be None"),
        ("generation_ended", {"cause": {"rank": 1}}, "node is missing"),
        ("generation_ended", {"cause": []}, "cause must not be"),
        ("outcome_decided", {"outcome": "rescaled"}, "outcome must be one of"),
    ],
)
def test_an_event_that_is_damaged_must_be_refused_with_what_is_wrong(name, facts, why):
    kind = events.KINDS[name]
    hints = typing.get_type_hints(kind)
    event = kind(**{field.name: VALUES[hints[field.name]] for field in dataclasses.fields(kind)})
    with pytest.raises(ValueError, match=why):
        events.from_line(events.to_line(event) | facts)


def test_events_of_a_newer_version_must_be_left_out_where_they_are_new_and_facts_that_are_unknown_too(path):
    path.write_text(
        '{"event": "supervisor_started", "time": 1.0, "seconds": 0.0, "job_id": "j", "version": 1, "mood": "good"}\n'
        '{"event": "node_sang", "time": 1.0, "seconds": 0.0, "song": "la"}\n'
        '{"event": "engine_back", "time": 2.0, "seconds": 1.0}\n'
    )
    started, back = Recorder(path).events
    assert started == events.SupervisorStarted("j", time=1.0) and isinstance(back, events.EngineBack)


def test_a_file_of_a_version_that_is_not_known_must_be_refused(path):
    path.write_text('{"event": "supervisor_started", "time": 1.0, "seconds": 0.0, "job_id": "j", "version": 2}\n')
    with pytest.raises(ValueError, match="^it has version 2, but this orchestrate reads version 1$"):
        Recorder(path)


# --- what they say of a job


def starting(generation: int) -> events.Event:
    return events.GenerationStarting(generation, ("master",), 1, 29500)


EXIT = events.WorkerEnded(1, "trainer-1", 137, stopping=False)
ENDED = events.GenerationEnded(
    generation=0, word=Outcome.FAILED, why="a worker failed", lasted=2.5, step=30, progress=True
)


def stopping(why: str) -> events.Event:
    return events.WorkersStopping(why, kill=False)


def test_a_job_of_which_nothing_was_started_must_have_no_history():
    history = History([events.SupervisorStarted("j"), events.NodesStarting(1, "docker")])
    assert (history.running, history.ended, history.exits) == (-1, [], [])
    assert (history.stopping, history.outcome) == ("", None)


def test_the_generation_that_was_started_last_must_be_the_one_that_runs():
    history = History([starting(0), EXIT])
    assert (history.running, history.exits) == (0, [EXIT])
    history = History([starting(0), EXIT, stopping("a worker failed"), replace(ENDED, cause=FAILURE), starting(1)])
    assert (history.running, history.exits, history.stopping) == (1, [], "")


def test_why_workers_were_asked_first_to_end_must_be_the_reason():
    assert History([starting(0), stopping("max_run was reached"), stopping("stopped by the user")]).stopping == (
        "max_run was reached"
    )


@pytest.mark.parametrize("cause", [FAILURE, None])
def test_a_generation_that_is_over_must_be_known_with_all_that_is_known_of_it(cause):
    history = History([starting(0), replace(ENDED, cause=cause)])
    assert history.ended == [replace(ENDED, cause=cause)]
    assert (history.running, history.furthest) == (-1, 30)


def test_an_outcome_that_was_decided_must_stand():
    history = History([starting(0), events.OutcomeDecided(Outcome.FAILED, "max_restarts is 0")])
    assert history.outcome == JobResult(Outcome.FAILED, "max_restarts is 0")
