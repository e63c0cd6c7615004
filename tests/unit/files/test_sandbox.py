"""A function that untrusted input can slow down must run in a separate process, with limits."""

import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import eventually

from orchestrate.files import sandbox


def test_a_call_must_return_what_the_function_returns():
    assert sandbox.call(re.escape, "a\ud800.b", seconds=1) == "a\ud800\\.b"


def test_a_call_that_takes_too_long_must_be_stopped():
    assert sandbox.call(re.findall, "(a+)+$", "a" * 100 + "!", seconds=1) is None


def test_a_call_that_crashes_must_leave_no_core_dump():
    assert sandbox.call(resource.getrlimit, resource.RLIMIT_CORE, seconds=1) == [0, 0]


def test_a_call_that_raises_must_return_none():
    assert sandbox.call(re.compile, "(", seconds=1) is None


def test_a_call_that_takes_too_much_memory_must_return_none(monkeypatch):
    monkeypatch.setattr(sandbox, "MEMORY", 100 << 20)
    assert sandbox.call(re.escape, "." * (30 << 20), seconds=10) is None


def test_a_process_that_uses_no_cpu_time_must_be_killed_too(monkeypatch):
    monkeypatch.setattr(sandbox, "KILL_AFTER", 0.1)
    assert sandbox.call(time.sleep, 1000, seconds=1) is None


def test_a_call_whose_process_cannot_be_started_must_return_none(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "executable", "/nonesuch")
    assert sandbox.call(os.getpid, seconds=1) is None


def test_a_call_whose_process_is_killed_must_return_none():
    assert sandbox.call(signal.raise_signal, signal.SIGKILL, seconds=1) is None


def test_a_process_must_not_receive_ctrl_c_from_the_terminal():
    assert sandbox.call(os.getsid, 0, seconds=1) != os.getsid(0)


def test_a_call_of_another_thread_must_end_when_asked_to():
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(sandbox.call, time.sleep, 1000, seconds=1)
        eventually(lambda: sandbox._running)
        sandbox.end()
        assert called.result() is None and not sandbox._running


@pytest.mark.parametrize("name", ["json", "resource", "importlib"])
def test_a_process_must_import_nothing_from_the_current_folder(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    assert sandbox.call(os.getcwd, seconds=1) == str(tmp_path)
