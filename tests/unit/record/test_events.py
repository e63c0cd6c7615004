"""Events must be kept complete and in order, with all that a second supervisor needs to know about a job."""

import dataclasses
import json
import os
import resource
import typing
from dataclasses import replace

import pytest
from support.scripted import Clock

from orchestrate.record import events, recorder
from orchestrate.record.history import History
from orchestrate.record.outcomes import Cause, JobResult, Outcome, Use
from orchestrate.record.recorder import Recorder, boot, objects
from orchestrate.spec.causes import Reason
from orchestrate.spec.redact import Mask


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def kept(path) -> list[dict]:
    """The events in the file."""
    return [*objects(path.read_bytes().splitlines())]


def test_an_event_must_be_written_kept_in_memory_and_shown_at_once(path, clock):
    shown = []
    emit = Recorder(path, shown.append, clock=clock)
    clock.sleep(1.5)
    emit(events.HangFound({0: "S"}, 20.0))
    first = {"event": "hang_found", "time": 1_000_001.5, "seconds": 1.5, "after": 20.0, "states": {"0": "S"}}
    assert kept(path) == [first]  # read while the recorder is still open
    assert emit.events == shown == [events.HangFound({0: "S"}, 20.0, time=1_000_001.5, seconds=1.5)]
    emit(events.EngineBack())
    emit.close()
    assert [line["event"] for line in kept(path)] == ["hang_found", "engine_back"]


def test_a_record_must_not_become_too_large_to_be_read(path, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_LINES", 2000)
    cause = Cause(rank=0, node="master", exit_code=1, cause=Reason.KILLED, summary="", hint="", last_lines=["x" * 900])
    first = Recorder(path)
    for generation in range(3):
        first(events.GenerationEnded(generation=generation, outcome=Outcome.FAILED, why="it failed", cause=cause))
    first.close()
    found = [ended.cause.last_lines for ended in History(Recorder(path).events).ended if ended.cause]
    assert found == [["x" * 900], ["x" * 900], []]


def test_a_second_recorder_must_continue_the_elapsed_seconds_of_the_job(path, clock):
    first = Recorder(path, clock=clock)
    first(events.EngineBack())
    clock.sleep(10)
    first(events.NodesDown())
    first.close()
    clock.sleep(60)
    second = Recorder(path, clock=clock)
    clock.sleep(5)
    second(events.NodeBack())
    second.close()
    assert [event["seconds"] for event in kept(path)] == [0.0, 10.0, 75.0]
    assert [*map(events.to_line, second.events)] == kept(path)


def test_the_time_between_the_end_of_a_job_and_its_resumption_must_not_count(path, clock):
    end, resume = events.JobEnded(Outcome.STOPPED, ""), events.JobResumed()
    for event, later in ((events.EngineBack(), 10), (end, 60), (resume, 10), (end, 60), (resume, 1), (end, 0)):
        emit = Recorder(path, clock=clock)
        emit(event)
        emit.close()
        clock.sleep(later)
    assert [event["seconds"] for event in kept(path)] == [0.0, 10.0, 10.0, 20.0, 20.0, 21.0]


@pytest.mark.parametrize("moved", [86_400.0, -86_400.0])
def test_a_change_of_the_time_of_day_must_not_change_the_seconds_of_a_job(path, clock, moved, monkeypatch):
    first = Recorder(path, clock=clock)
    first(events.SupervisorStarted("j", boot=boot(), monotonic=clock.monotonic()))
    clock.sleep(10)
    first(events.EngineBack())
    first.close()
    clock.sleep(5)
    monkeypatch.setattr(clock, "time", lambda: clock.now + moved)
    assert boot() and Recorder(path, clock=clock).seconds() == 15.0
    line = json.loads(path.read_text().splitlines()[0]) | {"boot": "of another machine"}
    path.write_text("".join([json.dumps(line) + "\n", *path.read_text().splitlines(keepends=True)[1:]]))
    assert Recorder(path, clock=clock).seconds() == max(10.0, 15.0 + moved)


def test_a_clock_that_was_set_back_must_not_give_negative_seconds(path, clock):
    path.write_text(json.dumps({"event": "engine_back", "time": clock.now + 3600, "seconds": 0.0}) + "\n")
    assert Recorder(path, clock=clock).seconds() == 0.0


def test_a_partial_line_of_a_killed_process_must_not_corrupt_the_next_event(path):
    path.write_text('{"event": "engine_back", "time": 1.0, "seconds": 0.0}\n{"event": "tw')
    emit = Recorder(path)
    emit(events.NodeBack())
    emit.close()
    assert [event["event"] for event in kept(path)] == ["engine_back", "node_back"]


def test_a_partly_written_event_must_be_completed_once_the_disk_has_space(tmp_path):
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


def test_events_must_be_written_in_order_and_once_when_the_disk_has_space_again(path, monkeypatch):
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


def test_lines_that_are_not_events_must_be_ignored(path):
    path.write_text(
        '{"event": "engine_back", "time": 1.0, "seconds": 0.0}\n[1]\n"two"\n{"event": 3}\n{"other": 1}\nnull\n'
        + "[" * 100_000
        + "\n"
    )
    assert [events.name(type(event)) for event in Recorder(path).events] == ["engine_back"]
    assert [*objects([b'{"a": 1}', b"7", b"\xff", b'{"b": 2}'])] == [{"a": 1}, {"b": 2}]


# --- authentication

KEY = bytes(range(32))
ONE, TWO, THREE = events.EngineBack(), events.NodesDown(), events.NodeBack()


def lines(path, *happened: events.Event, key: bytes = KEY) -> list[str]:
    """Record events, and return the lines of the file."""
    emit = Recorder(path, key=key)
    for event in happened:
        emit(event)
    emit.close()
    return path.read_text().splitlines()


def test_events_must_be_read_with_the_key_that_they_were_written_with(path):
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
        lambda original: [original[0].replace("engine_back", "engine_lost"), *original[1:]],
        lambda original: original[1:],
        lambda original: [original[0], *original[2:]],
        lambda original: [*original, original[-1]],
        lambda original: [*original, json.dumps({"event": "engine_back", "time": 1.0, "seconds": 0.0})],
        lambda original: [json.dumps({"event": "engine_back", "time": 1.0, "seconds": 0.0, "mac": "0" * 32})],
    ],
    ids=["changed", "first left out", "left out", "twice", "added", "replaced"],
)
def test_events_that_were_tampered_with_must_be_refused(path, change):
    path.write_text("".join(f"{line}\n" for line in change(lines(path, ONE, TWO, THREE))))
    with pytest.raises(ValueError, match="was not written by this job"):
        Recorder(path, key=KEY)


def test_events_written_without_a_key_or_with_another_one_must_be_refused(path):
    for key in (b"", KEY[::-1]):
        lines(path, ONE, key=key)
        with pytest.raises(ValueError, match="event 1, 'engine_back', was not written by this job"):
            Recorder(path, key=KEY)
        path.unlink()
    lines(path, ONE)
    with pytest.raises(ValueError, match="was not written by this job"):
        Recorder(path)


# --- format


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
VALUES: dict[object, typing.Any] = {
    float: 1.5,
    int: 7,
    str: "x",
    bool: True,
    tuple[str, ...]: ("a", "b"),
    dict[str, str]: {"a": "b"},
}
VALUES |= {dict[int, str]: {3: "S"}, Outcome: Outcome.FAILED, Reason | None: Reason.KILLED, Cause | None: FAILURE}
VALUES |= {
    tuple[int, ...]: (1, 2),
    dict[int, int]: {0: 848, 1: 1 << 40},
    Use | None: Use(848, 1.0, 2.0, gpu=False, torch=True),
}


def test_what_another_supervisor_needs_must_be_kept_even_if_secrets_have_the_same_text():
    texts = "job-one process trainer-1 killed failed supervisor_started worker_ended generation_ended"
    hide = Mask({f"TOKEN_{number}": text for number, text in enumerate(texts.split())})
    exit = events.WorkerEnded(1, "trainer-1", 137, stopping=False, known=Reason.KILLED)
    ended = replace(ENDED, why="", cause=FAILURE)
    for event in (events.SupervisorStarted("job-one"), events.NodesStarting(1, "process"), exit, ended):
        assert hide.inside(line := events.to_line(event), ours=events.OURS) == line


@pytest.mark.parametrize(
    ("name", "facts", "why"),
    [
        ("worker_ended", {"rank": -1}, "rank must be a whole number from 0"),
        ("worker_ended", {"rank": True}, "rank must be a whole number from 0"),
        ("worker_ended", {"node": 7}, "node must not be 7"),
        ("worker_ended", {"known": "bad luck"}, "known must not be 'bad luck'"),
        ("worker_ended", {"stopping": 1}, "stopping must not be 1"),
        ("worker_ended", {"time": float("nan")}, "time must be a number of seconds"),
        ("worker_ended", {"time": 10**400}, "time must be a number of seconds"),
        ("hang_found", {"states": {"x": "S"}}, "states must have numbers as names"),
        ("hang_found", {"states": {"1": 2}}, "states of '1' must not be 2"),
        ("hang_found", {"states": ["S"]}, "states must not be \\['S'\\]"),
        ("nodes_up", {"nodes": "master"}, "nodes must not be 'master'"),
        ("nodes_up", {"nodes": [None]}, "nodes must not be None"),
        ("generation_ended", {"cause": {"rank": 1}}, "node is missing"),
        ("generation_ended", {"cause": []}, "cause must not be"),
        ("outcome_decided", {"outcome": "rescaled"}, "outcome must be one of"),
        ("job_ended", {"outcome": "rescaled"}, "outcome must be one of"),
    ],
)
def test_a_damaged_event_must_be_refused_with_the_reason(name, facts, why):
    kind = events.KINDS[name]
    hints = typing.get_type_hints(kind)
    event = kind(**{field.name: VALUES[hints[field.name]] for field in dataclasses.fields(kind)})
    with pytest.raises(ValueError, match=why):
        events.from_line(events.to_line(event) | facts)


@pytest.mark.parametrize(
    "event", [events.CodeCopied(1, 1 << 42, 0, 0.0), events.CheckpointsFetched("s3://a", 1, 1 << 42, "j")]
)
def test_sizes_of_terabytes_must_be_read_as_they_were_written(event):
    assert events.from_line(events.to_line(event)) == event


def test_unknown_events_and_fields_of_a_newer_version_must_be_ignored(path):
    path.write_text(
        '{"event": "supervisor_started", "time": 1.0, "seconds": 0.0, "job_id": "j", "version": 1, "mood": "good"}\n'
        '{"event": "node_sang", "time": 1.0, "seconds": 0.0, "song": "la"}\n'
        '{"event": "engine_back", "time": 2.0, "seconds": 1.0}\n'
    )
    started, back = Recorder(path).events
    assert started == events.SupervisorStarted("j", time=1.0) and isinstance(back, events.EngineBack)


def test_a_file_of_an_unknown_version_must_be_refused(path):
    path.write_text('{"event": "supervisor_started", "time": 1.0, "seconds": 0.0, "job_id": "j", "version": 2}\n')
    with pytest.raises(ValueError, match="^it has version 2, but this orchestrate reads version 1$"):
        Recorder(path)


# --- history of a job


def starting(generation: int) -> events.Event:
    return events.GenerationStarting(generation, ("master",), 1, 29500)


EXIT = events.WorkerEnded(1, "trainer-1", 137, stopping=False)
ENDED = events.GenerationEnded(
    generation=0, outcome=Outcome.FAILED, why="a worker failed", lasted=2.5, step=30, progress=True
)


def stopping(why: str) -> events.Event:
    return events.WorkersStopping(why, kill=False)


def test_a_job_that_started_no_generation_must_have_no_history():
    history = History([events.SupervisorStarted("j"), events.NodesStarting(1, "docker")])
    assert (history.running, history.ended, history.exits) == (-1, [], [])
    assert (history.stopping, history.outcome) == ("", None)


def test_the_generation_started_last_must_be_the_running_one():
    history = History([starting(0), EXIT])
    assert (history.running, history.exits) == (0, [EXIT])
    hang = events.HangFound({0: "S"}, 20.0)
    history = History([starting(0), EXIT, hang, stopping("hung"), replace(ENDED, cause=FAILURE), starting(1)])
    assert (history.running, history.exits, history.stopping, history.states) == (1, [], "", {})


def test_the_first_reason_for_stopping_workers_must_be_kept():
    assert History([starting(0), stopping("max_run was reached"), stopping("stopped by the user")]).stopping == (
        "max_run was reached"
    )


@pytest.mark.parametrize("cause", [FAILURE, None])
def test_an_ended_generation_must_be_read_with_all_its_fields(cause):
    history = History([starting(0), replace(ENDED, cause=cause)])
    assert history.ended == [replace(ENDED, cause=cause)]
    assert (history.running, history.furthest) == (-1, 30)


def test_the_furthest_step_must_be_that_of_any_generation_also_before_the_job_was_resumed():
    assert History([ENDED, events.JobResumed(), replace(ENDED, generation=1, step=20)]).furthest == 30


def test_the_hosts_of_nodes_must_be_those_of_the_last_start():
    up = [events.NodesUp((), hosts) for hosts in ({"master": "one", "trainer-1": "one"}, {"master": "two"})]
    assert History([up[0], starting(0), ENDED, up[1]]).hosts == {"master": "two"}


def test_a_decided_outcome_must_be_kept():
    history = History([starting(0), events.OutcomeDecided(Outcome.FAILED, "max_restarts is 0")])
    assert history.outcome == JobResult(Outcome.FAILED, "max_restarts is 0")
