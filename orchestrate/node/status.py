"""Kubeflow's status protocol: what a script posts about its progress becomes lines of metrics.jsonl.

Hugging Face's Trainer posts its step and metrics every five seconds, without a change to the script, if
`KUBEFLOW_TRAINER_SERVER_URL` is set. The protocol is that of Kubeflow Trainer's TrainJob status (KEP-2779).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import socket
from typing import Any

from orchestrate.node.loop import Loop
from orchestrate.node.messages.listener import serve
from orchestrate.node.output import print_message
from orchestrate.node.ranks import Env
from orchestrate.node.trees import opened, replace

URL, TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"  # the latter is the path of a file
METRICS, TOKEN_FILE = "metrics.jsonl", ".status-token"  # in the job folder
NAMES = {"current_step": "step", "current_epoch": "epoch"}  # of metrics, and what they are called in metrics.jsonl
MAX_REQUEST, MAX_METRICS, MAX_NAME = 1 << 16, 100, 60  # bytes, metrics of a request, characters
MAX_NAMES = 1000  # metrics whose last value is kept
MAX_CLIENTS, TIMEOUT = 8, 10.0  # connections at a time, and seconds for one
ANSWER = "HTTP/1.1 {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
END = b"\r\n\r\n"  # of the header


class StatusServer:
    """Takes posts of rank 0 on the loopback interface of its node."""

    def __init__(self, loop: Loop) -> None:
        """Listen only once a worker can post."""
        self.loop, self.folder, self.token = loop, "", ""
        self.server: socket.socket | None = None
        self.clients: list[socket.socket] = []
        self.last: dict[str, float] = {}  # metrics as they were last written

    def variables(self, env: Env) -> Env:
        """Return the variables with which a worker posts; none for other ranks, or if it has a server already."""
        if env.get("RANK") != "0" or not env.get("JOB_DIR") or URL in env:
            return {}
        try:
            if not self.server or env["JOB_DIR"] != self.folder:
                self._open(env["JOB_DIR"])
            replace(f"{self.folder}/{TOKEN_FILE}", self.token, 0o400)
        except OSError as error:
            print_message(f"no progress from frameworks: {error}")
            return {}
        assert self.server
        return {URL: f"http://127.0.0.1:{self.server.getsockname()[1]}/", TOKEN: f"{self.folder}/{TOKEN_FILE}"}

    def _open(self, folder: str) -> None:
        self.close()
        os.makedirs(folder, exist_ok=True)
        self.folder, self.token, self.last = folder, os.urandom(16).hex(), {}
        self.server = socket.create_server(("127.0.0.1", 0))
        serve(self.loop, self.server, lambda sock, _: self._take(sock))

    def close(self) -> None:
        """Stop listening."""
        for sock in [*self.clients, *([self.server] if self.server else [])]:
            self._end(sock)
        self.server = None

    def _take(self, sock: socket.socket) -> None:
        if len(self.clients) >= MAX_CLIENTS:
            self._end(self.clients[0])
        buffer = bytearray()

        def read() -> None:
            try:
                chunk = sock.recv(MAX_REQUEST)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            buffer.extend(chunk)
            if answer := self._answer(bytes(buffer)) if chunk else "400 Bad Request":
                with contextlib.suppress(OSError):
                    sock.send(ANSWER.format(answer).encode())
                self._end(sock)

        sock.setblocking(False)
        self.clients.append(sock)
        self.loop.watch(sock, read)
        self.loop.after(TIMEOUT, lambda: self._end(sock))

    def _end(self, sock: socket.socket) -> None:
        if sock in self.clients:
            self.clients.remove(sock)
        if sock.fileno() >= 0:
            self.loop.forget(sock)
            sock.close()

    def _answer(self, request: bytes) -> str:
        """Return the status of the answer; empty if more of the request is to come."""
        if len(request) > MAX_REQUEST:
            return "413 Content Too Large"
        head, end, body = request.partition(END)
        if not end:
            return ""
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.token}".encode()):
            return "401 Unauthorized"
        size = headers.get("content-length", "")
        if not first.startswith("POST ") or not size.isascii() or not size.isdigit() or len(size) > 6:
            return "400 Bad Request"
        if int(size) > MAX_REQUEST:
            return "413 Content Too Large"
        if len(body) < int(size):
            return ""
        try:
            return self._write(*parsed(body[: int(size)]))
        except (ValueError, RecursionError):
            return "400 Bad Request"

    def _write(self, found: dict[str, float], percent: float) -> str:
        """Append what is new to metrics.jsonl: a post repeats all metrics, also those that the script measures rarely.

        The first and the last post of a training have no step; that of the last one follows from the number of steps.
        """
        if percent == 100 and "step" not in found and "total_steps" in self.last:
            found = {"step": self.last["total_steps"], **found}
        fresh = {name: value for name, value in found.items() if self.last.get(name) != value}
        if fresh:
            now = self.last | fresh
            steps: dict[str, float] = {name: now[name] for name in ("step", "total_steps") if name in now}
            try:
                descriptor = opened(f"{self.folder}/{METRICS}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                with open(descriptor, "wb", buffering=0) as file:
                    file.write(json.dumps(steps | fresh).encode() + b"\n")
            except OSError as error:
                print_message(f"{METRICS} cannot be written: {error}")
                return "500 Internal Server Error"
            self.last = now if len(now) <= MAX_NAMES else steps
        return "200 OK"


def parsed(body: bytes) -> tuple[dict[str, float], float]:
    """Return the metrics of a post, with the names of metrics.jsonl, and the percentage that is done, or 0.

    Raises ValueError if it is not a post.
    """
    content: Any = json.loads(body)
    try:
        status = content["trainerStatus"]
        found, percent = (status.get("metrics") or [])[:MAX_METRICS], status.get("progressPercentage") or 0
        pairs = [(str(metric["name"]), str(metric["value"])) for metric in found]
    except (TypeError, KeyError, AttributeError):
        raise ValueError("no trainerStatus with metrics") from None
    numbers = {
        NAMES.get(name, name): number
        for name, value in pairs
        if len(name) <= MAX_NAME and (number := _number(value)) is not None
    }
    return numbers, percent if type(percent) in (int, float) else 0


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return number if math.isfinite(number := float(text)) else None
    return None
