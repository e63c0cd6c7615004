"""A worker: one process with a `RANK`, its output and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from orchestrate.node.ranks import Env

LONGEST_LINE = 1 << 20  # bytes that are tagged as one line; a longer one is split


class Worker:
    """One process with a `RANK`, its process group and its output."""

    def __init__(self, command: list[str], env: Env, cwd: str | None, done: Callable[[int], None]) -> None:
        """Start `command` (arguments of Python); `done` gets its exit code, 128 + n where signal n ended it."""
        self.rank = env.get("RANK", "0")
        self.done = done
        self.partial = b""
        self.log = self._open_log(env.get("JOB_DIR"))
        self.process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)

    def _open_log(self, job_dir: str | None) -> int | None:
        if not job_dir:
            return None
        try:
            for name in ("logs", "checkpoints"):
                os.makedirs(f"{job_dir}/{name}", exist_ok=True)
            return os.open(f"{job_dir}/logs/rank-{self.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            say(f"rank {self.rank}: no log file: {error}")
            return None

    def pump(self) -> bool:
        """Move what the worker has written to its log and to stdout; False once there is no more to come."""
        try:
            chunk = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self._write(chunk)
        return bool(chunk)

    def _write(self, chunk: bytes) -> None:
        if self.log is not None:
            try:
                write(self.log, chunk)
            except OSError as error:  # a full disk must not end the training
                say(f"rank {self.rank}: the log file ends here: {error}")
                os.close(self.log)
                self.log = None
        lines = (self.partial + chunk).split(b"\n")
        self.partial = lines.pop()
        if len(self.partial) > LONGEST_LINE or (not chunk and self.partial):
            lines.append(self.partial)
            self.partial = b""
        tag = f"[rank {self.rank}] ".encode()
        emit(b"".join(tag + line + b"\n" for line in lines))

    def kill(self, number: int) -> None:
        """Send a signal to the worker; SIGKILL goes to all that it started, too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            elif self.process.returncode is None:
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """After the worker's end: end what it left running, take its last output, report its exit code."""
        self.kill(signal.SIGKILL)
        self._drain()
        self._write(b"")
        if self.log is not None:
            os.close(self.log)
        code = self.process.returncode
        self.done(128 - code if code < 0 else code)

    def _drain(self) -> None:
        while True:
            try:
                chunk = os.read(self.output, 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._write(chunk)
        assert self.process.stdout is not None
        self.process.stdout.close()


def kill(workers: list[Worker], number: int) -> None:
    """Send a signal to each of `workers`."""
    for worker in workers:
        worker.kill(number)


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


def say(text: str) -> None:
    """Print a line of the node's own."""
    emit(f"[node] {text}\n".encode())


def emit(data: bytes) -> None:
    """Write to stdout, which may be gone when nobody reads it any more."""
    with contextlib.suppress(OSError):
        write(1, data)
