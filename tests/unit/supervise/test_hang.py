"""A hung job must be distinguished from a working one, and the worker that the others wait for must be found."""

import contextlib

import pytest
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL

from orchestrate.errors import EngineLost
from orchestrate.record import debugging
from orchestrate.record.outcomes import Activity, JobResult, Outcome, Stack, WorkerExit
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.hang import late
from orchestrate.supervise.stacks import Position, parse_position

TORCH = "/usr/lib/python3/dist-packages/torch"
REDUCE = (f"{TORCH}/distributed/distributed_c10d.py", 2501, "all_reduce")
BACKWARD = (f"{TORCH}/autograd/graph.py", 841, "_engine_run_backward")
DDP = (f"{TORCH}/nn/parallel/distributed.py", 1637, "forward")
MINE = ("/workspace/train.py", 7, "step")
MAIN = ("/workspace/train.py", 30, "main")


def thread(*frames: tuple[str, int, str], current: bool = True) -> str:
    head = f"{'Current thread' if current else 'Thread'} 0x00007f (most recent call first):\n"
    return head + "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in frames)


def dumped(*threads: str) -> str:
    return "epoch 1\nFatal Python error: Aborted\n\n" + "\n".join(threads)


@pytest.mark.parametrize("waits", [REDUCE, BACKWARD, DDP])
def test_a_worker_in_a_collective_must_be_located_in_user_code_and_count_as_waiting(waits):
    found = parse_position(dumped(thread(waits, MINE, MAIN)))
    assert found == Position("/workspace/train.py:7 in step", waits[2], True)


@pytest.mark.parametrize(
    "library",
    [
        "/usr/local/lib/python3.12/site-packages/numpy/x.py",
        "/opt/python/dist-packages/numpy/x.py",
        "/usr/local/lib/python3.12/threading.py",
        "<frozen importlib._bootstrap>",
    ],
)
def test_library_code_must_not_be_taken_for_user_code(library):
    assert parse_position(dumped(thread((library, 1, "wait"), MINE))) == Position(
        "/workspace/train.py:7 in step", "wait", False
    )


def test_a_worker_whose_stack_has_no_user_code_must_be_located_at_the_top_frame():
    assert parse_position(dumped(thread(REDUCE, BACKWARD))) == Position(
        f"{REDUCE[0]}:2501 in all_reduce", "all_reduce", True, own=False
    )


@pytest.mark.parametrize(
    ("file", "between", "waits"),
    [
        ("", 0, True),
        ("/usr/lib/python3/threading.py", 6, True),
        ("/usr/lib/python3/threading.py", 20, False),
        ("/workspace/model.py", 1, False),  # a module that torch calls
    ],
)
def test_only_frames_near_the_top_and_before_the_users_code_must_count_as_a_collective(file, between, waits):
    frames = [(file, number, "wait") for number in range(between)]
    found = parse_position(dumped(thread(*frames, REDUCE, MAIN)))
    assert found and found.waits is waits


@pytest.mark.parametrize("current", [True, False])
def test_of_several_threads_the_last_one_must_count_which_is_the_main_one(current):
    main, other = thread(MINE, current=current), thread(REDUCE, current=not current)  # any may get the signal
    assert parse_position(dumped(other, main)) == Position("/workspace/train.py:7 in step", "step", False)


def test_the_main_thread_must_count_if_the_current_one_has_no_frames():
    found = parse_position(
        dumped(thread(), thread(REDUCE, current=False), thread(MINE, current=False), thread(current=False))
    )
    assert found and found.where == "/workspace/train.py:7 in step"


def test_of_two_dumps_the_last_must_count():
    found = parse_position(dumped(thread(MAIN)) + dumped(thread(MINE)))
    assert found and found.where == "/workspace/train.py:7 in step"


@pytest.mark.parametrize("log", ["", "epoch 1\n", thread(MINE), dumped(), dumped(thread())])
def test_a_log_without_a_stack_must_give_no_location(log):
    assert parse_position(log) is None


WAITING = Position("t.py:9 in all_reduce", "all_reduce", True)
ELSEWHERE = Position("t.py:4 in barrier", "barrier", True)
BUSY = Position("t.py:1 in load", "read", False)


@pytest.mark.parametrize(
    ("states", "locations", "rank", "sentence"),
    [
        ("SSTS", {0: WAITING, 1: WAITING, 3: BUSY}, 2, "is stopped (SIGSTOP); 2 others wait at t.py:9 in all_reduce"),
        ("STST", {0: WAITING}, 1, "is stopped (SIGSTOP)"),
        ("SStS", {0: WAITING, 1: BUSY}, 2, "is stopped by a debugger; 1 other waits at t.py:9"),
        ("SDSS", {0: WAITING, 1: WAITING, 2: BUSY}, 2, "never arrived: it is at t.py:1 in load; 2 others wait"),
        ("SSSS", {0: WAITING, 2: BUSY, 1: BUSY, 3: WAITING}, 1, "never arrived: it is at t.py:1 in load; 2 others"),
        ("SSSS", {0: WAITING, 1: WAITING, 3: WAITING}, 2, "never arrived: it does not respond and printed no stack"),
        ("SSDS", {0: WAITING, 1: WAITING, 3: WAITING}, 2, "never arrived: it waits for disk or network"),
        ("SSDD", {0: WAITING}, 1, "never arrived: it does not respond"),
        ("SSSS", {0: BUSY, 1: BUSY, 2: BUSY}, 0, "and all others are at t.py:1 in load"),
        ("SSSS", {3: WAITING, 0: WAITING, 1: WAITING, 2: WAITING}, 0, "and all others are at t.py:9 in all_reduce"),
        (
            "SSSS",
            {0: WAITING, 1: WAITING, 2: ELSEWHERE, 3: WAITING},
            2,
            "is not where the others are, but at t.py:4 in barrier; 3 others wait at t.py:9 in all_reduce",
        ),
        ("SS", {0: WAITING, 1: ELSEWHERE}, 0, "is not where the others are, but at t.py:9 in all_reduce; 1 other"),
        ("SSSS", {}, 0, "is idle and printed no stack"),
        ("DSSS", {}, 0, "waits for disk"),
        ("", {}, 0, "is idle"),
    ],
)
def test_the_worker_that_the_others_wait_for_must_be_named_with_its_location(states, locations, rank, sentence):
    letters = dict(reversed(list(enumerate(states))))
    found, what = late(letters, {number: locations.get(number) for number in [*locations, *letters]})
    assert found == rank and what.startswith(sentence)


def test_the_two_locations_where_most_others_wait_must_be_named():
    locations = {0: BUSY, 1: WAITING, 2: WAITING, 3: ELSEWHERE, 4: ELSEWHERE, 5: Position("t.py:5 in x", "x", True)}
    _, what = late(dict.fromkeys(locations, "S"), locations)
    assert what.endswith("; 2 others wait at t.py:9 in all_reduce; 2 others wait at t.py:4 in barrier")
    _, what = late({0: "S", 1: "S"}, {0: WAITING, 1: BUSY})
    assert what == "never arrived: it is at t.py:1 in load; 1 other waits at t.py:9 in all_reduce"


SPEC = JobSpec(trainers=2, grace=0.01, hang_after=10.0)


@pytest.mark.parametrize(("share", "hangs"), [(0.02, True), (0.1, False)])
def test_workers_that_only_poll_must_count_as_idle(job, share, hangs):
    engine, began = RecordingEngine([[]] * 1500 + [ALL_WELL], [ALL_WELL]), job.clock.now
    engine.activity = lambda: {rank: Activity("S", 1.0 + share * (job.clock.now - began)) for rank in engine.running}
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, hang_after=100.0)).outcome == "succeeded"
    assert len(job.causes()) == hangs


@pytest.mark.parametrize("sign", ["output", "processor", "paused", "silent", "debugged"])
def test_the_time_limit_must_count_from_the_last_sign_of_life(job, sign):
    engine, began = RecordingEngine([], [ALL_WELL]), job.clock.now
    wait, debugger = engine.wait, contextlib.ExitStack()
    if sign == "debugged":
        debugger.enter_context(debugging.held(job.paths))

    def busy() -> bool:
        return job.clock.now < began + 30

    def write(timeout):
        tenths = round(10 * (job.clock.now - began))
        if not busy():
            debugger.close()
        if sign == "output" and busy() and tenths % 20 == 0:
            job.paths.log(0).write_text("x" * tenths)
        return wait(timeout)

    engine.wait = write
    engine.activity = lambda: {
        rank: Activity("S", min(job.clock.now, began + 30) if sign == "processor" and rank == 1 else 1.0)
        for rank in engine.running
    }
    in_trouble = sign in ("paused", "silent")
    engine.troubles = lambda: {"trainer-1": sign} if in_trouble and busy() and job.clock.now > began + 5 else {}
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert (
        (35 if sign == "processor" else 38) <= job.when("hang_found")[0] < 43
    )  # only the second half of the time must be idle


@pytest.mark.parametrize("since", [0.0, 9.9])
def test_a_job_must_not_count_as_hung_while_nodes_report_nothing_about_their_workers(job, since):
    engine, silent = RecordingEngine([[]] * 600 + [ALL_WELL]), job.clock.now + since
    doing = engine.activity
    engine.activity = lambda: doing() if job.clock.now < silent else {}
    assert job.run(engine, SPEC) == JobResult(Outcome.SUCCEEDED, "finished")
    assert not job.causes()


def test_workers_that_take_long_to_save_and_exit_must_not_count_as_hung(job):
    engine = RecordingEngine([])
    engine.stop = lambda how: engine.batches.extend([[]] * 600 + [ALL_WELL])
    job.stops = lambda: int("start" in engine.calls)
    assert job.run(engine, JobSpec(trainers=2, grace=100.0, hang_after=10.0)).outcome == "stopped"
    assert "hang_found" not in job.names() and "dump" not in engine.calls


def test_a_job_without_hang_after_must_never_count_as_hung(job):
    engine = RecordingEngine([[]] * 9000 + [ALL_WELL])
    assert job.run(engine, JobSpec(trainers=2, hang_after=None)) == JobResult(Outcome.SUCCEEDED, "finished")
    assert not job.causes()


def test_nodes_must_be_asked_about_their_workers_only_every_few_seconds(job):
    engine, request_times = RecordingEngine([[]] * 90 + [ALL_WELL]), []
    doing = engine.activity
    engine.activity = lambda: (request_times.append(job.clock.now), doing())[1]
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert 2 <= len(request_times) <= 5 and request_times[0] > 1_000_000 + 4


def test_a_hang_must_be_reported_with_the_state_of_each_remaining_worker(job):
    engine = RecordingEngine([[WorkerExit(0, 0)]], [ALL_WELL])
    engine.activity = lambda: {0: Activity("T", 1.0), 1: Activity("S", 1.0), 2: Activity("D", 1.0)}
    job.paths.log(1).write_text("loading\nstill loading\n")
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert job.noted("hang_found") == [{"states": {"1": "S", "2": "D"}, "after": 10.0}]
    (cause,) = [ended.cause for ended in job.supervisor.history.ended if ended.cause]
    assert (cause.rank, cause.node, cause.exit_code, cause.cause) == (1, "trainer-1", 137, "hang")
    assert cause.last_lines == ["loading", "still loading"] and cause.log == str(job.paths.log(1))
    assert "rank 1 on trainer-1 is idle" in cause.summary and "hang_after" in cause.hint


def test_a_child_process_of_the_worker_that_the_others_wait_for_must_be_named(job):
    engine = RecordingEngine([], [ALL_WELL])
    engine.activity = lambda: {0: Activity("S", 1.0), 1: Activity("T", 1.0)}
    heads = "Stack (most recent call first):\n"
    own, child = f'{heads}  File "/t.py", line 1 in f\n', f'{heads}  File "/data.py", line 13 in read\n'
    engine.stacks = lambda: {0: Stack(own + own), 1: Stack(own + child + own)}
    assert job.run(engine, SPEC).outcome == "succeeded"
    (cause,) = [ended.cause for ended in job.supervisor.history.ended if ended.cause]
    assert cause.summary.endswith(
        "is stopped (SIGSTOP); child processes of it: at /data.py:13 in read and /t.py:1 in f"
    )


@pytest.mark.parametrize(("takes", "calls"), [(14.0, ["dump"]), (16.0, ["dump", "kill"])])
def test_hung_workers_must_get_a_few_seconds_to_print_their_stacks_before_they_are_killed(job, takes, calls):
    engine = RecordingEngine([], [ALL_WELL])

    def dump() -> None:
        engine.calls.append("dump")
        engine.batches = [[]] * int(takes * 10 - 1) + [[WorkerExit(rank, 134) for rank in range(3)]]

    engine.dump = dump
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert engine.calls == ["up", "start", *calls, "up", "start", "down"]
    assert job.noted("workers_stopping") == [{"why": "a worker failed", "kill": True}]
    assert job.when("workers_stopping")[0] - job.when("hang_found")[0] == pytest.approx(min(takes, 15.0), abs=0.3)
    assert [cause for _, cause in job.causes()] == ["hang"]
    aborts = [end for end in job.noted("worker_ended") if end["exit_code"]]
    assert len(aborts) == 3 and all(end["stopping"] for end in aborts)  # the supervisor ended them


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_frozen_worker_must_not_be_waited_for_since_it_prints_no_stack(job, state):
    engine = RecordingEngine([], [ALL_WELL])
    engine.activity = lambda: {0: Activity("S", 1.0), 1: Activity(state, 1.0), 2: Activity("S", 1.0)}

    def dump() -> None:
        engine.calls.append("dump")
        engine.batches = [[WorkerExit(0, 134), WorkerExit(2, 134)]] + [[]] * 1000

    engine.dump = dump
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert engine.calls[2:4] == ["dump", "kill"] and [cause for _, cause in job.causes()] == ["hang"]
    assert job.when("workers_stopping")[0] - job.when("hang_found")[0] < 1.0


def test_an_engine_that_is_lost_while_workers_print_their_stacks_must_leave_the_job_hung(job):
    engine = RecordingEngine([], [], [ALL_WELL])
    dump = engine.dump

    def leave() -> None:
        engine.dump = dump
        raise EngineLost("gone")

    engine.dump = leave
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert [cause for _, cause in job.causes()] == ["hang"] and len(job.noted("hang_found")) == 1
    assert engine.calls == ["up", "start", "adopt", "kill", "up", "start", "down"]
    cause = next(end.cause for end in job.supervisor.history.ended if end.cause)
    assert cause.node == "master" and cause.summary.startswith("the job hung; the engine was lost")


def test_an_idle_job_must_count_as_hung_and_every_worker_must_be_asked_for_its_stack(job):
    engine = RecordingEngine([], [ALL_WELL])
    stack = 'Fatal Python error: Aborted\n\nCurrent thread 0x0f (most recent call first):\n  File "{}", line 4 in {}\n'

    def dump() -> None:
        for rank in range(3):
            place = ("/w/train.py", "load") if rank == 2 else ("/x/torch/distributed/c10d.py", "all_reduce")
            job.paths.log(rank).write_text(stack.format(*place))
        engine.batches.append([WorkerExit(rank, 134) for rank in range(3)])

    engine.dump = dump
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, hang_after=20.0)).outcome == "succeeded"
    assert job.causes() == [(2, "hang")]
    (ended,) = [end for end in job.supervisor.history.ended if end.cause]
    assert ended.cause.summary == (
        "the job hung: rank 2 on trainer-2 never arrived: it is at /w/train.py:4 in load; "
        "2 others wait at /x/torch/distributed/c10d.py:4 in all_reduce"
    )


@pytest.mark.parametrize(("function", "named"), [("init_process_group", True), ("all_reduce", False)])
def test_a_file_at_which_workers_of_several_nodes_want_to_meet_must_be_named(job, tmp_path, function, named):
    (tmp_path / "train.py").write_text("import torch\ndist.init_process_group('gloo', init_method='file:///tmp/x')\n")
    engine = RecordingEngine([])

    def dump() -> None:
        for rank in range(3):
            job.paths.log(rank).write_text(dumped(thread((f"{TORCH}/distributed/c10d.py", 5, function), MINE)))
        engine.batches.append([WorkerExit(rank, 134) for rank in range(3)])

    engine.dump = dump
    spec = JobSpec(trainers=2, grace=0.01, hang_after=20.0, max_restarts=0, command=("train.py",))
    job.run(engine, spec, plan(spec, HERE.but(code=str(tmp_path)), "j", 29500))
    (ended,) = [end for end in job.supervisor.history.ended if end.cause]
    meets = "workers meet at a file (train.py:2), which each node has for itself: use env://"
    assert (ended.cause.hint == meets) is named


ERROR = """Traceback (most recent call last):
  File "/workspace/train.py", line 30, in <module>
    raise RuntimeError("bad sample")
RuntimeError: bad sample
"""
EXIT = ("/usr/lib/python3.12/threading.py", 1624, "_shutdown")


@pytest.mark.parametrize(
    ("log", "stack", "failed"),
    [
        (ERROR, thread(EXIT), True),
        (ERROR, "Current thread 0x00007f (most recent call first):\n  <no Python frame>\n", True),
        (ERROR + "wandb: view the run\n", thread(EXIT), True),
        (ERROR + "epoch 2\n" * 12, thread(EXIT), False),  # it was logged, and training went on
        (ERROR, thread(EXIT, MINE, MAIN), False),  # the script has caught it
        ("epoch 1\n", thread(EXIT), False),
    ],
)
def test_a_script_that_has_failed_but_cannot_exit_must_be_the_cause_with_its_own_error(job, log, stack, failed):
    engine = RecordingEngine([])

    def dump() -> None:
        for rank in range(3):
            end = f"Fatal Python error: Aborted\n\n{stack if rank == 1 else thread(REDUCE, MINE)}"
            job.paths.log(rank).write_text((log if rank == 1 else "epoch 1\n") + end)
        engine.batches.append([WorkerExit(rank, 134) for rank in range(3)])

    engine.dump = dump
    job.run(engine, JobSpec(trainers=2, grace=0.01, hang_after=20.0, max_restarts=0))
    (ended,) = [end for end in job.supervisor.history.ended if end.cause]
    assert (ended.cause.rank, ended.cause.cause) == (1, "error" if failed else "hang")
    if failed:
        assert ended.cause.summary == (
            "rank 1 on trainer-1 failed, but its threads or child processes kept it from exiting"
        )
        assert "RuntimeError: bad sample" in ended.cause.last_lines
        assert not [line for line in ended.cause.last_lines if "Fatal Python error" in line]


@pytest.mark.parametrize("alive", ["output", "processor", "metrics", "checkpoints", "pause"])
def test_an_active_job_must_not_count_as_hung(job, alive):
    engine = RecordingEngine([[]] * 400 + [ALL_WELL])  # forty seconds
    ticks, wait = iter(range(1000)), engine.wait

    def wait_and_live(timeout):
        tick = next(ticks)
        if alive == "output":
            job.paths.log(0).write_text("x" * tick)
        if alive == "metrics":
            job.paths.metrics.write_text("x" * tick)
        if alive == "checkpoints":
            job.paths.checkpoints.joinpath(f"step-{tick}").touch()
        return wait(timeout)

    engine.wait = wait_and_live
    if alive == "processor":
        engine.activity = lambda: {0: Activity("R", job.clock.now / 4), 1: Activity("S", 1.0), 2: Activity("S", 1.0)}
    if alive == "pause":
        engine.troubles = lambda: {"trainer-1": "paused"}
    assert job.run(engine, JobSpec(trainers=2, hang_after=10.0)) == JobResult(Outcome.SUCCEEDED, "finished")
    assert len(job.supervisor.history.ended) == 1


def test_an_idle_job_must_count_as_hung_after_the_time_limit_of_its_job_file(job):
    engine = RecordingEngine([])
    engine.activity = lambda: {
        rank: Activity("S", 1.0 + job.clock.now / 1000) for rank in engine.running
    }  # it only polls
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, hang_after=10.0, max_restarts=0)).outcome == "failed"
    (hang,) = [event for event in job.events if event["event"] == "hang_found"]
    assert 10 <= hang["seconds"] < 12
