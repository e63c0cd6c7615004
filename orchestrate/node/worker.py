"""A worker: one process with a `RANK`, its output and its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from orchestrate.node.command import expanded, of_python, words
from orchestrate.node.output import print_message, stdout
from orchestrate.node.ranks import Env
from orchestrate.node.stacks import Stack
from orchestrate.node.trees import FOLDER, opened
from orchestrate.node.warm import Forked, Zygote, die_with_parent, fields, processes

FAILED_TO_START, NOT_FOUND = 126, 127  # exit codes, as in a shell
MAX_PIPE = 1 << 16  # bytes in a pipe, where the kernel does not tell
MAX_LINE = 1 << 20  # bytes that are tagged as one line; a longer one is split
FOLDERS = ("logs", "checkpoints")  # that a node creates in a job's folder
SAGEMAKER, OF_SAGEMAKER = "SM_MODEL_DIR", ("model", "output", "output/data")  # with `sagemaker: true`
PF_EXITING = 4  # a flag in /proc/PID/stat, from linux/sched.h


class Worker:
    """One process with a `RANK`, its process group and its output."""

    def __init__(
        self,
        command: list[str],
        env: Env,
        cwd: str | None,
        done: Callable[[int], None],
        started: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """Prepare to start `command`, in which variables such as `$RANK` are expanded.

        `started` gets its process id, `done` its exit code, 128 + n if signal n ended it.
        """
        self.rank = env.get("RANK", "0")
        # On a fatal signal, including the SIGABRT for a hung worker, Python prints the stack of each thread.
        self.command, self.env, self.cwd = expanded(command, env), {"PYTHONFAULTHANDLER": "1"} | env, cwd
        self.done, self.started = done, started
        self.stopping = False  # whether it has been asked to stop
        self.closed = False
        self.cancelled: int | None = None  # the exit code if it was ended before it started
        self.partial = b""
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.stack: Stack | None = None  # if it was forked
        self.output, self.input = os.pipe()
        os.set_blocking(self.output, False)
        self.log = Log(env)

    def start(self, zygote: Zygote | None) -> None:
        """Fork it from `zygote` if it is for Python, or start a process; raises OSError if that fails."""
        with _stdin(self.env) as stdin:
            if zygote and of_python(self.command):
                self.stack = Stack(f"{self.env.get('JOB_ID')}-{self.env.get('RANK')}")
                files = [file for file in (stdin.fileno(), self.input, self.stack.file) if file >= 0]
                self.process = zygote.fork(self.command, self.env, self.cwd, *files)
            else:
                self.process = subprocess.Popen(
                    words(self.command),
                    env=self.env,
                    cwd=self.cwd,
                    stdin=stdin,
                    stdout=self.input,
                    stderr=self.input,
                    start_new_session=True,
                    preexec_fn=self._before,
                )
        self._no_more_input()
        self.started(self.process.pid)

    def failed_to_start(self, error: OSError) -> None:
        """Give it an exit code, and write the reason to its log."""
        missing = isinstance(error, FileNotFoundError) and error.filename != self.cwd
        why = f"did not start: {error.strerror}: {error.filename or self.command[0]}"
        self.cancel(NOT_FOUND if missing else FAILED_TO_START, why)

    def cancel(self, code: int, why: str) -> None:
        """End a worker that has not started with an exit code, and write the reason to its log."""
        self.say(why)
        self.cancelled = code

    def say(self, what: str) -> None:
        """Print a message about it, and write that to its log."""
        print_message(f"rank {self.rank} {what}")
        self.log.write(f"[node] rank {self.rank} {what}\n".encode(errors="backslashreplace"))

    def _before(self) -> None:
        """Runs between fork and exec."""
        die_with_parent()
        if cores := self.env.get("WORKER_CORES"):
            with contextlib.suppress(Exception):  # not numbers, not allowed, or not supported
                os.sched_setaffinity(0, map(int, cores.split(",")))

    @property
    def pid(self) -> int:
        """Its process id; 0 before it starts."""
        return self.process.pid if self.process else 0

    @property
    def exiting(self) -> bool:
        """Whether the kernel is already tearing it down and closing its files, though it has no exit code yet."""
        try:
            return bool(int(fields(self.pid)[6]) & PF_EXITING)
        except (OSError, IndexError, ValueError):  # not started, reaped, or not on Linux
            return False

    def poll(self) -> int | None:
        """Its exit code, 128 + n if signal n ended it; None while it runs or waits to be started."""
        if self.process is None:
            return self.cancelled
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def _no_more_input(self) -> None:
        if self.input >= 0:
            os.close(self.input)
            self.input = -1

    def pump(self) -> bool:
        """Copy output of the worker to its log and to stdout; False at the end of the output."""
        try:
            chunk = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self._write(chunk)
        return bool(chunk)

    def _write(self, chunk: bytes) -> None:
        self.log.write(chunk)
        lines = (self.partial + chunk).split(b"\n")
        self.partial = lines.pop()
        if len(self.partial) > MAX_LINE or (not chunk and self.partial):
            lines.append(self.partial)
            self.partial = b""
        tag = f"[rank {self.rank}] ".encode()
        stdout.write(b"".join(tag + line + b"\n" for line in lines))

    def kill(self, number: int) -> None:
        """Signal the worker; SIGKILL also goes to its process group. A worker that has not started is canceled."""
        if self.process is None:
            self.cancelled = self.cancelled or 128 + number
            return
        if self.closed:  # another process may have its id
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            elif self.process.returncode is None:
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """After the worker's end: kill its process group, read its last output, report its exit code."""
        self.kill(signal.SIGKILL)
        self._no_more_input()
        self._drain()
        self._write(b"")
        self.log.close()
        if self.stack:
            self.stack.close()
        code, self.closed = self.poll(), True
        assert code is not None
        self.done(code)

    def _drain(self) -> None:
        """Read what is in the pipe now: a process that is left, in a group of its own, could write for ever."""
        left = fcntl.fcntl(self.output, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else MAX_PIPE
        with contextlib.suppress(BlockingIOError):
            while left > 0 and (chunk := os.read(self.output, 1 << 16)):
                self._write(chunk)
                left -= len(chunk)
        os.close(self.output)


class Log:
    """A worker's log file. While it cannot be written, on a full disk for example, output is counted and dropped."""

    def __init__(self, env: Env) -> None:
        """Open `$JOB_DIR/logs/rank-N.log`, if `$JOB_DIR` is set, and mark the start of a generation after the first."""
        self.rank, self.file, self.lost = env.get("RANK", "0"), -1, 0
        generation = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        if "JOB_DIR" not in env:
            return
        try:
            self.file = _log_file(
                env["JOB_DIR"], f"rank-{self.rank}.log", [*FOLDERS, *OF_SAGEMAKER * (SAGEMAKER in env)]
            )
            within_a_line = _ends_within_a_line(self.file)
        except OSError as error:
            print_message(f"rank {self.rank}: no log file: {error}")
            return
        if generation != "0":
            self.write(b"\n" * within_a_line + f"[node] generation {generation}\n".encode())

    def write(self, data: bytes) -> None:
        """Write `data`; if earlier writes have failed, a line before it has the number of missing bytes."""
        if self.file < 0 or not (data or self.lost):
            return
        pending = data
        if self.lost:
            pending = f"\n[node] {self.lost} bytes are missing here: the file could not be written\n".encode() + data
        try:
            while pending:
                pending = pending[os.write(self.file, pending) :]
            self.lost = 0
        except OSError as error:  # a full disk must not end the training
            if not self.lost:
                print_message(f"rank {self.rank}: the log file cannot be written: {error}")
            noted = len(pending) <= len(data)
            self.lost = (0 if noted else self.lost) + min(len(pending), len(data))

    def close(self) -> None:
        """Close the file."""
        if self.file >= 0:
            os.close(self.file)


def activity(session: int) -> dict[str, Any]:
    """State of a session's leader, as a letter of proc(5); CPU seconds and resident bytes of the whole session."""
    state, ticks, pages = "", 0, 0
    for pid, facts in processes():
        if facts and int(facts[3]) == session:
            ticks += int(facts[11]) + int(facts[12])
            pages += int(facts[21])
            state = facts[0].decode() if pid == session else state
    cpu, memory = ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")
    return {"state": state, "cpu": cpu, "memory": memory}


def counters(groups: str) -> Iterator[str]:
    """Yield the files that may count kills by the kernel's OOM killer, from the text of /proc/self/cgroup.

    Those of this process's group in cgroup v2 and v1 come first, and that of the machine last. A group may have
    several paths, since a container sees only the end of the path that the kernel names.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part]
        for start in range(len(parts) + 1):
            if not controllers:
                yield "/".join(["/sys/fs/cgroup", *parts[start:], "memory.events"])
            elif controllers == "memory":
                yield "/".join(["/sys/fs/cgroup/memory", *parts[start:], "memory.oom_control"])
    yield "/proc/vmstat"


def _own_groups() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        return file.read()
    return ""


OOM_COUNTERS = tuple(counters(_own_groups()))


def oom_kills() -> int:
    """Number of processes killed by the kernel's OOM killer, in this process's group or on this machine."""
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError), open(path) as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _stdin(env: Env) -> BinaryIO:
    """Open the file that a worker reads as its standard input; a regular file, or /dev/null."""
    with contextlib.suppress(OSError):  # the job has removed it
        if path := env.get("WORKER_STDIN"):
            return os.fdopen(opened(path), "rb")
    return open(os.devnull, "rb")


def kill(workers: list[Worker], number: int) -> None:
    """Send a signal to each of `workers`."""
    for worker in workers:
        worker.kill(number)


def _log_file(job_dir: str, name: str, folders: list[str]) -> int:
    """Create folders in a job's folder, which workers can write to, and open a log there.

    Raises OSError if that is not a regular file.
    """
    os.makedirs(job_dir, exist_ok=True)
    top = os.open(job_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            with contextlib.suppress(OSError):
                os.mkdir(folder, dir_fd=top)
        logs = os.open("logs", FOLDER, dir_fd=top)
    finally:
        os.close(top)
    try:
        return opened(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, folder=logs)
    finally:
        os.close(logs)


def _ends_within_a_line(file: int) -> bool:
    return os.pread(file, 1, max(0, os.fstat(file).st_size - 1)) not in (b"", b"\n")
