"""Mode `wait`: an orchestrator starts workers in the node.

Over a Unix socket or TCP, JSON lines under a seal (sealed.py). An orchestrator asks, and the node says what happens to
everyone who has asked it anything:

    {"ask": "start", "command": […], "env": {…}, "inherit": bool, "cwd": …, "filtered": bool, "folders": {…}}
                              start a worker; with `inherit`, in the node's own environment and what `env` adds to it;
                              with `filtered`, only where the node's network has the filter of guard.py, as it has none
                              after a new start; with `folders`, only where these have the inodes that are given:
                              another user could have put others in their place before they were mounted
    {"ask": "stop", "kill": bool}    ask all workers to stop, and kill them after the grace period, or at once
    {"ask": "dump"}           have all workers print where they stand, and abort
    {"ask": "clean"}          make ready for another job
    {"ask": "end"}            end the node, too
    {"ask": "status"}         tell what is known of the workers
    {"ask": "lease", "relay": [address, port]}    end the workers when the relay there does not answer; see lease.py
    {"ask": "put" …}, {"ask": "news" …}, {"ask": "read" …}    files; see files.py

    {"say": "started", "generation", "rank", "pid"}
    {"say": "ended", "generation", "rank", "code", "at", "sign", "asked"}    `at` in seconds since 1970; the sign is
                              `oom` where the kernel has killed for lack of memory meanwhile, `ending` where the node
                              ends, `cut off` where its lease was over, or empty; `asked`: whether the node had asked
                              it to end
    {"say": "status", "generation", "codes", "signs", "running", "tags", "time"}
    {"say": "clean"}          a node that cannot make ready for another job ends instead
    {"say": "refused", "error"}    to who asked alone: nothing was done, and why; protocol.py has what may be asked

Who asks may go away; the worker stays, and so does its exit code.
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
LOOKS = 0.05  # seconds between two looks whether the filter is there
ROUTES = Path("/proc/self/net/route")
Place = tuple[int, int]  # a file's, in all file systems: device and inode
REFUSED = 128 + signal.SIGTERM  # the code of a worker whose generation was over before it could start


class Waiting:
    """The workers of the newest generation, running or ended, and who is told of them."""

    def __init__(self, loop: Loop, key: bytes) -> None:
        self.loop, self.key = loop, key
        self.job, self.folder, self.generation = "", "", -1
        self.sign = ""  # why workers end, where we end them of our own accord
        self.workers: dict[int, Worker] = {}  # by rank
        self.codes: dict[int, int] = {}  # of those that have ended
        self.signs: dict[int, str] = {}  # of those, too
        self.listeners: list[Listener] = []
        self.channels: list[Channel] = []  # of those who have asked something
        self.alone = False  # whether nobody else sees this node's folder
        self.files = Files()
        self.lease: Lease | None = None
        self.bound: dict[str, tuple[Place, int]] = {}  # where our sockets are, and their modes, by their paths
        self.standing = standing(os.getpid())

    def listen_tcp(self, port: int) -> None:
        """Have orchestrators ask over TCP; raises OSError."""
        self.alone = True
        server = socket.create_server(("", port), backlog=BACKLOG)
        self.listeners.append(Listener(self.loop, server, self.receive, self.key))

    def listen(self, path: str, mode: int = 0o600) -> None:
        """Have orchestrators ask over the Unix socket `path`; raises OSError."""
        server = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # that of an earlier life
        mask = os.umask(0o777 & ~mode)
        try:
            server.bind(path)
        finally:
            os.umask(mask)
        server.listen(BACKLOG)
        self.bound[path] = place(os.lstat(path)), mode
        self.listeners.append(Listener(self.loop, server, self.receive, self.key))

    def receive(self, channel: Channel, message: Any) -> None:
        """Do what is asked, or raise Refused; None means that whoever asked has gone."""
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
        elif ask == "dump":
            kill(self.loop.workers, signal.SIGABRT)  # on which Python's fault handler prints all stacks
        elif ask == "clean" and self.clean():
            for listener in self.listeners:
                listener.drop(kept=channel)  # what a process of the last job has asked meanwhile
            channel.send({"say": "clean"})
        elif ask == "status":
            channel.send({"say": "status", **self.status()})
        elif ask == "lease":
            if self.lease:
                self.lease.end()
            self.lease = Lease(self.loop, self.key, tuple(facts["relay"]), self.cut_off)

    def serve(self, channel: Channel, ask: str, **facts: Any) -> None:
        """Give or take files."""
        try:
            channel.send({"say": ask, **FILES[ask](self.files, **facts)})
        except (OSError, ValueError, tarfile.TarError) as error:
            channel.send({"say": ask, "error": str(error)})

    def fence(self, generation: int, over: bool = False) -> None:
        """Write into the job's folder which generation may save, where nobody else can."""
        if self.alone and self.folder and generation >= fence(self.folder):
            with contextlib.suppress(OSError):
                os.makedirs(self.folder, exist_ok=True)
                replace(f"{self.folder}/{FENCE}", f"{generation}{' over' * over}\n")

    def cut_off(self) -> None:
        """Nobody could tell us to stop any more: end the workers at once."""
        self.sign = "cut off"
        kill(self.loop.workers, signal.SIGKILL)

    def say(self, what: str, generation: int, rank: int, **facts: Any) -> None:
        """Tell everyone what happened to a worker."""
        for channel in list(self.channels):
            channel.send({"say": what, "generation": generation, "rank": rank, **facts})

    def start(self, command: list[str], env: Env, cwd: str | None, log: int | None = None) -> None:
        """Start a worker, unless its generation is over; one of a newer generation ends all older ones.

        `log` is how long its log is at home. Raises Refused where its environment names no rank or generation.
        """
        generation, rank = whose(env)
        if log is not None:
            self.files.follow(env.get("JOB_DIR", ""), rank, log)
        if self.job not in ("", env.get("JOB_ID")) and not self.clean():  # nobody has told us that it is over
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
            if codes is self.codes:  # else nobody waits for it any more
                asked = worker is None or worker.asked
                self.say("ended", generation, rank, code=code, at=time.time(), sign=signs[rank], asked=asked)

        worker: Worker | None = None
        worker = self.loop.start(command, env, cwd, done, lambda pid: self.say("started", generation, rank, pid=pid))
        if worker:
            self.workers[rank] = worker

    def clean(self) -> bool:
        """Make ready for another job: nothing of this one's is left, neither processes nor shared memory nor files.

        Where that cannot be, or the job has changed what the kernel grants us, the node ends; returns False then.
        """
        self.job, self.generation, self.workers, self.codes, self.signs = "", -1, {}, {}, {}
        if self.lease:
            self.lease.end()
            self.lease = None
        kill(self.loop.workers, signal.SIGKILL)
        try:
            self.loop.finish()
            wipe(os.environ.get("NODE_WIPE", "").split(), self.bound)
            self._bind_again()
            if standing(os.getpid()) != self.standing or self.loop.changed():
                raise OSError("the job has changed the limits or the priority of the node")
        except OSError as error:
            say(f"the node ends, since it cannot make ready for another job: {error}")
            self.loop.stop(end=True)
            return False
        return True

    def _bind_again(self) -> None:
        """Listen again where a worker has put something else in the place of a socket; raises OSError."""
        for path, (bound, mode) in list(self.bound.items()):
            try:
                found = place(os.lstat(path))
            except FileNotFoundError:
                found = None
            if found != bound:
                self.listen(path, mode)

    def status(self) -> dict[str, Any]:
        """The generation, the exit codes of the workers that have ended, and what those that run are doing."""
        importing = self.loop.zygote.process.pid if self.loop.zygote else 0  # for whoever waits to be started
        running = {
            rank: {"pid": worker.pid, **doing(worker.pid or importing)}
            for rank, worker in self.workers.items()
            if rank not in self.codes
        }
        known = {"codes": self.codes, "signs": self.signs, "running": running, "tags": self.files.tags}
        return {"generation": self.generation, "time": time.time(), **known}


def wait(path: str, shared: str, port: int, key: bytes) -> int:
    """Listen on the Unix socket `path` for workers to start, until told to end by those who know `key`.

    And on `shared`, if it is given and can be: in a folder that this kernel has outside of the container, too, it
    spares an orchestrator the way through the engine. And on a TCP port, where the orchestrator is on another machine.
    """
    loop = Loop()
    if POSSIBLE and (modules := os.environ.get("NODE_PRELOAD", "").split()):
        loop.warm(modules)
        warm_up(loop, os.environ.get("NODE_FILTERED") == "1")
    waiting = Waiting(loop, key)
    # In a container, to what the engine runs beside us, as another user; the key keeps others out.
    waiting.listen(path, 0o666 if os.getpid() == 1 else 0o600)
    if shared:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(shared), mode=0o700, exist_ok=True)
            waiting.listen(shared)
    if port:
        waiting.listen_tcp(port)
    loop.run()
    for each in filter(None, (path, shared)):
        with contextlib.suppress(OSError):  # it has gone already, or a worker has put something else there
            os.unlink(each)
    return 0


def warm_up(loop: Loop, filtered: bool) -> None:
    """Let modules of the job be imported: at once, or when the filter is there that the network is to have."""
    if loop.zygote and filtered and not marked(ROUTES.read_text()):
        loop.after(LOOKS, lambda: warm_up(loop, filtered))
    elif loop.zygote:
        loop.zygote.go()


def check(folders: dict[str, int]) -> None:
    """Raise Refused for a folder that has not the inode that it is to have."""
    for path, inode in folders.items():
        try:
            found = os.stat(path).st_ino
        except OSError as error:
            raise Refused(f"start: folders: {shown(path)} cannot be looked at: {error.strerror}") from None
        if found != inode:
            raise Refused(f"start: folders: {shown(path)} is another folder than the orchestrator's")


def whose(env: Env) -> tuple[int, int]:
    """Generation and rank of a worker, by its environment; raises Refused."""
    return integer(env, "TORCHELASTIC_RESTART_COUNT"), integer(env, "RANK")


def place(status: os.stat_result) -> Place:
    """Device and inode of a file."""
    return status.st_dev, status.st_ino


def ours(folder: str, name: str) -> bool:
    """Whether a file is a worker's, and so our user's; what a volume has from its image may be another one's."""
    try:
        return os.lstat(f"{folder}/{name}").st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _named(names: Collection[str]) -> Callable[[os.DirEntry[str]], bool]:
    return lambda entry: entry.name in names


def wipe(folders: list[str], kept: Collection[str]) -> None:
    """Empty folders, but for the paths `kept`, and free System V's memory, queues and semaphores.

    Only a container has those for itself. Raises OSError where something of a worker's stays.
    """
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):  # the job has put it in the folder's place
                os.unlink(folder)
                continue
            names = {os.path.basename(path) for path in kept if os.path.dirname(path) == folder}
            if left := [name for name in clear(folder, _named(names)) if ours(folder, name)]:
                raise OSError(f"{len(left)} files of the job cannot be removed from {folder}")
    libc = ctypes.CDLL(None)
    remove = {
        "shm": lambda number: libc.shmctl(number, IPC_RMID, None),
        "msg": lambda number: libc.msgctl(number, IPC_RMID, None),
        "sem": lambda number: libc.semctl(number, 0, IPC_RMID),
    }
    for kind in remove if folders else ():
        with contextlib.suppress(FileNotFoundError), open(f"/proc/sysvipc/{kind}") as file:  # the kernel may lack it
            for line in file.read().splitlines()[1:]:
                remove[kind](int(line.split()[1]))
