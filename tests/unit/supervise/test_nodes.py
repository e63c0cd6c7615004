"""Nodes must be up, and the plan of the generation written, before workers start, with a scripted engine."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.methods import before
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED, Job

from orchestrate.engines.base import Observed
from orchestrate.errors import EngineError, EngineLost
from orchestrate.plan.plan import read_plan
from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles


@pytest.mark.parametrize("fails", [True, False])
def test_a_node_that_comes_back_at_the_third_attempt_must_not_fail_the_job(job, fails):
    engine, attempts = RecordingEngine([KILLED], [ALL_WELL]), []
    up = engine.up

    def come_back(*arguments, **options) -> None:
        attempts.append(job.clock.now)
        engine.missing = {"trainer-1"} if fails and len(attempts) in (2, 3) else set()
        up(*arguments, **options)
        engine.missing = {"trainer-1"} if len(attempts) in (2, 3) else set()

    engine.up = come_back
    assert job.run(engine).outcome == "succeeded"
    assert engine.calls == ["up", "start", "stop", "up", "up", "up", "start", "down"]
    assert [later - sooner >= 1 for sooner, later in zip(attempts[1:], attempts[2:])] == [True, True]


def test_nodes_reported_to_be_up_must_be_alive_before_workers_start_on_them(job):
    engine = RecordingEngine([ALL_WELL])
    engine.nodes.discard("trainer-2")
    with pytest.raises(EngineError, match="2 of 3 nodes are running"):
        job.run(engine)
    assert engine.calls == ["up", "down"]


def make_unreachable(job: Job, engine: RecordingEngine, seconds: float, generation: int) -> None:
    """Make the engine unreachable for some seconds before a generation."""
    up, since = engine.up, []

    def fail(*arguments, **options) -> None:
        if len(engine.plans) == generation:
            since.append(job.clock.now)
            if job.clock.now < since[0] + seconds:
                raise EngineLost("gone")
        up(*arguments, **options)

    engine.up = fail


@pytest.mark.parametrize("generation", [0, 1])
def test_an_engine_that_is_unreachable_for_minutes_must_be_waited_for_and_reported_once(job, generation):
    engine = RecordingEngine(*[[KILLED]] * generation, [ALL_WELL])
    make_unreachable(job, engine, 290, generation)
    assert job.run(engine).outcome == "succeeded"
    assert job.noted("engine_lost") == [{"error": "gone"}]


def test_an_engine_that_stays_unreachable_must_lose_a_job_that_has_run_and_fail_another(job):
    engine = RecordingEngine([KILLED])
    make_unreachable(job, engine, 310, 1)
    assert job.run(engine) == JobResult(Outcome.LOST, "gone")
    assert 300 <= job.clock.now - 1_000_000 < 310
    job.paths.events.unlink()
    make_unreachable(job, engine := RecordingEngine(), 310, 0)
    with pytest.raises(EngineLost, match="gone"):
        job.run(engine)


def test_a_request_to_stop_must_end_the_wait_for_an_unreachable_engine(job):
    engine = RecordingEngine([KILLED])
    make_unreachable(job, engine, 310, 1)
    began = job.clock.now
    job.stops = lambda: int(job.clock.now > began + 20)
    assert job.run(engine).outcome == "stopped"
    assert job.clock.now < began + 25


@pytest.mark.parametrize("call", ["up", "gather"])
def test_calls_to_the_engine_that_take_long_must_learn_that_the_job_is_to_stop(job, call):
    engine, requests, answers = RecordingEngine(), [], []

    def take_long(*arguments) -> None:
        answers.append(arguments[-1]())
        requests.append("stop")
        answers.append(arguments[-1]())

    setattr(engine, call, take_long)
    job.stops = lambda: len(requests)
    assert job.run(engine).outcome == "stopped"
    assert answers == [False, True]


@pytest.mark.parametrize(
    ("file", "number"), [("fence", errno.ENOSPC), ("plan", errno.EDQUOT), ("plan", errno.EIO), ("plan", errno.EROFS)]
)
def test_a_file_that_workers_need_must_be_waited_for_while_the_disk_is_full_or_fails(job, monkeypatch, file, number):
    path, full = getattr(job.paths, file), ["full"]
    kind, write = (JobFiles, "fence") if file == "fence" else (Path, "write_text")
    write_file = getattr(kind, write)

    def no_space(*arguments) -> None:
        if full:
            raise OSError(number, os.strerror(number))
        write_file(*arguments)

    def make_space() -> int:
        if full and '"disk_full"' in job.paths.events.read_text():
            full.clear()
        return 0

    monkeypatch.setattr(kind, write, no_space)

    job.stops = make_space
    engine = RecordingEngine([ALL_WELL])
    assert job.run(engine).outcome == "succeeded"
    assert path.is_file() and job.names().count("disk_full") == 1


@pytest.mark.parametrize("file", ["fence", "plan"])
def test_a_run_directory_that_was_removed_must_end_the_job_at_once(job, file):
    engine = RecordingEngine([ALL_WELL])
    engine.up = before(engine.up, lambda: shutil.rmtree(job.paths.root if file == "plan" else job.paths.shared))
    began = job.clock.now
    with pytest.raises(EngineError, match="cannot write to the run directory: .*No such file or directory"):
        job.run(engine)
    assert job.clock.now - began < 1 and "disk_full" not in job.names() and engine.calls[-1] == "down"


@pytest.mark.parametrize("folder", ["root", "shared"])
def test_workers_whose_run_directory_is_removed_must_be_stopped_and_not_succeed(job, folder):
    engine, countdown = RecordingEngine([]), [*range(50)]
    wait = engine.wait

    def remove(timeout: float) -> Observed:
        if countdown and not countdown.pop():
            shutil.rmtree(getattr(job.paths, folder))
        return wait(timeout)

    engine.wait = remove
    outcome = job.run(engine)
    assert (outcome.outcome, outcome.why) == ("failed", "its run directory was removed")
    assert engine.calls[-2:] == ["stop", "down"] and 7 < job.when("workers_stopping")[0] < 9
    assert len(job.noted("workers_stopping")) == 1


@pytest.mark.parametrize("how", ["away", "an error"])
def test_a_run_directory_that_is_away_for_a_moment_must_not_end_the_job(job, how):
    engine, waits = RecordingEngine([*[[]] * 60, ALL_WELL]), [*range(60)]
    wait, away = engine.wait, job.paths.shared.with_name("away")

    def hide(timeout: float) -> Observed:
        if waits and waits.pop() == 50:
            job.paths.shared.rename(away)
            job.paths.shared.symlink_to(job.paths.shared) if how == "an error" else None
        elif len(waits) == 30:
            job.paths.shared.unlink(missing_ok=True)
            away.rename(job.paths.shared)
        return wait(timeout)

    engine.wait = hide
    assert job.run(engine).outcome == "succeeded" and not job.noted("workers_stopping")


def test_the_plan_of_each_generation_must_be_written_before_its_workers_start(job):
    kept = []
    engine = RecordingEngine([KILLED], [ALL_WELL])
    engine.start = before(engine.start, lambda: kept.append(read_plan(job.paths.plan.read_text(), {})))
    job.run(engine)
    assert [planned.generation for planned in kept] == [0, 1]
    assert kept == engine.plans


def test_the_first_generation_must_follow_the_plan_that_was_shown(job):
    spec = JobSpec(trainers=2, grace=0.01)
    shown = plan(spec, HERE, "j", 31_000)
    engine = RecordingEngine([ALL_WELL])
    assert job.run(engine, spec, shown).outcome == "succeeded"
    assert engine.plans == [shown]


def test_a_restart_on_a_cluster_must_keep_the_name_of_the_job(job):
    spec = JobSpec(trainers=2, grace=0.01)
    engine = RecordingEngine([KILLED], [ALL_WELL])
    job.run(engine, spec, plan(spec, HERE.but(cluster="box"), "j", 29500))
    assert [planned.workers[0].env["JOB_ID"] for planned in engine.plans] == ["j", "j"]


def test_a_restart_on_the_network_of_the_host_must_use_a_free_port(job):
    spec = JobSpec(trainers=2, grace=0.01, network="host")
    engine = RecordingEngine([KILLED], [ALL_WELL])
    job.run(engine, spec, plan(spec, HERE.but(network="host"), "j", 20000))
    assert engine.plans[1].port in range(20000, 30000) and engine.plans[1].port != 29501


def test_the_start_of_a_generation_must_be_recorded_as_events(job):
    engine = RecordingEngine([[WorkerExit(rank, 0) for rank in range(6)]])
    engine.hosts = {"master": "one", "trainer-2": "two", "trainer-9": "two"}
    spec = JobSpec(trainers=2, nproc_per_node=2)
    assert job.run(engine, spec, plan(spec, HERE.but(preload=("torch.nn",)), "j", 29500)).outcome == "succeeded"
    nodes = ["master", "trainer-1", "trainer-2"]
    assert job.noted("nodes_starting") == [{"nodes": 3, "engine": "docker"}]
    assert job.noted("nodes_up") == [{"nodes": nodes, "hosts": {"master": "one", "trainer-2": "two"}}]
    starting = {"generation": 0, "nodes": nodes, "world_size": 6, "master_port": 29500}
    assert job.noted("generation_starting") == [starting]
    assert job.noted("generation_started") == [{"generation": 0, "imports": ["torch"]}]
