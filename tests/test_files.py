"""What a node reports of its folder, and what is put there, must be the job's files as they are now."""

import base64
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from orchestrate.node.files import PIECE, Files


def packed(**files: str) -> bytes:
    """A tar file with files of these names and contents; `__` in a name stands for a folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def put(files: Files, folder: Path, data: bytes, size: int = PIECE) -> dict:
    """Give a node a tar file in pieces."""
    told = {}
    for offset in range(0, len(data), size):
        last = offset + size >= len(data)
        tag = hashlib.sha256(data).hexdigest() if last else ""
        told = files.upload(str(folder), base64.b64encode(data[offset : offset + size]).decode(), offset, tag)
    return told


def text(data: str) -> bytes:
    return base64.b64decode(data)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    (made / "logs").mkdir(parents=True)
    return made


def test_what_is_put_must_take_the_place_of_all_that_was_there_but_logs(job, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").touch()
    (job / "link").symlink_to(tmp_path / "outside")
    (job / "old").mkdir()
    (job / "old" / "file").touch()
    (job / ".hidden").touch()
    (job / "logs" / "rank-0.log").write_text("kept")
    data = packed(new="new", folder__deep="deep")
    told = put(Files(), job, data, 700)
    assert told == ({str(job): hashlib.sha256(data).hexdigest()},)
    assert sorted(path.name for path in job.iterdir()) == ["folder", "logs", "new"]
    assert (job / "folder" / "deep").read_text() == "deep" and (job / "logs" / "rank-0.log").read_text() == "kept"
    assert (tmp_path / "outside" / "mine").exists()


def test_what_is_put_in_one_folder_must_leave_that_of_another_alone(tmp_path):
    files, job, code = Files(), tmp_path / "job", tmp_path / "job-code"
    put(files, code, packed(code="x"))
    put(files, job, packed(first="1"))
    told = put(files, job, packed(second="2"))
    assert set(told.tags) == {str(job), str(code)}
    for folder in (job, code):
        assert files.changes(str(folder), {}) == ({}, {}, {}, [])
    (code / "code").unlink()
    assert (files.changes(str(code), {}).gone, files.changes(str(job), {}).gone) == (["code"], [])


def test_what_is_no_tar_file_must_be_refused_and_the_next_one_taken(job):
    files = Files()
    with pytest.raises(tarfile.TarError):
        put(files, job, b"no tar file")
    assert files.tags == {}
    put(files, job, packed(new="new"))
    assert (job / "new").exists() and list(files.tags) == [str(job)]


@pytest.mark.parametrize("before", [0, 1])
def test_a_piece_that_does_not_follow_the_last_one_must_be_refused(job, before):
    files, piece = Files(), base64.b64encode(b"piece").decode()
    if before:
        files.upload(str(job), piece, 0, "")
    with pytest.raises(OSError, match="a piece is missing"):
        files.upload(str(job), piece, 7, "")
    put(files, job, packed(new="new"))  # from the beginning
    assert [path.name for path in job.iterdir() if path.is_file()] == ["new"]


def test_only_what_workers_have_changed_of_what_was_put_must_be_news(job):
    files = Files()
    put(files, job, packed(same="same", changed="old", removed="x", touched="x"))
    for name in ("changed", "new", ".hidden", ".metadata"):
        (job / name).write_text("now")
    (job / "removed").unlink()
    os.utime(job / "touched", (1, 1))
    (job / ".half").mkdir()
    (job / ".half" / "file").touch()
    news = files.changes(str(job), {})
    assert sorted(news.files) == [".metadata", "changed", "new", "touched"]
    status = (job / "new").stat()
    assert news.files["new"] == [3, status.st_mtime_ns, status.st_ino, status.st_mode & 0o7777]
    assert news.gone == ["removed"]


def test_links_must_be_told_by_where_they_lead_and_not_followed(job, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").touch()
    (job / "folder").mkdir()
    (job / "folder" / "out").symlink_to(tmp_path / "outside")
    (job / "nowhere").symlink_to("gone")
    os.mkfifo(job / "fifo")
    news = Files().changes(str(job), {})
    assert news.links == {"folder/out": str(tmp_path / "outside"), "nowhere": "gone"}
    assert news.files == {}


def test_a_link_that_was_put_and_leads_nowhere_must_not_count_as_gone(job):
    files = Files()
    put(files, job, packed(kept="x"))
    (job / "kept").unlink()
    (job / "kept").symlink_to("nowhere")
    assert files.changes(str(job), {}).gone == []


def test_of_a_log_only_what_is_new_must_be_told_and_of_other_ranks_nothing(job):
    files, log = Files(), job / "logs" / "rank-1.log"
    log.write_bytes(b"of the last generation\n")
    (job / "logs" / "rank-2.log").write_bytes(b"of a rank that this node had before\n")
    files.follow(str(job), 1, 1000)  # at home there is more, from another node
    with log.open("ab") as file:
        file.write(b"new\n")
    have = {"logs/rank-1.log": 1000, "logs/rank-2.log": 0}
    news = files.changes(str(job), have)
    assert {path: text(data) for path, data in news.logs.items()} == {"logs/rank-1.log": b"new\n"}
    assert news.files == {}
    assert text(files.changes(str(job), have | {"logs/rank-1.log": 1002}).logs["logs/rank-1.log"]) == b"w\n"
    assert files.changes(str(job), have | {"logs/rank-1.log": 1004}).logs == {}
    assert files.changes(str(job), {}).logs == {}


def test_a_log_must_be_told_from_its_beginning_where_home_has_lost_some_of_it(job):
    files = Files()
    (job / "logs" / "rank-0.log").write_bytes(b"here\n")
    files.follow(str(job), 0, 100)
    assert text(files.changes(str(job), {"logs/rank-0.log": 3}).logs["logs/rank-0.log"]) == b"here\n"


def test_a_long_log_and_a_large_file_must_come_in_pieces(job):
    files = Files()
    files.follow(str(job), 0, 0)
    for path in ("logs/rank-0.log", "state.pt"):
        (job / path).write_bytes(b"a" * PIECE + b"b")
    first = files.changes(str(job), {"logs/rank-0.log": 0}).logs["logs/rank-0.log"]
    assert text(first) == b"a" * PIECE
    assert text(files.changes(str(job), {"logs/rank-0.log": PIECE}).logs["logs/rank-0.log"]) == b"b"
    told = [files.read(str(job), "state.pt", offset) for offset in (0, PIECE, PIECE + 1)]
    assert [text(one.data) for one in told] == [b"a" * PIECE, b"b", b""]
    assert told[0].facts == files.changes(str(job), {}).files["state.pt"]


def test_a_file_that_has_gone_must_be_an_error(job):
    with pytest.raises(OSError):
        Files().read(str(job), "gone", 0)
