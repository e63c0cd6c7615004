"""Mode `wait`: an orchestrator starts workers in the node.

Over the Unix socket, JSON lines. `{"command", "env", "cwd"}` starts a worker and `{"watch": rank}` takes up one that
was started before; both are answered with `{"pid"}`, and `{"code"}` when the worker has ended. `{"status": true}` is
answered with what the node knows of its workers. Who asks may go away; the worker stays, and so does its exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import stat
from typing import Any

from orchestrate.node.loop import Channel, Loop
from orchestrate.node.ranks import Env, fence
from orchestrate.node.warm import POSSIBLE
from orchestrate.node.worker import Worker, doing, kill

IPC_RMID = 0  # of shmctl(2)
REFUSED = 128 + signal.SIGTERM  # the code of a worker whose generation was over before it could start


class Waiting:
    """The workers of the newest generation, running or ended, and who wants to know their end."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.job, self.generation = "", -1
        self.workers: dict[int, Worker] = {}  # by rank
        self.codes: dict[int, int] = {}  # of those that have ended
        self.asking: dict[int, list[Channel]] = {}

    def receive(self, channel: Channel, request: Any) -> None:
        """Answer a request; None means that whoever asked has gone."""
        if request is None:
            return
        if "status" in request:
            channel.send(self.status())
            channel.close()
        elif "watch" in request:
            self.watch(channel, request["watch"])
        else:
            self.start(channel, request["command"], request["env"], request["cwd"])

    def start(self, channel: Channel, command: list[str], env: Env, cwd: str) -> None:
        """Start a worker, unless its generation is over; one of a newer generation ends all older ones."""
        if self.job not in ("", env.get("JOB_ID")):  # nobody has told us that it is over
            self.clean()
        self.job = env.get("JOB_ID", "")
        rank, generation = int(env["RANK"]), int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if generation < max(self.generation, fence(env.get("JOB_DIR"))):
            channel.send({"code": REFUSED})
            channel.close()
            return
        if generation > self.generation:
            kill(list(self.workers.values()), signal.SIGKILL)
            self.generation, self.workers, self.codes, self.asking = generation, {}, {}, {}

        asking = self.asking[rank] = [channel]

        def done(code: int) -> None:
            if generation == self.generation:
                self.codes[rank] = code
            for waits in asking:
                waits.send({"code": code})
                waits.close()

        worker = self.loop.start(command, env, cwd, done, lambda pid: channel.send({"pid": pid}))
        if worker:
            self.workers[rank] = worker

    def watch(self, channel: Channel, rank: int) -> None:
        """Tell how a worker ends, or has ended; nothing of one that was never started."""
        if rank in self.workers:
            channel.send({"pid": self.workers[rank].pid})
        if rank in self.workers and rank not in self.codes:
            self.asking[rank].append(channel)
            return
        if rank in self.codes:
            channel.send({"code": self.codes[rank]})
        channel.close()

    def clean(self) -> None:
        """Make ready for another job: nothing of this one's is left, neither processes nor shared memory nor files."""
        kill(self.loop.workers, signal.SIGKILL)
        self.loop.finish()
        wipe(os.environ.get("NODE_WIPE", "").split())
        self.job, self.generation, self.workers, self.codes, self.asking = "", -1, {}, {}, {}

    def status(self) -> dict[str, Any]:
        """The generation, the exit codes of the workers that have ended, and what those that run are doing."""
        importing = self.loop.zygote.process.pid if self.loop.zygote else 0  # for whoever waits to be started
        running = {
            rank: {"pid": worker.pid, **doing(worker.pid or importing)}
            for rank, worker in self.workers.items()
            if rank not in self.codes
        }
        return {"generation": self.generation, "codes": self.codes, "running": running}


def wait(path: str) -> int:
    """Listen on the Unix socket `path` for workers to start, until told to end."""
    loop = Loop()
    if POSSIBLE and (modules := os.environ.get("NODE_PRELOAD", "").split()):
        loop.warm(modules)
    waiting = Waiting(loop)
    loop.on_hangup = waiting.clean
    server = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o077)
    server.bind(path)
    os.umask(mask)
    server.listen(128)

    def accept() -> None:
        channel = Channel(loop, server.accept()[0], lambda request: waiting.receive(channel, request))

    loop.watch(server, accept)
    loop.run()
    os.unlink(path)
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
