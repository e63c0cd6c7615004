"""What the engine runs in a waiting node: stands for a worker, or asks the node for what it knows.

    python -I -S stub.py worker CMD…    start a worker with this environment and folder; end with its exit code
    python -I -S stub.py watch RANK     end with the exit code of a worker that was started before
    python -I -S stub.py status         print what the node knows of its workers

A program of its own that imports next to nothing: a gang starts no sooner than its last stub.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

KILLED = 137  # as SIGKILL's
WORKER_KILLED = 247  # the exit code of the stub of a worker that SIGKILL ended; as -9 looks to a shell
RETRY = 0.02  # seconds


def ask(path: str, request: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """Put a request to the node behind the Unix socket `path`, as soon as it listens, and wait for its last answer.

    A node that dies answers nothing more. Raises OSError where nobody listens within `timeout` seconds (a minute, if
    there is none), or no answer comes in that time.
    """
    deadline = time.monotonic() + (timeout or 60)
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            break
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY)
    connection.settimeout(timeout)
    answer: dict[str, Any] = {}
    with connection, connection.makefile("rwb") as stream:
        stream.write(json.dumps(request).encode() + b"\n")
        stream.flush()
        for line in stream:
            answer |= json.loads(line)
    return answer


def stand(path: str, request: dict[str, Any]) -> int:
    """Stand for a worker: end with its exit code, or as killed where the node ends before it.

    When a container dies its stubs are killed, too; so a worker that was killed in a node that lives has its own code.
    """
    code = int(ask(path, request).get("code", -1))
    return {-1: KILLED, KILLED: WORKER_KILLED}.get(code, code)


def main(word: str, *words: str) -> int:
    """Do what the command line says; return the exit code."""
    path = os.environ.get("NODE_SOCKET", "/tmp/node.sock")
    if word == "worker":
        return stand(path, {"command": words, "env": dict(os.environ), "cwd": os.getcwd()})
    if word == "watch":
        return stand(path, {"watch": int(words[0])})
    sys.stdout.write(json.dumps(ask(path, {"status": True}, timeout=5)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
