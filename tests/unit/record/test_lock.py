"""A job has one supervisor: the kernel reports whether it is alive, and no other process is taken for it."""

import dataclasses
import fcntl
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.commanded import supervised, watched
from support.optional import not_none
from support.plans import HERE, plan
from support.recording import RecordingEngine

from orchestrate.errors import UsageError
from orchestrate.host import records
from orchestrate.record import lock, run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.show.screen import Display
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch


@pytest.fixture
def other(tmp_path):
    """Another process that supervises the job."""
    held = tmp_path / "held"
    held.mkdir()
    JobPaths(held).lock.write_text("of an earlier supervisor with a longer name")
    with supervised(held) as process:
        yield process


@pytest.mark.timeout(60)
def test_a_second_supervisor_must_learn_at_once_which_process_is_the_first(tmp_path, other):
    paths = JobPaths(tmp_path / "held")
    assert not_none(lock.holder(paths)).pid == other.pid
    with pytest.raises(BlockingIOError), lock.held(paths):
        pass
    assert not_none(lock.holder(paths)).pid == other.pid


def test_the_lock_must_be_free_for_the_next_supervisor_after_the_first_has_ended(tmp_path, other):
    paths = JobPaths(tmp_path / "held")
    other.kill()
    other.wait()
    assert lock.holder(paths) is None
    with lock.held(paths):
        pass


def test_a_command_that_only_locks_a_job_must_not_be_taken_for_its_supervisor(tmp_path, monkeypatch):
    paths = JobPaths(tmp_path)
    with lock.held(paths):  # as a supervisor that has ended since
        pass
    with supervised(tmp_path, "rm") as other:
        forbid_signals(monkeypatch)
        assert not not_none(lock.holder(paths)).ask_to_stop()
        monkeypatch.undo()
        assert other.poll() is None


def test_the_lock_of_a_job_without_a_supervisor_must_have_no_holder(tmp_path):
    assert lock.holder(JobPaths(tmp_path)) is None


def test_a_job_whose_cluster_is_used_by_another_job_must_report_it_and_start_nothing(tmp_path, other):
    paths = JobPaths(tmp_path / "j")
    (tmp_path / "held" / "nodes").mkdir()
    records.make(tmp_path / "held")
    planned = plan(JobSpec(), HERE.but(cluster="held"), "j", 29500)
    run_dir.create(JobSpec(), planned, paths)
    engine = RecordingEngine()
    with pytest.raises(UsageError, match="held is in use by another job(\n|$)") as refused:
        launch.supervise(paths, engine, lambda: 0, watched(paths, Display(print)))
    assert "attach j" in refused.value.hint
    assert not engine.calls


def test_a_lock_that_cannot_be_opened_must_have_no_holder(tmp_path):
    paths = JobPaths(tmp_path)
    paths.lock.symlink_to(paths.lock)
    assert lock.holder(paths) is None


# --- a lock that another process holds

HOLD_LOCK = """import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locked(tmp_path):
    """Another process that has locked the file without writing its id to it."""
    paths = JobPaths(tmp_path)
    paths.lock.touch()
    command = [sys.executable, "-c", HOLD_LOCK, str(paths.lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert not_none(process.stdout).readline() == b"held\n"
        yield process


@pytest.mark.parametrize(
    "content", ["", "{pid}", "{pid} ", "{pid} 1", "-1 1", "0 0", "1 1", "x y", "\xff\x00", "{pid}" * 99]
)
def test_a_process_that_has_only_locked_the_file_must_not_be_taken_for_a_supervisor(
    tmp_path, locked, content, monkeypatch
):
    paths = JobPaths(tmp_path)
    paths.lock.write_bytes(content.format(pid=locked.pid).encode("latin-1"))
    forbid_signals(monkeypatch)
    found = not_none(lock.holder(paths))
    assert found.pid == 0 and not found.ask_to_stop()
    assert locked.poll() is None


def forbid_signals(monkeypatch) -> None:
    """Fail if a signal is sent."""
    for module, name in ((os, "kill"), (os, "killpg"), (signal, "pidfd_send_signal")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a signal was sent"))


@pytest.mark.skipif(sys.platform != "linux", reason="open file description locks exist only on Linux")
@pytest.mark.parametrize("content", ["-1 0", "1 0", "{pid} 0"])
def test_an_open_file_description_lock_must_not_lead_to_a_signal(tmp_path, content, monkeypatch):
    paths = JobPaths(tmp_path)
    paths.lock.write_text(content.format(pid=os.getpid()))
    forbid_signals(monkeypatch)
    with paths.lock.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))
        found = not_none(lock.holder(paths))
        assert found.pid == 0 and not found.ask_to_stop()


def test_a_process_that_reuses_the_id_of_an_ended_supervisor_must_not_be_signalled(tmp_path, other, monkeypatch):
    found = not_none(lock.holder(JobPaths(tmp_path / "held")))
    later = dataclasses.replace(found, name=f"{found.pid} 1")  # as if another process had the same id
    with monkeypatch.context() as patched:
        forbid_signals(patched)
        assert not later.ask_to_stop()
    before = len(os.listdir("/proc/self/fd"))
    assert found.ask_to_stop()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert other.wait(60) == -signal.SIGTERM
    forbid_signals(monkeypatch)
    assert not found.ask_to_stop()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to start a process of another user")
def test_a_process_of_another_user_must_not_be_taken_for_a_supervisor(tmp_path, monkeypatch):
    paths = JobPaths(tmp_path)
    with paths.lock.open("w+b") as file:
        (reader, writer), (ended, end) = os.pipe(), os.pipe()
        if not (pid := os.fork()):
            os.setuid(65534)
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.write(writer, b"held")
            os.close(end)
            os.read(ended, 1)
            os._exit(0)
        os.close(ended)
        assert os.read(reader, 4) == b"held"
        file.write(f"{pid} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}".encode())
    forbid_signals(monkeypatch)
    assert not_none(lock.holder(paths)).pid == 0
    os.close(end)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reader), os.close(writer)
