"""A node must report the current files of its folder, and store the files that are uploaded to it."""

import base64
import hashlib
import os
import tarfile
from pathlib import Path

import pytest
from support.uploads import packed, put, text

from orchestrate.node.files import PIECE, Files


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    (folder / "logs").mkdir(parents=True)
    return folder


def test_an_upload_must_replace_all_files_except_logs(job, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").touch()
    (job / "link").symlink_to(tmp_path / "outside")
    (job / "old").mkdir()
    (job / "old" / "file").touch()
    (job / ".hidden").touch()
    (job / "logs" / "rank-0.log").write_text("kept")
    data = packed(new="new", folder__deep="deep")
    answer = put(Files(), job, data, 700)
    assert answer == ({str(job): hashlib.sha256(data).hexdigest()},)
    assert sorted(path.name for path in job.iterdir()) == ["folder", "logs", "new"]
    assert (job / "folder" / "deep").read_text() == "deep" and (job / "logs" / "rank-0.log").read_text() == "kept"
    assert (tmp_path / "outside" / "mine").exists()


def test_an_upload_to_one_folder_must_leave_another_folder_alone(tmp_path):
    files, job, code = Files(), tmp_path / "job", tmp_path / "job-code"
    put(files, code, packed(code="x"))
    put(files, job, packed(first="1"))
    answer = put(files, job, packed(second="2"))
    assert set(answer.tags) == {str(job), str(code)}
    for folder in (job, code):
        assert files.changes(str(folder), {}) == ({}, {}, {}, [], {})
    (code / "code").unlink()
    assert (files.changes(str(code), {}).gone, files.changes(str(job), {}).gone) == (["code"], [])


def test_an_upload_that_is_not_a_tar_file_must_be_refused_and_the_next_one_accepted(job):
    files = Files()
    with pytest.raises(tarfile.TarError):
        put(files, job, b"not a tar file")
    assert files.tags == {}
    put(files, job, packed(new="new"))
    assert (job / "new").exists() and list(files.tags) == [str(job)]


@pytest.mark.parametrize("before", [0, 1])
def test_a_piece_out_of_sequence_must_be_refused(job, before):
    files, piece = Files(), base64.b64encode(b"piece").decode()
    if before:
        files.upload(str(job), piece, 0, "")
    with pytest.raises(OSError, match="a piece is missing"):
        files.upload(str(job), piece, 7, "")
    put(files, job, packed(new="new"))  # from the beginning
    assert [path.name for path in job.iterdir() if path.is_file()] == ["new"]


def test_only_changes_that_workers_made_after_the_upload_must_be_reported(job):
    files = Files()
    put(files, job, packed(same="same", changed="old", removed="x", touched="x"))
    for name in ("changed", "new", ".hidden", ".metadata"):
        (job / name).write_text("now")
    (job / "removed").unlink()
    os.utime(job / "touched", (1, 1))
    (job / ".half").mkdir()
    (job / ".half" / "file").touch()
    changes = files.changes(str(job), {})
    assert sorted(changes.files) == [".metadata", "changed", "new", "touched"]
    status = (job / "new").stat()
    assert changes.files["new"] == [3, status.st_mtime_ns, status.st_ino, status.st_mode & 0o7777]
    assert changes.gone == ["removed"]


def test_links_must_be_reported_with_their_targets_and_not_followed(job, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").touch()
    (job / "folder").mkdir()
    (job / "folder" / "out").symlink_to(tmp_path / "outside")
    (job / "nowhere").symlink_to("gone")
    os.mkfifo(job / "fifo")
    changes = Files().changes(str(job), {})
    assert changes.links == {"folder/out": str(tmp_path / "outside"), "nowhere": "gone"}
    assert changes.files == {}


def test_a_dangling_link_in_place_of_an_uploaded_file_must_not_count_as_gone(job):
    files = Files()
    put(files, job, packed(kept="x"))
    (job / "kept").unlink()
    (job / "kept").symlink_to("nowhere")
    assert files.changes(str(job), {}).gone == []


def test_only_new_output_of_the_nodes_own_ranks_must_be_sent(job):
    files, log = Files(), job / "logs" / "rank-1.log"
    log.write_bytes(b"of the last generation\n")
    (job / "logs" / "rank-2.log").write_bytes(b"of a rank that this node had before\n")
    files.follow(str(job), 1, 1000)  # the orchestrator has more, from another node
    with log.open("ab") as file:
        file.write(b"new\n")
    have = {"logs/rank-1.log": 1000, "logs/rank-2.log": 0}
    changes = files.changes(str(job), have)
    assert {path: text(data) for path, data in changes.logs.items()} == {"logs/rank-1.log": b"new\n"}
    assert changes.files == {}
    assert text(files.changes(str(job), have | {"logs/rank-1.log": 1002}).logs["logs/rank-1.log"]) == b"w\n"
    assert files.changes(str(job), have | {"logs/rank-1.log": 1004}).logs == {}
    assert files.changes(str(job), {}).logs == {}


def test_a_log_must_be_sent_from_its_start_if_the_orchestrator_has_lost_some_of_it(job):
    files = Files()
    (job / "logs" / "rank-0.log").write_bytes(b"here\n")
    files.follow(str(job), 0, 100)
    assert text(files.changes(str(job), {"logs/rank-0.log": 3}).logs["logs/rank-0.log"]) == b"here\n"


def test_a_long_log_and_a_large_file_must_be_sent_in_pieces(job):
    files = Files()
    files.follow(str(job), 0, 0)
    for path in ("logs/rank-0.log", "state.pt"):
        (job / path).write_bytes(b"a" * PIECE + b"b")
    first = files.changes(str(job), {"logs/rank-0.log": 0}).logs["logs/rank-0.log"]
    assert text(first) == b"a" * PIECE
    assert text(files.changes(str(job), {"logs/rank-0.log": PIECE}).logs["logs/rank-0.log"]) == b"b"
    answers = [files.read(str(job), "state.pt", offset) for offset in (0, PIECE, PIECE + 1)]
    assert [text(one.data) for one in answers] == [b"a" * PIECE, b"b", b""]
    assert answers[0].facts == files.changes(str(job), {}).files["state.pt"]


def test_reading_a_file_that_is_gone_must_be_an_error(job):
    with pytest.raises(OSError):
        Files().read(str(job), "gone", 0)
