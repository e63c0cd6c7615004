"""What a node knows of its workers' processes."""

import os
import signal
import sys

from support.waiting import eventually

from orchestrate.node.worker import Worker, activity


def test_the_memory_of_a_session_must_be_in_bytes():
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[1]) * page
    found = activity(os.getsid(0))["memory"]  # this process is part of the session, and may be its only one
    assert own / 2 < found < page * os.sysconf("SC_PHYS_PAGES")


def test_a_worker_that_has_been_reaped_must_not_be_killed_again(monkeypatch):
    codes: list[int] = []
    worker = Worker([sys.executable, "-c", ""], {}, None, codes.append)
    worker.start(None)
    eventually(lambda: worker.poll() is not None)
    worker.close()
    killed: list[int] = []  # its id may be that of another process by now
    monkeypatch.setattr(os, "killpg", lambda pid, number: killed.append(pid))
    worker.kill(signal.SIGKILL)
    assert codes == [0] and not killed
