"""A job must wait for a paused or silent node, but only briefly for one that is cut off; on a scripted engine."""

import pytest
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, Job

from orchestrate.record.outcomes import JobResult, Outcome, WorkerExit
from orchestrate.spec.spec import JobSpec


def troubled(job: Job, *times: tuple[float, float, str], workers: int = 3) -> RecordingEngine:
    """An engine whose trainer-2 is in trouble in the first generation: (start, end, trouble), times in seconds."""
    well = [WorkerExit(rank, 0) for rank in range(workers)]
    engine, began = RecordingEngine([*[[]] * 1000, well], [well]), job.clock.now

    def troubles() -> dict[str, str]:
        now = job.clock.now - began
        found = [trouble for start, end, trouble in times if start <= now < end and engine.calls.count("start") == 1]
        return {"trainer-2": found[0]} if found else {}

    engine.troubles = troubles
    return engine


@pytest.mark.parametrize(
    ("times", "causes"),
    [
        ([(1, 5.5, "partition")], []),
        ([(1, 7, "partition")], [(2, "partition")]),
        ([(1, 60, "paused")], []),
        ([(1, 60, "silent")], []),
        ([(1, 20, "paused"), (20, 24, "partition")], []),
        ([(1, 4, "partition"), (5, 8, "partition")], []),
    ],
)
def test_only_a_node_that_is_cut_off_for_over_five_seconds_must_count_as_lost(job, times, causes):
    assert job.run(troubled(job, *times)).outcome == "succeeded"
    assert job.causes() == causes


def test_each_problem_of_a_node_must_be_reported_once_and_so_must_its_end(job):
    job.run(troubled(job, (1, 10, "paused"), (20, 24, "silent"), (24, 27, "paused")))
    assert [name for name in job.names() if name.startswith("node_")] == [
        *("node_in_trouble", "node_well"),
        *("node_in_trouble", "node_in_trouble", "node_well"),
    ]
    assert job.noted("node_in_trouble") == [
        {"node": "trainer-2", "trouble": trouble} for trouble in ("paused", "silent", "paused")
    ]
    assert job.noted("node_well") == [{"node": "trainer-2"}] * 2


def test_a_lost_node_must_be_recorded_once_under_its_first_worker(job):
    engine = troubled(job, (1, 60, "partition"), workers=6)
    assert job.run(engine, JobSpec(trainers=2, nproc_per_node=2, grace=3.0)).outcome == "succeeded"
    assert job.causes() == [(4, "partition")]
    lost = {"rank": 4, "node": "trainer-2", "exit_code": 137, "stopping": False, "known": "partition", "use": None}
    assert [end for end in job.noted("worker_ended") if end.get("known")] == [lost]


def test_a_node_that_is_cut_off_while_workers_are_stopped_must_not_be_blamed(job):
    engine = troubled(job, (1, 60, "partition"))
    engine.generations[0] = [[]] * 20 + [[WorkerExit(1, 1)]] + [[]] * 100 + [[WorkerExit(0, 143), WorkerExit(2, 143)]]
    engine.stop = lambda how: None
    assert job.run(engine, JobSpec(trainers=2, grace=30.0)).outcome == "succeeded"
    assert job.causes() == [(1, "error")]
    assert job.names().count("worker_ended") == 6


def test_a_lost_node_must_not_be_reported_as_recovered(job):
    engine = RecordingEngine([[], [WorkerExit(2, 137)]], [ALL_WELL])
    engine.troubles = lambda: {"trainer-2": "silent"} if 2 in engine.running else {}
    assert job.run(engine).outcome == "succeeded"
    assert "node_in_trouble" in job.names() and "node_well" not in job.names()


def test_a_node_that_stays_cut_off_must_stop_the_gang_before_the_next_generation(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.generation.PARTITION_TIMEOUT", 0.05)
    engine = RecordingEngine([], [ALL_WELL])
    engine.troubles = lambda: {"trainer-2": "partition"} if engine.calls.count("start") == 1 else {}
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == [(2, "partition")]
    assert engine.calls == ["up", "start", "stop", "up", "start", "down"]


def test_a_node_that_is_cut_off_briefly_must_be_left_alone(job):
    engine = RecordingEngine([[]] * 5 + [ALL_WELL])
    troubles = iter([{"trainer-2": "partition"}, {"trainer-2": "partition"}])
    engine.troubles = lambda: next(troubles, {})
    assert job.run(engine).outcome == "succeeded"
    assert [name for name in job.names() if name.startswith("node_")] == ["node_in_trouble", "node_well"]


def test_trouble_with_a_node_without_workers_must_not_matter(job, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.generation.PARTITION_TIMEOUT", 0.0)
    engine = RecordingEngine([[]] * 5 + [ALL_WELL])
    engine.troubles = lambda: {"trainer-7": "partition"}
    assert job.run(engine) == JobResult(Outcome.SUCCEEDED, "finished")
    assert len(job.supervisor.history.ended) == 1
    assert not job.noted("node_in_trouble")


def test_trouble_with_a_node_without_workers_must_not_excuse_a_hang(job):
    engine = RecordingEngine([], [ALL_WELL])
    engine.troubles = lambda: {"trainer-7": "paused"}  # a standby node
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, hang_after=20.0)).outcome == "succeeded"
    assert [cause for _, cause in job.causes()] == ["hang"]


def test_a_node_whose_workers_have_succeeded_may_be_cut_off(job):
    engine = RecordingEngine([[WorkerExit(2, 0)], *[[]] * 100, ALL_WELL[:2]])
    engine.troubles = lambda: {"trainer-2": "partition"} if 2 not in engine.running else {}
    assert job.run(engine).outcome == "succeeded"
    assert job.causes() == []
