"""Files of a node on another machine must be copied here, and only those; with a real node, over TCP."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ends import KEY
from support.ports import free_port
from support.processes import gone
from support.repo import ROOT
from support.tcp_node import Node

from orchestrate.engines.swarm import sync as sync_module
from orchestrate.engines.swarm.last_lines import rescued
from orchestrate.engines.swarm.sync import FileSync
from orchestrate.engines.swarm.upload import packed, send_archive, written_files
from orchestrate.errors import EngineError
from orchestrate.node.files import PIECE
from orchestrate.node.messages import protocol

LONG = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 85  # a name of 255 bytes


@pytest.fixture
def node(tmp_path):
    instance = Node(tmp_path)
    yield instance
    instance.end()


@pytest.fixture
def sync(node, tmp_path):
    target = tmp_path / "home"
    (target / "logs").mkdir(parents=True)
    instance = FileSync(target, str(node.job), {"master": [0]}, node.connect)
    yield instance
    instance.close()


def test_a_client_without_the_key_must_get_no_answer(node):
    assert node.connect(key=bytes(32)) is None
    node.connect().converse(protocol.GetStatus(), protocol.Status)  # the node still works


def test_files_written_by_a_worker_must_be_copied(node, sync):
    link = node.connect()
    node.start(
        link,
        "import os, pathlib\n"
        "job_dir = pathlib.Path(os.environ['JOB_DIR'])\n"
        "step = job_dir / 'checkpoints' / 'step-1'\n"
        "step.mkdir()\n"
        "(step / 'state.pt').write_bytes(bytes(range(256)) * 8192)\n"
        "(job_dir / 'checkpoints' / 'last').symlink_to('step-1')\n"
        "(job_dir / 'checkpoints' / '.half').write_text('half')\n"
        "(step / '.metadata').write_text('of a distributed checkpoint')\n"
        f"(job_dir / {LONG!r}).touch()\n"
        "(job_dir / os.fsdecode(b'no text \\xff')).touch()\n"
        "print('done\\r\\x00', end='')\n",
    )
    assert node.until(link, protocol.Ended).code == 0
    sync.catch_up(20)
    odd = os.fsdecode(b"no text \xff")
    found = {str(path.relative_to(sync.run_dir)) for path in sync.run_dir.rglob("*") if not path.is_dir()}
    assert found == {"logs/rank-0.log", "checkpoints/step-1/state.pt", "checkpoints/step-1/.metadata", LONG, odd}
    link = sync.run_dir / "checkpoints" / "last"
    inode = link.lstat().st_ino
    sync.catch_up(20)
    assert (link.readlink(), link.lstat().st_ino) == (Path("step-1"), inode)  # and the link was not recreated
    assert (sync.run_dir / "checkpoints" / "last" / "state.pt").read_bytes() == bytes(range(256)) * 8192
    assert (sync.run_dir / "logs" / "rank-0.log").read_bytes() == b"done\r\x00"


def test_a_sparse_file_larger_than_any_disk_must_be_copied_with_its_holes(node, sync):
    link = node.connect()
    node.start(
        link,
        "import os\n"
        "with open(os.environ['JOB_DIR'] + '/sparse', 'wb') as file:\n"
        "    for offset in (0, 1 << 30, 1 << 41):\n"
        "        file.seek(offset)\n"
        "        file.write(b'data')\n"
        "    file.truncate(1 << 42)\n",
    )
    assert node.until(link, protocol.Ended).code == 0
    sync.copy_all(60)
    with (sync.run_dir / "sparse").open("rb") as file:
        status = os.fstat(file.fileno())
        assert status.st_size == 1 << 42 and status.st_blocks * 512 < 1 << 20
        assert [os.pread(file.fileno(), 4, offset) for offset in (0, 1 << 30, 1 << 41)] == [b"data"] * 3


def test_files_must_be_copied_in_the_order_they_were_written(node, sync, monkeypatch):
    copied = []
    keep = sync_module.Fetch.keep
    monkeypatch.setattr(sync_module.Fetch, "keep", lambda self: (copied.append(self.path), keep(self)))
    link = node.connect()
    node.start(
        link,
        "import os, pathlib\n"
        "half = pathlib.Path(os.environ['JOB_DIR'], 'checkpoints', '.half')\n"
        "half.mkdir()\n"
        "for time, name in enumerate(('b', 'manifest', 'a')):\n"
        "    (half / name).write_text(name)\n"
        "    os.utime(half / name, (time, 1 if name == 'a' else 10 * time))\n"
        "half.rename(half.with_name('step-1'))\n",
    )
    assert node.until(link, protocol.Ended).code == 0
    sync.catch_up(20)
    assert copied == ["checkpoints/step-1/b", "checkpoints/step-1/a", "checkpoints/step-1/manifest"]


def test_files_removed_by_a_worker_must_be_removed_from_the_copy(node, sync):
    link = node.connect()
    write = "import os, pathlib; (pathlib.Path(os.environ['JOB_DIR']) / 'checkpoints' / '{}').{}"
    node.start(link, write.format("old", "touch()"))
    node.until(link, protocol.Ended)
    sync.catch_up(20)
    assert (sync.run_dir / "checkpoints" / "old").exists()
    node.start(link, write.format("old", "unlink()"), generation=1)
    node.until(link, protocol.Ended)
    sync.catch_up(20)
    assert not (sync.run_dir / "checkpoints" / "old").exists()


def test_a_log_started_on_another_node_must_be_continued(node, sync):
    log = sync.run_dir / "logs" / "rank-0.log"
    log.write_bytes(b"what a node wrote that is lost\n")
    link = node.connect()
    node.start(link, "print('more')", generation=1, log=log.stat().st_size)
    node.until(link, protocol.Ended)
    sync.catch_up(20)
    so_far = b"what a node wrote that is lost\n[node] generation 1\nmore\n"
    assert log.read_bytes() == so_far
    node.start(link, "print('again')", generation=2, log=log.stat().st_size)  # and so must the log of this node
    node.until(link, protocol.Ended)
    sync.catch_up(20)
    assert log.read_bytes() == so_far + b"[node] generation 2\nagain\n"


def test_uploaded_files_must_arrive_and_not_be_copied_back(node, sync, tmp_path):
    given = tmp_path / "given" / "checkpoints"
    given.mkdir(parents=True)
    (given / "state.pt").write_bytes(os.urandom(3_000_000))
    (given / "last").symlink_to("state.pt")
    node.job.mkdir()
    (node.job / "stale").touch()
    link = node.connect()
    with packed(given.parent, written_files(given.parent), given.parent) as (file, digest):
        send_archive(link, str(node.job), file, digest)
    assert link.converse(protocol.GetStatus(), protocol.Status).tags == {str(node.job): digest}
    assert (node.job / "checkpoints" / "last").read_bytes() == (given / "state.pt").read_bytes()
    assert not (node.job / "stale").exists()
    sync.catch_up(20)
    assert not (sync.run_dir / "checkpoints" / "state.pt").exists()


def test_uploaded_files_removed_on_the_first_node_must_be_removed_from_the_copy(node, sync):
    (sync.run_dir / "checkpoints").mkdir()
    for name in ("old", "new"):
        (sync.run_dir / "checkpoints" / name).write_text("given")
    link = node.connect()
    with packed(sync.run_dir, written_files(sync.run_dir), sync.run_dir) as (file, digest):
        send_archive(link, str(node.job), file, digest)
    node.start(link, "import os, pathlib; (pathlib.Path(os.environ['JOB_DIR']) / 'checkpoints' / 'old').unlink()")
    node.until(link, protocol.Ended)
    sync.catch_up(20)
    assert [path.name for path in (sync.run_dir / "checkpoints").iterdir()] == ["new"]


def test_an_upload_after_an_interrupted_one_must_be_complete(node, tmp_path):
    given = tmp_path / "given"
    given.mkdir()
    (given / "state.pt").write_bytes(os.urandom(3 * PIECE))
    link = node.connect()
    piece = base64.b64encode(b"an interrupted upload").decode()
    link.converse(protocol.Upload(str(node.job), piece, 0, ""), protocol.Uploaded)
    with pytest.raises(EngineError, match="a piece is missing"):
        link.converse(protocol.Upload(str(node.job), piece, PIECE, ""), protocol.Uploaded)
    with packed(given, written_files(given), given) as (file, digest):
        send_archive(link, str(node.job), file, digest)
    assert (node.job / "state.pt").read_bytes() == (given / "state.pt").read_bytes()


def test_a_damaged_upload_must_not_be_unpacked(node):
    node.job.mkdir()
    (node.job / "kept").touch()
    data = base64.b64encode(b"no tar file").decode()
    with pytest.raises(EngineError, match="the upload is damaged"):
        node.connect().converse(protocol.Upload(str(node.job), data, 0, "0" * 64), protocol.Uploaded)
    assert (node.job / "kept").exists()


def test_a_file_that_cannot_be_copied_must_be_reported_without_blocking_others(node, sync):
    (sync.run_dir / "taken").mkdir()
    (sync.run_dir / "taken" / "mine").touch()
    link = node.connect()
    node.start(
        link,
        "import os, pathlib\n"
        "for name in ('taken', 'free'): (pathlib.Path(os.environ['JOB_DIR']) / name).write_text('x')\n",
    )
    node.until(link, protocol.Ended)
    assert sync.catch_up(20)
    assert (sync.run_dir / "free").read_text() == "x" and (sync.run_dir / "taken" / "mine").exists()
    assert list(sync.errors) == ["taken"] and isinstance(sync.errors["taken"], IsADirectoryError)
    (sync.run_dir / "taken" / "mine").unlink()
    (sync.run_dir / "taken").rmdir()
    assert sync.catch_up(20)  # now it succeeds
    assert not sync.errors and (sync.run_dir / "taken").read_text() == "x"


def test_a_path_that_changes_its_type_must_be_copied_as_its_new_type(node, sync):
    link = node.connect()
    setup = "import os, pathlib, shutil; job = pathlib.Path(os.environ['JOB_DIR'])\n"
    node.start(
        link,
        f"{setup}(job / 'a' / 'b').mkdir(parents=True); (job / 'a' / 'b' / 'x').touch(); (job / 'c').touch()\n"
        "(job / 'run.sh').touch(); (job / 'run.sh').chmod(0o755); (job / 'a' / 'b' / 'to').symlink_to('x')\n",
    )
    node.until(link, protocol.Ended)
    assert sync.catch_up(20)
    assert (sync.run_dir / "a" / "b" / "to").readlink() == Path("x") and (sync.run_dir / "c").is_file()
    assert os.access(sync.run_dir / "run.sh", os.X_OK) and not os.access(sync.run_dir / "c", os.X_OK)
    node.start(
        link,
        f"{setup}shutil.rmtree(job / 'a'); (job / 'a').write_text('file')\n"
        "(job / 'c').unlink(); (job / 'c').mkdir(); (job / 'c' / 'x').touch()\n",
        generation=1,
    )
    node.until(link, protocol.Ended)
    assert sync.catch_up(20)
    assert (sync.run_dir / "a").read_text() == "file" and (sync.run_dir / "c" / "x").is_file() and not sync.errors


def test_a_file_that_its_owner_cannot_read_must_still_be_copied(node, sync):
    link = node.connect()
    node.start(link, "import os; os.close(os.open(os.environ['JOB_DIR'] + '/shut', os.O_CREAT | os.O_WRONLY, 0))")
    node.until(link, protocol.Ended)
    assert sync.catch_up(20)
    assert (sync.run_dir / "shut").is_file()


def test_a_log_that_cannot_be_written_must_be_reported_and_continued_later(node, sync):
    log = sync.run_dir / "logs" / "rank-0.log"
    log.symlink_to("elsewhere")
    link = node.connect()
    node.start(link, "print('all of it')")
    node.until(link, protocol.Ended)
    assert sync.catch_up(20)
    assert list(sync.errors) == ["logs/rank-0.log"]
    log.unlink()
    assert sync.catch_up(20)
    assert log.read_text() == "all of it\n" and not sync.errors


def test_of_a_file_written_by_two_nodes_the_first_nodes_version_must_be_copied(tmp_path):
    target, nodes = tmp_path / "home", {}
    (target / "logs").mkdir(parents=True)
    for name in ("master", "trainer-1"):
        (tmp_path / name / "job").mkdir(parents=True)
        (tmp_path / name / "job" / "same").write_text(name)
        (tmp_path / name / "job" / f"of-{name}").touch()
        nodes[name] = Node(tmp_path / name)
    sync = FileSync(target, "job", {"master": [0], "trainer-1": [1]}, lambda name: nodes[name].connect())
    try:
        assert sync.catch_up(20)
        (tmp_path / "trainer-1" / "job" / "same").write_text("written later")
        assert sync.catch_up(20)
    finally:
        sync.close()
        for each in nodes.values():
            each.end()
    assert (target / "same").read_text() == "master"
    assert (target / "of-master").exists() and (target / "of-trainer-1").exists()


@pytest.mark.exhaustive
def test_a_node_whose_relay_is_gone_must_end_its_workers(node, tmp_path):
    port = free_port()
    settings = {"NODE_MODE": "relay", "NODE_PORT": str(port), "NODE_KEY": KEY.hex()}
    relay = subprocess.Popen([sys.executable, str(ROOT / "orchestrate" / "node")], env=os.environ | settings)
    try:
        link = node.connect()
        link.send(protocol.Lease(("127.0.0.1", port)))
        node.start(link, "import time; time.sleep(600)")
        pid = node.until(link, protocol.Started).pid
        link.sock.settimeout(12)  # renewed for longer than one lease lasts
        with pytest.raises(TimeoutError):
            link.sock.recv(1)
        assert not gone(pid)
    finally:
        relay.kill()
        relay.wait()
    link.sock.settimeout(30)
    ended = node.until(link, protocol.Ended)
    assert (ended.code, ended.hint) == (137, "cut off")
    assert gone(pid)


@pytest.mark.parametrize(
    ("log", "stdout", "missing"),
    [
        (b"a\nb\n", b"[rank 1] a\n[rank 0] x\n[rank 1] b\n[rank 1] c\n[rank 1] d", b"c\nd\n"),
        (b"a\nb", b"[rank 1] a\n[rank 1] bc\n", b"c\n"),
        (b"old\n[node] generation 1\na\n", b"[rank 1] old\n[rank 1] a\n[rank 1] b\n", b"b\n"),
        (b"a\n", b"[rank 1] a\n[rank 1] b\n[rank 1] a\n[rank 1] c\n", b"c\n"),
        (b"x" * 300 + b"a\n", b"[rank 1] " + b"x" * 280 + b"a\n[rank 1] b\n", b"b\n"),  # the copy starts later
        (b"[node] generation 1\na\n", b"[rank 1] a\n[rank 1] b\n", b"b\n"),
        (b"a\n", b"", b""),
        (b"a\nhalf a", b"", b"\n"),  # the mark of the next generation must start a line
        (b"elsewhere\n", b"[rank 1] a\n", b""),
        (b"", b"[rank 1] a\n", b""),
    ],
)
def test_the_last_lines_of_a_lost_worker_must_be_recovered_from_its_nodes_stdout(log, stdout, missing):
    assert rescued(log, stdout, 1) == missing
