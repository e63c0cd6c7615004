"""The supervisor's decisions over the generations of a job, up to its outcome; on a scripted engine."""

import errno
import json

import pytest
from support.methods import after, before, raising
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED

from orchestrate.engines.base import Observed, Stop
from orchestrate.errors import EngineError, ResourceError
from orchestrate.record.events import WarningIssued
from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.record.progress import Progress
from orchestrate.record.report import line
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.policy import NOT_SAVED


def test_a_job_must_succeed_only_when_all_workers_have(job):
    engine = RecordingEngine([[WorkerExit(1, 0)], [], [WorkerExit(0, 0), WorkerExit(2, 0)]])
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert engine.calls == ["up", "start", "down"]


def test_a_failure_must_stop_the_gang_and_start_the_next_generation(job):
    engine = RecordingEngine([[WorkerExit(1, 0)], [], [WorkerExit(2, 137)]], [ALL_WELL])
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert engine.calls == ["up", "start", "stop", "up", "start", "down"]
    assert job.causes() == [(2, "killed")]


def test_each_generation_must_have_its_own_port_restart_count_and_fence(job):
    fences = []
    engine = RecordingEngine([KILLED], [KILLED], [ALL_WELL])
    engine.start = before(engine.start, lambda: fences.append(job.paths.fence.read_text()))
    job.run(engine)
    envs = [plan.workers[0].env for plan in engine.plans]
    assert [env["MASTER_PORT"] for env in envs] == ["29500", "29501", "29502"]
    assert [env["TORCHELASTIC_RESTART_COUNT"] for env in envs] == ["0", "1", "2"]
    assert fences == ["0\n", "1\n", "2\n"]


def test_workers_must_be_fenced_before_they_are_stopped(job):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    engine.stop = after(engine.stop, lambda: engine.calls.append(job.paths.fence.read_text().strip()))
    job.run(engine)
    assert engine.calls[2:4] == ["stop", "0 over"]


def test_a_job_that_fails_too_often_must_end_with_the_last_cause(job):
    engine = RecordingEngine(*[[KILLED]] * 2)
    outcome = job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=1))
    assert outcome == JobResult(Outcome.FAILED, "max_restarts is 1")
    assert job.causes() == [(1, "killed")] * 2
    assert engine.calls[-1] == "down"


def test_metrics_must_count_as_progress(job):
    engine = RecordingEngine(*[[KILLED]] * 6, [ALL_WELL])
    start = engine.start

    def advance(plan, stopped=None) -> None:
        start(plan)
        with job.paths.metrics.open("a") as file:
            file.write(json.dumps({"step": 10 * len(engine.plans)}) + "\n")

    engine.start = advance
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=10)).outcome == "succeeded"
    assert [ended.step for ended in job.supervisor.history.ended] == [10, 20, 30, 40, 50, 60, 70]


def test_repeated_metrics_must_not_count_as_progress(job):
    engine = RecordingEngine(*[[KILLED]] * 6)
    job.paths.metrics.write_text('{"step": 5}\n')
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=10)).why == NOT_SAVED
    assert [ended.progress for ended in job.supervisor.history.ended] == [True, False, False, False]


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ([[0, 1, 2], [0, 1, 2, 3]], "generation 1 began at step 0 again, although step 2 had been reached: "),
        ([[0, 1, 2], [1, 2, 3]], ""),
        ([[5], [5, 6]], ""),  # nothing was repeated but the first step
        ([[0, 1, 2], []], ""),
    ],
)
@pytest.mark.parametrize("where", ["metrics", "output"])
def test_a_script_that_does_not_continue_from_a_checkpoint_must_be_named(job, steps, warned, where):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    start = engine.start

    def write(plan, stopped=None) -> None:
        start(plan)
        for step in steps[plan.generation]:
            if where == "output":
                job.supervisor.files.heard(Progress(step))
                job.supervisor.files.heard(Progress(0, 9, bar=True))
            else:
                with job.paths.metrics.open("a") as file:
                    file.write(json.dumps({"step": step}) + "\n")

    engine.start = write
    job.run(engine)
    warnings = [warning["text"] for warning in job.noted("warning_issued")]
    assert warnings == ([f"{warned}the script has not continued from a checkpoint"] if warned else [])


@pytest.mark.parametrize(("lasted", "saves", "warned"), [(60, False, 1), (60, True, 0), (1, False, 0)])
def test_a_restart_without_a_checkpoint_must_be_warned_of_once_if_it_loses_much(job, lasted, saves, warned):
    engine = RecordingEngine(*[[KILLED]] * 2, [ALL_WELL])
    start = engine.start

    def run(plan, stopped=None) -> None:
        start(plan)
        job.clock.now += lasted
        if saves:
            (job.paths.checkpoints / "step-1").write_text("1")

    engine.start = run
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=10)).outcome == "succeeded"
    warnings = [warning["text"] for warning in job.noted("warning_issued")]
    assert ["$JOB_DIR/checkpoints is empty" in text for text in warnings] == [True] * warned


def test_a_permanent_failure_must_not_be_retried(job):
    job.paths.log(0).write_text("ModuleNotFoundError: No module named 'nonesuch'\n")
    engine = RecordingEngine([[WorkerExit(0, 1)]])
    assert job.run(engine) == JobResult(Outcome.FAILED, "this kind of failure is not retried")
    assert job.causes() == [(0, "script")]


def test_only_last_lines_of_the_current_generation_must_count_for_the_cause(job):
    job.paths.log(1).write_text("ModuleNotFoundError: No module named 'x'\n[node] generation 1\nValueError: new\n")
    engine = RecordingEngine([[WorkerExit(0, 137)]], [[WorkerExit(1, 1)]], [ALL_WELL])
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == [(0, "killed"), (1, "error")]


@pytest.mark.parametrize(("requested", "cause"), [(False, (1, "terminated")), (True, (0, "error"))])
def test_a_worker_terminated_externally_must_be_distinguished_from_one_that_we_stopped(job, requested, cause):
    job.paths.log(0).write_text("RuntimeError: Connection reset by peer\n")
    engine = RecordingEngine([[WorkerExit(0, 1)], [WorkerExit(1, 143, requested)], [WorkerExit(2, 143)]], [ALL_WELL])
    engine.stop = lambda how: engine.calls.append("stop")  # all are stopped after the exit of rank 0
    assert job.run(engine, JobSpec(trainers=2, grace=5.0)).outcome == "succeeded"
    assert job.causes() == [cause]
    assert engine.calls == ["up", "start", "stop", "up", "start", "down"]


@pytest.mark.parametrize(
    ("later", "cause", "stopped"),
    [
        ([[]] * 10 + [[WorkerExit(2, 1)]], (1, "timeout"), 1.2),  # as soon as one worker is left
        ([], (1, "timeout"), 2.1),
        ([[WorkerExit(2, 0)]], (2, "left early"), 0.2),
        ([[WorkerExit(1, 137)]], (1, "killed"), 0.2),
        ([[WorkerExit(2, 0), WorkerExit(1, 1)]], (1, "error"), 0.2),
    ],
)
def test_other_waiting_workers_must_have_time_to_time_out_too(job, later, cause, stopped):
    for rank in (0, 2):
        job.paths.log(rank).write_text("RuntimeError: Timed out waiting 3000ms for recv operation to complete\n")
    engine = RecordingEngine([[WorkerExit(0, 1)], *later], [ALL_WELL])
    assert job.run(engine, JobSpec(trainers=2, grace=5.0)).outcome == "succeeded"
    assert job.causes() == [cause]
    assert job.when("workers_stopping") == [pytest.approx(stopped, abs=0.15)]  # at most two steps of 0.1 s


def test_workers_that_fail_one_after_the_other_must_be_stopped_once(job):
    engine = RecordingEngine([[WorkerExit(0, 1)], [WorkerExit(1, 1, False)], [WorkerExit(2, 1, False)]], [ALL_WELL])
    engine.stop = lambda how: engine.calls.append("stop")
    assert job.run(engine).outcome == "succeeded"
    assert job.names().count("workers_stopping") == 1


def test_a_request_to_stop_must_stop_the_gang(job):
    engine = RecordingEngine([])
    job.stops = lambda: 1 if "start" in engine.calls else 0
    assert job.run(engine) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert engine.calls == ["up", "start", "stop", "down"]


def test_a_request_to_stop_before_the_workers_start_must_start_none(job):
    engine = RecordingEngine()
    job.stops = lambda: len(engine.calls)
    assert job.run(engine).outcome == "stopped"
    assert engine.calls == ["up", "down"]


def test_a_request_to_stop_before_the_nodes_start_must_only_remove_leftovers(job):
    engine = RecordingEngine()
    job.stops = lambda: 1
    assert job.run(engine).outcome == "stopped"
    assert engine.calls == ["remove j"]


def test_a_later_supervisor_must_not_restart_a_job_that_could_not_start(job):
    engine = RecordingEngine()
    engine.missing = {"trainer-1"}
    with pytest.raises(EngineError):
        job.run(engine)
    engine = RecordingEngine()
    assert job.run(engine) == JobResult(Outcome.FAILED, "could not start: no such node")
    assert engine.calls == ["adopt", "down"]


def test_files_that_cannot_be_sent_must_end_the_job_and_not_count_as_a_lost_engine(job):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    start = engine.start

    def fail(plan, stopped=None) -> None:
        if len(job.supervisor.history.ended) == 1:
            raise ResourceError("cannot send files to the nodes: No space left on device")
        start(plan)

    engine.start = fail
    with pytest.raises(ResourceError):
        job.run(engine)
    (outcome,) = job.noted("outcome_decided")
    assert outcome["reason"] == "could not continue: cannot send files to the nodes: No space left on device"
    assert engine.calls == ["up", "start", "stop", "up", "down"]


def test_a_request_to_stop_while_the_nodes_start_must_not_wait_for_them(job):
    engine = RecordingEngine()
    engine.missing = {"trainer-1"}
    job.stops = lambda: int("up" in engine.calls)
    assert job.run(engine).outcome == "stopped"
    assert engine.calls == ["up", "down"]


def test_a_request_to_stop_during_the_restart_delay_must_end_the_job(job):
    engine = RecordingEngine([KILLED], [KILLED], [ALL_WELL])
    job.stops = lambda: int(len(job.supervisor.history.ended) == 2)  # during the delay of one second
    assert job.run(engine) == JobResult(Outcome.STOPPED, "stopped by the user")


def test_only_a_second_request_to_stop_must_kill(job):
    engine = RecordingEngine([], stubborn=True)
    job.stops = lambda: ("start" in engine.calls) + ("stop" in engine.calls)
    assert job.run(engine, JobSpec(trainers=2, grace=30)).outcome == "stopped"
    assert engine.calls == ["up", "start", "stop", "kill", "down"]


@pytest.mark.parametrize(
    ("takes", "code", "hurried", "killed"),
    [(28, 137, False, False), (31, 143, False, False), (12, 137, True, False), (31, 137, False, True)],
)
def test_workers_that_a_request_to_stop_had_to_kill_must_be_named(job, takes, code, hurried, killed):
    engine, stopped = RecordingEngine([]), []
    engine.stop = lambda how: stopped.append(job.clock.now)
    scripted = engine.wait

    def wait(timeout: float) -> Observed:
        if stopped and engine.running and job.clock.now - stopped[0] > takes:
            engine.running.clear()
            return Observed([WorkerExit(0, 143), WorkerExit(1, code), WorkerExit(2, code)])
        return scripted(timeout)

    engine.wait = wait
    job.stops = lambda: ("start" in engine.calls) + (hurried and bool(stopped) and job.clock.now > stopped[0] + 10)
    assert job.run(engine, JobSpec(trainers=2, grace=30.0)).outcome == "stopped"
    text = "ranks 1, 2 did not end after SIGTERM: killed after the grace period of 30 s"
    assert job.noted("warning_issued") == [{"text": text}] * killed


def test_nodes_whose_workers_do_not_end_must_be_removed_before_the_next_generation(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.stopping.REPORT_TIMEOUT", 0.01)
    engine = RecordingEngine([[WorkerExit(1, 137)]], [ALL_WELL], stubborn=True)
    assert job.run(engine).outcome == "succeeded"
    assert engine.calls == ["up", "start", "stop", "discard master trainer-2", "up", "start", "down"]


@pytest.mark.parametrize("takes", [0.0, 29.0, 34.0, 36.0, None])
def test_nodes_must_be_removed_only_after_the_grace_period_of_their_workers(job, takes):
    stopped = []

    def end(how: Stop) -> None:
        engine.calls.append("stop")
        stopped.append(job.clock.now)

    def wait(timeout: float) -> Observed:
        first = engine.calls.count("start") == 1
        if first and engine.running and stopped and takes is not None and job.clock.now - stopped[0] > takes:
            engine.running.clear()
            return Observed([WorkerExit(0, 143), WorkerExit(2, 143)])
        return scripted(timeout)

    engine = RecordingEngine([KILLED], [ALL_WELL])
    engine.stop, scripted, engine.wait = end, engine.wait, wait
    assert job.run(engine, JobSpec(trainers=2, grace=30.0)).outcome == "succeeded"
    removed = [call for call in engine.calls if call.startswith("discard")]
    assert removed == ([] if takes is not None and takes < 35 else ["discard master trainer-2"])


def test_a_supervisor_that_crashes_must_remove_the_nodes(job):
    engine = RecordingEngine([])
    engine.wait = raising(KeyError)
    with pytest.raises(KeyError):
        job.run(engine)
    assert engine.calls == ["up", "start", "down"] and engine.graces == [0]
    engine.down = raising(EngineError("stuck"))
    with pytest.raises(KeyError):  # this does not hide the bug
        job.run(engine)


def test_max_run_must_stop_the_gang(job):
    assert job.run(RecordingEngine([]), JobSpec(trainers=2, max_run=0.01)) == JobResult(
        Outcome.STOPPED, "max_run was reached"
    )


def test_max_run_must_count_from_the_start_of_the_job(job):
    began = job.clock.now
    engine = RecordingEngine([[]] * 200 + [KILLED], [])  # twenty seconds, then without end
    outcome = job.run(engine, JobSpec(trainers=2, grace=1.0, max_run=30.0))
    assert outcome == JobResult(Outcome.STOPPED, "max_run was reached")
    assert engine.calls == ["up", "start", "stop", "up", "start", "stop", "down"]
    assert 30 <= job.clock.now - began < 31


def test_nodes_that_cannot_start_must_be_removed(job):
    engine = RecordingEngine()
    engine.missing = {"trainer-1"}
    with pytest.raises(EngineError, match="no such node"):
        job.run(engine, JobSpec(trainers=2, min_trainers=0))
    assert engine.calls == ["up", "down"]


def test_nodes_that_cannot_be_replaced_must_fail_the_job(job):
    engine = RecordingEngine([KILLED])
    engine.start = after(engine.start, lambda: engine.missing.add("trainer-1"))
    assert job.run(engine) == JobResult(Outcome.FAILED, "the job cannot continue: no such node")


def test_a_full_disk_must_delay_the_restart_until_all_files_are_copied(job):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    engine.start = after(engine.start, lambda: engine.full.append(OSError(errno.ENOSPC, "full", "a")))
    assert job.run(engine).outcome == "succeeded"
    assert engine.calls == ["up", "start", "stop", "up", "gather", "start", "down"]
    assert [event["error"] for event in job.events if event["event"] == "disk_full"] == ["[Errno 28] full: 'a'"]


def test_a_disk_that_stays_full_must_end_the_job_and_leave_files_on_the_nodes(job, monkeypatch):
    for module in ("supervise.context", "supervise.generation"):
        monkeypatch.setattr(f"orchestrate.{module}.ENGINE_TIMEOUT", 0.01)
    engine = RecordingEngine([KILLED])
    engine.start = after(engine.start, lambda: engine.full.extend([OSError(errno.ENOSPC, "full")] * 9))
    reason = "the job cannot continue: cannot write to the run directory: [Errno 28] full"
    assert job.run(engine) == JobResult(Outcome.FAILED, reason)
    assert engine.calls == ["up", "start", "stop", "up", "gather", "gather", "down"]


def test_a_failed_clean_up_must_not_replace_the_outcome(job):
    engine = RecordingEngine([ALL_WELL])
    engine.down = raising(ResourceError("stuck"))
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished", left="stuck")


def test_a_request_to_stop_while_nodes_are_replaced_must_stop_the_job(job):
    engine = RecordingEngine([KILLED])
    engine.start = after(engine.start, lambda: engine.missing.add("trainer-1"))
    job.stops = lambda: int(engine.calls.count("up") > 2)
    assert job.run(engine) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert engine.calls.count("up") == 3


def test_a_warning_of_the_engine_must_be_an_event_and_be_printed(job):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    engine.start = after(
        engine.start, lambda: len(engine.plans) > 1 and engine.warn("the nodes can reach this machine")
    )
    assert job.run(engine).outcome == "succeeded"
    (event,) = [event for event in job.supervisor.emit.events if isinstance(event, WarningIssued)]
    assert line(event) == "warning: the nodes can reach this machine"


def test_workers_that_delay_the_start_must_be_reported_until_they_have_started(job):
    engine = RecordingEngine([[]] * 60 + [ALL_WELL])
    engine.slow = [{0, 1, 2}] * 20 + [{1, 2}] * 2 + [{2}] * 20  # 0.1 s each
    assert job.run(engine).outcome == "succeeded"
    # All three keep no other worker waiting, and two delay the start only briefly.
    assert job.noted("workers_awaited") == [{"ranks": [2]}]
    assert job.when("workers_awaited") == [pytest.approx(3.3, abs=0.15)]
    assert job.noted("workers_started") == [{}]
    assert job.when("workers_started") == [pytest.approx(4.3, abs=0.15)]


def test_workers_that_are_stopped_before_they_start_must_not_be_reported_as_started(job):
    engine = RecordingEngine([[WorkerExit(0, 137)]], [ALL_WELL])
    engine.slow = [{1, 2}]
    assert job.run(engine).outcome == "succeeded"
    assert len(job.noted("workers_started")) == 1  # those of the second generation
