"""`down` must remove the cluster that it names, and no other; on a scripted engine."""

import os
from pathlib import Path

import pytest
from support.commanded import create, noted, runs_elsewhere, supervised

from orchestrate.record.events import GenerationStarting
from orchestrate.record.paths import JobPaths


def cluster(tmp_path: Path, name: str) -> JobPaths:
    return create(JobPaths(tmp_path / name), cluster=name)


def test_down_must_take_down_only_the_named_cluster(do, engine, tmp_path):
    one, other = cluster(tmp_path, "c-1"), cluster(tmp_path, "d-1")
    engine.things = ["container one"]
    assert do("down", "c", "--dry-run") == (0, ["container one", f"folder {one.root}"], [])
    assert engine.calls == [] and one.root.exists()
    assert do("down", "c") == (0, [], ["c-1 removed"])
    assert (engine.calls, engine.graces) == (["remove c-1"], [30])
    assert not one.root.exists() and other.root.exists()


def test_down_without_a_name_must_remove_the_only_cluster(do, engine, tmp_path):
    assert do("down") == (2, [], [f"error: no clusters in {tmp_path}"])
    one = cluster(tmp_path, "c-1")
    two = cluster(tmp_path, "d-1")
    assert do("down") == (2, [], ["error: no cluster given", "hint: name one of c-1, d-1"])
    assert do("down", "d-1") == (0, [], ["d-1 removed"])
    assert do("down", "--dry-run") == (0, [f"folder {one.root}"], []) and not two.root.exists()
    assert do("down") == (0, [], ["c-1 removed"]) and not one.root.exists()


def test_down_must_find_a_cluster_in_another_folder_by_its_whole_name(do, engine, tmp_path):
    one = cluster(tmp_path / "elsewhere", "c-1")
    engine.states = [runs_elsewhere(one.root, "c-1", os.getuid(), "nodes")]
    assert do("down", "c")[0] == 2 and one.root.exists()
    assert do("down", "c-1") == (0, [], ["c-1 removed"]) and not one.root.exists()


def test_the_cluster_of_another_user_must_stay_up(do, engine, tmp_path):
    paths = cluster(tmp_path, "c-1")
    engine.states = [runs_elsewhere(paths.root, "c-1", os.getuid() + 1, "nodes")]
    for command in (["down", "c-1", "--dry-run"], ["down", "c-1"]):
        assert do(*command)[2][0] == f"error: c-1 belongs to user {os.getuid() + 1}"
    assert engine.calls == [] and paths.root.exists()


def test_rm_of_a_job_that_may_still_run_on_a_cluster_must_give_a_hint(do, engine, tmp_path):
    cluster(tmp_path, "c-1")
    paths = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    code, _, err = do("rm", "a-1")
    assert (code, err[1]) == (2, "hint: python -m orchestrate stop a-1, or down c-1")
    assert paths.logs.exists() and engine.calls == []


@pytest.mark.parametrize("file", ["job.yaml", "events.jsonl"])
def test_a_cluster_whose_job_can_be_neither_continued_nor_stopped_must_be_removable(do, engine, tmp_path, file):
    cluster(tmp_path, "c-1")
    paths = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    noted(paths, *(GenerationStarting(number, ("master",), 1, 29500) for number in range(2)))
    assert do("down", "c-1")[2][0] == "error: c-1 is in use by a-1, which has no supervisor"
    (paths.root / file).write_text("[" + (paths.root / file).read_text()[1:])
    code, _, err = do("stop", "a-1")
    assert code and err[1].startswith("error: could not stop a-1: "), err
    assert err[2] == "hint: python -m orchestrate down c-1 removes its nodes, and what runs on them"
    assert do("down", "c-1") == (0, [], ["c-1 removed"])


def test_a_cluster_that_a_job_uses_must_stay_up(do, engine, tmp_path):
    paths = cluster(tmp_path, "c-1")
    with supervised(paths.root) as other:
        code, _, err = do("down", "c-1")
    assert (code, err) == (
        2,
        [f"error: c-1 is in use by a job (process {other.pid})", "hint: python -m orchestrate ps"],
    )
    create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    with supervised(paths.root), supervised(tmp_path / "a-1"):
        assert do("down", "c-1")[2][1] == "hint: python -m orchestrate stop a-1"
    assert engine.calls == [] and paths.root.exists()


def test_an_unknown_cluster_must_be_reported_with_the_existing_ones(do, engine, tmp_path):
    create(JobPaths(tmp_path / "a-1"))
    assert do("down", "a-1")[2] == ["error: no such cluster: a-1", f"hint: no clusters in {tmp_path}"]
    for name in ("c-1", "c-2", "d-1"):
        cluster(tmp_path, name)
    assert do("down", "a-1")[2][1] == f"hint: clusters in {tmp_path}: c-1, c-2, d-1"
    assert do("down", "c") == (
        2,
        [],
        ["error: c matches 2 clusters", f"hint: clusters in {tmp_path}: c-1, c-2"],
    )


def test_the_full_name_of_a_cluster_must_be_enough_even_if_another_begins_with_it(do, engine, tmp_path):
    for name in ("c", "c-1"):
        cluster(tmp_path, name)
    assert do("down", "c") == (0, [], ["c removed"])
    assert (tmp_path / "c-1").exists() and not (tmp_path / "c").exists()
