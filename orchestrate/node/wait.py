"""Mode `wait`: an orchestrator starts workers in the node.

Both sides send JSON lines with an HMAC (sealed.py) over a Unix socket or TCP. An orchestrator sends requests; the node
reports events to every client that has sent one:

    {"ask": "start", "command": […], "env": {…}, "inherit": bool, "cwd": …, "filtered": bool, "folders": {…}}
                              start a worker; with `inherit`, `env` is added to the node's own environment; with
                              `filtered`, only if the node's network has the filter of guard.py, which a restarted
                              container does not have; with `folders`, only if these paths have the given inodes:
                              another user could have replaced them before they were mounted
    {"ask": "stop", "kill": bool}    stop all workers: SIGTERM, then SIGKILL after the grace period, or SIGKILL at once
    {"ask": "freeze"}         stop all workers where they stand (SIGSTOP)
    {"ask": "dump"}           make all workers print their stacks, and abort
    {"ask": "clean"}          clean up for another job
    {"ask": "end"}            stop all workers and end the node
    {"ask": "status"}         report the state of the workers
    {"ask": "lease", "relay": [address, port]}    end the workers when this relay does not answer; see lease.py
    {"ask": "put" …}, {"ask": "news" …}, {"ask": "read" …}    files; see files.py

    {"say": "started", "generation", "rank", "pid"}
    {"say": "ended", "generation", "rank", "code", "at", "sign", "asked"}    `at` in seconds since 1970; the sign is
                              `oom` if the kernel has killed a process for lack of memory meanwhile, `ending` if the
                              node ends, `cut off` if its lease has expired, or empty; `asked`: whether the node had
                              sent it SIGTERM
    {"say": "status", "generation", "codes", "signs", "running", "tags", "time", "importing"}
    {"say": "clean"}          a node that cannot be cleaned ends instead
    {"say": "refused", "error"}    to this client only: why a request was not executed; protocol.py defines valid ones

A client may disconnect; its workers go on, and the node keeps their exit codes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import stat
import tarfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from orchestrate.node.files import Files
from orchestrate.node.guard import marked
from orchestrate.node.lease import Lease
from orchestrate.node.listener import BACKLOG, Listener
from orchestrate.node.loop import Channel, Loop
from orchestrate.node.output import say
from orchestrate.node.place import placed
from orchestrate.node.protocol import Refused, integer, request, shown
from orchestrate.node.ranks import FENCE, Env, fence
from orchestrate.node.trees import clear, replace
from orchestrate.node.warm import POSSIBLE, standing
from orchestrate.node.worker import Worker, doing, kill, oom_kills

FILES: dict[str, Callable[..., dict[str, Any]]] = {"put": Files.put, "news": Files.news, "read": Files.read}
IPC_RMID = 0  # of shmctl(2), msgctl(2) and semctl(2)
LOOKS = 0.05  # seconds between two checks for the filter
ROUTES = Path("/proc/self/net/route")
REFUSED = 128 + signal.SIGTERM  # the code of a worker whose generation was over before it could start


class Waiting:
    """The workers of the newest generation, running or ended, and the clients that get reports."""

    def __init__(self, loop: Loop, key: bytes) -> None:
        self.loop, self.key = loop, key
        self.job, self.folder, self.generation = "", "", -1
        self.sign = ""  # why workers end, if the node itself ends them
        self.workers: dict[int, Worker] = {}  # by rank
        self.codes: dict[int, int] = {}  # of workers that have ended
        self.signs: dict[int, str] = {}  # of the same workers
        self.listeners: list[Listener] = []
        self.channels: list[Channel] = []  # of clients that have sent a request
        self.alone = False  # whether only this node sees its job folder
        self.files = Files()
        self.lease: Lease | None = None
        self.bound: dict[str, tuple[os.stat_result, int]] = {}  # path of a socket: the file, and its mode
        self.standing = standing(os.getpid())

    def listen_tcp(self, port: int) -> None:
        """Accept requests over TCP; raises OSError."""
        self.alone = True
        server = socket.create_server(("", port), backlog=BACKLOG)
        self.listeners.append(Listener(self.loop, server, self.receive, self.key))

    def listen(self, path: str, mode: int = 0o600) -> None:
        """Accept requests over the Unix socket `path`; raises OSError."""
        server, early = socket.socket(socket.AF_UNIX), f"{path}~"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(early)  # left by an earlier start
        mask = os.umask(0o777 & ~mode)
        try:
            server.bind(early)
        finally:
            os.umask(mask)
        server.listen(BACKLOG)
        os.replace(early, path)  # clients see it only once it accepts connections
        self.bound[path] = os.lstat(path), mode
        self.listeners.append(Listener(self.loop, server, self.receive, self.key))

    def receive(self, channel: Channel, message: Any) -> None:
        """Execute a request, or raise Refused; None means that the client has disconnected."""
        if message is None:
            if channel in self.channels:
                self.channels.remove(channel)
            return
        ask, facts = request(message)
        if ask in FILES:
            return self.serve(channel, ask, **facts)
        if channel not in self.channels:
            self.channels.append(channel)
        if ask == "start":
            env = {**os.environ, **facts["env"]} if facts["inherit"] else facts["env"]
            if facts["filtered"] and not marked(ROUTES.read_text()):
                return self.say("ended", *whose(env), code=REFUSED, at=time.time(), sign="ending", asked=False)
            check(facts["folders"] or {})
            self.start(facts["command"], placed(env) if self.alone else env, facts["cwd"], facts["log"])
        elif ask == "stop":
            self.fence(self.generation, over=True)
            self.loop.stop()
            if facts["kill"]:
                kill(self.loop.workers, signal.SIGKILL)
        elif ask == "end":
            self.loop.stop(end=True)
        elif ask == "freeze":
            kill([worker for worker in self.loop.workers if worker.pid], signal.SIGSTOP)
        elif ask == "dump":
            kill(self.loop.workers, signal.SIGABRT)  # on which Python's fault handler prints all stacks
            kill(self.loop.workers, signal.SIGCONT)
        elif ask == "clean" and self.clean():
            for listener in self.listeners:
                listener.drop(kept=channel)  # drops requests of processes of the last job
            channel.send({"say": "clean"})
        elif ask == "status":
            channel.send({"say": "status", **self.status()})
        elif ask == "lease":
            if self.lease:
                self.lease.end()
            self.lease = Lease(self.loop, self.key, tuple(facts["relay"]), self.cut_off)

    def serve(self, channel: Channel, ask: str, **facts: Any) -> None:
        """Send or receive files."""
        try:
            channel.send({"say": ask, **FILES[ask](self.files, **facts)})
        except (OSError, ValueError, tarfile.TarError) as error:
            channel.send({"say": ask, "error": str(error)})

    def fence(self, generation: int, over: bool = False) -> None:
        """Write the generation that may save into the job's folder, if the orchestrator has no access to it."""
        if self.alone and self.folder and generation >= fence(self.folder):
            with contextlib.suppress(OSError):
                os.makedirs(self.folder, exist_ok=True)
                replace(f"{self.folder}/{FENCE}", f"{generation}{' over' * over}\n")

    def cut_off(self) -> None:
        """Kill the workers: a request to stop could no longer reach this node."""
        self.sign = "cut off"
        kill(self.loop.workers, signal.SIGKILL)

    def say(self, what: str, generation: int, rank: int, **facts: Any) -> None:
        """Report an event of a worker to all clients."""
        for channel in list(self.channels):
            channel.send({"say": what, "generation": generation, "rank": rank, **facts})

    def start(self, command: list[str], env: Env, cwd: str | None, log: int | None = None) -> None:
        """Start a worker, unless its generation is over; one of a newer generation ends all older ones.

        `log` is the length of its downloaded log. Raises Refused if its environment has no valid rank or generation.
        """
        generation, rank = whose(env)
        if log is not None:
            self.files.follow(env.get("JOB_DIR", ""), rank, log)
        if self.job not in ("", env.get("JOB_ID")) and not self.clean():  # the last job was not cleaned up
            return
        self.job, self.folder, self.sign = env.get("JOB_ID", ""), env.get("JOB_DIR", ""), ""
        if generation < max(self.generation, fence(env.get("JOB_DIR"))):
            return self.say("ended", generation, rank, code=REFUSED, at=time.time(), sign="", asked=True)
        if generation > self.generation:
            kill(list(self.workers.values()), signal.SIGKILL)
            self.generation, self.workers, self.codes, self.signs = generation, {}, {}, {}
            self.fence(generation)
        codes, signs, before = self.codes, self.signs, oom_kills()

        def done(code: int) -> None:
            codes[rank] = code
            signs[rank] = "oom" if oom_kills() > before else "ending" if self.loop.ending else self.sign
            if codes is self.codes:  # otherwise a newer generation or job has begun
                asked = worker is None or worker.asked
                self.say("ended", generation, rank, code=code, at=time.time(), sign=signs[rank], asked=asked)

        worker: Worker | None = None
        worker = self.loop.start(command, env, cwd, done, lambda pid: self.say("started", generation, rank, pid=pid))
        if worker:
            self.workers[rank] = worker

    def clean(self) -> bool:
        """Clean up for another job: remove all processes, shared memory and files of this one.

        If that fails, or the job has changed the node's limits or priority, the node ends, and this returns False.
        """
        self.job, self.generation, self.workers, self.codes, self.signs = "", -1, {}, {}, {}
        self.files = Files()  # what was uploaded may have been changed
        if self.lease:
            self.lease.end()
            self.lease = None
        kill(self.loop.workers, signal.SIGKILL)
        try:
            self.loop.finish()
            if folders := os.environ.get("NODE_WIPE", "").split():  # only a container has its own ones
                wipe(folders, self.bound)
                free_ipc()
            self._bind_again()
            if standing(os.getpid()) != self.standing or self.loop.changed():
                raise OSError("the job has changed the limits or the priority of the node")
        except OSError as error:
            say(f"the node ends, since it cannot make ready for another job: {error}")
            self.loop.stop(end=True)
            return False
        return True

    def _bind_again(self) -> None:
        """Listen again if a worker has replaced or removed a socket; raises OSError."""
        for path, (bound, mode) in list(self.bound.items()):
            try:
                there = os.path.samestat(os.lstat(path), bound)
            except FileNotFoundError:
                there = False
            if not there:
                self.listen(path, mode)

    def status(self) -> dict[str, Any]:
        """The generation, the exit codes of workers that have ended, and the state of those that run."""
        zygote = self.loop.zygote
        importing = zygote.process.pid if zygote else 0  # for workers that wait for the import
        running = {
            rank: {"pid": worker.pid, **doing(worker.pid or importing)}
            for rank, worker in self.workers.items()
            if rank not in self.codes
        }
        known: dict[str, Any] = {"codes": self.codes, "signs": self.signs, "running": running, "tags": self.files.tags}
        known["importing"] = zygote is not None and zygote.ready is None
        return {"generation": self.generation, "time": time.time(), **known}


def wait(path: str, shared: str, port: int, key: bytes) -> int:
    """Listen on the Unix socket `path` for requests of clients that have `key`, until asked to end.

    Also on `shared`, if possible: a socket in a mounted folder, which an orchestrator on the same kernel can reach
    without the engine. And on a TCP port, for an orchestrator on another machine.
    """
    loop = Loop()
    if POSSIBLE and (modules := os.environ.get("NODE_PRELOAD", "").split()):
        loop.warm(modules)
        warm_up(loop, os.environ.get("NODE_FILTERED") == "1")
    waiting = Waiting(loop, key)
    # In a container, pipe.py runs as another user; without the key, others get no answer.
    waiting.listen(path, 0o666 if os.getpid() == 1 else 0o600)
    if shared:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(shared), mode=0o700, exist_ok=True)
            waiting.listen(shared)
    if port:
        waiting.listen_tcp(port)
    loop.run()
    for each in filter(None, (path, shared)):
        with contextlib.suppress(OSError):  # already removed, or replaced by a worker
            os.unlink(each)
    return 0


def warm_up(loop: Loop, filtered: bool) -> None:
    """Let the zygote import modules of the job: at once, or as soon as the expected filter is in place."""
    if loop.zygote and filtered and not marked(ROUTES.read_text()):
        loop.after(LOOKS, lambda: warm_up(loop, filtered))
    elif loop.zygote:
        loop.zygote.go()


def check(folders: dict[str, int]) -> None:
    """Raise Refused for a folder with another inode than expected."""
    for path, inode in folders.items():
        try:
            found = os.stat(path).st_ino
        except OSError as error:
            raise Refused(f"start: folders: {shown(path)} cannot be read: {error.strerror}") from None
        if found != inode:
            raise Refused(f"start: folders: {shown(path)} is another folder than the orchestrator's")


def whose(env: Env) -> tuple[int, int]:
    """Generation and rank of a worker, from its environment; raises Refused."""
    return integer(env, "TORCHELASTIC_RESTART_COUNT"), integer(env, "RANK")


def ours(folder: str, name: str) -> bool:
    """Whether a file belongs to our user, as files of workers do; files from the image may have another owner."""
    try:
        return os.lstat(f"{folder}/{name}").st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def wipe(folders: list[str], kept: Collection[str]) -> None:
    """Empty folders except for the paths `kept`; raises OSError if files of a worker cannot be removed."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):  # the job has replaced the folder
                os.unlink(folder)
                continue
            names = {os.path.basename(path) for path in kept if os.path.dirname(path) == folder}
            if left := [name for name in clear(folder, names) if ours(folder, name)]:
                raise OSError(f"{len(left)} files of the job cannot be removed from {folder}")


def free_ipc() -> None:
    """Free all System V shared memory, queues and semaphores; only a container has its own ones."""
    libc = ctypes.CDLL(None)
    remove: dict[str, Callable[[int], object]] = {
        "shm": lambda number: libc.shmctl(number, IPC_RMID, None),
        "msg": lambda number: libc.msgctl(number, IPC_RMID, None),
        "sem": lambda number: libc.semctl(number, 0, IPC_RMID),
    }
    for kind, free in remove.items():
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sysvipc/{kind}") as file:  # not in every kernel
            for line in file.read().splitlines()[1:]:
                free(int(line.split()[1]))
