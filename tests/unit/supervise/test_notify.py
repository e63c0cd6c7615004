"""Which events of a job are worth a notification, and a program that gets them."""

import contextlib
import dataclasses
import json
import socket
import threading

import pytest
from support.commanded import SPEC, Whole, create, supervise
from support.methods import raising
from support.waiting import eventually

from orchestrate.errors import EngineError
from orchestrate.files import log_file
from orchestrate.record import events
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.supervise import notify


def test_a_program_that_does_not_end_must_not_keep_the_job(monkeypatch):
    monkeypatch.setattr(notify, "LAST", 0.2)
    monkeypatch.setattr(notify, "TIMEOUT", 2.0)
    notifier = notify.Notifier("sleep 1000", "a-1", "/runs/a-1")
    notifier.waiting.put({"event": "started"})
    eventually(lambda: notifier.waiting.empty())
    notifier.close()
    assert notifier.thread.is_alive()


def test_a_server_that_does_not_end_its_answer_must_be_given_up_and_asked_no_more(monkeypatch):
    monkeypatch.setattr(notify, "LAST", 5.0)
    monkeypatch.setattr(notify, "TIMEOUT", 0.5)
    monkeypatch.setattr(notify, "TRIES", (0.0,))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        notifier = notify.Notifier(f"http://127.0.0.1:{listener.getsockname()[1]}/", "a-1", "/runs/a-1")
        notifier.event(events.GenerationStarted(0, ()))
        notifier.event(events.JobEnded(Outcome.SUCCEEDED, ""))
        sock, _ = listener.accept()
        ended = threading.Event()

        def go_on() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.1):
                    sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

        with sock:
            writer = threading.Thread(target=go_on)
            writer.start()
            notifier.close()
            ended.set()
            writer.join()
        assert not notifier.thread.is_alive()
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_only_events_that_a_user_waits_for_must_be_notified():
    happened = [
        events.GenerationStarted(0, ()),
        events.RestartDecided(True, "restart 1 of 3", 0.0),
        events.GenerationStarted(1, ()),
        events.EngineBack(),
        events.HangFound({1: "S"}, 90.0),
        events.WorkersIsolated(3, "call it"),
        events.RestartDecided(False, "max_restarts is 3", 0.0),
        events.JobEnded(Outcome.FAILED, "max_restarts is 3"),
    ]
    assert [found for event in happened for found in notify.notable(event)] == [
        ("started", ""),
        ("restarted", "restart 1 of 3"),
        ("hung", "no activity for 90 s"),
        ("isolated", "call it"),
        ("failed", "max_restarts is 3"),
    ]


def test_a_notification_must_have_all_facts_and_follow_no_redirection(server, monkeypatch):
    monkeypatch.setattr(notify, "TRIES", (0.0, 0.0))
    server.answers = [302]
    notifier = notify.Notifier(server.url, "a-1", "/runs/a-1")
    notifier.event(events.RestartDecided(True, "restart 1 of 3", 0.0, time=7.0, seconds=2.0))
    notifier.close()
    facts = {"event": "restarted", "text": "restart 1 of 3", "time": 7.0, "seconds": 2.0}
    assert server.types == ["application/json"] * 2
    assert [data for data, _ in server.requests] == [facts | {"job_id": "a-1", "run_directory": "/runs/a-1"}] * 2


@pytest.mark.parametrize(("user", "sent"), [("", [None]), ("me:word@", ["Basic bWU6d29yZA=="])])
def test_a_notification_must_have_no_credentials_but_those_of_its_url(server, tmp_path, monkeypatch, user, sent):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    notifier = notify.Notifier(server.url.replace("//", f"//{user}"), "a-1", "/runs/a-1")
    notifier.event(events.GenerationStarted(0, ()))
    notifier.close()
    assert server.credentials == sent


def test_a_server_that_does_not_answer_must_be_asked_again(monkeypatch):
    monkeypatch.setattr(notify, "TRIES", (0.0, 0.0))
    monkeypatch.setattr(notify, "TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        notifier = notify.Notifier(f"http://127.0.0.1:{server.getsockname()[1]}/", "a-1", "/runs/a-1")
        notifier.event(events.GenerationStarted(0, ()))
        for connection, _ in (server.accept(), server.accept()):
            connection.close()
        notifier.close()
    assert not notifier.thread.is_alive()


def test_the_failure_of_a_job_that_could_not_start_must_be_notified_before_its_command_ends(tmp_path):
    spec = dataclasses.replace(SPEC, on_event=f"sh -c 'cat > {tmp_path}/told'")
    engine, before = Whole([]), {*threading.enumerate()}
    engine.up = raising(EngineError("no nodes"))
    with pytest.raises(EngineError, match="no nodes"):
        supervise(create(JobPaths(tmp_path / "a-1"), spec), engine)
    assert json.loads((tmp_path / "told").read_text())["event"] == "failed"
    assert {*threading.enumerate()} <= before  # it was waited for


def test_a_failed_notification_must_be_logged_without_its_target_and_output(tmp_path, monkeypatch, capfd):
    """Its target may contain a token, and stdout may be reserved for the report."""
    monkeypatch.setattr(notify, "TRIES", (0.0,))
    monkeypatch.setattr(notify, "LAST", 60.0)  # on a busy machine, a command takes seconds to start
    with log_file.kept(tmp_path / "log", str):
        notifier = notify.Notifier("sh -c 'echo canary-7; exit 3'", "a-1", "/runs/a-1")
        notifier.event(events.GenerationStarted(0, ()))
        notifier.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.endswith(": the notification started failed: CalledProcessError")
    assert capfd.readouterr() == ("", "")


def test_the_body_of_an_answer_must_not_be_read(server):
    server.endless = True
    notifier = notify.Notifier(server.url, "a-1", "/runs/a-1")
    notifier.event(events.GenerationStarted(0, ()))
    notifier.close()
    assert not notifier.thread.is_alive() and len(server.requests) == 1 and server.sent < 32 << 20
