"""What workers write in their working directory, which stays with the job: copies that they have not changed do not."""

import os

import pytest
from support.memory import peak

OWNER = (61000, 61000) if os.geteuid() == 0 else (os.getuid(), os.getgid())


def test_code_that_changes_while_the_job_runs_must_not_look_written_by_workers(tree):
    """Otherwise, a job that is resumed would run the old code."""
    tree.write("train.py")
    tree.write("removed.py")
    copied = tree.copy().copied
    assert tree.copy().copied == copied  # as after a crash
    tree.write("train.py", "fixed meanwhile")
    (tree.code / "removed.py").unlink()
    (tree.work / "model.pt").write_text("new")
    assert tree.tidy(copied=copied) == (["model.pt"], True)
    tree.copy()
    assert tree.found() == {"train.py": "fixed meanwhile", "model.pt": "new"}


def test_only_what_workers_have_written_must_stay(tree):
    for name in ("kept.py", "pkg/same.py", "pkg/changed.py", "pkg/touched.py", "removed.py"):
        tree.write(name)
    for name in ("best", "latest"):
        (tree.code / name).symlink_to("pkg")
    tree.copy()
    (tree.work / "best").unlink()
    (tree.work / "best").symlink_to("logs")
    (tree.work / "removed.py").unlink()
    (tree.work / "pkg/changed.py").write_text("longer than before")
    os.utime(tree.work / "pkg/touched.py", ns=(1, 1))
    (tree.work / "logs/version_0").mkdir(parents=True)
    (tree.work / "logs/version_0/events").write_text("x")
    (tree.work / "made/empty").mkdir(parents=True)
    (tree.work / "pkg/__pycache__").mkdir()
    (tree.work / "pkg/__pycache__/same.cpython-312.pyc").write_text("x")
    (tree.work / "mine").symlink_to("/workspace/other")
    (tree.work / "no__pycache__").write_text("x")
    written, complete = tree.tidy()
    made = ["best", "logs/version_0/events", "mine", "no__pycache__"]
    assert (written, complete) == ([*made, "pkg/changed.py", "pkg/touched.py"], True)
    assert sorted(tree.found()) == written
    assert (tree.work / "made/empty").is_dir() and not (tree.work / "pkg/__pycache__").exists()


def test_a_list_of_written_files_must_be_limited(tree):
    for number in range(5):
        (tree.work / str(number)).write_text("x")
    written, complete = tree.tidy(most=3)
    assert (len(written), complete) == (3, False)
    assert len(tree.found()) == 5


def test_tidying_must_not_follow_links(tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    tree.write("pkg/a")
    tree.copy()
    (outside / "a").write_text("old")
    os.utime(outside / "a", ns=(1, (tree.code / "pkg/a").stat().st_mtime_ns))
    (tree.work / "pkg" / "a").unlink()
    (tree.work / "pkg").rmdir()
    (tree.work / "pkg").symlink_to(outside)
    assert tree.tidy() == (["pkg"], True)
    assert (outside / "a").exists()


def test_tidying_must_not_follow_a_link_in_place_of_the_job_folder(tree, tmp_path):
    """The nodes of a cluster can replace the folder of a job."""
    outside = tmp_path / "outside"
    (outside / "work" / "__pycache__").mkdir(parents=True)
    (outside / "work" / "__pycache__" / "a").write_text("")
    tree.work.rmdir()
    tree.work.parent.rmdir()
    tree.work.parent.symlink_to(outside)
    with pytest.raises(OSError):
        tree.tidy()
    assert (outside / "work" / "__pycache__" / "a").exists()


def test_a_large_folder_must_be_tidied_without_a_list_of_its_files(tree):
    (tree.code / "many").mkdir()
    for number in range(1000):
        (tree.code / "many" / str(number)).touch()
    tree.copy()
    for number in range(9000):
        (tree.work / "many" / f"new {number:0200}.txt").touch()
    runs = [peak(lambda: tree.tidy(most=10)) for _ in range(3)]  # threads of other tests may take memory meanwhile
    assert all((len(found), complete) == (10, False) for (found, complete), _ in runs)
    assert min(most for _, most in runs) < 3 << 19
    assert len(os.listdir(tree.work / "many")) == 9000
    for path in (tree.work / "many").iterdir():
        path.unlink()
    tree.tidy()
    assert os.listdir(tree.work) == []
