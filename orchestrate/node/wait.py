"""Mode `wait`: an orchestrator starts workers in the node."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from typing import Any

from orchestrate.node.loop import Channel, Loop, connect
from orchestrate.node.worker import Worker, kill


def wait(path: str) -> int:
    """Listen on the Unix socket `path` for workers to start, until told to end."""
    loop = Loop()
    server = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o077)
    server.bind(path)
    os.umask(mask)
    server.listen(128)

    def accept() -> None:
        running: list[Worker] = []

        def receive(request: Any) -> None:
            if request is None:  # the stub is gone, and nobody would learn how its worker ends
                kill(running, signal.SIGKILL)
            elif started := loop.start(request["command"], request["env"], request["cwd"], done):
                running.append(started)
                channel.send({"pid": started.process.pid})

        def done(code: int) -> None:
            running.clear()
            channel.send({"code": code})
            channel.close()

        channel = Channel(loop, server.accept()[0], receive)

    loop.watch(server, accept)
    loop.run()
    os.unlink(path)
    return 0


def ask(path: str, command: list[str]) -> int:
    """Be the stub: have the node behind `path` run `command` in this environment; return the worker's exit code."""
    connection = connect(socket.AF_UNIX, path, timeout=60)
    request = {"command": command, "env": dict(os.environ), "cwd": os.getcwd()}
    with connection, connection.makefile("rwb") as stream:
        stream.write(json.dumps(request).encode() + b"\n")
        stream.flush()
        answers = [json.loads(line) for line in stream]
    answer = {key: value for message in answers for key, value in message.items()}
    if "code" not in answer and "pid" in answer:  # the node has died: its worker must not outlive it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(answer["pid"], signal.SIGKILL)
    return int(answer.get("code", 128 + signal.SIGKILL))
