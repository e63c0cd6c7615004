"""A job has one supervisor: that it lives is the kernel's word, and no other process is taken for it."""

import dataclasses
import fcntl
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.commanded import supervised
from support.plans import HERE, plan

from orchestrate.engines.recording import RecordingEngine
from orchestrate.errors import UsageError
from orchestrate.files import lock, records
from orchestrate.files.paths import JobPaths
from orchestrate.job import store
from orchestrate.job.spec import JobSpec
from orchestrate.supervise import launch


@pytest.fixture
def other(tmp_path):
    """Another process that supervises the job."""
    held = tmp_path / "held"
    held.mkdir()
    with supervised(held) as process:
        yield process


@pytest.mark.timeout(60)
def test_a_second_supervisor_must_be_told_at_once_who_is_the_first(tmp_path, other):
    paths = JobPaths(tmp_path / "held")
    assert lock.holder(paths).pid == other.pid
    with pytest.raises(BlockingIOError), lock.held(paths):
        pass


def test_the_end_of_a_supervisor_must_make_room_for_the_next(tmp_path, other):
    paths = JobPaths(tmp_path / "held")
    other.kill()
    other.wait()
    assert lock.holder(paths) is None
    with lock.held(paths):
        pass


def test_a_job_that_nobody_supervises_must_have_no_holder(tmp_path):
    assert lock.holder(JobPaths(tmp_path)) is None


def test_a_job_whose_cluster_another_job_has_taken_must_say_so_and_start_nothing(tmp_path, other):
    paths = JobPaths(tmp_path / "j")
    (tmp_path / "held" / "nodes").mkdir()
    records.make(tmp_path / "held")
    made = plan(JobSpec(), HERE.but(cluster="held"), "j", 29500)
    store.create(JobSpec(), made, paths)
    engine = RecordingEngine()
    with pytest.raises(UsageError, match="held is in use by another job$") as refused:
        launch.supervise(paths, engine, lambda: 0, print)
    assert "attach j" in refused.value.hint
    assert not engine.calls


def test_a_lock_that_cannot_be_looked_at_must_have_no_holder(tmp_path):
    paths = JobPaths(tmp_path)
    paths.lock.symlink_to(paths.lock)
    assert lock.holder(paths) is None


# --- a lock that somebody else holds

LOCKS = """import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locked(tmp_path):
    """Another process that has locked the file, and says nothing of itself there."""
    paths = JobPaths(tmp_path)
    paths.lock.touch()
    command = [sys.executable, "-c", LOCKS, str(paths.lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process


@pytest.mark.parametrize(
    "says", ["", "{pid}", "{pid} ", "{pid} 1", "-1 1", "0 0", "1 1", "x y", "\xff\x00", "{pid}" * 99]
)
def test_a_process_that_has_locked_the_file_must_not_be_taken_for_a_supervisor(tmp_path, locked, says, monkeypatch):
    paths = JobPaths(tmp_path)
    paths.lock.write_bytes(says.format(pid=locked.pid).encode("latin-1"))
    kept(monkeypatch)
    found = lock.holder(paths)
    assert found.pid == 0 and not found.ask_to_stop()
    assert locked.poll() is None


def kept(monkeypatch) -> None:
    """No signal must be sent."""
    for module, name in ((os, "kill"), (os, "killpg"), (signal, "pidfd_send_signal")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a signal was sent"))


@pytest.mark.skipif(sys.platform != "linux", reason="has no locks of an open file")
@pytest.mark.parametrize("says", ["-1 0", "1 0", "{pid} 0"])
def test_a_lock_of_an_open_file_must_not_be_a_process_to_signal(tmp_path, says, monkeypatch):
    paths = JobPaths(tmp_path)
    paths.lock.write_text(says.format(pid=os.getpid()))
    kept(monkeypatch)
    with paths.lock.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))
        found = lock.holder(paths)
        assert found.pid == 0 and not found.ask_to_stop()


def test_a_supervisor_that_has_ended_must_not_be_signalled_by_the_number_that_it_had(tmp_path, other, monkeypatch):
    found = lock.holder(JobPaths(tmp_path / "held"))
    later = dataclasses.replace(found, started="1")  # as if another process had got its number
    with monkeypatch.context() as patched:
        kept(patched)
        assert not later.ask_to_stop()
    assert found.ask_to_stop()
    assert other.wait(60) == -signal.SIGTERM
    kept(monkeypatch)
    assert not found.ask_to_stop()


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to start a process of another user")
def test_a_process_of_another_user_must_not_be_taken_for_a_supervisor(tmp_path, monkeypatch):
    paths = JobPaths(tmp_path)
    with paths.lock.open("w+b") as file:
        (reader, told), (ended, end) = os.pipe(), os.pipe()
        if not (pid := os.fork()):
            os.setuid(65534)
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.write(told, b"held")
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
        os.close(ended)
        assert os.read(reader, 4) == b"held"
        file.write(f"{pid} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}".encode())
    kept(monkeypatch)
    assert lock.holder(paths).pid == 0
    os.close(end)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reader), os.close(told)
