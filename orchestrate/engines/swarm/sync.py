"""Copies the files of nodes that share no folder with us to the job's folder here.

The names of the files are untrusted, since nodes run other people's code: nothing is written outside of the job's
folder, over the orchestrator's own files there, or through a link.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrate.engines.base import never
from orchestrate.engines.connection import NodeConnection
from orchestrate.engines.swarm.fetch import Fetch, reachable, same
from orchestrate.engines.swarm.fetch import link as place_link
from orchestrate.errors import EngineError
from orchestrate.files.folder import MAX_DEPTH, MAX_ENTRIES, Folder
from orchestrate.job.logs import MARK
from orchestrate.job.plan import counted
from orchestrate.node import protocol
from orchestrate.node.checks import shown
from orchestrate.node.files import LOGS, Facts
from orchestrate.node.ranks import FENCE
from orchestrate.node.trees import hidden

log = logging.getLogger(__name__)

SYNC_INTERVAL = 0.2  # seconds between two rounds
OVERLAP = 256  # bytes at the end of a log by which it is found in the node's stdout
RETRY_INTERVAL = 5.0  # seconds until a failed file is tried again
EXPECTED = (EngineError, OSError, ValueError)  # ValueError: a node may send anything
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSE_TIMEOUT = 5.0  # seconds in which what is under way ends; a connection that is being made may take longer
MAX_TURN = 0.5  # seconds for which a node's files are fetched before its logs have their turn
OWN = {FENCE}  # what the orchestrator keeps in a job's folder


@dataclass(eq=False)
class _Node:
    """What has been copied from one node."""

    name: str
    logs: list[str]  # paths
    link: NodeConnection | None = None
    files: dict[str, Facts] = field(default_factory=dict)  # copied files; links have no facts
    failed: dict[str, tuple[Facts, float]] = field(default_factory=dict)  # failed files: facts and time
    fetching: Fetch | None = None
    heard: bool = False  # whether it has answered in the last round
    trouble: str = ""  # why not


class FileSync:
    """Copies the files of a job in the background while it runs."""

    def __init__(
        self, run_dir: Path, folder: str, ranks: dict[str, list[int]], connect: Callable[[str], NodeConnection | None]
    ) -> None:
        """Copy `folder` of these nodes from now on, and the logs of their ranks; earlier nodes take precedence.

        `connect` connects to a node, or returns None if the node does not run; it raises EngineError.
        """
        self.run_dir, self.folder, self.connect = run_dir, folder, connect
        self.here = Folder(run_dir.parent, run_dir.name)
        self.nodes = [_Node(name, [f"{LOGS}/rank-{rank}.log" for rank in own]) for name, own in ranks.items()]
        self.owners: dict[str, int] = {}  # path: the number of the node that it comes from
        self.owning = threading.Lock()  # held while `owners`, or a file that depends on it, is changed
        self.errors: dict[str, Exception] = {}  # path: why it could not be copied
        self.left: dict[str, str] = {}  # node: a path that cannot be copied
        self.warned: set[str] = set()  # nodes for which that was reported
        self.looks = 0  # rounds that have begun
        self.changed = threading.Condition()
        self.closing = False
        self.failure: Exception | None = None  # what has ended the thread
        self.called = 0.0  # when `catch_up` was last called
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def catch_up(self, timeout: float, stopped: Callable[[], bool] = never) -> bool:
        """Wait until everything that nodes had written before the call is copied or has failed; else False.

        Returns after `timeout` seconds at most, and once `stopped()`.
        """
        with self.changed:
            if self.failure:
                raise self.failure
            self.called = time.monotonic()
            until = self.looks + 2  # the current round may have begun before the call
            while not (done := self.looks >= until or self.closing):
                if stopped() or time.monotonic() > self.called + timeout:
                    break
                self.changed.wait(SYNC_INTERVAL)
                if self.failure:
                    raise self.failure
            return done

    def lacks_space(self) -> None:
        """Raise an OSError if the disk here was full."""
        for path, error in self.errors.copy().items():  # a copy: the thread may change it
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(error.errno, error.strerror, path)

    def come_home(self, timeout: float, stopped: Callable[[], bool] = never) -> None:
        """Copy all files; raises EngineError if some fail, which then stay on their nodes.

        At most `timeout` seconds pass, and nothing is waited for once `stopped()`.
        """
        if not self.catch_up(timeout, stopped):
            late = "stopped before all files were copied"
            raise EngineError(late if stopped() else f"not all files were copied from the nodes within {timeout:g} s")
        errors = self.errors.copy()
        for path, why in errors.items():
            raise EngineError(f"{counted(len(errors), 'file')} could not be copied, such as {shown(path)}: {why}")

    def silent(self) -> set[str]:
        """The nodes that have not answered in the last round."""
        return {node.name for node in self.nodes if not node.heard}

    def warnings(self) -> list[str]:
        """What a user must know of files that stay on their nodes, once for each node."""
        new = {node: path for node, path in self.left.copy().items() if node not in self.warned}
        self.warned |= new.keys()
        why = f"its path has more than {MAX_DEPTH} folders, or is too long here, or no text in this locale"
        return [f"{node}: not all files are copied, such as {shown(path)}: {why}" for node, path in new.items()]

    def close(self) -> None:
        """Stop copying, and wait for a short time until a running copy has ended."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        for link in [node.link for node in self.nodes]:
            if link:
                link.interrupt()
        self.thread.join(CLOSE_TIMEOUT)

    # --- the thread

    def _run(self) -> None:
        try:
            self._copy()
        except Exception as error:  # ours: whoever waits for files gets it
            log.exception("copying files has failed")
            with self.changed:
                self.failure = error
                self.changed.notify_all()
        for node in self.nodes:
            self._forget(node)

    def _copy(self) -> None:
        busy = False
        with ThreadPoolExecutor(8) as pool:
            while not self.closing:
                with self.changed:
                    if not busy:
                        self.looks += 1
                        self.changed.notify_all()
                busy = any(list(pool.map(self._visit, self.nodes)))
                if not busy:
                    with self.changed:
                        self.changed.wait_for(lambda: self.closing, SYNC_INTERVAL)

    def _visit(self, node: _Node) -> bool:
        """Copy what is new on a node; return whether there is more."""
        try:
            node.link = node.link or self.connect(node.name)
            if node.link is None or self.closing:
                return False
            have = {path: self._size(path) for path in node.logs}
            news = node.link.converse(protocol.GetChanges(self.folder, have), protocol.Changes)
            node.heard, node.trouble = True, ""
            said = [self._append(path, data) for path, data in news.logs.items() if path in have]
            self._make_way(node, {**news.files, **news.links})
            more = self._fetch(node, news.files)
            self._tidy(node, news, more)
            return more or any(said)
        except EXPECTED as error:  # no connection, or an invalid answer: the next round starts over
            if str(error) != node.trouble:
                log.debug("%s: %s", node.name, error)
            node.trouble = str(error)
            self._forget(node)
            return False

    def _forget(self, node: _Node) -> None:
        if node.link:
            node.link.close()
        if node.fetching:
            node.fetching.drop()
        node.link = node.fetching = None
        node.heard = False

    def _size(self, path: str) -> int:
        try:
            return (self.run_dir / path).stat().st_size
        except OSError:
            return 0

    def _append(self, path: str, data: str) -> bool:
        """Append new output to a log; return whether that has worked."""
        try:
            descriptor = os.open(self.run_dir / path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            with os.fdopen(descriptor, "ab") as file:
                file.write(base64.b64decode(data))
        except OSError as error:  # for example a full disk; the next round continues after a partial write
            self.errors[path] = error
            return False
        self.errors.pop(path, None)
        return True

    def _fetch(self, node: _Node, files: dict[str, Facts]) -> bool:
        """Fetch pieces of files that differ from those here, oldest first; return whether there is more."""
        wanted, now = {}, time.monotonic()
        for path in node.failed.keys() - files.keys():  # removed on the node
            del node.failed[path]
            self.errors.pop(path, None)
        for path, told in files.items():
            failed, when = node.failed.get(path, ([], 0.0))
            waits = told == failed and when > max(self.called, now - RETRY_INTERVAL)
            if told != node.files.get(path) and not waits and self._ours(node, path):
                if same(self.run_dir / path, told):  # copied by an earlier supervisor
                    node.files[path] = told
                else:
                    wanted[path] = told
        if node.fetching:
            wanted.pop(node.fetching.path, None)
        youngest_first = sorted(wanted, key=lambda path: wanted[path][1], reverse=True)
        until = time.monotonic() + MAX_TURN
        while time.monotonic() < until and not self.closing:
            if not node.fetching and not youngest_first:
                return False
            path = node.fetching.path if node.fetching else youngest_first.pop()
            try:
                node.fetching = node.fetching or Fetch(self.here, path, wanted[path])
                if not self._piece(node, node.fetching):
                    continue
                self.errors.pop(path, None)
            except ConnectionError:
                raise
            except Exception as error:  # skip this file only, and report it at the end
                if str(error) != str(self.errors.get(path)):
                    log.debug("%s of %s: %s", shown(path), node.name, error, exc_info=not isinstance(error, EXPECTED))
                node.failed[path] = files.get(path, []), time.monotonic()
                self.errors[path] = error.with_traceback(None)  # it would keep the piece in memory
            if node.fetching:
                node.fetching.drop()
            node.fetching = None
        return True

    def _piece(self, node: _Node, fetch: Fetch) -> bool:
        """Fetch the next piece of a file; return whether this attempt is over."""
        assert node.link
        piece = node.link.converse(protocol.Read(self.folder, fetch.path, fetch.offset), protocol.Piece)
        if piece.facts != fetch.told:  # changed meanwhile; the next round fetches it again
            return True
        if not fetch.take(base64.b64decode(piece.data), piece.offset):
            return False
        with self.owning:
            if self.owners.get(fetch.path) == self.nodes.index(node):  # unless an earlier node has claimed it
                fetch.keep()
                node.files[fetch.path] = fetch.told
        return True

    def _ours(self, node: _Node, path: str) -> bool:
        """Whether a file may be copied from this node: its path is safe, and no earlier node has it."""
        parts = PurePosixPath(path).parts
        harmless = parts and path == "/".join(parts) and not parts[0].startswith("/") and not {"..", "."} & set(parts)
        if not harmless or parts[0] in OWN or parts[0] == LOGS or any(map(hidden, parts)):
            return False
        if not reachable(self.here, path):
            self.left.setdefault(node.name, path)
            return False
        if any(os.path.islink(folder) for folder in list((self.run_dir / path).parents)[: len(parts) - 1]):
            return False
        number = self.nodes.index(node)
        with self.owning:
            owner = self.owners.setdefault(path, number)
            if number < owner:
                self.owners[path] = number
                self.nodes[owner].files.pop(path, None)  # copied again once no earlier node has it
            return number <= owner

    def _make_way(self, node: _Node, files: dict[str, Any]) -> None:
        """Remove a file where the node now has a folder of that name, and the files of a folder that now is a file."""
        gone = [path for path in node.files if path not in files]
        names = sorted(files) if gone else []
        for path in gone:
            first = bisect_left(names, f"{path}/")
            folder = first < len(names) and names[first].startswith(f"{path}/")
            if folder or any(str(parent) in files for parent in PurePosixPath(path).parents):
                self._remove(node, path)

    def _tidy(self, node: _Node, news: protocol.Changes, more: bool) -> None:
        """Remove what the node has removed, and have its links.

        While `more` of its files come, what they may replace stays: but only so much of it.
        """
        number, there = self.nodes.index(node), news.files.keys() | news.links.keys()
        with self.owning:
            gone = [path for path, owner in self.owners.items() if owner == number and path not in there]
            for path in gone:
                if path not in node.files:  # it was never copied
                    del self.owners[path]
        old = [path for path in gone if path in node.files]
        if more and len(old) < MAX_ENTRIES:
            return
        for path in old:
            self._remove(node, path)
        if node is self.nodes[0]:
            for path in news.gone:
                if self._ours(node, path):
                    self._remove(node, path)
        for path, target in news.links.items():
            link = self.run_dir / path
            plain = "/" not in target and target not in ("..", ".", "")
            free = os.path.islink(link) or path in node.files or not os.path.exists(link)
            if plain and free and self._ours(node, path):
                with contextlib.suppress(OSError):
                    node.files[path] = []
                    place_link(self.here, path, target)

    def _remove(self, node: _Node, path: str) -> None:
        node.files.pop(path, None)
        target = self.run_dir / path
        with self.owning, contextlib.suppress(OSError):
            if self.owners.pop(path, None) is not None:
                target.unlink(missing_ok=True)
                for folder in list(target.parents)[: len(PurePosixPath(path).parts) - 1]:
                    folder.rmdir()  # only if it is empty


def rescued(here: bytes, copy: bytes, rank: int) -> bytes:
    """What is missing at the end of a worker's log, from its node's stdout, whose lines begin with the rank.

    If the two do not overlap, only a line break, so that the mark of the next generation begins a new line: a node's
    stdout is a copy that may have gaps.
    """
    tag = f"[rank {rank}] ".encode()
    text = b"\n".join(line.removeprefix(tag) for line in copy.split(b"\n") if line.startswith(tag))
    text += b"\n" * copy.endswith(b"\n")
    known = here.rpartition(b"\n" + MARK)[2].partition(b"\n")[2] if MARK in here else here
    end = known[-OVERLAP:]
    at = text.rfind(end) if end else -1
    lacking = text[at + len(end) :] if at >= 0 else b""
    return lacking + b"\n" * (not (here + lacking).endswith(b"\n") and bool(here + lacking))
