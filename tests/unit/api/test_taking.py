"""Only one process at a time must use a cluster, until its nodes are removed, also by one that was interrupted."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commanded import Whole, create, supervised
from support.plans import HERE, plan
from support.repo import ROOT

from orchestrate.api.cluster import Cluster, InUse, bring_up, take_down
from orchestrate.cli.main import main
from orchestrate.engines.base import never
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(trainers=2)


def taken_by_another(paths: JobPaths) -> bool:
    """Whether another process can lock a cluster."""
    code = "import sys; from pathlib import Path; from orchestrate.record import lock; "
    code += "from orchestrate.record.paths import JobPaths; lock.held(JobPaths(Path(sys.argv[1]))).__enter__()"
    return not subprocess.run([sys.executable, "-c", code, paths.root], cwd=ROOT, capture_output=True).returncode


def test_no_other_process_must_use_a_cluster_before_its_nodes_are_up(tmp_path):
    engine, seen = Whole(), []

    def up(plan, stopped=never) -> None:
        seen.append(taken_by_another(JobPaths(tmp_path / plan.project)))

    engine.up = up
    with contextlib.ExitStack() as held:
        one, _ = bring_up(engine, SPEC, tmp_path, held)
        seen.append(taken_by_another(one.paths))
    assert [*seen, taken_by_another(one.paths)] == [False, False, True]


def test_a_cluster_must_not_be_removed_while_a_job_on_it_starts(tmp_path):
    one = Cluster(create(JobPaths(tmp_path / "c-1"), cluster="c-1"), SPEC, plan(SPEC, HERE, "c-1", 0))
    create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    engine = Whole()
    with supervised(tmp_path / "a-1"), pytest.raises(InUse, match="c-1 is in use by a-1"):
        take_down(engine, one, 7.0)
    assert not engine.calls
    take_down(engine, one, 7.0)
    assert engine.calls == ["remove c-1"]


def test_a_job_must_take_a_cluster_only_if_no_other_process_has_and_its_nodes_are_there(tmp_path):
    one = Cluster(create(JobPaths(tmp_path / "c-1"), cluster="c-1"), SPEC, plan(SPEC, HERE, "c-1", 0))
    with supervised(one.paths.root), contextlib.ExitStack() as held:
        assert not one.take(held)
        with pytest.raises(InUse, match="c-1 is in use by another process"):
            take_down(Whole(), one, 7.0)
    with contextlib.ExitStack() as held:
        assert one.take(held) and not taken_by_another(one.paths)
    job = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    with contextlib.ExitStack() as held:
        assert not one.take(held)
    run_dir.move_from_cluster(job)
    take_down(Whole(), one, 7.0)
    with contextlib.ExitStack() as held:
        assert not one.take(held)


def test_a_move_out_of_a_cluster_that_was_killed_before_its_last_step_must_be_finished(tmp_path, monkeypatch):
    create(JobPaths(tmp_path / "c-1"), cluster="c-1")
    mine = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    mine.log(0).write_text("mine")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith(".job-"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        run_dir.move_from_cluster(mine)
    assert not mine.shared.exists()
    run_dir.load(mine)
    assert mine.log(0).read_text() == "mine" and not mine.shared.is_symlink()


def test_what_a_down_that_was_killed_has_left_must_be_removable(tmp_path, monkeypatch):
    one = Cluster(create(JobPaths(tmp_path / "c-1"), cluster="c-1"), SPEC, plan(SPEC, HERE, "c-1", 0))

    def killed(path: Path) -> None:
        shutil.rmtree(path / "nodes")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("orchestrate.files.folder.remove", killed)
        take_down(Whole(), one, 7.0)
    assert one.paths.root.exists()
    assert main(["down", "c-1", "--runs", str(tmp_path)]) == 0 and not one.paths.root.exists()


def on_a_cluster(runs: Path) -> JobPaths:
    create(JobPaths(runs / "c-1"), cluster="c-1")
    mine = create(JobPaths(runs / "a-1"), cluster="c-1")
    mine.log(0).write_text("mine")
    return mine


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_pull_puts_in_the_way_of_a_move_must_replace_no_files_of_the_job(tmp_path, kind):
    mine = on_a_cluster(tmp_path)
    (mine.root / ".job").touch() if kind == "file" else (mine.root / ".job").mkdir()
    run_dir.move_from_cluster(mine)
    assert mine.log(0).read_text() == "mine" and not mine.shared.is_symlink()


@pytest.mark.parametrize("own", [True, False])
def test_a_folder_that_a_pull_names_as_a_cluster_must_not_be_emptied(tmp_path, own):
    """The job has nodes of its own, or those of another cluster."""
    mine = create(JobPaths(tmp_path / "a-1")) if own else on_a_cluster(tmp_path)
    (tmp_path / "victim" / "nodes").mkdir(parents=True)
    (tmp_path / "victim" / "nodes" / "file").write_text("mine")
    (tmp_path / "evil").symlink_to("victim")
    mine.shared.rename(mine.root / "moved") if own else mine.shared.unlink()
    mine.shared.symlink_to(f"../evil/nodes/{mine.root.name}")
    with pytest.raises(OSError, match="not one of your run directories|has no record|was replaced"):
        run_dir.move_from_cluster(mine)
    assert (tmp_path / "victim" / "nodes" / "file").read_text() == "mine"
