"""The one thread of a node: worker output, sockets, signals and timers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from orchestrate.node.messages.checks import seconds
from orchestrate.node.output import print_message, stdout
from orchestrate.node.ranks import Env
from orchestrate.node.store import VARIABLE, Store, expected
from orchestrate.node.warm import (
    IMPORT_TIMEOUT,
    Zygote,
    adopt_orphans,
    children,
    leftover_processes,
    limits_and_priority,
)
from orchestrate.node.worker import FAILED_TO_START, Worker, kill

MIN_DESCRIPTORS = 64  # that a node needs
MAX_WAIT = 3600.0  # seconds; epoll_wait(2) takes no more than 24 days
FLUSH_INTERVAL = 0.05  # seconds
ENDING = (signal.SIGTERM, signal.SIGINT)


class Loop:
    """Runs callbacks for events and timers; ends on request, once no worker is left."""

    def __init__(self) -> None:
        """Install signal handlers; raises Refused for an invalid environment variable."""
        self.selector = selectors.DefaultSelector()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.zygote: Zygote | None = None
        self.adopting = adopt_orphans()  # so that no orphan outlives the node
        self.rights = _rights()
        self.workers: list[Worker] = []
        self.held: Worker | None = None  # a command that other workers wait for
        self.failed: tuple[int, str] | None = None  # how such a command has failed: no worker starts after that
        self.store: Store | None = None  # torch's store, once rank 0 has started here
        self.grace = seconds(os.environ, "NODE_GRACE", 30)  # between SIGTERM and SIGKILL
        self.ending = False  # the node has been asked to end, and starts no more workers
        self.on_end: Callable[[], None] = lambda: None  # called when `ending` becomes true
        self.on_store: Callable[[], None] = lambda: None  # called when workers can connect to the store
        writer, reader = socket.socketpair()
        for end in (writer, reader):
            end.setblocking(False)
        self._wakeup_writer = writer  # kept open: signals are written to its descriptor
        self.watch(reader, lambda: self._signals(reader.recv(4096)))
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self.asked = False  # by a first signal; a second one kills the workers
        for number in (signal.SIGCHLD, *ENDING):
            signal.signal(number, lambda *_: None)

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `source` can be read."""
        self.selector.register(source, selectors.EVENT_READ, callback)

    def forget(self, source: Any) -> None:
        """Stop watching `source`, if it is watched."""
        if source in self.selector.get_map():
            self.selector.unregister(source)

    def time(self) -> float:
        """Seconds of the clock of `after`, which never goes back."""
        return time.monotonic()

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` once, `seconds` from now."""
        self.timers.append((self.time() + seconds, callback))

    def warm(self, modules: list[str]) -> None:
        """Import `modules` now, for workers that start later."""
        self.zygote = zygote = Zygote(modules, self._settled)

        def read() -> None:
            self.forget(zygote.sock)
            zygote.read()

        self.watch(zygote.sock, read)
        self.after(IMPORT_TIMEOUT, zygote.late)

    def start(
        self,
        command: list[str],
        env: Env,
        cwd: str | None,
        done: Callable[[int], None],
        started: Callable[[int], None] = lambda pid: None,
    ) -> Worker | None:
        """Start a worker as soon as its modules are imported; `started` gets its process id, `done` its exit code.

        No worker starts once the node has been asked to end.
        """
        if self.ending:
            done(128 + signal.SIGTERM)
            return None
        if VARIABLE in env:
            env = env | {VARIABLE: str(expected(env))}
        try:
            worker = Worker(command, env, cwd, done, started)
        except OSError as error:
            print_message(f"rank {env.get('RANK')} did not start: {error}")
            done(FAILED_TO_START)
            return None
        self.workers.append(worker)
        self.watch(worker.output, lambda: self._pump(worker))
        if self.failed:
            worker.cancel(*self.failed)
            return worker
        if env.get(VARIABLE) == "True" and worker.rank == "0":
            self._open_store(worker)
        if self.zygote:
            self.zygote.go()
        self._launch_waiting()
        return worker

    def _open_store(self, first: Worker) -> None:
        self.close_store()
        try:
            self.store = Store(first.env)
        except OSError as error:
            return first.failed_to_start(error)
        self.on_store()

    def _watch_store(self, store: Store) -> None:
        def host() -> None:
            self.forget(store.server)
            store.host(self.zygote, self._abandon_zygote)

        if store.server.fileno() >= 0:  # no worker has connected
            self.forget(store.server)
            self.watch(store.server, host)

    def close_store(self) -> None:
        """End torch's store of an older generation, if there is one."""
        if self.store:
            if self.store.server.fileno() >= 0:  # no worker has connected
                self.forget(self.store.server)
            self.store.close()
            self.store = None

    def hold(self, first: Worker) -> None:
        """Start `first` at once, and other workers only after `release`."""
        self.held = first
        if self.zygote and self.zygote.ready is None:
            self.zygote.remember()
        self.workers.append(first)
        self.watch(first.output, lambda: self._pump(first))
        try:
            first.start(None)
        except OSError as error:
            first.failed_to_start(error)

    def release(self, code: int, command: str) -> None:
        """Start the workers that are waiting; if `code`, the exit code of `command`, is not 0, end them with it.

        Those that come later also end with it, until `failed` is reset.
        """
        self.held = None
        self.failed = (code, f"was not started: `{command}` failed with exit code {code}") if code else None
        if self.failed:
            for worker in self.waiting():
                worker.cancel(*self.failed)
        self._launch_waiting()

    def waiting(self) -> list[Worker]:
        """Return the workers that have not been started."""
        return [worker for worker in self.workers if worker.poll() is None and not worker.pid]

    def _launch_waiting(self) -> None:
        if not self.held and (self.zygote is None or self.zygote.ready is not None):
            for worker in self.waiting():
                self._launch(worker)
            if self.store:
                self._watch_store(self.store)

    def _settled(self, why: str) -> None:
        """The import has finished or failed: start the workers that were waiting for it."""
        if why:
            print_message(f"starting a fresh interpreter for each worker: {why}")
        self._launch_waiting()

    def _launch(self, worker: Worker) -> None:
        try:
            if self.zygote and self.zygote.ready:
                try:
                    return worker.start(self.zygote)
                except OSError as error:
                    if error.errno != errno.EMSGSIZE:
                        self._abandon_zygote(str(error))
            worker.start(None)
        except OSError as error:
            worker.failed_to_start(error)

    def _abandon_zygote(self, why: str) -> None:
        """Stop using the zygote, and kill a process that it may have forked without reporting it."""
        assert self.zygote
        print_message(f"starting a fresh interpreter for each worker: {why}")
        self.zygote.ready = False
        self.zygote.end()
        for pid in set(children()) - self._ours():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def stop(self, end: bool = False) -> None:
        """Send each worker SIGTERM once, and SIGKILL after the grace period; `end` also ends the node."""
        running = [each for each in self.workers if not each.stopping and each.poll() is None]
        asked = [each for each in running if not each.exiting]
        for worker in asked:
            worker.stopping = True
        kill(asked, signal.SIGTERM)
        if running:
            self.after(self.grace, lambda: kill(running, signal.SIGKILL))
        if end and not self.ending:
            self.ending = True
            self.on_end()

    def run(self) -> None:
        """Serve until the node has been asked to end and no worker is left."""
        while self.workers or not self.ending:
            first = min((when - self.time() for when, _ in self.timers), default=MAX_WAIT)
            if stdout.flush():  # the reader of stdout is slow: try again soon
                first = min(FLUSH_INTERVAL, first)
            ready = self.selector.select(max(0.0, min(first, MAX_WAIT)))
            self._keep_rights()
            for key, _ in ready:
                key.data()
            now = self.time()
            due = [callback for when, callback in self.timers if when <= now]
            self.timers = [timer for timer in self.timers if timer[0] > now]
            for callback in due:
                callback()
            self._reap()
        if self.zygote:
            self.zygote.end()
            self.zygote = None
        self.finish()
        stdout.flush(last=True)

    def _keep_rights(self) -> None:
        """Kill all processes of a container in which one has changed what we need to answer, before it is too late.

        With so few descriptors that this cannot be undone, the node ends.
        """
        if self.rights == (now := _rights()):
            return
        print_message("a process has changed the node's priority or its limit of descriptors")
        _kill_others()
        most = now[0][1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the second one cannot be raised again
        self.rights = _rights()
        if 0 <= most < MIN_DESCRIPTORS:
            self.stop(end=True)

    def changed(self) -> bool:
        """Whether a worker has changed the limits or priority of the zygote; raises OSError."""
        zygote = self.zygote
        return (
            zygote is not None
            and zygote.ready is not False
            and bool(zygote.limits_and_priority)
            and limits_and_priority(zygote.process.pid) != zygote.limits_and_priority
        )

    def _pump(self, worker: Worker) -> None:
        if not worker.pump():
            self.forget(worker.output)

    def _signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                continue
            self.stop(end=True)
            if self.asked and "NODE_PATIENT" not in os.environ:
                kill(self.workers, signal.SIGKILL)
            self.asked = True

    def _reap(self) -> None:
        if self.store and self.store.lost():  # who connects now would try until torch's timeout, half an hour
            self.close_store()
            for worker in self.workers:
                worker.say("is killed: the process that hosts torch's store has ended")
                worker.kill(signal.SIGKILL)
        while ended := [worker for worker in self.workers if self._can_be_reaped(worker)]:  # an end can cause others
            for worker in ended:
                self.workers.remove(worker)
                self.forget(worker.output)
                worker.close()
        if self.adopting:
            self._reap_strays()

    def _can_be_reaped(self, worker: Worker) -> bool:
        """Whether a worker has ended; one that had not started also waits for the end of the command of `hold`."""
        return worker.poll() is not None and (not self.held or worker.pid > 0 or worker is self.held)

    def _reap_strays(self) -> None:
        """Reap adopted processes that workers have left running; until then they stay zombies."""
        ours = self._ours()
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in ours:  # it has just ended; the next turn reaps it
                    return
                os.waitpid(found.si_pid, 0)

    def _ours(self) -> set[int]:
        """The children that are workers, host torch's store or fork workers."""
        ours = {worker.pid for worker in self.workers}
        if self.zygote and self.zygote.process.poll() is None:
            ours.add(self.zygote.process.pid)
        if self.store and self.store.process and self.store.process.poll() is None:
            ours.add(self.store.process.pid)
        return ours

    def finish(self) -> None:
        """Wait for killed workers, kill what they left running, and continue the zygote if they have stopped it."""
        self.close_store()
        while self.workers:
            self.kill_leftovers()  # one of them may trace a worker, which is reaped only after that
            self._reap()
            time.sleep(0.001)
        self.kill_leftovers()
        if self.adopting and self.zygote:
            self.zygote.process.send_signal(signal.SIGCONT)

    def end_leftovers(self, most: float) -> None:
        """Kill what ended workers have left running, and torch's store, which they could have taken over.

        If that takes longer than `most` seconds, since processes can multiply meanwhile, or if they cannot be listed,
        process 1 of a container kills all others at once, with the zygote.
        """
        self.close_store()
        try:
            ended = self.kill_leftovers(most)
        except OSError:
            ended = False
        if not ended:
            _kill_others()

    def kill_leftovers(self, most: float = float("inf")) -> bool:
        """Kill what ended workers have left running, for `most` seconds; return whether nothing is left.

        Raises OSError if the processes cannot be listed.
        """
        if not self.adopting:
            return True
        ours, until = self._ours(), self.time() + most
        while left := set(leftover_processes()) - ours:
            if self.time() > until:
                return False
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except PermissionError:  # runs as another user, through sudo for example; it is left running
                    ours.add(pid)
                    continue
                except ProcessLookupError:
                    pass
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)  # one that is traced ends only after its tracer
            time.sleep(0.001)
        return True


def _rights() -> tuple[tuple[int, int], int, int]:
    """Our limits of descriptors, our priority and our scheduler, which our user can change."""
    scheduler = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    return resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0), scheduler


def _kill_others() -> None:
    """Kill all other processes at once, with the zygote, if this is process 1 of a container."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
