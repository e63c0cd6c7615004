"""Ctrl-C and SIGTERM must count as requests to stop; the second must end a command whatever it waits for."""

import signal
import threading

import pytest
from support.waiting import eventually

from orchestrate import patience
from orchestrate.cli import signals
from orchestrate.patience import Abandoned
from orchestrate.spec.spec import JobSpec


def next_lines(capsys, number: int = 1) -> str:
    """The next lines on stderr, printed by another thread; a test that did not wait would leave them to the next."""
    parts: list[str] = []
    eventually(lambda: parts.append(capsys.readouterr().err) or "".join(parts).count("\n") >= number)
    assert "".join(parts).count("\n") == number
    return "".join(parts)


def test_each_ctrl_c_and_sigterm_must_count_but_not_a_lost_terminal(capsys):
    count = signals.count(JobSpec(grace=7.0))
    assert count() == 0
    signal.raise_signal(signal.SIGHUP)
    assert (count(), capsys.readouterr().err) == (0, "")
    signal.raise_signal(signal.SIGINT)
    first = next_lines(capsys)
    assert count() == 1 and "7 s" in first
    signal.raise_signal(signal.SIGTERM)
    assert (count(), next_lines(capsys)) == (2, "killing the workers\n")


@pytest.fixture
def impatient(monkeypatch):
    """A job file's grace period and the command's patience are hundredths of a second; handlers are restored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, patience.SIGNAL)}
    monkeypatch.setattr(signals, "HURRY", 0.05)
    monkeypatch.setattr(signals, "HURRY_PER_NODE", 0.0)
    monkeypatch.setattr(signals, "AGAIN", 0.05)
    yield JobSpec(grace=0.01)
    patience.calm()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("numbers", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_a_command_must_give_up_waiting_for_what_does_not_respond(impatient, numbers, capsys):
    """After a second request, or the grace period of a SIGTERM: the engine may be frozen, for example."""
    count = signals.count(impatient)
    for number in numbers:
        signal.raise_signal(number)
    for _ in range(2):  # also if it then waits for its own threads
        with pytest.raises(Abandoned):
            threading.Event().wait(60)
    assert count() == 2 and next_lines(capsys, 2)


def test_one_ctrl_c_must_leave_a_command_all_the_time_that_it_needs(impatient, capsys):
    before = {*threading.enumerate()}
    count = signals.count(impatient)
    signal.raise_signal(signal.SIGINT)
    assert (
        count() == 1 and len({*threading.enumerate()} - before) == 1
    )  # it prints; no other one waits to send a signal
    assert next_lines(capsys)
