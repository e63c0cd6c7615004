"""File reports and uploads of a node: it must report each change once, and no hidden or uploaded files."""

import base64
import io
import os
import tarfile
from pathlib import Path

import pytest
from support.uploads import sparse

from orchestrate.node.files import PIECE, Files, digest
from orchestrate.node.messages import protocol


@pytest.fixture
def job(tmp_path):
    folder = tmp_path / "job"
    (folder / "logs").mkdir(parents=True)
    return folder


def put(files: Files, folder: Path, **content: str) -> str:
    """Upload files to a node; return their tag."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in content.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(text), 1
            archive.addfile(entry, io.BytesIO(text.encode()))
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = tarfile.SYMTYPE, "not/there"
        archive.addfile(entry)
    tag, data = digest(buffer), base64.b64encode(buffer.getvalue()).decode()
    assert files.upload(str(folder), data, 0, tag).tags[str(folder)] == tag
    return tag


def changes(files: Files, folder: Path, **have: int) -> protocol.Changes:
    return files.changes(str(folder), {f"logs/{name}.log".replace("_", "-"): count for name, count in have.items()})


def test_uploaded_files_must_not_be_reported_until_they_change(job):
    files = Files()
    put(files, job, one="1", two="2", three="3")
    assert changes(files, job) == protocol.Changes({}, {}, {}, [], {})
    (job / "one").write_text("changed")
    (job / "two").unlink()
    (job / "link").unlink()
    (job / "link").symlink_to("one")
    found = changes(files, job)
    assert (list(found.files), found.gone, found.links) == (["one"], ["two"], {"link": "one"})
    assert found.files["one"][0] == 7


def test_uploads_to_another_folder_must_not_count(job, tmp_path):
    files, code, near = Files(), tmp_path / "code", tmp_path / "job-2"
    first = put(files, job, one="1")
    second = put(files, code, one="1")
    put(files, near, one="1")
    assert files.tags | {str(near): ""} == {str(job): first, str(code): second, str(near): ""}
    (near / "one").unlink()
    (code / "one").unlink()
    assert changes(files, job).gone == [] and not changes(files, job).files
    for folder in (code, job):
        put(files, folder)  # replaces what was there
    assert not changes(files, job).files and changes(files, code).gone == []
    assert changes(files, near).gone == ["one"]


def test_an_upload_must_replace_everything_but_logs_and_the_working_directory(job):
    (job / "work").mkdir()
    (job / "work" / "mine").write_text("written here")
    (job / "logs" / "rank-0.log").write_text("so far")
    (job / "step-1").mkdir()
    (job / "step-1" / "state.pt").touch()
    (job / "last").symlink_to("step-1")
    (job / "away").symlink_to("logs")
    put(Files(), job, state="new")
    assert {path.name for path in job.iterdir()} == {"logs", "work", "state", "link"}
    assert (job / "work" / "mine").read_text() == "written here"
    assert (job / "logs" / "rank-0.log").read_text() == "so far"


def test_an_upload_must_arrive_in_pieces_and_start_over_after_an_error(job):
    files, pieces = Files(), [b"some ", b"bytes"]
    for _ in range(2):  # the first upload is never finished
        assert files.upload(str(job), base64.b64encode(pieces[0]).decode(), 0, "") == protocol.Uploaded({})
    with pytest.raises(OSError, match="the upload is damaged"):
        files.upload(str(job), base64.b64encode(pieces[1]).decode(), 5, "wrong")
    with pytest.raises(OSError, match="a piece is missing"):  # a refused upload is not continued
        files.upload(str(job), base64.b64encode(pieces[1]).decode(), 10, "")
    put(files, job, one="1")
    assert (job / "one").read_text() == "1"


def test_only_visible_files_and_links_must_be_reported(job):
    for name in (
        "a",
        ".hidden",
        ".metadata",
        "sub/b",
        "sub/.c",
        "sub/deep/e",
        ".cache/d",
        "logs/rank-0.log",
        "logs.txt",
    ):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).touch()
    (job / "sub" / "to").symlink_to("b")
    (job / "nowhere").symlink_to("not/there")
    (job / "folder").symlink_to("sub")
    os.mkfifo(job / "pipe")
    found = changes(Files(), job)
    assert set(found.files) == {"a", ".metadata", "sub/b", "sub/deep/e", "logs.txt"}
    assert found.links == {"sub/to": "b", "nowhere": "not/there", "folder": "sub"}
    assert changes(Files(), job / "not there") == protocol.Changes({}, {}, {}, [], {})


def test_a_log_must_be_reported_in_pieces_from_the_length_already_copied(job):
    files, log = Files(), job / "logs" / "rank-0.log"
    log.write_bytes(b"x" * (PIECE + 3))
    assert not changes(files, job, rank_0=0).logs  # a rank that this node never ran
    files.follow(str(job), 0, PIECE + 3)  # the copied log has the same length, so it is this one

    def reported(have: int) -> bytes:
        return base64.b64decode(changes(files, job, rank_0=have).logs.get("logs/rank-0.log", ""))

    assert [len(reported(have)) for have in (0, 1, 3, PIECE, PIECE + 3)] == [PIECE, PIECE, PIECE, 3, 0]
    assert not changes(files, job).logs and not changes(files, job, rank_1=0).logs
    files.follow(str(job), 0, PIECE + 10)  # the copied log has 7 more bytes, from another node
    assert [len(reported(have)) for have in (5, PIECE + 9, PIECE + 10)] == [PIECE, 1, 0]
    files.follow(str(job), 1, 100)
    (job / "logs" / "rank-1.log").write_text("new")
    assert base64.b64decode(changes(files, job, rank_1=101).logs["logs/rank-1.log"]) == b"ew"


def test_a_file_must_be_read_in_pieces_with_its_reported_facts(job):
    content = os.urandom(PIECE + 5)
    (job / "state.pt").write_bytes(content)
    files = Files()
    found = [files.read(str(job), "state.pt", offset) for offset in (0, PIECE, PIECE + 5)]
    assert [one.offset for one in found] == [0, PIECE, PIECE + 5]
    assert [base64.b64decode(one.data) for one in found] == [content[:PIECE], content[PIECE:], b""]
    assert [one.facts for one in found] == [changes(files, job).files["state.pt"]] * 3
    with pytest.raises(FileNotFoundError):
        files.read(str(job), "gone", 0)


def test_holes_in_a_file_must_not_be_read(job):
    sparse(job / "sparse", 1 << 42, 1 << 30, 1 << 41)
    files, at, found = Files(), 0, []
    while piece := base64.b64decode((reply := files.read(str(job), "sparse", at)).data):
        at = reply.offset + len(piece)
        found.append((reply.offset, piece.rstrip(b"\0")))
        assert reply.facts[0] == 1 << 42 and len(piece) < PIECE
    assert found == [(1 << 30, b"data"), (1 << 41, b"data")]


def test_holes_in_a_log_must_be_skipped(job):
    log = job / "logs" / "rank-0.log"
    files, copy = Files(), b""
    files.follow(str(job), 0, 0)
    log.write_bytes(b"first\n")
    for size in (1 << 30, 1 << 40):
        while logs := changes(files, job, rank_0=len(copy)).logs:
            assert logs == changes(files, job, rank_0=len(copy)).logs  # as if the answer was lost
            copy += base64.b64decode(logs["logs/rank-0.log"])
        with log.open("r+b") as file:
            file.seek(size)
            file.write(b"more\n")
    while logs := changes(files, job, rank_0=len(copy)).logs:
        copy += base64.b64decode(logs["logs/rank-0.log"])
    assert copy.replace(b"\0", b"") == b"first\nmore\nmore\n" and len(copy) < PIECE


@pytest.mark.parametrize("change", ["size", "time", "inode", "mode"])
def test_any_change_to_a_file_must_be_reported(job, change):
    files, path = Files(), job / "one"
    put(files, job, one="1")
    status = path.stat()
    if change == "size":
        path.write_text("12")
    elif change == "inode":
        (job / "other").write_text("2")
        (job / "other").replace(path)
    elif change == "mode":
        path.chmod(0o755)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (change == "time")))
    if change == "inode":
        path.chmod(status.st_mode)
    assert list(changes(files, job).files) == ["one"]
