"""`up`: which nodes it starts, and which jobs use them; on a scripted engine."""

import os
from pathlib import Path

import pytest
from support.commanded import create, supervised
from support.optional import not_none
from support.plans import HERE, Site
from support.scripted import ALL_WELL

from orchestrate.engines.base import JobState
from orchestrate.host import records
from orchestrate.record import run_dir
from orchestrate.record.outcomes import WorkerExit
from orchestrate.record.paths import JobPaths

APP = ("--gpus", "none", "--", "-m", "app.train")


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


# --- a cluster


def test_up_must_start_nodes_that_jobs_use(do, engine, runs):
    code, (name,), err = do("up", "--trainers", "2", "--gpus", "none")
    assert code == 0 and name.startswith("cluster-")
    assert err[0].startswith(f"3 nodes are up for jobs started in {Path.cwd()}")
    assert name in err[1]
    assert engine.calls == ["prepare", "up"]
    engine.generations, engine.calls = [[ALL_WELL]], []
    code, out, err = do("run", "--trainers", "2", *APP)
    assert code == 0 and f", on {name}" in err[0]
    assert engine.calls == ["prepare", "up", "start", "down"]
    assert {path.name for path in runs.iterdir()} == {name, Path(err[-1]).name}


def test_many_workers_on_few_cores_must_be_pointed_out_once_before_their_nodes_start(do, engine, runs):
    count = 32 * len(HERE.cores) + 1
    warning = f"warning: {count} workers on {len(HERE.cores)} cores: "
    assert do("up", "--nodes", str(count), "--gpus", "none")[2][0].startswith(warning)
    engine.generations = [[WorkerExit(rank, 0) for rank in range(count)]]
    err = do("run", "--nodes", str(count), "--keep", "1m", "--runs", str(runs / "other"), *APP)[2]
    assert sum(line.startswith(warning) for line in err) == 1 and err[0].startswith(warning)


def test_up_must_name_other_clusters_for_jobs_from_this_folder(do, engine, runs):
    create(JobPaths(runs / "elsewhere-1"), cluster="elsewhere-1")  # for jobs from another folder
    _, (name,), err = do("up", "--trainers", "2", "--gpus", "none")
    assert not any("note" in line for line in err)
    assert f"note: {name} is also up" in do("up", "--trainers", "1", "--gpus", "none")[2]


def test_up_must_leave_no_nodes_if_it_is_interrupted(do, engine, runs, monkeypatch):
    look = engine.inventory
    engine.inventory = lambda *some, **more: Site(*look(*some, **more)).but(preload=("torch",))

    def interrupted(*_) -> bool:
        raise KeyboardInterrupt

    engine.wait_until_warm = interrupted
    assert do("up", "--trainers", "2", "--gpus", "none")[0] == 130
    assert [path.name for path in runs.iterdir()] == [] and engine.calls[-1].startswith("remove cluster-")


@pytest.mark.parametrize("warm", [True, False])
def test_up_must_return_when_its_nodes_are_warm_or_say_that_they_are_not(do, engine, runs, warm):
    engine.warm, look = warm, engine.inventory
    engine.inventory = lambda *some, **more: Site(*look(*some, **more)).but(preload=("torch", "numpy"))
    code, _, err = do("up", "--trainers", "2", "--gpus", "none")
    assert code == 0 and engine.calls == ["prepare", "up", "warmed"]
    assert ("the nodes are still importing torch, numpy; the first job waits for them" in err) != warm


def test_a_cluster_whose_jobs_are_in_another_folder_must_be_named_with_that_folder(do, engine, runs, tmp_path):
    _, (name,), _ = do("up", "--trainers", "2", "--gpus", "none")
    engine.generations = [[ALL_WELL], [ALL_WELL]]
    job = Path(do("run", "--trainers", "2", *APP)[2][-1])
    do.runs = tmp_path / "others"
    _, (small,), _ = do("up", "--trainers", "1", "--gpus", "none")
    create(JobPaths(runs / "elsewhere-1"), cluster="elsewhere-1")  # for jobs from another folder
    clusters = (runs / "unreadable-1", runs / name, do.runs / small, runs / "elsewhere-1")
    engine.states = [JobState(path.name, "docker", 3, path / "nodes", os.getuid()) for path in clusters]
    engine.states.append(JobState(job.name, "docker", 3, job / "job", os.getuid()))
    code, _, err = do("run", "--trainers", "2", *APP)
    assert code == 0 and err[:2] == [
        f"not using {small}: it has 1 trainer, the job needs 2",
        f"not using {name}: its jobs are in another folder (--runs {runs})",
    ]
    assert err[2].startswith("job ") and " on " not in err[2].partition("workers")[2]


def test_nodes_that_are_kept_must_have_the_settings_of_their_job_but_not_its_secrets(do, engine, runs, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2000")
    engine.generations = [[ALL_WELL]]
    options = ("--keep", "10m", "-e", "API_TOKEN", "--secret", "API_TOKEN", "--memory", "2g")
    assert do("run", "--trainers", "2", *options, *APP)[0] == 0
    (paths,) = map(JobPaths, runs.glob("kept-*"))
    spec, plan = run_dir.load(paths)
    assert (spec.memory, spec.trainers, spec.env, spec.secrets, spec.contents) == ("2g", 2, {}, {}, {})
    assert plan.placement.keep == 600.0 and not_none(records.find(paths.root)).secrets == {}
    engine.generations, engine.calls = [[ALL_WELL]], []
    assert do("plan", "--trainers", "2", *APP)[0] == 0
    code, _, err = do("run", "--trainers", "2", *APP)
    assert code == 0 and err[0].startswith("job ")  # and nothing of nodes that it does not use
    removed = f"remove {paths.root.name}"  # only a job that runs may need their memory
    assert engine.calls == ["look", "prepare", removed, "up", "start", "down"]


def test_nodes_that_are_kept_and_in_use_must_be_named(do, engine, runs):
    engine.generations = [[ALL_WELL]]
    do("run", "--trainers", "2", "--keep", "10m", *APP)
    (kept,) = runs.glob("kept-*")
    with supervised(kept):
        (line,) = do("plan", "--trainers", "2", *APP)[2]
    assert line.startswith(f"not using {kept.name}: it is in use by a job")


def test_a_cluster_must_have_the_name_it_was_given(do, engine, runs):
    code, (name,), err = do("up", "--trainers", "0", "--gpus", "none", "--name", "mine")
    assert code == 0 and name.startswith("mine-")
    assert err[0].startswith("1 node is up")
