"""The node's side of warm starts: runs the zygote, the process that forks workers."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrate.node.messages.checks import Refused
from orchestrate.node.messages.protocol import parsed, wait_at_most

PADDING = "." * 4096  # reserves space in its command line, which a forked worker overwrites with its own
IMPORT_TIMEOUT = 300.0  # seconds, at most
FORK_TIMEOUT = 10.0  # seconds that a fork may take
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36  # of Linux' prctl(2)
SUPPORTED = sys.platform == "linux"
libc = ctypes.CDLL(None) if SUPPORTED else None
GO = b"g"  # as in zygote.py
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}  # ioprio_get(2), for which the C library has no function
IOPRIO_WHO_PROCESS = 1
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; runs between fork and exec."""
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> bool:
    """Adopt orphaned descendants instead of process 1 (subreaper); False if that is not supported."""
    return libc is not None and not libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def protect() -> None:
    """Keep workers, which run as the same user, from reading, writing and tracing this process.

    A forked child is protected as well, until it executes a program or resets the flag.
    """
    if libc is not None:
        libc.prctl(PR_SET_DUMPABLE, 0)


class Forked:
    """A child process that the zygote has forked and we have adopted; the part of `Popen` that a worker needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # it was reaped elsewhere
                pid, status = self.pid, signal.SIGKILL
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Zygote:
    """The process that imports `modules` and forks workers; `ready` is None until it has imported them."""

    def __init__(self, modules: list[str], settled: Callable[[str], None]) -> None:
        """Start it; `settled` is called once it can fork, with an empty string, or once it cannot, with the reason."""
        self.ready: bool | None = None
        self.go_sent = False
        self.limits_and_priority: list[Any] = []  # limits and priority of its process before a job could change them
        self.settled = settled
        self.sock, child_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wait_at_most(self.sock, FORK_TIMEOUT)
        reader, writer = os.pipe()
        with child_sock, open(reader, "rb"), open(writer, "wb"):
            descriptor = str(child_sock.fileno())
            path = str(Path(__file__).with_name("programs") / "zygote.py")
            self.process = subprocess.Popen(
                [sys.executable, "-u", path, descriptor, str(os.getpid()), PADDING, *modules],
                env=_without_cwd(os.environ) | {"PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=[child_sock.fileno()],
                start_new_session=True,
            )

    def go(self) -> None:
        """Allow it to import modules of the job's folder as well."""
        if not self.go_sent:
            self.go_sent = True
            with contextlib.suppress(OSError):  # it has ended
                self.sock.send(GO)

    def read(self) -> None:
        """Receive whether it is ready, or notice its end."""
        answer = self._receive()
        self._settle(answer.get("ready") is True, str(answer.get("why", "the process that forks workers exited")))

    def fork(self, command: list[str], env: Mapping[str, str], cwd: str | None, *descriptors: int) -> Forked:
        """Fork a worker; the descriptors are its input, its output and, if given, a file for its stack.

        Raises OSError: EMSGSIZE if the message is too long, another error if the zygote does not respond, even if it
        has forked.
        """
        message = json.dumps({"command": command, "env": env, "cwd": cwd or os.getcwd()})
        socket.send_fds(self.sock, [message.encode()], descriptors)
        pid = self._receive().get("pid")
        if type(pid) is not int or pid <= 1:  # a signal to -1 would reach every process
            raise OSError(errno.ETIMEDOUT, "the process that forks workers does not respond")
        return Forked(pid)

    def remember(self) -> None:
        """Record the limits and the priority of its process: the first process of a job is about to start."""
        if not self.limits_and_priority:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self.limits_and_priority = limits_and_priority(self.process.pid)

    def late(self) -> None:
        """Stop using it if it is not ready by now."""
        if self.ready is None:
            self._settle(False, f"importing took longer than {IMPORT_TIMEOUT:g} s")

    def end(self) -> None:
        """Kill it; its workers continue."""
        self.process.kill()
        self.process.wait()
        self.sock.close()

    def _settle(self, ready: bool, why: str) -> None:
        self.ready = ready
        if ready:
            self.remember()
        else:
            self.end()
        self.settled(why)

    def _receive(self) -> dict[str, Any]:
        """Its next message; empty if it has ended, or if an imported module has written something else."""
        with contextlib.suppress(OSError, Refused):
            return parsed(self.sock.recv(1 << 16))
        return {}


def _without_cwd(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without empty PYTHONPATH entries, which mean the working directory: it belongs to the job."""
    path = os.pathsep.join(filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))
    return {**env, **({"PYTHONPATH": path} if "PYTHONPATH" in env else {})}


def limits_and_priority(pid: int) -> list[Any]:
    """Limits, priority, scheduler and cores of a process, which its user can change; empty if this is not Linux."""
    if not SUPPORTED:
        return []
    bounds = [resource.prlimit(pid, number) for number in LIMITS]
    priorities = [os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), _io_priority(pid)]
    return [*bounds, *priorities, os.sched_getaffinity(pid)]


def _io_priority(pid: int) -> int:
    """I/O priority of a process; 0 on architectures whose system call number is unknown."""
    number = IOPRIO_GET.get(os.uname().machine) if sys.maxsize > 1 << 32 else None
    return int(ctypes.CDLL(None).syscall(number, IOPRIO_WHO_PROCESS, pid)) if number else 0


def processes() -> Iterator[tuple[int, list[bytes]]]:
    """All visible processes with their `fields`.

    Raises OSError if /proc cannot be read.
    """
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is hidden
            yield int(name), fields(int(name))


def fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name, which may contain anything; raises OSError if it has ended."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def children() -> list[int]:
    """The child processes of this one.

    Raises OSError if they cannot be listed: a worker can reduce our descriptor limit with prlimit(2).
    """
    return [pid for pid, facts in processes() if facts and int(facts[1]) == os.getpid()]


def leftover_processes() -> list[int]:
    """Our children, and if we are process 1 of a container, all other processes of our user.

    A worker may have started one that is not our child, by taking over a process that the engine has started in the
    container. Raises OSError as `children` does.
    """
    own = os.getpid()
    if own != 1:
        return children()
    found = [(pid, facts) for pid, facts in processes() if pid != own and facts]
    return [pid for pid, facts in found if int(facts[1]) == own or (facts[0] != b"Z" and user(pid) == os.geteuid())]


def user(pid: int) -> int:
    """The user id of a process; -1 if it has ended. The folder in /proc belongs to root for some processes."""
    try:
        words = Path(f"/proc/{pid}/status").read_text(errors="replace").partition("\nUid:")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(words[1])
