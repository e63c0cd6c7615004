"""Which events of a job are worth a notification, and a program that gets them."""

from support.waiting import eventually

from orchestrate.job import events
from orchestrate.job.outcomes import Outcome
from orchestrate.supervise import notify


def test_a_program_that_does_not_end_must_not_keep_the_job(monkeypatch):
    monkeypatch.setattr(notify, "LAST", 0.2)
    monkeypatch.setattr(notify, "TIMEOUT", 2.0)
    notifier = notify.Notifier("sleep 1000", "a-1", "/runs/a-1")
    notifier.waiting.put({"event": "started"})
    eventually(lambda: notifier.waiting.empty())
    notifier.close()
    assert notifier.thread.is_alive()


def test_only_events_that_a_user_waits_for_must_be_notified():
    happened = [
        events.GenerationStarted(0, ()),
        events.RestartDecided(True, "restart 1 of 3", 0.0),
        events.GenerationStarted(1, ()),
        events.EngineBack(),
        events.RestartDecided(False, "max_restarts is 3", 0.0),
        events.JobEnded(Outcome.FAILED, "max_restarts is 3"),
    ]
    assert [found for event in happened for found in notify.notable(event)] == [
        ("started", ""),
        ("restarted", "restart 1 of 3"),
        ("failed", "max_restarts is 3"),
    ]
