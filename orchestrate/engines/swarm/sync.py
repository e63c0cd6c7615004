"""Copying of files from nodes on other machines to the job folder here.

File names are untrusted, since nodes run other people's code: nothing is written outside of the job folder, over the
orchestrator's own files, or through a link.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrate.clock import SYSTEM, Clock, Stall
from orchestrate.engines.base import never
from orchestrate.engines.connection import NodeConnection, one_at_a_time
from orchestrate.engines.swarm.fetch import Fetch, clear_way, obstacle, reachable, same
from orchestrate.engines.swarm.fetch import link as place_link
from orchestrate.engines.swarm.node_copy import NodeCopy
from orchestrate.engines.swarm.owners import MAX_FILES, Owners
from orchestrate.errors import EngineError
from orchestrate.files.folder import MAX_DEPTH, MAX_ENTRIES, Folder
from orchestrate.host import records
from orchestrate.node.files import LOGS, Facts, real_folder
from orchestrate.node.messages import protocol
from orchestrate.node.messages.checks import shown
from orchestrate.node.ranks import FENCE
from orchestrate.node.trees import hidden, opened
from orchestrate.plan.plan import pluralize

log = logging.getLogger(__name__)

SYNC_INTERVAL = 0.2  # seconds between rounds
RETRY_INTERVAL = 5.0  # seconds until a failed file is tried again
EXPECTED = (EngineError, OSError, ValueError)  # ValueError: nodes may send anything
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSE_TIMEOUT = 5.0  # seconds for the current round to end; connecting may take longer
MAX_TURN = 0.5  # seconds to fetch a node's files before checking its logs again
STALL_SECONDS, STALL_BYTES = 120.0, 1 << 20  # copying all files ends if fewer bytes come within that time
MAX_LINKS = 10_000  # of a node; those in folders of packages lead to other folders, and are not copied
OWN = {FENCE}  # files of the orchestrator in a job folder


class FileSync:
    """Copies the files of a job in the background while it runs, of each node in a thread: none waits for another."""

    def __init__(
        self,
        run_dir: Path,
        folder: str,
        ranks: dict[str, list[int]],
        connect: Callable[[str], NodeConnection | None],
        clock: Clock = SYSTEM,
    ) -> None:
        """Start copying `folder` from the nodes, and the logs of their ranks; earlier nodes take precedence.

        `connect` connects to a node, or returns None if it is not running; it raises EngineError.
        """
        self.run_dir, self.folder, self.connect, self.clock = run_dir, folder, connect, clock
        self.here = Folder(run_dir.parent, run_dir.name, records.inode(run_dir.parent))
        self.nodes = [NodeCopy(name, [f"{LOGS}/rank-{rank}.log" for rank in own]) for name, own in ranks.items()]
        self.owners = Owners()
        self.large = threading.RLock()  # held while a large list is handled
        self.moved = 0  # bytes that have come, and at least STALL_BYTES for each file
        self.errors: dict[str, Exception] = {}  # path: why it could not be copied
        self.left: dict[str, str] = {}  # node: a path that cannot be copied
        self.late: set[str] = set()  # nodes of which the last wait has not seen all files, as they did not respond
        self.warned: set[str] = set()  # nodes for which `left` was reported
        self.changed = threading.Condition()
        self.closed = threading.Event()
        self.failure: Exception | None = None  # the error that ended a thread
        self.called = 0.0  # time of the last call of `catch_up`
        self.threads = [threading.Thread(target=self._run, args=[node], daemon=True) for node in self.nodes]
        for thread in self.threads:
            thread.start()

    def catch_up(self, timeout: float, stopped: Callable[[], bool] = never) -> bool:
        """Wait until all that nodes wrote before the call is copied or has failed; return False otherwise.

        Returns after at most `timeout` seconds, or once `stopped()`.
        """
        with self.changed:
            self._check()
            self.called = self.clock.monotonic()
            last = {node.name: node.looks for node in self.nodes}  # the current round may have begun before the call
            while not (done := self.closed.is_set() or all(self._is_done(node, last) for node in self.nodes)):
                if stopped() or self.clock.monotonic() > self.called + timeout:
                    break
                self.changed.wait(SYNC_INTERVAL)
                self._check()
            self.late = {node.name for node in self.nodes if node.whole <= last[node.name]}
            return done

    def _is_done(self, node: NodeCopy, last: dict[str, int]) -> bool:
        """Whether a round after the `last` one has copied all from a node, or nothing waits for it: it is silent."""
        after = node.looks > last[node.name] + 1
        return node.whole > last[node.name] or node.given_up or (after and not node.heard)

    def give_up(self, name: str) -> None:
        """Wait for a node no longer, until it responds again."""
        for node in self.nodes:
            if node.name == name:
                node.given_up = True

    def _check(self) -> None:
        """Raise EngineError if a thread has ended: the job goes on to its end, and leaves its nodes."""
        if self.failure:
            raise EngineError(f"files of nodes are not copied anymore: {self.failure!r}") from self.failure

    def lacks_space(self) -> None:
        """Raise OSError if the local disk was full."""
        for path, error in self.errors.copy().items():  # a copy: the thread may change it
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(error.errno, error.strerror, path)

    def copy_all(self, timeout: float, stopped: Callable[[], bool] = never) -> None:
        """Copy all files; raises EngineError if some fail, which then stay on their nodes.

        Waits at most `timeout` seconds, only while files come, and no longer once `stopped()`.
        """
        stall = Stall(self.clock, STALL_SECONDS, STALL_BYTES)
        if not self.catch_up(timeout, lambda: stopped() or stall.seen(self.moved)):
            late = "not all files were copied from the nodes in time"
            raise EngineError("stopped before all files were copied" if stopped() else late)
        if why := self.failed():
            raise EngineError(why)

    def failed(self) -> str:
        """Return which files could not be copied, and why; empty if there are none."""
        errors = self.errors.copy()
        why = next((f"such as {shown(path)}: {why}" for path, why in errors.items()), "")
        return why and f"{pluralize(len(errors), 'file')} could not be copied, {why}"

    def silent(self) -> set[str]:
        """Return the nodes that did not respond in the last round, or in the last wait for their files."""
        return {node.name for node in self.nodes if not node.heard} | self.late

    def warnings(self) -> list[str]:
        """Return warnings about files that cannot be copied, once for each node."""
        new = {node: path for node, path in self.left.copy().items() if node not in self.warned}
        self.warned |= new.keys()
        why = f"the path has more than {MAX_DEPTH} folders, is too long, or cannot be encoded in this locale, "
        why += f"or there are more than {MAX_LINKS:,} links, or {MAX_FILES:,} files"
        return [f"{node}: some files are not copied, such as {shown(path)}: {why}" for node, path in new.items()]

    def close(self) -> None:
        """Stop copying, and wait briefly for the current rounds."""
        self.closed.set()
        for link in filter(None, [node.link for node in self.nodes]):
            link.interrupt()
        until = SYSTEM.monotonic() + CLOSE_TIMEOUT
        for node, thread in zip(self.nodes, self.threads):
            thread.join(0 if node.given_up else max(0, until - SYSTEM.monotonic()))

    # --- the thread of a node

    def _run(self, node: NodeCopy) -> None:
        try:
            while not self.closed.is_set():
                with self.changed:
                    node.due, node.ends, node.blocked, node.looks = None, None, False, node.looks + 1
                    self.changed.notify_all()
                while self._visit(node) and not self.closed.is_set():
                    pass
                with self.changed:
                    node.whole = node.looks if node.heard and not node.blocked else node.whole
                    self.changed.notify_all()
                self.closed.wait(SYNC_INTERVAL)
        except Exception as error:  # raised again in `catch_up`
            log.exception("copying files failed")
            with self.changed:
                self.failure = error
                self.changed.notify_all()
        self._disconnect(node)

    def _visit(self, node: NodeCopy) -> bool:
        """Copy new data from a node; return whether the round is to copy more.

        What changes during the round does not make it longer: processes that a job has left could write forever.
        """
        try:
            node.link = node.link or self.connect(node.name)
            if node.link is None or self.closed.is_set():
                return False
            with contextlib.ExitStack() as held:
                return self._copy_from(node, node.link, held)
        except EXPECTED as error:  # no connection, or an invalid answer: the next round starts over
            if str(error) != node.trouble:
                log.debug("%s: %s", node.name, error)
            node.trouble = str(error)
            self._disconnect(node)
            return False

    def _copy_from(self, node: NodeCopy, link: NodeConnection, held: contextlib.ExitStack) -> bool:
        """Copy new data from a node; `held` gets the lock of a large list."""
        have = {path: self.here.size(path) for path in node.logs}
        changes = link.converse(
            protocol.GetChanges(self.folder, have), protocol.Changes, admit=one_at_a_time(self.large, held)
        )
        node.heard, node.given_up, node.trouble = True, False, ""
        if node.ends is None:
            node.ends = {path: end for path, end in (changes.ends or {}).items() if path in have}
        appended = [self._append(path, data) for path, data in changes.logs.items() if path in have]
        self._remove_conflicts(node, {**changes.files, **changes.links})
        more = self._fetch(node, changes.files)
        self._remove_deleted(node, changes, more)
        return bool(node.due) or any(appended) and any(self.here.size(path) < end for path, end in node.ends.items())

    def _disconnect(self, node: NodeCopy) -> None:
        if node.link:
            node.link.close()
        node.drop()
        node.link, node.heard = None, False

    def _append(self, path: str, data: str) -> bool:
        """Append new output to a log; return whether that succeeded."""
        below, _, name = path.rpartition("/")
        try:
            with self.here.opened(below) as folder:
                descriptor = opened(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, folder)
            with os.fdopen(descriptor, "ab") as file:
                self.moved += file.write(base64.b64decode(data))
        except OSError as error:  # for example a full disk; the next round continues after a partial write
            self.errors[path] = error
            return False
        self.errors.pop(path, None)
        return True

    def _fetch(self, node: NodeCopy, files: dict[str, Facts]) -> bool:
        """Fetch pieces of files that differ from the local ones, the due ones first; return whether there is more."""
        wanted, now = {}, self.clock.monotonic()
        for path in node.failed.keys() - files.keys():  # removed on the node
            del node.failed[path]
            self.errors.pop(path, None)
        for path, facts in files.items():
            failed, when = node.failed.get(path, ([], 0.0))
            waits = facts == failed and when > max(self.called, now - RETRY_INTERVAL)
            if facts != node.files.get(path) and not waits and self._may_copy(node, path):
                if not same(self.run_dir / path, facts):
                    wanted[path] = facts
                    continue
                with self.owners.lock:
                    if self._owns(node, path):  # copied by an earlier supervisor
                        node.files[path] = facts
        due = node.due = set(wanted) if node.due is None else node.due & wanted.keys()
        if node.fetching and not node.fetching.goes_on(wanted.get(node.fetching.path)):
            node.drop()
        if node.fetching:
            del wanted[node.fetching.path]
        last_first = sorted(wanted, key=lambda path: (path not in due, wanted[path][1]), reverse=True)
        until = self.clock.monotonic() + MAX_TURN
        while (node.fetching or last_first) and self.clock.monotonic() < until and not self.closed.is_set():
            path = node.fetching.path if node.fetching else last_first.pop()
            try:
                if not node.fetching and real_folder(f"{self.run_dir}/{path}"):
                    self._take_folder(node, path)
                node.fetching = node.fetching or Fetch(self.here, path, wanted[path], node.name)
                if not self._fetch_piece(node, node.fetching):
                    continue
                self.errors.pop(path, None)
            except ConnectionError:
                raise
            except Exception as error:  # skip only this file, and report it at the end
                if str(error) != str(self.errors.get(path)):
                    log.debug("%s of %s: %s", shown(path), node.name, error, exc_info=not isinstance(error, EXPECTED))
                node.failed[path] = files.get(path, []), self.clock.monotonic()
                self.errors[path] = error.with_traceback(None)  # a traceback would keep the piece in memory
            due.discard(path)
            node.drop()
        return bool(node.fetching or last_first)

    def _fetch_piece(self, node: NodeCopy, fetch: Fetch) -> bool:
        """Fetch the next piece of a file; return whether the attempt has ended."""
        assert node.link
        piece = node.link.converse(protocol.Read(self.folder, fetch.path, fetch.offset), protocol.Piece)
        if not fetch.goes_on(piece.facts):  # the next round fetches it again
            return True
        self.moved += len(piece.data)
        if not fetch.write(base64.b64decode(piece.data), piece.offset):
            return False
        self.moved += STALL_BYTES
        with self.owners.lock:
            if self._owns(node, fetch.path) and fetch.keep():
                node.files[fetch.path] = fetch.told
        return True

    def _owns(self, node: NodeCopy, path: str) -> bool:
        return self.owners.owns(path, self.nodes.index(node))

    def _may_copy(self, node: NodeCopy, path: str) -> bool:
        """Whether a file may be copied from a node: its path is safe, no earlier node has it, and copying goes on."""
        if self.closed.is_set():  # a list may be long
            return False
        parts = PurePosixPath(path).parts
        harmless = parts and path == "/".join(parts) and not parts[0].startswith("/") and not {"..", "."} & set(parts)
        if not harmless or parts[0] in {*OWN, LOGS} or any(map(hidden, parts)):
            return False
        if not reachable(self.here, path):
            self.left.setdefault(node.name, path)
            return False
        number = self.nodes.index(node)
        with self.owners.lock:
            if (thing := obstacle(self.run_dir, path)) and not self._make_way(node, thing):
                self.errors.pop(path, None)  # of an attempt before the other node had it
                return False
            owner = self.owners.claim(path, number)
            if owner is None:
                self.left.setdefault(node.name, path)
                return False
            if number < owner:
                self.nodes[owner].files.pop(path, None)  # copied again if no earlier node has it
            return number <= owner

    def _make_way(self, node: NodeCopy, thing: str) -> bool:
        """Remove a file or link in place of a folder of a node's file; return False if another node may have it.

        It is of an earlier generation, or of a later node.
        """
        node.blocked = node.blocked or any(each.looks < 2 for each in self.nodes if each is not node)
        if node.blocked or self.owners.by_path.get(thing, len(self.nodes)) < self.nodes.index(node):
            return False
        try:
            clear_way(self.here, thing)
        except OSError as error:
            self.errors[thing] = error
            return False
        self.errors.pop(thing, None)
        return True

    def _take_folder(self, node: NodeCopy, path: str) -> None:
        """Remove the files of later nodes below a node's file, and the folder if nothing else is in it."""
        with self.owners.lock:
            for each, owner in self.owners.below(path).items():
                if owner > self.nodes.index(node):
                    self._remove(self.nodes[owner], each)

    def _remove_conflicts(self, node: NodeCopy, files: dict[str, Any]) -> None:
        """Remove a file if the node now has a folder with its name, and files of a folder that is now a file."""
        with self.owners.lock:  # the thread of an earlier node may take files from this one
            gone = [path for path in node.files if path not in files]
        names = sorted(files) if gone else []
        for path in gone:
            first = bisect_left(names, f"{path}/")
            folder = first < len(names) and names[first].startswith(f"{path}/")
            if folder or any(str(parent) in files for parent in PurePosixPath(path).parents):
                self._remove(node, path)

    def _remove_deleted(self, node: NodeCopy, changes: protocol.Changes, more: bool) -> None:
        """Remove what was removed on the node, and create its links.

        While `more` files are to come, keep a limited number of files that they may replace.
        """
        number, there = self.nodes.index(node), changes.files.keys() | changes.links.keys()
        with self.owners.lock:
            gone = [path for path in self.owners.of(number) if path not in there]
            for path in gone:
                if path not in node.files:  # it was never copied
                    self.owners.forget(path)
        old = [path for path in gone if path in node.files]
        if more and len(old) < MAX_ENTRIES:
            return
        for path in old:
            self._remove(node, path)
        for path in changes.gone if node is self.nodes[0] else ():
            with self.owners.lock:
                again = path in self.owners.by_path  # another node has written it anew
                if not again and not obstacle(self.run_dir, path) and self._may_copy(node, path):
                    self._remove(node, path)
        plain = {path: to for path, to in changes.links.items() if "/" not in to and to not in ("..", ".", "")}
        if len(plain) > MAX_LINKS:
            self.left.setdefault(node.name, next(islice(plain, MAX_LINKS, None)))
        for path, target in islice(plain.items(), MAX_LINKS):
            link = self.run_dir / path
            free = os.path.islink(link) or path in node.files or not os.path.exists(link)
            if free and self._may_copy(node, path):
                with contextlib.suppress(OSError):
                    node.files[path] = []
                    place_link(self.here, path, target, node.name)

    def _remove(self, node: NodeCopy, path: str) -> None:
        node.files.pop(path, None)
        with self.owners.lock, contextlib.suppress(OSError):
            if self._owns(node, path):
                self.owners.forget(path)
                below, _, name = path.rpartition("/")
                with self.here.opened(below) as folder, contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                while below:
                    below, _, name = below.rpartition("/")
                    with self.here.opened(below) as folder:
                        os.rmdir(name, dir_fd=folder)  # only if it is empty
