"""Uploads to nodes on other hosts: the code without ignored files, and the files that nodes have written."""

import base64
import contextlib
import io
import itertools
import os
import socket
import subprocess
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.ends import KEY
from support.optional import not_none
from support.uploads import sparse

from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.swarm import upload
from orchestrate.engines.swarm.sync import OWN
from orchestrate.engines.swarm.upload import code_files, on_each, packed, send_archive, written_files
from orchestrate.errors import ResourceError, UsageError
from orchestrate.files.folder import ROOT
from orchestrate.node.files import PIECE, Files, digest
from orchestrate.node.messages import protocol


def test_code_must_be_sent_without_ignored_files(tmp_path):
    names = ["train.py", "pkg/model.py", "data/big.bin", ".git/config", "runs/job/plan.json", "env/pyvenv.cfg"]
    names += ["pyvenv.cfg", "tools/env/pyvenv.cfg", "tools/env/bin/x.py", "tools/run.py", "node_modules/x.js"]
    names += ["keep.log", "drop.log", ".env", "pkg/.cache/x"]
    for name in [*names, "env/lib/x.py", "pkg/__pycache__/model.pyc"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".dockerignore").write_text("# not code\n\n data \n*.log\n!keep.log\n")
    (tmp_path / "gone.py").symlink_to("not there")
    sent = {str(path.relative_to(tmp_path)) for path in code_files(tmp_path, tmp_path / "runs")}
    assert sent == {"train.py", "pkg/model.py", "pyvenv.cfg", "tools/run.py", "keep.log"}


def test_records_of_jobs_must_not_be_sent(tmp_path, monkeypatch):
    (tmp_path / "code" / "state" / "orchestrate").mkdir(parents=True)
    for name in ("train.py", "state/orchestrate/0.json"):
        (tmp_path / "code" / name).write_text("x")
    (tmp_path / "link").symlink_to("code")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "link" / "state"))
    assert code_files(tmp_path / "code", tmp_path / "runs") == [tmp_path / "code" / "train.py"]


def test_a_dangling_link_must_not_be_sent_whatever_its_target(tmp_path):
    for name, target in (("long", "x" * 300), ("loop", "loop"), ("gone", "none/at/all")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "train.py").touch()
    assert code_files(tmp_path, tmp_path / "runs") == [tmp_path / "train.py"]
    (tmp_path / "long").unlink()  # glob() raises an error for it


def test_run_directories_must_not_be_sent_wherever_they_are(tmp_path):
    code = tmp_path / "code"
    for name in ("train.py", "out/jobs/j-1/plan.json", "out/x", "jobs/y"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).touch()

    def sent(runs: Path) -> set[str]:
        return {str(path.relative_to(code)) for path in code_files(code, runs)}

    assert sent(code / "out" / "jobs") == {"train.py", "out/x", "jobs/y"}
    assert sent(tmp_path) == sent(tmp_path / "elsewhere") == {"train.py", "out/x", "jobs/y", "out/jobs/j-1/plan.json"}
    with pytest.raises(UsageError, match="is the code folder"):
        sent(code)


def test_code_that_is_too_large_must_be_refused(tmp_path):
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(256 << 20)
    assert code_files(tmp_path, tmp_path / "runs") == [tmp_path / "weights.bin"]
    (tmp_path / "train.py").write_text("x")  # together, they are too large
    with pytest.raises(ResourceError, match="more than 256 MB"):
        code_files(tmp_path, tmp_path / "runs")
    (tmp_path / ".dockerignore").write_text("weights.bin")
    assert code_files(tmp_path, tmp_path / "runs") == [tmp_path / "train.py"]


def test_files_that_nodes_have_written_must_be_sent_with_links(tmp_path):
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("checkpoints/step-1/state.pt", "checkpoints/.half", "result", "logs", *OWN):
        (tmp_path / name).write_text("x")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x").touch()
    (tmp_path / "checkpoints" / "step-1" / ".metadata").touch()  # part of a torch checkpoint
    (tmp_path / "checkpoints" / "last").symlink_to("step-1")
    (tmp_path / "newest").symlink_to("result")
    sent = {str(path.relative_to(tmp_path)) for path in written_files(tmp_path)}
    assert sent == {"checkpoints/step-1/state.pt", "checkpoints/last", "result", "newest"} | {
        "checkpoints/step-1/.metadata"
    }


class FakeNode:
    """A connection to a fake node that receives a tar file."""

    def __init__(self) -> None:
        self.content, self.requests = b"", []

    def converse(self, request: protocol.Upload, answer: type, patience: float, *_: object) -> None:
        assert (request.folder, request.offset, answer) == ("job", len(self.content), protocol.Uploaded)
        self.content += base64.b64decode(request.data)
        self.requests.append((request.tag, patience))


def test_an_archive_must_be_sent_in_pieces_with_its_digest_in_the_last_one(tmp_path):
    (tmp_path / "large").write_bytes(bytes(range(256)) * (PIECE // 256 * 2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    (tmp_path / "folder" / "not").touch()
    node = FakeNode()
    with packed(tmp_path, [tmp_path / "large", tmp_path / "folder" / "inside"], tmp_path) as (file, tag):
        send_archive(cast(NodeConnection, node), "job", file, tag)
        assert tag == digest(file)
    assert [sent for sent, _ in node.requests] == ["", "", tag]
    (*_, (_, first), (_, last)) = node.requests
    assert last > 10 * first  # the node unpacks the archive
    with tarfile.open(fileobj=io.BytesIO(node.content)) as archive:
        assert archive.getnames() == ["folder/inside", "large"]
        assert not_none(archive.extractfile("large")).read() == (tmp_path / "large").read_bytes()


def test_sending_an_archive_must_end_once_it_is_to_stop(tmp_path):
    (tmp_path / "small").touch()  # the node gets ten minutes to unpack
    here, there = socket.socketpair()
    link = NodeConnection(here, KEY)
    asked = itertools.count()
    with contextlib.closing(link), there, packed(tmp_path, [tmp_path / "small"], tmp_path) as (file, tag):
        threading.Thread(target=lambda: [*iter(lambda: there.recv(1 << 20), b"")], daemon=True).start()
        with pytest.raises(ConnectionError):  # the node reads, and answers nothing
            send_archive(link, "job", file, tag, lambda: next(asked) == 2)


class Link:
    """A connection to a node that may be gone."""

    def __init__(self, node: str) -> None:
        self.node, self.closed = node, False

    def close(self) -> None:
        self.closed = True


def test_a_node_that_is_gone_must_be_reported_and_no_connection_stay_open():
    links = {name: Link(name) for name in ("master", "trainer-1")}

    def act(link: NodeConnection) -> None:
        if cast(Link, link).node == "master":
            raise ConnectionResetError("reset")

    errors = on_each(links, lambda node: cast(NodeConnection, links[node]), act)
    assert {node: str(error) for node, error in errors.items()} == {"master": "cannot send files to master: reset"}
    assert all(link.closed for link in links.values())


def test_files_that_disappear_while_they_are_packed_must_be_reported(tmp_path):
    with pytest.raises(ResourceError, match="cannot send"), packed(tmp_path, [tmp_path / "gone"], tmp_path):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_files_must_be_packed_on_the_disk_of_the_job_and_a_full_disk_be_reported(tmp_path, name):
    run, small = tmp_path / "run", tmp_path / "small"
    run.mkdir()
    small.mkdir()
    (tmp_path / "dense").write_bytes(os.urandom(1 << 20))
    sparse(tmp_path / "sparse", 1 << 30, *range(0, 64 << 20, 1 << 20))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=True)
    try:
        with (
            pytest.raises(ResourceError, match="No space left on device") as error,
            packed(tmp_path, [tmp_path / name], small),
        ):
            pass
        assert error.value.hint == f"check free space: df {small}"
        with packed(tmp_path, [tmp_path / name], run) as (file, _):
            assert os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(f"{run}/")
    finally:
        subprocess.run(["umount", small], check=True)


def test_holes_of_a_file_must_be_preserved(tmp_path):
    source, job = tmp_path / "source", tmp_path / "node" / "job"
    source.mkdir()
    job.parent.mkdir()
    sparse(source / "sparse", 1 << 42, 0, 1 << 30, 1 << 41)
    sparse(source / "empty", 1 << 41)
    (source / "dense").write_bytes(os.urandom(100_000))
    (source / "link").symlink_to("dense")
    with packed(source, written_files(source), source.parent) as (file, tag):
        assert os.fstat(file.fileno()).st_size < 1 << 20
        Files().upload(str(job), base64.b64encode(file.read()).decode(), 0, tag)
    for name in ("sparse", "empty", "dense", "link"):
        assert (job / name).lstat().st_size == (source / name).lstat().st_size
    with (job / "sparse").open("rb") as copied:
        assert os.fstat(copied.fileno()).st_blocks * 512 < 1 << 20
        assert [os.pread(copied.fileno(), 4, offset) for offset in (0, 1 << 30, 1 << 41)] == [b"data"] * 3
    assert (job / "dense").read_bytes() == (source / "dense").read_bytes()


def test_a_file_with_too_many_holes_must_be_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "MAX_PARTS", 2)
    (tmp_path / "long").write_bytes(b"1" * 3 * PIECE)
    os.truncate(tmp_path / "long", 1 << 42)
    with packed(tmp_path, [tmp_path / "long"], tmp_path):  # its parts have no hole between them
        pass
    sparse(tmp_path / "sparse", 1 << 42, 0, 1 << 30, 1 << 41)
    with (
        pytest.raises(ResourceError, match="sparse has more than 2 parts between holes"),
        packed(tmp_path, [tmp_path / "sparse"], tmp_path),
    ):
        pass


def test_a_file_with_holes_that_grows_while_it_is_packed_must_be_sent_as_it_was(tmp_path, monkeypatch):
    source, job = tmp_path / "source", tmp_path / "node" / "job"
    source.mkdir()
    job.parent.mkdir()
    sparse(source / "sparse", 1 << 30, 0, 1 << 20)

    def grown(path: str):
        file = ROOT.open(path)
        with open(path, "r+b") as more:
            more.seek((1 << 30) - 2)
            more.write(b"later")
        return file

    monkeypatch.setattr(upload, "ROOT", SimpleNamespace(open=grown))
    with packed(source, [source / "sparse"], source.parent) as (file, tag):
        Files().upload(str(job), base64.b64encode(file.read()).decode(), 0, tag)
    assert (job / "sparse").stat().st_size == 1 << 30
    with (job / "sparse").open("rb") as copied:
        assert os.pread(copied.fileno(), 9, (1 << 30) - 2) == b"la"
