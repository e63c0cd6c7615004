"""Mode `agent`: an orchestrator starts workers in the node, and gets reports of their ends; see protocol.py."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import tarfile
import time
from pathlib import Path
from typing import Any

from orchestrate.node.files import Files
from orchestrate.node.lease import Lease
from orchestrate.node.local_env import local_env
from orchestrate.node.loop import Loop
from orchestrate.node.messages import protocol
from orchestrate.node.messages.channel import Channel
from orchestrate.node.messages.checks import Refused, integer, shown
from orchestrate.node.messages.listener import BACKLOG, Listener
from orchestrate.node.output import print_message
from orchestrate.node.programs.guard import marked
from orchestrate.node.ranks import FENCE, Env, fence
from orchestrate.node.stacks import collect
from orchestrate.node.status import StatusServer
from orchestrate.node.store import blocked
from orchestrate.node.traffic import Traffic, families
from orchestrate.node.trees import FOLDER, check, missing, replace
from orchestrate.node.warm import SUPPORTED, limits_and_priority
from orchestrate.node.wipe import free_ipc, wipe
from orchestrate.node.worker import FAILED_TO_START, Worker, activity, kill, oom_kills

FILTER_INTERVAL = 0.05  # seconds between two checks for the packet filter
ROUTES = Path("/proc/self/net/route")
MAX_KILLING = 1.0  # seconds in which leftover processes are killed while files are copied
FIRST_JOB = 60.0  # seconds that a new node waits at least for its first job: the other nodes may take long to start
NOT_STARTED = 128 + signal.SIGTERM  # exit code of a worker whose generation ended before it could start


class Agent:
    """The workers of the newest generation, running or ended, and the clients that get reports."""

    def __init__(self, loop: Loop, key: bytes) -> None:
        self.loop, self.key = loop, key
        self.job, self.folder, self.generation = "", "", -1
        self.hint = ""  # why workers end, if the node itself ends them
        self.unmasked = missing(os.environ.pop("NODE_MASKS", ""))  # once: what they hide may go later
        self.workers: dict[int, Worker] = {}  # by rank
        self.codes: dict[int, int] = {}  # exit codes of workers that have ended
        self.hints: dict[int, str] = {}  # of the same workers
        self.listeners: list[Listener] = []
        self.channels: list[Channel] = []  # of clients that have sent a request
        self.alone = False  # whether only this node sees its job folder
        self.remote = False  # whether this is another machine than the orchestrator's, with its own GPUs and interfaces
        self.files = Files()
        self.lease: Lease | None = None
        self.traffic, self.progress = Traffic(loop, self._pids), StatusServer(loop)
        # Path of a socket: the file, its mode, and the listener.
        self.bound: dict[str, tuple[os.stat_result, int, Listener]] = {}
        self.limits_and_priority = limits_and_priority(os.getpid())
        self.idle_since = time.monotonic() + FIRST_JOB
        loop.on_store = lambda: self.report(protocol.Listening(self.generation))
        self.prepared = False  # whether the command of `before` has succeeded for this job
        self.next: tuple[protocol.Start, Env] | None = None  # the last request while that command was running

    def expire(self, keep: float) -> None:
        """End the node once it has had neither a job nor a client for `keep` seconds."""
        left = self.idle_since + keep - time.monotonic()
        if self.job or self.channels:
            left = keep
        if left > 0:
            self.loop.after(min(left, keep), lambda: self.expire(keep))
        else:
            print_message(f"ending the node: no job has used it for {keep:g} s")
            self.loop.stop(end=True)

    def listen_tcp(self, port: int, alone: bool = True) -> int:
        """Accept requests over TCP, on any port if it is 0, and return it; `alone` as above. Raises OSError."""
        self.alone, self.remote = alone, True
        server = socket.create_server(("", port), backlog=BACKLOG)
        self.listeners.append(Listener(self.loop, server, self.receive, self.key))
        return int(server.getsockname()[1])

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
        self.listeners.append(listener := Listener(self.loop, server, self.receive, self.key))
        self.bound[path] = os.lstat(path), mode, listener

    def receive(self, channel: Channel, message: Any) -> None:
        """Execute a request, or raise Refused; None means that the client has disconnected."""
        if message is None:
            if channel in self.channels:  # it has sent a request, unlike one that only looks whether the node listens
                self.channels.remove(channel)
                self.idle_since = time.monotonic()
            return
        request = protocol.decode(message, protocol.REQUESTS)
        if isinstance(request, protocol.Upload | protocol.GetChanges | protocol.Read):
            return self.transfer(channel, request)
        if channel not in self.channels:
            self.channels.append(channel)
        match request:
            case protocol.Start():
                self.start_if_safe(request)
            case protocol.Stop():
                self.fence(self.generation, over=True)
                self.loop.stop()
                if request.kill:
                    kill(self.loop.workers, signal.SIGKILL)
                if request.leftovers:
                    self.loop.end_leftovers(MAX_KILLING)
            case protocol.End():
                self.loop.stop(end=True)
            case protocol.Freeze():
                kill([worker for worker in self.loop.workers if worker.pid], signal.SIGSTOP)
            case protocol.Dump():
                kill(self.loop.workers, signal.SIGABRT)  # on which Python's fault handler prints all stacks
                kill(self.loop.workers, signal.SIGCONT)
            case protocol.Clean() if self.clean():
                for listener in self.listeners:
                    listener.drop(kept=channel)  # drops requests of processes of the last job
                channel.send(protocol.Cleaned())
            case protocol.GetStatus():
                channel.send(self.status())
            case protocol.GetStacks():
                self.collect_stacks()
            case protocol.Lease(relay):
                if self.lease:
                    self.lease.end()
                self.lease = Lease(self.loop, self.key, (relay[0], relay[1]), self.cut_off)

    def collect_stacks(self) -> None:
        """Report the stack of each worker and of its child processes."""
        generation, pids = self.generation, self._pids()
        found = families({rank: pid for rank, pid in pids.items() if pid})
        running = {rank: (pid, found.get(rank, []), self.workers[rank].stack) for rank, pid in pids.items()}
        collect(self.loop, running, lambda *found: self.report(protocol.Stack(generation, *found)))

    def transfer(self, channel: Channel, request: protocol.Upload | protocol.GetChanges | protocol.Read) -> None:
        """Send or receive files."""
        try:
            if isinstance(request, protocol.Upload):
                return channel.send(self.files.upload(*request))
            channel.send(
                self.files.read(*request) if isinstance(request, protocol.Read) else self.files.changes(*request)
            )
        except (OSError, ValueError, tarfile.TarError) as error:
            channel.send(protocol.Failed(str(error)))

    def fence(self, generation: int, over: bool = False) -> None:
        """Write the generation that may save into the job's folder, if the orchestrator has no access to it."""
        if self.alone and self.folder and generation >= fence(self.folder):
            with contextlib.suppress(OSError):
                os.makedirs(self.folder, exist_ok=True)
                replace(f"{self.folder}/{FENCE}", f"{generation}{' over' * over}\n")

    def cut_off(self) -> None:
        """Kill the workers: a request to stop could no longer reach this node."""
        self.hint = "cut off"
        kill(self.loop.workers, signal.SIGKILL)
        self.loop.end_leftovers(MAX_KILLING)

    def report(self, report: protocol.Report) -> None:
        """Send a report to all clients."""
        for channel in list(self.channels):
            channel.send(report)

    def start_if_safe(self, request: protocol.Start) -> None:
        """Start a worker, if filter and folders are as the orchestrator expects; raises Refused."""
        env = {**os.environ, **request.env} if request.inherit else request.env
        if request.filtered and not marked(ROUTES.read_text()):
            return self.report(protocol.Ended(*whose(env), NOT_STARTED, time.time(), "ending", stopping=False))
        check(request.folders or {})
        if self.unmasked:
            raise Refused(f"start: {shown(self.unmasked)} is not hidden: a job has put a link in its place")
        self.start(request, local_env(env) if self.remote else env)

    def start(self, request: protocol.Start, env: Env) -> None:
        """Start a worker, unless its generation is over; a newer generation ends all older workers.

        Raises Refused if its environment has no valid rank or generation, or if a secret cannot be written.
        """
        generation, rank = whose(env)
        if self.job not in ("", env.get("JOB_ID")) and not self.clean():  # the last job was not cleaned up
            return
        if request.log is not None:
            self.files.follow(env.get("JOB_DIR", ""), rank, request.log)
        self.job, self.folder, self.hint = env.get("JOB_ID", ""), env.get("JOB_DIR", ""), ""
        if generation < max(self.generation, fence(env.get("JOB_DIR"))):
            return self.report(protocol.Ended(generation, rank, NOT_STARTED, time.time(), "", stopping=True))
        if generation > self.generation:
            kill(list(self.workers.values()), signal.SIGKILL)
            self.loop.close_store()
            self.generation, self.workers, self.codes, self.hints = generation, {}, {}, {}
            self.loop.failed = None
            self.traffic.forget()
            self.fence(generation)
        codes, hints, before = self.codes, self.hints, oom_kills()

        def done(code: int) -> None:
            codes[rank] = code
            hints[rank] = "oom" if oom_kills() > before else "ending" if self.loop.ending else self.hint
            if codes is self.codes:  # otherwise a newer generation or job has begun
                stopping = worker is None or worker.stopping
                self.report(protocol.Ended(generation, rank, code, time.time(), hints[rank], stopping, self._use(rank)))

        self._write_secrets(request.secrets or {})
        self._prepare(request, env)
        env = env | self.progress.variables(env)
        worker: Worker | None = None
        started = lambda pid: self.report(protocol.Started(generation, rank, pid))  # noqa: E731
        worker = self.loop.start(request.command, env, request.cwd, done, started)
        if worker:
            self.workers[rank] = worker
            if env.get("WORLD_SIZE", "1") != "1" or env.get("CUDA_VISIBLE_DEVICES"):
                self.traffic.start()

    def _write_secrets(self, secrets: dict[str, str]) -> None:
        """Write the job's secret files, which only this user can read; raises Refused."""
        for path, content in secrets.items():
            folder, name = os.path.split(path)
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                descriptor = os.open(folder, FOLDER)  # on a cluster, a project could have put a link there
                try:
                    replace(name, content, 0o400, descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise Refused(f"start: secrets: cannot write {shown(path)}: {error.strerror}") from None

    def _prepare(self, request: protocol.Start, env: Env) -> None:
        """Run the command of `before`, unless it has succeeded here for this job; workers wait for its end.

        If it fails or is stopped, the next generation runs it again, once it has ended.
        """
        if not request.before or self.prepared or self.loop.failed or self.loop.ending:
            return
        if self.loop.held:
            self.next = request, env
            return
        command, generation, self.next = shlex.join(request.before), self.generation, None

        def done(code: int) -> None:
            self.prepared, self.loop.held = not code and not first.stopping, None
            if not self.prepared and generation != self.generation and self.next and self.loop.waiting():
                return self._prepare(*self.next)
            self.loop.release(code, command)

        try:
            first = Worker(request.before, env, request.cwd, done)
        except OSError as error:
            print_message(f"cannot run {command}: {error}")
            return done(FAILED_TO_START)
        self.loop.hold(first)

    def _pids(self) -> dict[int, int]:
        return {rank: worker.pid for rank, worker in self.workers.items() if rank not in self.codes}

    def _use(self, rank: int) -> dict[str, Any] | None:
        use = self.traffic.use(rank)
        return use._asdict() if use else None

    def clean(self) -> bool:
        """Clean up for another job: remove all processes, shared memory and files of this one.

        If that fails, or the job has changed the node's limits or priority, the node ends, and this returns False.
        """
        self.job, self.generation, self.workers, self.codes, self.hints = "", -1, {}, {}, {}
        self.traffic.forget()
        self.progress.close()
        self.files, self.next = Files(), None  # what was uploaded may have been changed
        if self.lease:
            self.lease.end()
            self.lease = None
        kill(self.loop.workers, signal.SIGKILL)
        try:
            self.loop.finish()
            self.prepared, self.loop.failed = False, None  # only now: a command that had just ended has set them
            if folders := os.environ.get("NODE_WIPE", "").split():  # only a container has its own
                wipe(folders, self.bound)
                free_ipc()
                if port := blocked():
                    raise OSError(f"sockets of the job block port {port}")
            self._bind_again()
            if limits_and_priority(os.getpid()) != self.limits_and_priority or self.loop.changed():
                raise OSError("the job has changed the limits or the priority of the node")
        except OSError as error:
            print_message(f"ending the node, which cannot be cleaned for another job: {error}")
            self.loop.stop(end=True)
            return False
        return True

    def _bind_again(self) -> None:
        """Listen again if a worker has replaced or removed a socket; raises OSError."""
        for path, (bound, mode, listener) in list(self.bound.items()):
            try:
                there = os.path.samestat(os.lstat(path), bound)
            except FileNotFoundError:
                there = False
            if not there:
                listener.close()
                self.listen(path, mode)

    def status(self) -> protocol.Status:
        """Report the generation, the exit codes of ended workers, and the state of running ones."""
        zygote = self.loop.zygote
        # What workers that have not been started wait for.
        first = self.loop.held.pid if self.loop.held else zygote.process.pid if zygote else 0
        running = {
            str(rank): {"pid": worker.pid, **activity(worker.pid or first)}
            for rank, worker in self.workers.items()
            if rank not in self.codes
        }
        return protocol.Status(
            generation=self.generation,
            codes={str(rank): code for rank, code in self.codes.items()},
            hints={str(rank): hint for rank, hint in self.hints.items()},
            running=running,
            tags=self.files.tags,
            time=time.time(),
            importing=zygote is not None and zygote.ready is None,
            uses={str(rank): use for rank in self.workers if (use := self._use(rank))},
        )


def serve(path: str, shared: str, port: int, key: bytes, keep: float) -> int:
    """Listen on the Unix socket `path` for requests of clients that have `key`, until asked to end.

    Also listen on `shared`, if possible: a socket in a mounted folder, which an orchestrator on the same kernel can
    reach without the engine; and on a TCP port, for an orchestrator on another machine. Also end after `keep` seconds
    without a job, if that is not 0.
    """
    loop = Loop()
    if SUPPORTED and (modules := os.environ.get("NODE_PRELOAD", "").split()):
        loop.warm(modules)
        warm_up(loop, os.environ.get("NODE_FILTERED") == "1")
    agent = Agent(loop, key)
    # In a container, pipe.py runs as another user; without the key, others get no answer.
    if path:
        agent.listen(path, 0o666 if os.getpid() == 1 else 0o600)
    if shared:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(shared), mode=0o700, exist_ok=True)
            agent.listen(shared)
    if port:
        agent.listen_tcp(port)
    if folder := os.environ.get("NODE_ADDRESSES"):
        register(folder, agent.listen_tcp(0, alone=False))
    if keep:
        agent.expire(keep)
    loop.run()
    for each in filter(None, (path, shared)):
        with contextlib.suppress(OSError):  # already removed, or replaced by a worker
            os.unlink(each)
    return 0


def register(folder: str, port: int) -> None:
    """Write where this node of a scheduler listens into a folder that all machines share; raises OSError.

    Its name is that of the list in `NODE_NAMES` whose place is the number of this task.
    """
    name = os.environ["NODE_NAMES"].split()[int(os.environ["SLURM_PROCID"])]
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for variable in {each for each in os.environ if each.startswith("SLURM")} - {"SLURM_JOB_ID"}:
        del os.environ[variable]  # workers are not tasks of Slurm, for which frameworks would take them
    replace(f"{folder}/{name}", f"{os.environ['NODE_LAUNCH']} {host} {port}\n", 0o600)


def warm_up(loop: Loop, filtered: bool) -> None:
    """Let the zygote import modules of the job: at once, or as soon as the expected filter is in place."""
    if loop.zygote and filtered and not marked(ROUTES.read_text()):
        loop.after(FILTER_INTERVAL, lambda: warm_up(loop, filtered))
    elif loop.zygote:
        loop.zygote.go()


def whose(env: Env) -> tuple[int, int]:
    """Return generation and rank of a worker, from its environment; raises Refused."""
    return integer(env, "TORCHELASTIC_RESTART_COUNT"), integer(env, "RANK")
