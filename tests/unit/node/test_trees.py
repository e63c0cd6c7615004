"""Nothing in a folder that workers write to must block a node, lead it outside, or crash it."""

import io
import os
import re
import socket
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import WITHOUT_CAPABILITIES
from support.memory import peak
from support.repo import ROOT
from support.uploads import packed, put, text

from orchestrate.node import ranks, trees
from orchestrate.node.files import PIECE, Files
from orchestrate.node.ranks import fence
from orchestrate.node.trees import clear, opened, replace, walk
from orchestrate.node.wipe import wipe

DEEP = 3000  # nested folders: more than the frames of Python's stack and the characters of a path


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "job"
    (folder / "logs").mkdir(parents=True)
    yield folder
    subprocess.run(["chmod", "-R", "u+rwx", str(tmp_path)], capture_output=True)
    subprocess.run(["rm", "-rf", str(folder)], check=True)  # too deep for pytest


def nest(folder: Path, name: str = "d" * 100, depth: int = DEEP) -> None:
    """Create nested folders, with a file in every hundredth, including the last."""
    parent = os.open(folder, os.O_RDONLY)
    for level in range(depth):
        os.mkdir(name, dir_fd=parent)
        child = os.open(name, os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
        if level % 100 == 99:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=parent))
    os.close(parent)


def add_special_files(folder: Path, outside: Path) -> None:
    """Fill a folder with special files, links, a file with an odd name and a sparse file."""
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "socket"))
    (folder / "loop").symlink_to("loop")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "out").symlink_to(outside)
    (folder / os.fsdecode(b"no text \xff\n\x1b[31m")).touch()
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 40)


def run_without_capabilities(code: str, *arguments: object) -> str:
    """Run a program without capabilities, so that mode 0 also excludes root; return its output."""
    rights = WITHOUT_CAPABILITIES if os.geteuid() == 0 else ""
    command = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{rights}{code}"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- changes


@pytest.mark.parametrize("name", ["d", "d" * 100])
def test_deeply_nested_folders_must_be_listed_up_to_the_maximum_path_length(job, name):
    nest(job, name)
    (job / "state.pt").touch()
    found = Files().changes(str(job), {}).files
    assert {path.count("/") for path in found} >= set(range(0, 3800 // (len(name) + 1), 100))


def test_special_files_must_be_neither_listed_nor_read(job, tmp_path):
    (tmp_path / "secret").touch()
    add_special_files(job, tmp_path)
    changes = Files().changes(str(job), {})
    assert set(changes.files) == {"sparse", os.fsdecode(b"no text \xff\n\x1b[31m")}
    assert set(changes.links) == {"loop", "zero", "out"}
    assert changes.files["sparse"][0] == 1 << 40
    for name in ("fifo", "socket", "loop", "zero", "out", "logs", "gone", "out/secret/x", "d" * 5000):
        with pytest.raises(OSError):
            Files().read(str(job), name, 0)
    for offset in (0, (1 << 40) - 3, 1 << 41, 10**18 - 1):  # holes are not sent
        assert text(Files().read(str(job), "sparse", offset).data) == b""
    with (job / "sparse").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"end")
    piece = Files().read(str(job), "sparse", 0)
    assert text(piece.data).endswith(b"end") and piece.offset + len(text(piece.data)) == 1 << 40


@pytest.mark.parametrize("kind", ["fifo", "zero", "out", "folder", "loop", "nothing"])
def test_a_log_that_is_not_a_regular_file_must_be_ignored(job, tmp_path, kind):
    add_special_files(tmp_path, tmp_path)
    (tmp_path / "folder").mkdir()
    files, log = Files(), job / "logs" / "rank-0.log"
    files.follow(str(job), 0, 0)
    if kind != "nothing":
        (tmp_path / kind).rename(log)
    assert files.changes(str(job), {"logs/rank-0.log": 0}).logs == {}
    files.follow(str(job), 0, 7)  # a log is not looked up through a link either


def test_a_log_of_terabytes_must_be_sent_in_pieces_without_holes(job):
    files, log = Files(), job / "logs" / "rank-0.log"
    files.follow(str(job), 0, 0)
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"x" * (PIECE + 1))
    name = "logs/rank-0.log"
    assert text(files.changes(str(job), {name: 0}).logs[name]) == b"x" * PIECE
    assert text(files.changes(str(job), {name: PIECE}).logs[name]).rstrip(b"\0") == b"x"


def test_an_unreadable_folder_must_be_skipped_and_an_unreadable_file_be_read():
    code = """
import os, pathlib, tempfile
from orchestrate.node.files import Files
with tempfile.TemporaryDirectory() as folder:
    for name in ("closed", "open"):
        os.mkdir(f"{folder}/{name}")
        pathlib.Path(f"{folder}/{name}/file").write_text("x")
        os.chmod(f"{folder}/{name}/file", 0)
    os.chmod(f"{folder}/closed", 0)
    found = Files().changes(folder, {}).files
    print(*found, Files().read(folder, "open/file", 0).data, oct(os.stat(f"{folder}/open/file").st_mode))
    os.chmod(f"{folder}/closed", 0o700)
"""
    assert run_without_capabilities(code) == "open/file eA== 0o100600\n"


# --- uploads


def test_uploaded_files_must_replace_any_existing_content(job, tmp_path):
    (tmp_path / "secret").touch()
    add_special_files(job, tmp_path)
    nest(job)
    (job / "folder").mkdir(mode=0)
    (job / "work").symlink_to(tmp_path)  # a real folder of this name would be kept
    put(Files(), job, packed(new="new"))
    assert {path.name for path in job.iterdir()} == {"new", "logs"}
    assert (tmp_path / "secret").exists()


def test_an_upload_to_a_folder_that_became_a_link_must_be_refused(job, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").touch()
    job.rename(tmp_path / "moved")
    job.symlink_to(outside)
    with pytest.raises(OSError):
        put(Files(), job, packed(new="new"))
    assert [path.name for path in outside.iterdir()] == ["mine"]


def test_an_upload_must_create_only_files_folders_and_links_with_safe_modes(job, tmp_path):
    upload = io.BytesIO()
    with tarfile.open(fileobj=upload, mode="w") as archive:
        for name, kind, mode in (
            ("folder", tarfile.DIRTYPE, 0o7777),
            ("folder/tool", tarfile.REGTYPE, 0o6755),
            ("fifo", tarfile.FIFOTYPE, 0o644),
            ("device", tarfile.CHRTYPE, 0o666),
            ("link", tarfile.SYMTYPE, 0o777),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.linkname = kind, mode, "/etc/hostname"
            archive.addfile(entry)
    put(Files(), job, upload.getvalue())
    found = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in job.rglob("*") if not path.is_symlink()}
    assert found | {"logs": 0} == {"folder": 0o755, "tool": 0o755, "logs": 0}
    assert os.readlink(job / "link") == "/etc/hostname"  # unchanged from the user's code folder
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../evil"))
    if hasattr(tarfile, "tar_filter"):
        with pytest.raises(tarfile.TarError):
            put(Files(), job, outside.getvalue())
        assert not (tmp_path / "evil").exists()


# --- emptying folders


def test_a_folder_with_any_content_must_be_emptied(job, tmp_path):
    (tmp_path / "secret").touch()
    add_special_files(job, tmp_path)
    nest(job)
    nest(job, "e")
    before = len(os.listdir("/proc/self/fd"))
    wipe([str(job)], {str(job / "socket")})
    assert len(os.listdir("/proc/self/fd")) <= before
    assert [path.name for path in job.iterdir()] == ["socket"]
    assert (tmp_path / "secret").exists()


def test_unreadable_folders_must_be_emptied():
    code = """
import os, pathlib, tempfile
from orchestrate.node.wipe import wipe
with tempfile.TemporaryDirectory() as top:
    folder = f"{top}/folder"
    os.makedirs(f"{folder}/a/b/c")
    pathlib.Path(f"{folder}/a/b/c/file").touch()
    for path in ("a/b/c/file", "a/b/c", "a/b", "a", ""):
        os.chmod(f"{folder}/{path}", 0)
    wipe([folder], set())
    print(os.listdir(folder))
"""
    assert run_without_capabilities(code) == "[]\n"


def test_entries_that_cannot_be_removed_must_be_skipped_and_returned():
    code = """
import hashlib, os, sys, tempfile
from orchestrate.node.files import Files
from orchestrate.node.trees import clear
real = os.unlink
def unlink(path, **more):
    if path == "kept":
        raise PermissionError(1, "no", path)
    real(path, **more)
with tempfile.TemporaryDirectory() as folder:
    os.makedirs(f"{folder}/a/b")
    for name in ("kept", "a/kept", "a/b/kept", "a/b/other", "other"):
        open(f"{folder}/{name}", "w").close()
    os.unlink = unlink
    print(len(clear(folder)), sum(len(files) for _, _, files in os.walk(folder)))
    try:
        Files().upload(folder, "", 0, hashlib.sha256().hexdigest())
    except OSError as error:
        print(error)
    os.unlink = real
    print(clear(folder), os.listdir(folder))
"""
    first, refusal, *rest = run_without_capabilities(code).splitlines()
    assert (first, rest) == ("3 3", ["[] []"])
    assert re.fullmatch("cannot empty /.*: .*kept cannot be removed", refusal)


def test_wipe_must_remove_a_link_or_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    wipe([str(tmp_path / name) for name in ("link", "file", "gone")], set())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- the fence


@pytest.mark.parametrize("kind", ["fifo", "zero", "out", "folder", "loop", "large", "bytes", "empty"])
def test_an_unreadable_fence_must_be_generation_0_and_be_replaced(job, tmp_path, kind):
    add_special_files(tmp_path, tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_text(" " * 5000 + "7")
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "empty").touch()
    path = job / ranks.FENCE
    (tmp_path / kind).rename(path)
    assert fence(str(job)) == 0
    if kind != "folder":
        replace(str(path), "3 over\n")
        assert path.read_text() == "3 over\n" and fence(str(job)) == 4
        assert stat.S_IMODE(path.stat().st_mode) & 0o7133 == 0
    else:
        with pytest.raises(OSError):
            replace(str(path), "3\n")
    with pytest.raises(UnicodeEncodeError):
        replace(str(path), "\ud800")
    assert sorted(os.listdir(job)) == [ranks.FENCE, "logs"]


# --- concurrent changes


def test_files_that_appear_and_vanish_must_not_end_a_walk(job):
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for name in ("a", "b"):
                (job / name).mkdir(exist_ok=True)
                (job / name / "file").touch()
            (job / "a" / "file").unlink()
            (job / "a").rmdir()
            (job / "b").rename(job / "c")
            (job / "c" / "file").unlink()
            (job / "c").rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            list(walk(str(job)))
    finally:
        stop.set()
        thread.join()


def test_only_regular_files_must_be_opened(tmp_path):
    add_special_files(tmp_path, tmp_path)
    for name in ("fifo", "socket", "loop", "zero", "out"):
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
            with pytest.raises(OSError):
                opened(str(tmp_path / name), flags)
    before = len(os.listdir("/proc/self/fd"))
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match="not a regular file"):
            opened(str(tmp_path / "fifo"), flags)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert clear(str(tmp_path)) == []


def test_a_folder_with_many_names_must_be_emptied_in_parts(tmp_path, monkeypatch):
    """A job can create millions of empty files with long names."""
    monkeypatch.setattr(trees, "BATCH", 3)
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "file").touch()
    assert clear(str(tmp_path), keep=["1", "4", "8", "9"]) == []
    assert sorted(os.listdir(tmp_path)) == ["1", "4", "8", "9"]


def test_a_folder_with_many_folders_must_be_emptied_in_little_memory(tmp_path):
    for number in range(2000):
        (tmp_path / "job" / str(number)).mkdir(parents=True)
    left, most = peak(lambda: clear(str(tmp_path)))
    assert left == [] and [*tmp_path.iterdir()] == [] and most < 50_000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists mounts")
def test_a_mask_must_be_at_its_path_and_not_where_a_link_leads(tmp_path):
    (tmp_path / "link").symlink_to("/proc")
    (tmp_path / "folder").symlink_to("/")
    assert trees.missing("") == trees.missing(trees.packed(["/proc", "/dev/shm"])) == ""
    for wrong in (str(tmp_path / "link"), str(tmp_path / "folder" / "proc"), str(tmp_path)):
        assert trees.missing(trees.packed(["/proc", wrong])) == wrong
