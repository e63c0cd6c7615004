"""The working directory: a writable copy of the code folder; what workers write in it stays with the job."""

import errno
import os
import resource
import signal
import stat
import threading

import pytest
from support.methods import after
from support.plans import HERE, plan
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, Job

from orchestrate.errors import EngineError
from orchestrate.files import work
from orchestrate.files.folder import Folder
from orchestrate.files.work import Copy, tidy
from orchestrate.job.outcomes import Outcome, WorkerExit
from orchestrate.job.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles

OWNER = (61000, 61000) if os.geteuid() == 0 else (os.getuid(), os.getgid())


class Tree:
    """A code folder, and the job folder that it is copied to."""

    def __init__(self, folder) -> None:
        self.code, self.work = folder / "code", folder / "job" / "work"
        self.code.mkdir()
        self.work.mkdir(parents=True)

    def write(self, name: str, text: str = "old", mode: int = 0o644) -> None:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def copy(self, hidden=(), owner=None) -> Copy:
        copy = Copy(self.code, hidden, Folder(self.work.parents[1], "job"), "work", "/workspace", owner)
        copy.run()
        return copy

    def tidy(self, most: int = 100, copied=()) -> tuple[list[str], bool]:
        return tidy(self.code, Folder(self.work.parents[1], "job"), "work", "/workspace", most, dict(copied))

    def found(self) -> dict[str, str]:
        """The content of each file in the working directory, and the target of each link."""
        found = {}
        for path in sorted(self.work.rglob("*")):
            name = str(path.relative_to(self.work))
            if path.is_symlink():
                found[name] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[name] = path.read_text()
        return found


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_the_copy_must_have_everything_but_what_is_hidden(tree):
    for name in ("train.py", "pkg/__init__.py", "pkg/deep/er/x", "secret/key", "pkg/key"):
        tree.write(name, name)
    (tree.code / "empty").mkdir()
    (tree.code / "latest").symlink_to("pkg/deep")
    copy = tree.copy(hidden=["secret", "pkg/key"])
    expected = {name: name for name in ("train.py", "pkg/__init__.py", "pkg/deep/er/x")}
    assert tree.found() == expected | {"latest": "-> pkg/deep"}
    assert (tree.work / "empty").is_dir()
    assert (copy.files, copy.bytes, copy.links) == (3, sum(map(len, expected)), 0)


def test_a_copy_must_leave_no_file_open(tree, monkeypatch):
    monkeypatch.setattr(work, "MAX_FILE", 10)
    for number in range(20):
        tree.write(f"{number}.py", "x" * number)
    before = len(os.listdir("/proc/self/fd"))
    tree.copy()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_copy_must_be_writable_and_keep_its_time_and_rights_but_no_set_user_id(tree):
    tree.write("run.sh", mode=0o4755)
    os.utime(tree.code / "run.sh", ns=(1, 1_234_567_890_123_456_789))
    (tree.code / "latest").symlink_to("run.sh")
    if not os.geteuid():  # others could not copy it
        tree.write("not_its_owners.py", mode=0o044)
    tree.copy(owner=OWNER)
    status = (tree.work / "run.sh").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o755, 1_234_567_890_123_456_789)
    assert (status.st_uid, status.st_gid) == OWNER
    for path in (tree.work, tree.work / "latest"):
        assert (path.lstat().st_uid, path.lstat().st_gid) == OWNER
    assert os.geteuid() or stat.S_IMODE((tree.work / "not_its_owners.py").stat().st_mode) == 0o444


def test_sockets_and_pipes_must_not_be_copied(tree):
    os.mkfifo(tree.code / "pipe")
    tree.copy()
    assert not os.listdir(tree.work)


@pytest.mark.parametrize(("name", "rights"), [("key", 0), ("folder/key", 1), ("folder/key", 4)])
def test_what_the_nodes_user_cannot_read_must_become_a_link(tree, name, rights):
    tree.write(name)
    first = name.partition("/")[0]
    (tree.code / first).chmod(rights << 6 if os.geteuid() else rights)
    tree.copy(owner=OWNER)
    assert tree.found() == {first: f"-> /workspace/{first}"}
    (tree.code / first).chmod(0o700)
    assert tree.tidy() == ([], True)


@pytest.mark.parametrize("name", ["node_modules/a/b.js", ".venv/pyvenv.cfg"])
def test_folders_of_packages_must_become_links(tree, name):
    tree.write(name)
    first = name.partition("/")[0]
    assert (tree.copy().links, tree.found()) == (1, {first: f"-> /workspace/{first}"})


def test_files_and_folders_over_the_limits_must_become_links(tree, monkeypatch):
    monkeypatch.setattr(work, "MAX_FILE", 10)
    monkeypatch.setattr(work, "MAX_BYTES", 12)
    monkeypatch.setattr(work, "MAX_FILES", 4)
    tree.write("a.py", "1234")
    tree.write("large", "x" * 11)
    for number in range(4):  # one more than after a.py
        tree.write(f"data/{number}")
    tree.write("later/1", "12345678")
    tree.write("later/2", "1")
    tree.copy()
    links = {name: f"-> /workspace/{name}" for name in ("large", "data", "later/2")}
    assert tree.found() == {"a.py": "1234", "later/1": "12345678"} | links
    assert tree.tidy() == ([], True)


def test_files_that_exist_must_be_kept(tree):
    tree.write("a/train.py")
    tree.write("a/new.py")
    (tree.work / "a").mkdir()
    (tree.work / "a" / "train.py").write_text("changed by a worker")
    tree.copy()
    assert tree.found() == {"a/train.py": "changed by a worker", "a/new.py": "old"}


def test_a_copy_must_not_follow_what_workers_have_put_in_its_place(tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("link/x", "file/x", "part/x"):
        tree.write(name)
    (tree.work / "link").symlink_to(outside)
    (tree.work / "file").write_text("no folder")
    (tree.work / "part").mkdir()
    (tree.work / "part" / work.PART).symlink_to(outside / "x")
    tree.copy()
    assert (tree.work / "part" / "x").read_text() == "old"
    assert not os.listdir(outside)
    assert (tree.work / "file").read_text() == "no folder"


def test_a_pipe_in_place_of_an_unfinished_file_must_not_block_a_copy(tree):
    tree.write("a")
    os.mkfifo(tree.work / work.PART)
    copying = threading.Thread(target=tree.copy, daemon=True)
    copying.start()
    copying.join(30)
    assert tree.found() == {"a": "old"}


def test_no_file_of_the_code_folder_must_be_missing_however_many_it_has(tree, monkeypatch):
    monkeypatch.setattr(work, "MAX_FILES", 3)
    for number in range(9):
        tree.write(f"{number}.png")
    copy = tree.copy()
    assert (len(tree.found()), copy.files, copy.links) == (9, 3, 6)


def test_a_copy_that_is_stopped_must_end_early(tree):
    for name in ("a", "b", "c"):
        tree.write(name)
    copy = Copy(tree.code, (), Folder(tree.work.parents[1], "job"), "work", "/workspace", None)
    copy.stopped = lambda: copy.files == 2
    copy.run()
    assert set(tree.found()) == {"a", "b"}


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


def test_a_copy_that_failed_must_be_completed_by_the_next_one(tree):
    tree.write("large", "x" * 100_000)
    tree.write("small")
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError) as failure:
            tree.copy()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert failure.value.errno == errno.EFBIG
    assert "large" not in tree.found()
    tree.copy()
    assert tree.found() == {"large": "x" * 100_000, "small": "old"}
    with pytest.raises(FileNotFoundError):
        Copy(tree.code, (), Folder(tree.code / "none", "job"), "work", "/workspace", None).run()


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


def copying(folder):
    """The plan of a job whose workers run in a copy of `folder`."""
    site = HERE.but(code=str(folder), original="/workspace")
    return plan(JobSpec(trainers=2, grace=0.01), site, "j", 29500)


def test_what_was_copied_must_be_known_to_the_next_supervisor(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("old")
    (tmp_path / "code" / "key").write_text("hidden")
    job, wanted, user = Job(tmp_path / "runs"), copying(tmp_path / "code"), os.getuid() or 1234
    (job.paths.shared / "work").mkdir()
    engine = RecordingEngine([[WorkerExit(1, 137)]], [ALL_WELL])
    engine.masked = {"key"}
    assert job.run(engine, JobSpec(trainers=2, grace=0.01, user=str(user)), wanted).outcome == Outcome.SUCCEEDED
    assert (job.paths.shared / "work" / "train.py").read_text() == "old"
    assert (job.paths.shared / "work" / "train.py").stat().st_uid == user
    (copied,) = job.noted("code_copied")  # not again at the restart
    assert (copied["files"], copied["bytes"], copied["links"]) == (1, 3, 0)
    (tmp_path / "code" / "train.py").write_text("fixed meanwhile")
    written = JobFiles(job.paths).tidy(wanted.placement)
    assert written and (written.files, written.complete) == ([], True)
    assert not os.listdir(job.paths.shared / "work")


def test_a_copy_must_end_before_the_job_does(tmp_path, monkeypatch):
    class Slow(Copy):
        def run(self):
            for _ in range(3000):
                if self.stopped() or pause.wait(0.01):
                    break
            engine.calls.append("copied" if self.stopped() else "not stopped")

    pause, engine = threading.Event(), RecordingEngine()
    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Slow)
    engine.missing = {"trainer-1"}
    with pytest.raises(EngineError):
        Job(tmp_path / "runs").run(engine, plan_=copying(tmp_path))
    assert "copied" in engine.calls and engine.calls.index("copied") < engine.calls.index("down")
    pause.set()


def test_a_request_to_stop_must_cut_a_copy_short(tmp_path, monkeypatch):
    class Slow(Copy):
        def run(self):
            up.wait(30)
            answers.append(self.stopped())

    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Slow)
    job, engine, up, answers = Job(tmp_path / "runs"), RecordingEngine(), threading.Event(), []
    engine.up = after(engine.up, up.set)
    job.stops = lambda: int(up.is_set())
    assert job.run(engine, plan_=copying(tmp_path)).outcome == Outcome.STOPPED
    assert answers == [True]


def test_a_copy_must_be_repeated_once_the_disk_has_space(tmp_path, monkeypatch):
    class Full(Copy):
        def run(self):
            if '"disk_full"' not in job.paths.events.read_text():
                raise OSError(errno.ENOSPC, "No space left on device")
            super().run()

    monkeypatch.setattr("orchestrate.supervise.work_copy.Copy", Full)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    job = Job(tmp_path / "runs")
    (job.paths.shared / "work").mkdir()
    assert job.run(RecordingEngine([ALL_WELL]), plan_=copying(tmp_path / "code")).outcome == Outcome.SUCCEEDED
    assert job.names().count("disk_full") == 1 and (job.paths.shared / "work" / "train.py").exists()
