"""A standby node must replace a lost one at once, with a scripted engine."""

import pytest
from support.methods import after
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED, Job, WhenAsked

from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(trainers=2, grace=0.01, spares=1)


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.ThreadPoolExecutor", WhenAsked)
    return Job(tmp_path)


def with_standby(*generations: list[list[WorkerExit]], lost: tuple[str, ...] = ("trainer-1",)) -> RecordingEngine:
    """An engine with a standby node that loses nodes for good in the first generation."""
    engine = RecordingEngine(*generations)
    engine.nodes.add("trainer-3")
    engine.start = after(engine.start, lambda: engine.missing.update(lost))
    return engine


def nodes(engine: RecordingEngine) -> list[list[str]]:
    return [[worker.node for worker in plan.workers] for plan in engine.plans]


def test_a_standby_node_must_be_up_before_the_job_starts_and_have_no_worker(job):
    engine, requested = with_standby([ALL_WELL]), []
    engine.hosts = {"master": "one", "trainer-3": "two"}
    up = engine.up

    def record(plan, *arguments, **options) -> None:
        requested.append(plan.nodes)
        up(plan, *arguments, **options)

    engine.up = record
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert requested == [("master", "trainer-1", "trainer-2", "trainer-3")]
    assert engine.calls == ["up", "start", "down"]
    assert nodes(engine) == [["master", "trainer-1", "trainer-2"]]
    assert [found["hosts"] for found in job.noted("nodes_up")] == [{"master": "one"}]


def test_a_standby_node_must_replace_a_lost_one_without_waiting_for_it(job):
    engine = with_standby([KILLED], [ALL_WELL])
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert nodes(engine)[1] == ["master", "trainer-2", "trainer-3"]
    assert engine.calls == ["up", "start", "stop", "start", "up", "down"]  # meanwhile, the lost one may come back
    assert "nodes_missing" not in job.names() and "node_back" not in job.names()


def test_a_standby_node_must_replace_a_lost_one_even_if_it_comes_back_before_the_restart(job):
    engine = with_standby([KILLED], [ALL_WELL])
    alive, counts = engine.alive, []

    def look() -> dict[str, str]:
        counts.extend(["after the failure"] * ("stop" in engine.calls))
        if len(counts) == 2:
            engine.missing.clear()
        return alive()

    engine.alive = look
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert nodes(engine)[1] == ["master", "trainer-2", "trainer-3"]


def test_a_node_that_comes_back_meanwhile_must_be_up_before_the_next_failure_is_handled(job):
    engine = with_standby([KILLED], [KILLED], [ALL_WELL])
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert engine.calls == ["up", "start", "stop", "start", "stop", "up", "start", "up", "down"]


def test_a_job_without_standby_nodes_must_have_its_nodes_up_before_the_next_generation(job):
    engine = RecordingEngine([KILLED], [ALL_WELL])
    assert job.run(engine, JobSpec(trainers=2, grace=0.01)).outcome == "succeeded"
    assert engine.calls == ["up", "start", "stop", "up", "start", "down"]


def test_a_job_that_loses_more_nodes_than_it_has_on_standby_must_wait_for_one_to_come_back(job):
    engine = with_standby([KILLED], [ALL_WELL], lost=("trainer-1", "trainer-2"))
    assert job.run(engine, SPEC) == JobResult(Outcome.FAILED, "the job cannot continue: no such node")
    assert engine.calls == ["up", "start", "stop", "up", "up", "up", "down"]


def test_a_job_must_continue_with_enough_nodes_even_if_none_is_left_on_standby(job):
    engine = with_standby([KILLED], [ALL_WELL], lost=("trainer-1", "trainer-2"))
    up = engine.up

    def bring_one(*arguments, **options) -> None:
        engine.missing.discard("trainer-1")
        up(*arguments, **options)

    engine.up = bring_one
    assert job.run(engine, SPEC).outcome == "succeeded"
    assert nodes(engine)[1] == ["master", "trainer-1", "trainer-3"]


def test_a_job_without_a_minimum_must_not_continue_with_fewer_nodes(job):
    engine = with_standby([KILLED], [ALL_WELL])
    alive, counts = engine.alive, []

    def look() -> dict[str, str]:  # the standby node dies, too, as soon as it has been counted
        counts.extend(["look"] * (engine.calls[-1:] == ["stop"]))
        return {node: "" for node in alive() if node != "trainer-3" or len(counts) < 2}

    engine.alive = look
    outcome = job.run(engine, SPEC)
    assert outcome == JobResult(Outcome.FAILED, "the job cannot continue: 2 of 3 nodes are running")


def test_a_job_with_a_minimum_must_continue_if_its_standby_node_is_lost_at_the_last_moment(job):
    engine = with_standby([KILLED], [ALL_WELL[:2]])
    alive, counts = engine.alive, []

    def look() -> dict[str, str]:
        counts.extend(["after the failure"] * ("stop" in engine.calls))
        return {node: "" for node in alive() if node != "trainer-3" or len(counts) < 2}

    engine.alive = look
    spec = JobSpec(trainers=2, grace=0.01, spares=1, min_trainers=1)
    assert job.run(engine, spec).outcome == "succeeded"
    assert nodes(engine)[1] == ["master", "trainer-2"]
    (missing,) = job.noted("nodes_missing")
    assert missing["error"] == "2 of 3 nodes are running"
