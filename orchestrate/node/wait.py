"""Mode `wait`: an orchestrator starts workers in the node.

Over a Unix socket, JSON lines. An orchestrator asks, and the node says what happens to everyone who has asked it
anything:

    {"ask": "start", "command": […], "env": {…}, "inherit": bool, "cwd": …}    start a worker; with `inherit`, in the
                              node's own environment and what `env` adds to it
    {"ask": "stop", "kill": bool}    ask all workers to stop, and kill them after the grace period, or at once
    {"ask": "dump"}           have all workers print where they stand, and abort
    {"ask": "clean"}          make ready for another job
    {"ask": "status"}         tell what is known of the workers

    {"say": "started", "generation", "rank", "pid"}
    {"say": "ended", "generation", "rank", "code", "at", "sign"}    `at` in seconds since 1970; the sign is `oom` where
                              the kernel has killed for lack of memory meanwhile, `ending` where the node ends, or empty
    {"say": "status", "generation", "codes", "signs", "running"}
    {"say": "clean"}

Who asks may go away; the worker stays, and so does its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import stat
import time
from typing import Any

from orchestrate.node.loop import Channel, Loop
from orchestrate.node.ranks import Env, fence
from orchestrate.node.warm import POSSIBLE
from orchestrate.node.worker import Worker, doing, kill, oom_kills

IPC_RMID = 0  # of shmctl(2)
REFUSED = 128 + signal.SIGTERM  # the code of a worker whose generation was over before it could start


class Waiting:
    """The workers of the newest generation, running or ended, and who is told of them."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.job, self.generation = "", -1
        self.workers: dict[int, Worker] = {}  # by rank
        self.codes: dict[int, int] = {}  # of those that have ended
        self.signs: dict[int, str] = {}  # of those, too
        self.channels: list[Channel] = []

    def listen(self, path: str) -> None:
        """Have orchestrators ask over the Unix socket `path`; raises OSError."""
        server = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # that of an earlier life
        mask = os.umask(0o077)
        try:
            server.bind(path)
        finally:
            os.umask(mask)
        server.listen(128)

        def accept() -> None:
            channel = Channel(self.loop, server.accept()[0], lambda request: self.receive(channel, request))

        self.loop.watch(server, accept)

    def receive(self, channel: Channel, request: Any) -> None:
        """Do what is asked; None means that whoever asked has gone."""
        if request is None:
            if channel in self.channels:
                self.channels.remove(channel)
            return
        if channel not in self.channels:
            self.channels.append(channel)
        ask = request["ask"]
        if ask == "start":
            env = {**os.environ, **request["env"]} if request["inherit"] else request["env"]
            self.start(request["command"], env, request["cwd"])
        elif ask == "stop":
            self.loop.stop()
            if request["kill"]:
                kill(self.loop.workers, signal.SIGKILL)
        elif ask == "dump":
            kill(self.loop.workers, signal.SIGABRT)  # on which Python's fault handler prints all stacks
        elif ask == "clean":
            self.clean()
            channel.send({"say": "clean"})
        elif ask == "status":
            channel.send({"say": "status", **self.status()})

    def say(self, what: str, generation: int, rank: int, **facts: Any) -> None:
        """Tell everyone what happened to a worker."""
        for channel in list(self.channels):
            channel.send({"say": what, "generation": generation, "rank": rank, **facts})

    def start(self, command: list[str], env: Env, cwd: str | None) -> None:
        """Start a worker, unless its generation is over; one of a newer generation ends all older ones."""
        if self.job not in ("", env.get("JOB_ID")):  # nobody has told us that it is over
            self.clean()
        self.job = env.get("JOB_ID", "")
        rank, generation = int(env["RANK"]), int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if generation < max(self.generation, fence(env.get("JOB_DIR"))):
            return self.say("ended", generation, rank, code=REFUSED, at=time.time(), sign="")
        if generation > self.generation:
            kill(list(self.workers.values()), signal.SIGKILL)
            self.generation, self.workers, self.codes, self.signs = generation, {}, {}, {}
        codes, signs, before = self.codes, self.signs, oom_kills()

        def done(code: int) -> None:
            codes[rank] = code
            signs[rank] = "oom" if oom_kills() > before else "ending" if self.loop.ending else ""
            if codes is self.codes:  # else nobody waits for it any more
                self.say("ended", generation, rank, code=code, at=time.time(), sign=signs[rank])

        worker = self.loop.start(command, env, cwd, done, lambda pid: self.say("started", generation, rank, pid=pid))
        if worker:
            self.workers[rank] = worker

    def clean(self) -> None:
        """Make ready for another job: nothing of this one's is left, neither processes nor shared memory nor files."""
        self.job, self.generation, self.workers, self.codes, self.signs = "", -1, {}, {}, {}
        kill(self.loop.workers, signal.SIGKILL)
        self.loop.finish()
        wipe(os.environ.get("NODE_WIPE", "").split())

    def status(self) -> dict[str, Any]:
        """The generation, the exit codes of the workers that have ended, and what those that run are doing."""
        importing = self.loop.zygote.process.pid if self.loop.zygote else 0  # for whoever waits to be started
        running = {
            rank: {"pid": worker.pid, **doing(worker.pid or importing)}
            for rank, worker in self.workers.items()
            if rank not in self.codes
        }
        return {"generation": self.generation, "codes": self.codes, "signs": self.signs, "running": running}


def wait(path: str, shared: str) -> int:
    """Listen on the Unix socket `path` for workers to start, until told to end.

    And on `shared`, if it is given and can be: in a folder that this kernel has outside of the container, too, it
    spares an orchestrator the way through the engine.
    """
    loop = Loop()
    if POSSIBLE and (modules := os.environ.get("NODE_PRELOAD", "").split()):
        loop.warm(modules)
    waiting = Waiting(loop)
    waiting.listen(path)
    if shared:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(shared), mode=0o700, exist_ok=True)
            waiting.listen(shared)
    loop.run()
    for each in filter(os.path.exists, (path, shared)):
        os.unlink(each)
    return 0


def wipe(folders: list[str]) -> None:
    """Empty folders, but for sockets; and free System V's shared memory, which only a container has for itself."""
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif not stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
    if folders:
        with contextlib.suppress(OSError), open("/proc/sysvipc/shm") as file:
            for line in file.read().splitlines()[1:]:
                ctypes.CDLL(None).shmctl(int(line.split()[1]), IPC_RMID, None)
