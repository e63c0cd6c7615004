"""Python's debugger in a running worker: a forked one calls `attach` on a signal, `main` connects a terminal to it.

    python debugger.py JOB RANK

Both run in the node. The debugger talks through a Unix socket in /tmp, and only to a process of the same user; when
that ends, the worker goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
import types
from typing import Any

ATTACH = 47  # a real-time signal, as in zygote.py
ZYGOTE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zygote.py")  # its frames are not the script's
POLL = 0.2  # seconds between two looks for a debugger
NATIVE_AFTER = 2.0  # seconds without an answer after which a worker is probably not in Python code
LIMITS = "time limit (NCCL: 10 minutes, gloo: 30)"
PEER = struct.Struct("iii")  # struct ucred of unix(7): process, user, group


def path_of(pid: int) -> str:
    """Return where a process of this user waits for the debugger of a worker."""
    own = f"/tmp/orchestrate-{os.geteuid()}"  # of the orchestrator on this machine; no other account can enter it
    with contextlib.suppress(OSError):
        status = os.lstat(own)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return f"{own}/debug-{pid}"
    return f"/tmp/orchestrate-debug-{os.geteuid()}-{pid}"


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the process and user at the other end."""
    pid, user, _ = PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return pid, user


class Terminal:
    """The other end of the connection, as the debugger's input and output; its loss is the end of the input."""

    encoding = "utf-8"

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file = sock, sock.makefile("r", encoding=self.encoding, errors="replace")

    def readline(self) -> str:
        """Read a command."""
        with contextlib.suppress(OSError):
            return self.file.readline()
        return ""

    def write(self, text: str) -> None:
        """Show some output."""
        with contextlib.suppress(OSError):
            self.sock.sendall(text.encode(self.encoding, "replace"))

    def flush(self) -> None:
        """Do nothing: `write` keeps nothing back."""

    def close(self) -> None:
        """End the connection."""
        self.file.close()
        self.sock.close()


def attach(frame: types.FrameType, wait: bool = False) -> None:
    """Debug a worker where it is; runs in its main thread.

    If no process waits for it, it goes on, or with `wait`, as for `breakpoint()`, waits for one.
    """
    import pdb

    if not (sock := awaited(frame) if wait else connected()):
        return
    terminal: Any = Terminal(sock)

    class Debugger(pdb.Pdb):
        def do_quit(self, arg: str) -> bool:
            """Leave the worker, and let it go on."""
            self.clear_all_breaks()
            self.set_continue()
            return True

        do_q = do_exit = do_EOF = do_quit  # noqa: N815 (the names of commands)

        def set_continue(self) -> None:
            """Let the worker go on; without breakpoints, it does not come back."""
            super().set_continue()
            if not self.breaks:
                terminal.close()

    debugger = Debugger(stdin=terminal, stdout=terminal, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    debugger.reset()
    # As `set_trace` does, which would stop only at the next line, perhaps of a call that takes long.
    here: types.FrameType | None = frame
    while here and here.f_code.co_filename != ZYGOTE:
        here.f_trace = debugger.trace_dispatch
        debugger.botframe = here
        here = here.f_back
    debugger.interaction(frame, None)
    if terminal.sock.fileno() >= 0:  # it is to stop again
        sys.settrace(debugger.trace_dispatch)


def connected() -> socket.socket | None:
    """Connect to the process that waits for this worker's debugger, if there is one."""
    sock = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        sock.setblocking(False)  # another user can have the path, and accept no connection
        sock.connect(path_of(os.getpid()))
        sock.setblocking(True)
        if peer(sock)[1] in (0, os.geteuid()):
            return sock
    sock.close()
    return None


def awaited(frame: types.FrameType) -> socket.socket | None:
    """Print the command that debugs this worker, and wait for it; None at once in a thread or a child process."""
    rank, place = os.environ.get("RANK"), f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if threading.current_thread() is not threading.main_thread() or os.getsid(0) != os.getpid():
        say(f"breakpoint() at {place} is only for the main thread of a worker")
        return None
    command = f"python -m orchestrate debug {os.environ.get('JOB_ID')} --rank {rank}"
    say(f"rank {rank} waits at {place} for: {command}")
    before = signal.signal(ATTACH, lambda *_: None)  # which would attach here
    try:
        while not (sock := connected()):
            time.sleep(POLL)
        return sock
    finally:
        signal.signal(ATTACH, before)


def find(job: str, rank: str) -> int:
    """Return the process of a worker, or 0: the first one with the file for its stack."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            for file in os.listdir(f"/proc/{int(name)}/fd"):
                if os.readlink(f"/proc/{name}/fd/{file}") == f"/memfd:{job}-{rank} (deleted)" and catches(int(name)):
                    found.append(int(name))
                    break
    return min(found, default=0, key=lambda pid: os.stat(f"/proc/{pid}").st_ctime)


def catches(pid: int) -> bool:
    """Whether the signal reaches Python code of a process of this user, and does not end it."""
    with open(f"/proc/{pid}/status") as file:
        status = file.read()
    user, caught = (status.partition(f"\n{name}:")[2].split()[0] for name in ("Uid", "SigCgt"))
    return int(user) == os.geteuid() and bool(int(caught, 16) >> ATTACH - 1 & 1)


def main(job: str, rank: str) -> str:
    """Connect this terminal to the debugger of a worker until one of them ends; return what is wrong, if anything."""
    pid = find(job, rank)
    if not pid:
        return f"rank {rank} cannot be debugged: it has not started, or is not a script that was started warm"
    path = path_of(pid)
    if listens(path):
        return f"rank {rank} is being debugged"
    if os.environ.get("WORLD_SIZE") != "1":
        say(f"rank {rank} stops; the others wait for it in their collectives, which fail after their {LIMITS}")
    say("q or Ctrl-D leaves the debugger, and the worker goes on")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
        os.umask(0o077)
        listener.bind(path)
        try:
            listener.listen(1)
            os.kill(pid, ATTACH)
            if not select.select([listener], [], [], NATIVE_AFTER)[0]:
                say(f"rank {rank} is in a call of a library, such as a collective, and stops when that returns")
            while not select.select([listener], [], [], 0.5)[0]:
                os.kill(pid, 0)
                if has_ended(0):
                    return ""
            sock, _ = listener.accept()
        except ProcessLookupError:
            return f"rank {rank} has ended"
        finally:
            os.unlink(path)
    with sock:
        if peer(sock)[0] != pid:
            return f"another process than rank {rank} has answered"
        relay(sock)
    return ""


def listens(path: str) -> bool:
    """Whether a process listens on a Unix socket."""
    with open("/proc/net/unix") as sockets:
        return any(line.split(maxsplit=7)[7:] == [f"{path}\n"] for line in sockets)


def has_ended(descriptor: int) -> bool:
    """Whether a pipe or a terminal has no other end, and nothing left to read."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    found = dict(poll.poll(0)).get(descriptor, 0)
    return bool(found & select.POLLHUP) and not found & select.POLLIN


def relay(sock: socket.socket) -> None:
    """Pass commands and output on until the worker goes on; the end of our input lets it."""
    sources: list[Any] = [sock, 0]
    while True:
        ready = select.select(sources, [], [])[0]
        if sock in ready:
            if not (text := sock.recv(1 << 16)):
                return
            os.write(1, text)
        if 0 in ready:
            if text := os.read(0, 1 << 16):
                sock.sendall(text)
            else:
                sock.shutdown(socket.SHUT_WR)
                sources.remove(0)


def say(text: str) -> None:
    """Print a message."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        problem = main(*sys.argv[1:3])
    except (KeyboardInterrupt, ConnectionError, BrokenPipeError):
        problem = ""
    except OSError as error:
        problem = f"cannot debug rank {sys.argv[2]}: {error.strerror}"
    sys.exit(problem or 0)  # which prints it, and exits with code 1
