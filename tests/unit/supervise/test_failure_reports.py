"""Causes of failures must be reported in full, and progress must be measured; on a scripted engine."""

import json

import pytest
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED

from orchestrate.engines.base import Stop
from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.policy import NOT_SAVED

RESET = "RuntimeError: Connection reset by peer\n"


def test_a_cause_must_include_the_nodes_explanation_and_the_workers_last_lines(job):
    calls = []
    engine = RecordingEngine([KILLED], [ALL_WELL])
    engine.explain = lambda end, node: (calls.append((end.rank, node)), Reason.OUT_OF_MEMORY)[1]
    engine.hosts = {"trainer-1": "gpu-box"}
    job.paths.log(1).write_text("epoch 1\nepoch 2\n")
    assert job.run(engine).outcome == "succeeded"
    (cause,) = [ended.cause for ended in job.supervisor.history.ended if ended.cause]
    assert calls == [(1, "trainer-1")]
    assert (cause.rank, cause.node, cause.exit_code, cause.cause) == (1, "trainer-1", 137, "out of memory")
    assert cause.last_lines == ["epoch 1", "epoch 2"] and cause.log == str(job.paths.log(1))
    assert cause.summary.startswith("rank 1 on trainer-1 (gpu-box) was killed by the kernel's OOM killer")


def test_a_worker_that_left_early_must_be_the_root_cause_without_asking_its_node(job):
    engine = RecordingEngine([[WorkerExit(1, 0)], [], [WorkerExit(0, 1)]], [ALL_WELL])
    engine.explain = lambda end, node: Reason.NODE_LOST
    job.paths.log(0).write_text(RESET)
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == [(1, "left early")]


@pytest.mark.parametrize(("grace", "cause"), [(1.0, (0, "error")), (30.0, (1, "killed"))])
def test_a_worker_killed_after_the_grace_period_must_not_be_the_root_cause(job, grace, cause):
    engine = RecordingEngine([[WorkerExit(0, 1)], *[[]] * 14, [WorkerExit(1, 137), WorkerExit(2, 143)]], [ALL_WELL])
    engine.stop = lambda how: None
    job.paths.log(0).write_text(RESET)
    assert job.run(engine, JobSpec(trainers=2, grace=grace)).outcome == "succeeded"
    assert job.causes() == [cause]


@pytest.mark.parametrize(("slow", "starts"), [(400, 1), (0, 3)])
def test_import_time_must_not_count_as_progress(job, slow, starts):
    """For forty seconds, workers either have not started or do nothing."""
    engine = RecordingEngine(*[[[]] * 400 + [[WorkerExit(1, 1)]] for _ in range(3)])
    engine.slow = [{0, 1, 2}] * slow
    job.paths.log(1).write_text("OSError: [Errno 30] Read-only file system: 'x'\n")
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=2)).outcome == "failed"
    assert engine.calls.count("start") == starts


@pytest.mark.parametrize("error", ["ModuleNotFoundError: No module named 'x'", "AttributeError: no", "NameError: x"])
@pytest.mark.parametrize(
    ("step", "seconds", "cause", "starts"),
    [(0, 1, "script", 1), (0, 590, "script", 1), (0, 610, "error", 2), (7, 1, "error", 2)],
)
def test_a_script_with_an_error_must_be_retried_only_after_progress(job, error, step, seconds, cause, starts):
    engine = RecordingEngine([*[[]] * (seconds * 10), [WorkerExit(1, 1)]], [ALL_WELL])
    job.paths.log(1).write_text(f"{error}\n")
    job.paths.metrics.write_text(json.dumps({"step": step}) + "\n" if step else "")
    job.run(engine, JobSpec(trainers=2, grace=0.01, hang_after=0))
    assert job.causes() == [(1, cause)] and engine.calls.count("start") == starts


@pytest.mark.parametrize("saves", [True, False])
def test_a_new_checkpoint_must_count_as_progress_without_metrics(job, saves):
    engine = RecordingEngine(*[[KILLED]] * 4, [ALL_WELL])
    start = engine.start
    job.paths.checkpoints.joinpath("step-0").touch()

    def save(plan, stopped=None) -> None:
        start(plan)
        if saves:
            job.paths.checkpoints.joinpath(f"step-{len(engine.plans)}").touch()

    engine.start = save
    outcome = job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=10))
    assert outcome == (JobResult(Outcome.SUCCEEDED, "finished") if saves else JobResult(Outcome.FAILED, NOT_SAVED))
    assert {ended.progress for ended in job.supervisor.history.ended} == {saves}


@pytest.mark.parametrize(("seconds", "progress"), [(28, False), (32, True)])
def test_half_a_minute_must_count_as_progress_for_a_job_without_metrics_or_checkpoints(job, seconds, progress):
    began = job.clock.now
    assert job.run(RecordingEngine([*[[]] * (seconds * 10), KILLED], [ALL_WELL])).outcome == "succeeded"
    ended = job.supervisor.history.ended[0]
    assert ended.progress is progress
    assert ended.lasted == pytest.approx(seconds, abs=1) and ended.time == pytest.approx(began + seconds, abs=1)
    assert [ended.generation for ended in job.supervisor.history.ended] == [0, 1]


def test_only_a_step_beyond_all_earlier_ones_must_count_as_progress(job):
    engine = RecordingEngine(*[[KILLED]] * 5, [ALL_WELL])
    start, steps = engine.start, iter([10, 20, 15, 20, 21, 22])

    def advance(plan, stopped=None) -> None:
        start(plan)
        with job.paths.metrics.open("a") as file:
            file.write(json.dumps({"step": next(steps)}) + "\n")

    engine.start = advance
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=10)).outcome == "succeeded"
    assert [ended.progress for ended in job.supervisor.history.ended] == [True, True, False, False, True, True]


@pytest.mark.parametrize(("gpus", "killed_after"), [("all", 5.0), ("none", None)])
def test_workers_hanging_in_nccl_after_a_failure_must_be_killed_before_the_grace_period_ends(job, gpus, killed_after):
    """A worker that waits in an NCCL kernel cannot handle SIGTERM; on a CPU it gets the whole grace period."""
    engine = RecordingEngine([[WorkerExit(1, 1)], *[[]] * 200, [WorkerExit(0, 143), WorkerExit(2, 143)]], [ALL_WELL])
    stops: list[tuple[float, Stop]] = []
    engine.stop = lambda how: stops.append((job.clock.now, how))
    spec = JobSpec(trainers=2, grace=30.0, gpus=gpus)
    site = HERE.but(gpus=("GPU-0", "GPU-1", "GPU-2"))
    assert job.run(engine, spec, plan(spec, site, "j", 29500)).outcome == "succeeded"
    assert [how for _, how in stops] == [Stop.TERMINATE, Stop.KILL][: 2 if killed_after else 1]
    if killed_after:
        assert 0 <= stops[1][0] - stops[0][0] - killed_after < 1
        assert job.when("workers_lost") == [pytest.approx(2 * killed_after, abs=1)]  # the nodes report a kill at once
    assert [stop["kill"] for stop in job.noted("workers_stopping")] == [False, True][: len(stops)]
    assert job.causes() == [(1, "error")]


def test_the_worker_that_the_others_waited_for_must_be_reported_even_if_it_was_killed(job):
    """NCCL's watchdog aborts the waiting workers; the one they wait for hangs and does not handle SIGTERM."""
    engine = RecordingEngine([[WorkerExit(0, 134), WorkerExit(1, 134)], *[[]] * 100, [WorkerExit(2, 137, True)]])
    engine.stop = lambda how: None
    for rank in (0, 1):
        job.paths.log(rank).write_text("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n")
    site = HERE.but(gpus=("GPU-0", "GPU-1", "GPU-2"))
    spec = JobSpec(trainers=2, gpus="all", max_restarts=0)
    assert job.run(engine, spec, plan(spec, site, "j", 29500)).outcome == "failed"
    assert job.causes() == [(2, "timeout")]


def test_the_report_of_a_crash_must_have_the_last_output_and_the_innermost_frames(job):
    stack = "".join(f'  File "/w/{number}.py", line 1 in call\n' for number in range(60))
    job.paths.log(1).write_text(
        f"step 7\nFatal Python error: Segmentation fault\n\nCurrent thread 0x0f (most):\n{stack}"
    )
    job.run(RecordingEngine([[WorkerExit(1, 139)]]), JobSpec(trainers=2, grace=0.01, max_restarts=0))
    (ended,) = job.supervisor.history.ended
    assert ended.cause and ended.cause.last_lines[:4] == [
        "step 7",
        "Fatal Python error: Segmentation fault",
        "Current thread 0x0f (most):",
        '  File "/w/0.py", line 1 in call',
    ]
