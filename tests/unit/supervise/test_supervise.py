"""A job from its first supervisor to its report: what is written, and what if that is not possible."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.commanded import SPEC, Whole, create, supervise, supervised
from support.methods import after, before, raising
from support.optional import not_none
from support.plans import HERE, plan
from support.scripted import ALL_WELL, KILLED

from orchestrate.api.cluster import Cluster, take_down
from orchestrate.errors import EngineError, OrchestrateError, UsageError
from orchestrate.host import records
from orchestrate.patience import Abandoned
from orchestrate.record import lock, run_dir
from orchestrate.record.outcomes import WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import objects


@pytest.fixture
def paths(tmp_path):
    return JobPaths(tmp_path / "runs" / "a-1")


def test_a_finished_job_must_have_a_report_and_events(paths):
    create(paths)
    paths.metrics.write_text('{"step": 4, "loss": 0.5}\n')
    for name in (names := [f"step-{number:02}" for number in (10, 3, 7, 1, 9, 2)]):
        (paths.checkpoints / name).mkdir()
        (paths.checkpoints / name / "state.pt").touch()
    (paths.checkpoints / ".hidden").touch()
    (paths.checkpoints / ".step-11.half").mkdir()
    (paths.checkpoints / ".step-11.half" / "state.pt").touch()
    (paths.checkpoints / "last").symlink_to("step-10")
    data, shown = supervise(paths, Whole([KILLED], [ALL_WELL]))
    assert run_dir.ended(paths) == data
    assert (data["outcome"], data["generations"], data["final_metrics"]) == ("succeeded", 2, {"step": 4, "loss": 0.5})
    assert data["checkpoints"] == [str(paths.checkpoints / name / "state.pt") for name in sorted(names)]
    events = [*objects(paths.events.read_bytes().splitlines())]
    assert (events[0]["event"], events[0]["job_id"]) == ("supervisor_started", "a-1")
    ended = events[-1]
    assert (ended["event"], ended["outcome"], ended["reason"]) == ("job_ended", "succeeded", "finished")
    assert data["duration_s"] == ended["seconds"]
    assert run_dir.load(paths)[1].generation == 1  # of the newest generation
    assert [line for line in shown if line.startswith("generation 0 failed: rank 1 on trainer-1")]
    assert lock.holder(paths) is None


def test_the_key_of_a_job_must_be_deleted_with_its_nodes(paths, monkeypatch):
    create(paths)
    assert len(records.need(paths.root).key) == 64
    engine = Whole([ALL_WELL], [ALL_WELL])
    monkeypatch.setattr(engine, "down", fail_to_remove)
    assert supervise(paths, engine)[0]["left_behind"] == "no space left"
    assert records.need(paths.root).key  # needed to stop the nodes
    create(other := JobPaths(paths.root.with_name("b-1")))
    supervise(other, Whole([ALL_WELL]))
    assert not records.need(other.root).key


def fail_to_remove(grace: float, stopped: Callable[[], bool]) -> None:
    raise EngineError("no space left")


def test_the_files_of_nodes_that_may_still_write_must_be_neither_removed_nor_copied(paths, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    site, spec = (
        HERE.but(code=f"{tmp_path}/code", original="/w"),
        dataclasses.replace(SPEC, output=f"file://{tmp_path}"),
    )
    run_dir.create(spec, plan(spec, site, "a-1"), paths)
    engine = Whole([ALL_WELL])
    engine.down = raising(EngineError("stuck"))
    data, shown = supervise(paths, engine)
    assert (paths.work / "train.py").exists() and data["written"] == []
    assert [copy["error"] for copy in data["copies"]] == ["nodes may still write"]
    assert (tmp_path / "a-1" / "orchestrate" / "report.json").exists()
    assert not [line for line in shown if "could not finish" in line]


def test_a_report_must_describe_the_final_nodes_of_a_job(paths, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.nodes.MAX_ATTEMPTS", 1)
    create(paths, dataclasses.replace(SPEC, min_trainers=0))
    engine = Whole([KILLED], [[WorkerExit(0, 0), WorkerExit(1, 0)]])
    engine.start = after(engine.start, lambda: engine.missing.add("trainer-1"))
    data, _ = supervise(paths, engine)
    assert (data["world_size"], run_dir.load(paths)[1].nodes) == (2, ("master", "trainer-2"))


def test_a_job_that_cannot_start_must_write_a_report_and_raise(paths):
    create(paths)
    engine = Whole()
    engine.missing = {"trainer-1"}
    with pytest.raises(EngineError, match="no such node"):
        supervise(paths, engine)
    ended = not_none(run_dir.ended(paths))
    assert (ended["outcome"], ended["reason"]) == ("failed", "could not start: no such node")
    assert [*objects(paths.events.read_bytes().splitlines())][-1]["event"] == "job_ended"


@pytest.mark.skipif(os.getuid() != 0 or sys.platform != "linux", reason="needs root to mount a small disk")
def test_the_end_of_a_job_that_has_filled_the_disk_must_be_recorded(paths):
    paths.root.parent.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=755", "none", paths.root.parent], check=True)
    try:
        create(paths)
        engine = Whole([ALL_WELL])

        def fill() -> None:
            with pytest.raises(OSError, match="No space left"), (paths.shared / "filler").open("wb", 0) as file:
                while True:
                    file.write(bytes(4096))

        engine.start = after(engine.start, fill)
        data, shown = supervise(paths, engine)
        assert data["outcome"] == "succeeded" and run_dir.ended(paths) == data
        assert not [line for line in shown if "could not finish" in line]
        assert [*objects(paths.events.read_bytes().splitlines())][-1]["event"] == "job_ended"
        assert not paths.reserve.exists()
    finally:
        subprocess.run(["umount", paths.root.parent], check=True)


def test_a_job_whose_end_was_not_recorded_must_not_be_taken_over(paths):
    create(paths)
    records.end(paths.root)
    with pytest.raises(UsageError, match="a-1 has ended, and how was not recorded"):
        supervise(paths, engine := Whole([ALL_WELL]))
    assert not engine.calls and not paths.report.exists()


def test_a_job_whose_cluster_was_removed_before_it_started_must_have_failed(paths):
    create(cluster := JobPaths(paths.root.parent / "c-1"), cluster="c-1")
    job = create(JobPaths(paths.root.parent / "b-1"), cluster="c-1")
    take_down(engine := Whole([ALL_WELL]), Cluster(cluster, *run_dir.load(cluster)), 0)
    with pytest.raises(OrchestrateError, match="its cluster was removed before it started"):
        supervise(job, engine)
    assert engine.calls == ["remove c-1"]
    data = not_none(run_dir.ended(job))
    assert (data["outcome"], data["reason"]) == ("failed", "its cluster was removed before it started")


def test_a_failure_to_write_the_report_must_not_hide_the_outcome(paths, monkeypatch):
    create(paths)
    write, full = records.write, raising(OSError(28, "No space left on device"))
    monkeypatch.setattr(records, "write", lambda path, text: (full if path == paths.report else write)(path, text))
    data, shown = supervise(paths, Whole([ALL_WELL]))
    assert data["outcome"] == "succeeded"
    assert [line for line in shown if line.startswith(f"warning: could not finish all files of {paths.root}: ")]
    assert not records.need(paths.root).key  # the later steps are done


def test_a_run_directory_that_was_removed_must_be_named_and_not_created_again(paths):
    create(paths)
    engine = Whole([])
    engine.start = after(engine.start, lambda: shutil.rmtree(paths.root))
    data, shown = supervise(paths, engine)
    assert data["reason"] == "its run directory was removed" and not paths.root.exists()
    assert shown[-1] == f"warning: {paths.root} was removed or replaced while the job ran: its report and logs are lost"


def test_a_job_that_has_removed_its_own_folder_must_have_its_outcome_and_a_report(paths):
    create(paths)
    engine = Whole([ALL_WELL])
    engine.start = after(engine.start, lambda: shutil.rmtree(paths.shared))
    data, shown = supervise(paths, engine)
    assert data["outcome"] == "succeeded" and not [line for line in shown if line.startswith("warning")]
    assert run_dir.ended(paths) and not records.need(paths.root).key


def test_a_job_must_not_get_a_second_supervisor(paths):
    engine = Whole([ALL_WELL])
    with supervised(create(paths).root), pytest.raises(BlockingIOError):
        supervise(paths, engine)
    assert engine.calls == [] and not paths.events.exists()


def test_a_job_on_a_cluster_must_lock_it_and_get_its_files_back_at_the_end(paths, monkeypatch):
    inside = paths.root.parent / "c-1" / "nodes" / "a-1"
    JobPaths(paths.root.parent / "c-1").create_cluster()
    create(paths, cluster="c-1")
    (inside / "program").touch()
    seen = []
    engine = Whole([ALL_WELL])
    engine.up = before(engine.up, lambda: seen.append(engine.run))
    engine.start = after(engine.start, lambda: (inside / "program").chmod(0o4755))
    locked: list[JobPaths] = []
    held = lock.held
    monkeypatch.setattr(lock, "held", lambda of: (locked.append(of), held(of))[1])
    data, _ = supervise(paths, engine)
    assert data["outcome"] == "succeeded"
    assert seen == [inside.parent]  # the folder of the cluster's nodes
    assert locked == [paths, JobPaths(inside.parents[1])]
    assert not paths.shared.is_symlink() and run_dir.ended(paths) == data and not inside.exists()
    assert (paths.shared / "program").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("call", ["up", "down"])
def test_a_job_that_is_given_up_must_have_a_report_with_what_is_left(paths, call):
    create(paths)
    engine = Whole([ALL_WELL])
    setattr(engine, call, raising(Abandoned()))
    data, _ = supervise(paths, engine)
    assert data["outcome"] == ("stopped" if call == "up" else "succeeded")
    assert data["left_behind"] and not_none(run_dir.ended(paths))["left_behind"] == data["left_behind"]
