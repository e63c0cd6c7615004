"""The working directory: a writable copy of the code folder; what workers write in it stays with the job."""

import contextlib
import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading

import pytest
from support.repo import ROOT

from orchestrate.errors import EngineError
from orchestrate.files import work
from orchestrate.files.folder import Folder
from orchestrate.files.work import Copy

OWNER = (61000, 61000) if os.geteuid() == 0 else (os.getuid(), os.getgid())


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
    assert len(os.listdir("/proc/self/fd")) <= before


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


@pytest.mark.skipif(os.geteuid() != 0, reason="must be root to read what the nodes' user cannot")
@pytest.mark.parametrize("mode", [0o600, 0o000])
def test_the_nodes_user_must_be_able_to_read_what_root_can(tree, mode):
    tree.write("private/key", mode=mode)
    (tree.code / "private").chmod(0o700)
    tree.code.chmod(0o700)
    assert tree.copy(owner=OWNER).unreadable == {}
    assert tree.found() == {"private/key": "old"}
    for path in (tree.work, tree.work / "private", tree.work / "private" / "key"):
        status = path.stat()
        assert status.st_uid == OWNER[0] and status.st_mode & stat.S_IRUSR
    assert tree.tidy() == ([], True)


@pytest.mark.parametrize(
    ("folder", "file", "named"),
    [
        (0o755, 0o644, {}),
        (0o755, 0o600, {"deep/large": ["deep/large"], "many": ["many"]}),
        (0o711, 0o644, {"many": ["many"]}),  # cannot be listed
        (0o700, 0o644, {"deep/large": ["deep"], "many": ["many"]}),
        (0o700, 0o600, {"deep/large": [".", "deep", "deep/large"], "many": [".", "many"]}),
    ],
)
def test_what_neither_a_copy_nor_a_link_lets_nodes_read_must_be_named(tree, monkeypatch, folder, file, named):
    monkeypatch.setattr(work, "MAX_FILE", 10)
    monkeypatch.setattr(work, "MAX_FILES", 2)
    tree.write("deep/large", "x" * 11, mode=file)
    for name in ("many/1", "many/2", "many/3", ".venv/pyvenv.cfg"):
        tree.write(name)
    (tree.code / "many").chmod(0o700 if file == 0o600 else folder)
    for name in ("deep", ".venv"):
        (tree.code / name).chmod(folder)
    if "." in named.get("many", ()):
        tree.code.chmod(0o700)
    copy = tree.copy(owner=(61000, 61000) if os.geteuid() == 0 else (os.getuid() + 1, os.getgid() + 1))
    assert copy.unreadable == named


def test_run_directories_must_be_left_out_wherever_they_are(tree):
    for name in ("plan.json", "job.yaml", "events.jsonl", "job/work/big"):
        tree.write(f"old/jobs/a-1/{name}")
    tree.write("old/plan.json")
    assert not tree.copy().unreadable
    assert tree.found() == {"old/plan.json": "old"}


COPY = """
import sys
from pathlib import Path
from orchestrate.files.folder import Folder
from orchestrate.files.work import Copy
copy = Copy(Path(sys.argv[1]), (), Folder(Path(sys.argv[2]), "job"), "work", "/workspace", None)
copy.run()
print(*sorted(copy.unreadable))
"""
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")  # as root, who could read all files


def test_what_the_caller_cannot_read_must_become_a_link_and_be_named(tree):
    tree.write("key", mode=0)
    tree.write("folder/key")
    (tree.code / "folder").chmod(0)
    command = [sys.executable, "-c", COPY, str(tree.code), str(tree.work.parents[1])]
    prefix = WITHOUT_RIGHTS if os.geteuid() == 0 else ()
    done = subprocess.run([*prefix, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["folder", "key"]
    (tree.code / "folder").chmod(0o700)
    assert tree.found() == {name: f"-> /workspace/{name}" for name in ("folder", "key")}


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


def test_many_folders_and_deep_ones_must_become_links(tree, monkeypatch):
    """Each costs a start as much as a file, and a deep one as much as many."""
    monkeypatch.setattr(work, "MAX_DEPTH", 3)
    (tree.code / "a" / "b" / "c" / "d" / "e").mkdir(parents=True)
    tree.copy()
    assert tree.found() == {"a/b/c/d": "-> /workspace/a/b/c/d"}
    monkeypatch.setattr(work, "MAX_FOLDERS", 8)
    for number in range(20):
        (tree.code / "wide" / f"x{number}").mkdir(parents=True)
    assert tree.copy().folders == 8
    assert tree.found().items() >= {"wide/x19": "-> /workspace/wide/x19"}.items()


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


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_nothing_in_place_of_an_unfinished_file_must_prevent_or_block_a_copy(tree, make):
    tree.write("a")
    make(tree.work / work.PART)
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


def test_a_file_that_grows_must_be_copied_only_as_far_as_it_was(tree):
    tree.write("grows", "x" * (work.PIECE * 4))
    done = threading.Event()

    def grow() -> None:
        with (tree.code / "grows").open("ab", buffering=0) as file:
            while not done.is_set() and file.tell() < 4 * work.MAX_FILE:
                file.write(bytes(work.PIECE))

    grower = threading.Thread(target=grow)
    grower.start()
    try:
        tree.copy()
    finally:
        done.set()
        grower.join()
    assert (tree.work / "grows").is_symlink() or (tree.work / "grows").stat().st_size <= work.MAX_FILE


@pytest.mark.parametrize("look", [0, 1])
def test_a_code_folder_that_is_led_elsewhere_must_not_be_copied(tree, tmp_path, look):
    """A job that can write to a folder above it may put a link in place of that, before the copy or during it."""
    above, private, looks = tmp_path / "above", tmp_path / "private" / "code" / "deep", iter(range(100))
    private.mkdir(parents=True)
    for path in (private / "key", private.parent / "key"):
        path.touch()
    above.mkdir()
    tree.code = tree.code.rename(above / "code")
    tree.write("deep/a")

    def swap() -> bool:
        if next(looks) == look:
            above.rename(tmp_path / "moved").with_name("above").symlink_to(tmp_path / "private")
        return False

    with contextlib.nullcontext() if look else pytest.raises(EngineError, match="above/code cannot be read"):
        tree.copy(stopped=swap)
    assert above.is_symlink() and not any(path.name == "key" for path in tree.work.rglob("*"))
