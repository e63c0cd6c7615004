"""Workers that train alone, and GPUs that are not used, must be reported."""

import dataclasses

import pytest
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import KILLED

from orchestrate.record.outcomes import Activity, JobResult, Outcome, Use, WorkerExit
from orchestrate.record.report import text
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.isolation_check import CHECK_AFTER, are_isolated

ALONE = Use(exchanged=848, connected=3.0, sampled=5.0, gpu=False, torch=True)
TOGETHER = dataclasses.replace(ALONE, exchanged=100_000)
STRICT = JobSpec(trainers=2, grace=0.01, require_communication=True)


@pytest.mark.parametrize(
    ("uses", "isolated"),
    [
        ([ALONE, ALONE], True),
        ([ALONE, TOGETHER], False),
        ([TOGETHER, ALONE], True),  # rank 0 may host the store, to which all connect
        ([ALONE, dataclasses.replace(ALONE, exchanged=0, connected=0.0)], True),
        ([ALONE, dataclasses.replace(ALONE, connected=2.5)], None),  # it may just have begun
        ([ALONE, dataclasses.replace(ALONE, sampled=1.0)], None),
        ([ALONE, None], None),
        ([ALONE], None),
        ([ALONE, dataclasses.replace(ALONE, exchanged=1143)], False),  # one all-reduce of a number
        ([ALONE, *[dataclasses.replace(ALONE, exchanged=6970)] * 15], True),  # 16 workers create a process group
    ],
)
def test_workers_must_count_as_isolated_only_if_it_is_known(uses, isolated):
    known = {rank: use for rank, use in enumerate(uses) if use}
    assert are_isolated(known, len(uses), by_kernel=True) is isolated


@pytest.mark.parametrize(("exchanged", "isolated"), [(0, True), (848, False)])
def test_a_connection_must_be_enough_if_data_can_bypass_the_kernel(exchanged, isolated):
    """NCCL uses NVLink, shared memory or RDMA."""
    use = dataclasses.replace(ALONE, exchanged=exchanged, connected=float(exchanged))
    assert are_isolated({0: use, 1: use}, 2, by_kernel=False) is isolated


def ended(*uses: Use | None, workers: int = 3) -> list[WorkerExit]:
    """The exits of workers that have used the last of `uses`, or each its own."""
    return [WorkerExit(rank, 0, use=uses[min(rank, len(uses) - 1)]) for rank in range(workers)]


def test_isolated_workers_must_be_in_the_report_with_a_hint(job):
    engine = RecordingEngine([ended(ALONE, dataclasses.replace(ALONE, torch=False, version="2.9.0"))])
    spec = JobSpec(trainers=2, grace=0.01, command=("train.py",))
    assert job.run(engine, spec) == JobResult(Outcome.SUCCEEDED, "finished")
    (generation,) = job.supervisor.history.ended
    assert generation.exchanged == {0: 848, 1: 848, 2: 848} and generation.versions == ("2.9.0",)
    assert "init_process_group" in generation.isolated


GROUP = "dist.init_process_group('gloo')\n"


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("import torch", "call torch.distributed.init_process_group() and train a DistributedDataParallel model"),
        (f"import torch\n{GROUP}", "after init_process_group() at train.py:2, train a DistributedDataParallel model"),
        (
            f"import model\n{GROUP}",
            "init_process_group() is at train.py:2, DistributedDataParallel at model.py:1: see why",
        ),
        (f"{GROUP}mp.spawn(main)", "see whether this run called mp.spawn() at train.py:2: the job starts the workers"),
        (
            f"os.environ['MASTER_PORT'] = '29500'\n{GROUP}",
            "see whether this run set its own address of rank 0 at train.py:1: leave it to the job (MASTER_ADDR)",
        ),
        (
            "# mp.spawn(main)\nimport accelerate",
            "pass model, optimizer and data loaders to Accelerator.prepare(); on the",
        ),
    ],
)
def test_the_hint_for_isolated_workers_must_say_what_was_seen_in_the_script(job, tmp_path, source, hint):
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "model.py").write_text("from torch.nn.parallel import DistributedDataParallel")
    spec = JobSpec(trainers=2, grace=0.01, command=("train.py",))
    planned = plan(spec, HERE.but(code=str(tmp_path)), "j", 29500)
    assert job.run(RecordingEngine([ended(ALONE)]), spec, planned).outcome == "succeeded"
    assert job.supervisor.history.ended[0].isolated.startswith(hint)


def test_isolated_workers_of_a_failed_generation_must_not_be_in_the_report(job):
    engine = RecordingEngine([[dataclasses.replace(end, code=1) for end in ended(ALONE)]])
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, max_restarts=0)).outcome == "failed"
    assert job.supervisor.history.ended[0].isolated == ""


@pytest.mark.parametrize(
    ("changes", "use"),
    [
        ({"gpus": ("GPU-0", "GPU-1", "GPU-2")}, ALONE),
        ({"engine": "process"}, dataclasses.replace(ALONE, gpu=True)),  # one that the job did not give it
        ({"nproc": 2}, ALONE),
        ({"engine": "swarm", "network": "host"}, dataclasses.replace(ALONE, exchanged=0)),  # another interface
    ],
)
def test_workers_whose_data_may_not_be_counted_must_not_be_in_the_report(job, changes, use):
    nproc = changes.pop("nproc", 1)
    spec = JobSpec(trainers=2, nproc_per_node=nproc, grace=0.01)
    engine = RecordingEngine([ended(use, workers=3 * nproc)])
    assert job.run(engine, spec, plan(spec, HERE.but(**changes), "j", 29500)).outcome == "succeeded"
    assert job.supervisor.history.ended[0].isolated == ""


@pytest.mark.parametrize(
    ("imports", "hint"),
    [
        ("torch, transformers", "use a Trainer or an Accelerator"),
        ("lightning", "of the Trainer"),
        ("deepspeed", "engine"),
    ],
)
def test_the_hint_must_fit_the_framework_of_the_script(job, tmp_path, imports, hint):
    (tmp_path / "train.py").write_text(f"import {imports}\n")
    spec = JobSpec(trainers=2, grace=0.01, command=("train.py",))
    assert job.run(RecordingEngine([ended(ALONE)]), spec, plan(spec, HERE.but(code=str(tmp_path)), "j", 29500))
    assert hint in job.supervisor.history.ended[0].isolated


@pytest.mark.parametrize("use", [TOGETHER, None, dataclasses.replace(ALONE, torch=False)])
def test_other_workers_must_not_be_in_the_report(job, use):
    """A script without torch may well have nothing to exchange."""
    assert job.run(RecordingEngine([ended(use)])) == JobResult(Outcome.SUCCEEDED, "finished")
    assert job.supervisor.history.ended[0].isolated == ""


@pytest.mark.parametrize(
    ("use", "result"),
    [
        (TOGETHER, JobResult(Outcome.SUCCEEDED, "finished")),
        (ALONE, JobResult(Outcome.FAILED, "the workers exchanged no data (require_communication)")),
        (
            dataclasses.replace(ALONE, exchanged=0, sampled=0.1),
            JobResult(Outcome.FAILED, "it is unknown whether the workers exchanged data (require_communication)"),
        ),
        (dataclasses.replace(ALONE, connected=0.2), JobResult(Outcome.SUCCEEDED, "finished")),
        (None, JobResult(Outcome.FAILED, "it is unknown whether the workers exchanged data (require_communication)")),
    ],
)
def test_required_communication_must_be_proven(job, use, result):
    assert job.run(RecordingEngine([ended(use)]), STRICT) == result


def test_required_communication_must_be_proven_for_each_worker(job):
    assert job.run(RecordingEngine([ended(TOGETHER, TOGETHER, None)]), STRICT).why.startswith("it is unknown")


def test_one_worker_must_need_no_communication(job):
    spec = dataclasses.replace(STRICT, trainers=0)
    engine = RecordingEngine([[WorkerExit(0, 0, use=ALONE)]])
    assert job.run(engine, spec, plan(spec, HERE, "j", 29500)) == JobResult(Outcome.SUCCEEDED, "finished")


def run_for(
    job,
    seconds: float,
    use: Use | None,
    gpus: tuple[str, ...] = (),
    late: float = 0.0,
    failures: int = 0,
    begins: float | None = 0.0,
) -> None:
    """A job whose generations run for some seconds.

    Its workers start `late` seconds after it, have used `use`, and write a first metric `begins` seconds after it.
    """
    working = [[]] * int(10 * seconds)
    engine = RecordingEngine(*[[*working, KILLED]] * failures, [*working, ended(use)])
    start = job.clock.now

    def activity() -> dict[int, Activity]:
        if begins is not None and job.clock.now - start > begins:
            job.paths.metrics.write_text('{"step": 1}\n')
        now = use and dataclasses.replace(use, sampled=job.clock.now - start - late)
        return {rank: Activity("R", 1.0, use=now) for rank in range(3)}

    engine.activity = activity
    spec = JobSpec(trainers=2, grace=0.01, command=("train.py",))
    assert job.run(engine, spec, plan(spec, HERE.but(gpus=gpus), "j", 29500)).outcome == "succeeded"


def test_isolated_workers_must_be_reported_once_while_they_run(job):
    run_for(job, 5 * CHECK_AFTER, ALONE)
    (event,) = job.noted("workers_isolated")
    assert event["world_size"] == 3 and "init_process_group" in event["hint"]


@pytest.mark.parametrize(("seconds", "times"), [(CHECK_AFTER + 80.0, 0), (CHECK_AFTER + 120.0, 1)])
def test_a_minute_must_count_from_the_start_of_the_last_worker(job, seconds, times):
    run_for(job, seconds, ALONE, late=100.0)
    assert len(job.noted("workers_isolated")) == times


def test_what_workers_have_used_must_survive_a_takeover(job):
    engine = RecordingEngine([[WorkerExit(rank, 0, use=ALONE)] for rank in range(3)])
    assert job.run(engine, STRICT).outcome == "failed"
    assert [event["use"]["exchanged"] for event in job.noted("worker_ended")] == [848] * 3


@pytest.mark.parametrize(
    ("seconds", "use"), [(CHECK_AFTER / 2, ALONE), (2 * CHECK_AFTER, TOGETHER), (2 * CHECK_AFTER, None)]
)
def test_no_warning_must_be_given_before_a_minute_or_if_workers_communicate(job, seconds, use):
    run_for(job, seconds, use)
    assert job.noted("workers_isolated") == []


@pytest.mark.parametrize(("used", "ranks"), [(False, [[0, 1, 2]]), (True, [])])
def test_gpus_that_are_not_used_in_the_first_minute_must_be_reported(job, used, ranks):
    run_for(job, 2 * CHECK_AFTER, dataclasses.replace(TOGETHER, gpu=used), gpus=("GPU-0", "GPU-1", "GPU-2"))
    assert [event["ranks"] for event in job.noted("gpus_unused")] == ranks


@pytest.mark.parametrize(("begins", "times"), [(None, 0), (65.0, 0), (20.0, 1)])
def test_a_minute_must_count_from_the_first_sign_of_training(job, begins, times):
    """A script may load data or compile for minutes before it creates a process group or prints a step."""
    unused = dataclasses.replace(ALONE, exchanged=0, connected=0.0)
    run_for(job, 2 * CHECK_AFTER, unused, gpus=("GPU-0", "GPU-1", "GPU-2"), begins=begins)
    assert [len(job.noted(name)) for name in ("workers_isolated", "gpus_unused")] == [times, times]


def test_a_launcher_in_the_script_must_be_named(job):
    found = dataclasses.replace(ALONE, launcher="torchrun")
    assert job.run(RecordingEngine([ended(ALONE, found, ALONE)])).outcome == "succeeded"
    assert job.supervisor.history.ended[0].isolated == (
        "torchrun starts workers of its own on each node: run its script as the job's, without torchrun"
    )


def test_a_job_that_was_stopped_must_not_be_told_to_exchange_data(job):
    engine = RecordingEngine([[], ended(ALONE)])
    job.stops = lambda: 1
    assert job.run(engine).outcome == "stopped"
    assert [ended.isolated for ended in job.supervisor.history.ended] in ([], [""])


def test_a_job_on_the_cpu_must_not_be_asked_for_gpus(job):
    run_for(job, 2 * CHECK_AFTER, TOGETHER)
    assert job.noted("gpus_unused") == []


def test_the_end_of_a_job_must_show_the_warning():
    data = {
        "outcome": "succeeded",
        "world_size": 4,
        "duration_s": 1.0,
        "generations": 1,
        "root_cause": None,
        "failures": [],
        "pace": [],
        "left_behind": "",
        "written": [],
        "copies": [],
        "isolated": "call it",
        "truncated": [],
    }
    assert text(data).splitlines()[1:] == [
        "warning: the 4 workers exchanged no data: if they train, each trained its own model",
        "hint: call it",
    ]
    assert len(text(data | {"isolated": ""}).splitlines()) == 1


def test_isolated_workers_and_unused_gpus_must_be_warned_about_once_for_all_generations(job):
    unused = dataclasses.replace(ALONE, exchanged=0, connected=0.0)
    run_for(job, 2 * CHECK_AFTER, unused, gpus=("GPU-0", "GPU-1", "GPU-2"), failures=2)
    assert [len(job.noted(name)) for name in ("generation_starting", "workers_isolated", "gpus_unused")] == [3, 1, 1]
