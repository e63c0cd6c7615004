"""Notifications: tells a web server or a program about the events of a job that a person may want to know of.

Never in the way: events wait in a queue, failures are retried and then only logged.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from orchestrate.record import events
from orchestrate.record.events import Event
from orchestrate.storage.parallel import started

log = logging.getLogger(__name__)

KEY = "ORCHESTRATE_WEBHOOK_KEY"  # variable with the key that signs requests
SIGNATURE = "X-Orchestrate-Signature"  # header: sha256=HMAC-SHA256 (RFC 2104) of the body
TRIES = (0.0, 1.0, 5.0)  # seconds to wait before each attempt
TIMEOUT = 10.0  # seconds for a request, or for a program
LAST = 15.0  # seconds for the notifications that are left at the end of a job


def notable(event: Event) -> Iterator[tuple[str, str]]:
    """Yield the kind of an event that is worth a notification, and what has happened."""
    match event:
        case events.GenerationStarted(generation=0):
            yield "started", ""
        case events.RestartDecided(restart=True):
            yield "restarted", event.why
        case events.HangFound():
            yield "hung", f"no activity for {event.after:g} s"
        case events.WorkersIsolated():
            yield "isolated", event.hint
        case events.JobEnded():
            yield event.outcome.value, event.reason


class Notifier:
    """Sends notifications of one job in the background."""

    def __init__(self, target: str, job_id: str, run: str) -> None:
        """`target` is a URL, or a command; `run` is the run directory."""
        self.target, self.about = target, {"job_id": job_id, "run_directory": run}
        self.waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.request: Future[None] | None = None
        if target:
            self.thread.start()

    def event(self, event: Event) -> None:
        """Queue the notification of an event, if it is worth one."""
        for kind, text in notable(event) if self.target else ():
            self.waiting.put({"event": kind, "text": text, "time": event.time, "seconds": event.seconds, **self.about})

    def close(self) -> None:
        """Wait a short time for what has not been sent."""
        if self.target:
            self.waiting.put(None)
            self.thread.join(LAST)

    def _work(self) -> None:
        while (data := self.waiting.get()) is not None:
            for wait in TRIES:
                time.sleep(wait)
                try:
                    self._send(data)
                    break
                except Exception as error:  # a library or a program may fail in any way
                    log.info("the notification %s failed: %s", data["event"], type(error).__name__)

    def _send(self, data: dict[str, Any]) -> None:
        """Send one notification; raises an error if it does not arrive."""
        body = json.dumps(data).encode()
        if not is_url(self.target):
            command = [*shlex.split(self.target), data["event"]]
            subprocess.run(command, input=body, capture_output=True, timeout=TIMEOUT, check=True)
            return
        import requests  # only here: it takes time

        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers[SIGNATURE] = "sha256=" + hmac.digest(key.encode(), body, "sha256").hex()
        options: Any = {"timeout": TIMEOUT, "allow_redirects": False, "stream": True}  # the body is not read
        given = requests.utils.get_auth_from_url(self.target)  # else it would send what ~/.netrc has for the host
        options["auth"] = given if any(given) else lambda request: request

        def post() -> None:
            with requests.post(self.target, data=body, headers=headers, **options) as answer:
                if answer.status_code >= 300:
                    raise OSError(f"status {answer.status_code}")

        # The timeout of requests is for each read. A request cannot be ended, and no second one must run beside it.
        if self.request and not self.request.done():
            raise TimeoutError
        self.request = started(post)
        self.request.result(2 * TIMEOUT)


def is_url(target: str) -> bool:
    """Whether a target is a web server, and not a program."""
    return target.startswith(("http://", "https://"))
