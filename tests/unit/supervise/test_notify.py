"""A program that is notified about the events of a job."""

from support.waiting import eventually

from orchestrate.supervise import notify


def test_a_program_that_does_not_end_must_not_keep_the_job(monkeypatch):
    monkeypatch.setattr(notify, "LAST", 0.2)
    monkeypatch.setattr(notify, "TIMEOUT", 2.0)
    notifier = notify.Notifier("sleep 1000", "a-1", "/runs/a-1")
    notifier.waiting.put({"event": "started"})
    eventually(lambda: notifier.waiting.empty())
    notifier.close()
    assert notifier.thread.is_alive()
