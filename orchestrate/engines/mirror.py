"""Copies the files of nodes that share no folder with us to the job's folder here.

The names of the files are untrusted, since nodes run other people's code: nothing is written outside of the job's
folder, over the orchestrator's own files there, or through a link.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrate.engines import never
from orchestrate.engines.links import Link
from orchestrate.errors import EngineError
from orchestrate.logs import MARK
from orchestrate.node.files import LOGS, PIECE, Facts
from orchestrate.node.ranks import FENCE
from orchestrate.node.trees import hidden
from orchestrate.plan import counted

OFTEN = 0.2  # seconds between two rounds
OVERLAP = 256  # bytes at the end of a log by which it is found in the node's stdout
AGAIN = 5.0  # seconds until a failed file is tried again
FULL = (errno.ENOSPC, errno.EDQUOT)
TURN = 0.5  # seconds for which files of a node are fetched before its logs are again
OWN = {FENCE}  # files of the orchestrator in a job's folder


class _Fetch:
    """A file that is being copied, under a hidden name."""

    def __init__(self, home: Path, path: str, told: Facts) -> None:
        self.path, self.told, self.target = path, told, home / path
        self.target.parent.mkdir(parents=True, exist_ok=True)
        # not the name with a suffix, which could have more than 255 bytes
        self.temporary = self.target.with_name(f".{hashlib.sha256(os.fsencode(path)).hexdigest()}.coming")
        self.temporary.unlink(missing_ok=True)
        self.file = self.temporary.open("xb")

    def keep(self) -> None:
        """Move it to its place, with the modification time and the executable bit of the original."""
        self.file.close()
        if self.told[3] & 0o100:
            mode = self.temporary.stat().st_mode
            self.temporary.chmod(mode | (mode & 0o444) >> 2)
        os.utime(self.temporary, ns=(self.told[1], self.told[1]))
        self.temporary.replace(self.target)

    def drop(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)


@dataclass(eq=False)
class _Node:
    """What has been copied from one node."""

    name: str
    logs: list[str]  # paths
    link: Link | None = None
    files: dict[str, Facts] = field(default_factory=dict)  # copied files; links have no facts
    failed: dict[str, tuple[Facts, float]] = field(default_factory=dict)  # failed files: facts and time
    fetching: _Fetch | None = None
    heard: bool = False  # whether it has answered in the last round


class Mirror:
    """Copies the files of a job in the background while it runs."""

    def __init__(
        self, home: Path, folder: str, ranks: dict[str, list[int]], connect: Callable[[str], Link | None]
    ) -> None:
        """Copy `folder` of these nodes from now on, and the logs of their ranks; earlier nodes take precedence.

        `connect` connects to a node, or returns None if the node does not run; it raises EngineError.
        """
        self.home, self.folder, self.connect = home, folder, connect
        self.nodes = [_Node(name, [f"{LOGS}/rank-{rank}.log" for rank in own]) for name, own in ranks.items()]
        self.owners: dict[str, int] = {}  # path: the index of the node that it is copied from
        self.owning = threading.Lock()  # held while `owners`, or a file that depends on it, is changed
        self.errors: dict[str, Exception] = {}  # path: why it could not be copied
        self.looks = 0  # rounds that have begun
        self.changed = threading.Condition()
        self.closing = False
        self.called = 0.0  # when `catch_up` was last called
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def catch_up(self, timeout: float, stopped: Callable[[], bool] = never) -> bool:
        """Wait until everything that nodes had written before the call is copied or has failed; else False.

        Returns after `timeout` seconds at most, and once `stopped()`.
        """
        with self.changed:
            self.called = time.monotonic()
            until = self.looks + 2  # the current round may have begun before the call
            while not (done := self.looks >= until or self.closing):
                if stopped() or time.monotonic() > self.called + timeout:
                    break
                self.changed.wait(OFTEN)
            return done

    def lacks_space(self) -> None:
        """Raise an OSError if the disk here was full."""
        for path, error in self.errors.copy().items():  # a copy: the thread may change it
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(error.errno, error.strerror, path)

    def come_home(self, timeout: float) -> None:
        """Copy all files; raises EngineError if some fail, which then stay on their nodes."""
        if not self.catch_up(timeout):
            raise EngineError(f"not all files were copied from the nodes within {timeout:g} s")
        errors = self.errors.copy()
        for path, why in errors.items():
            raise EngineError(f"{counted(len(errors), 'file')} could not be copied, such as {path}: {why}")

    def silent(self) -> set[str]:
        """The nodes that have not answered in the last round."""
        return {node.name for node in self.nodes if not node.heard}

    def close(self) -> None:
        """Stop copying."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join()
        for node in self.nodes:
            self._forget(node)

    # --- the thread

    def _run(self) -> None:
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
                        self.changed.wait_for(lambda: self.closing, OFTEN)

    def _visit(self, node: _Node) -> bool:
        """Copy what is new on a node; return whether there is more."""
        try:
            node.link = node.link or self.connect(node.name)
            if node.link is None:
                return False
            have = {path: self._size(path) for path in node.logs}
            news = node.link.converse("news", folder=self.folder, have=have)
            node.heard = True
            said = [self._append(path, data) for path, data in news["logs"].items() if path in have]
            self._make_way(node, {**news["files"], **news["links"]})
            more = self._fetch(node, news["files"])
            if not more:  # replacements of removed files are here
                self._tidy(node, news)
            return more or any(said)
        except Exception:  # no connection, or an invalid answer: the next round starts over
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
            return (self.home / path).stat().st_size
        except OSError:
            return 0

    def _append(self, path: str, data: str) -> bool:
        """Append new output to a log; return whether that has worked."""
        try:
            descriptor = os.open(self.home / path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
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
            waits = told == failed and when > max(self.called, now - AGAIN)
            if told != node.files.get(path) and not waits and self._ours(node, path):
                if _same(self.home / path, told):  # copied by an earlier supervisor
                    node.files[path] = told
                else:
                    wanted[path] = told
        if node.fetching:
            wanted.pop(node.fetching.path, None)
        youngest_first = sorted(wanted, key=lambda path: wanted[path][1], reverse=True)
        until = time.monotonic() + TURN
        while time.monotonic() < until:
            if not node.fetching and not youngest_first:
                return False
            path = node.fetching.path if node.fetching else youngest_first.pop()
            try:
                node.fetching = node.fetching or _Fetch(self.home, path, wanted[path])
                if not self._piece(node, node.fetching):
                    continue
                self.errors.pop(path, None)
            except ConnectionError:
                raise
            except (OSError, EngineError) as error:  # skip this file only
                node.failed[path] = files.get(path, []), time.monotonic()
                self.errors[path] = error
            if node.fetching:
                node.fetching.drop()
            node.fetching = None
        return True

    def _piece(self, node: _Node, fetch: _Fetch) -> bool:
        """Fetch the next piece of a file; return whether this attempt is over."""
        assert node.link
        piece = node.link.converse("read", folder=self.folder, path=fetch.path, offset=fetch.file.tell())
        data = base64.b64decode(piece["data"])
        fetch.file.write(data)
        if piece["facts"] != fetch.told:  # changed meanwhile; the next round fetches it again
            return True
        if len(data) == PIECE:
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
        if any(folder.is_symlink() for folder in list((self.home / path).parents)[: len(parts) - 1]):
            return False
        number = self.nodes.index(node)
        with self.owning:
            owner = self.owners.setdefault(path, number)
            if number < owner:
                self.owners[path] = number
                self.nodes[owner].files.pop(path, None)  # copied again once no earlier node has it
            return number <= owner

    def _make_way(self, node: _Node, files: dict[str, Any]) -> None:
        """Remove files that are in the way of a new folder, or of a file where a folder was."""
        for path in [path for path in node.files if path not in files]:
            if any(other.startswith(f"{path}/") for other in files) or any(
                str(folder) in files for folder in PurePosixPath(path).parents
            ):
                self._remove(node, path)

    def _tidy(self, node: _Node, news: dict[str, Any]) -> None:
        """Remove what the node has removed, and create its links."""
        number = self.nodes.index(node)
        mine = {path for path, owner in [*self.owners.items()] if owner == number}
        for path in mine - news["files"].keys() - news["links"].keys():
            if path in node.files:
                self._remove(node, path)
            else:  # it was never copied
                self.owners.pop(path, None)
        if node is self.nodes[0]:
            for path in news["gone"]:
                if self._ours(node, path):
                    self._remove(node, path)
        for path, there in news["links"].items():
            link = self.home / path
            plain = "/" not in there and there not in ("..", ".", "")
            free = link.is_symlink() or path in node.files or not link.exists()
            if plain and free and self._ours(node, path):
                with contextlib.suppress(OSError):
                    node.files[path] = []
                    _link(link, there)

    def _remove(self, node: _Node, path: str) -> None:
        node.files.pop(path, None)
        target = self.home / path
        with self.owning, contextlib.suppress(OSError):
            if self.owners.pop(path, None) is not None:
                target.unlink(missing_ok=True)
                for folder in list(target.parents)[: len(PurePosixPath(path).parts) - 1]:
                    folder.rmdir()  # only if it is empty


def _link(link: Path, there: str) -> None:
    """Create a link to `there`, or replace an old one atomically."""
    if link.is_symlink() and os.readlink(link) == there:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    fresh = link.with_name(f".{hashlib.sha256(os.fsencode(link.name)).hexdigest()}.coming")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(there)
    fresh.replace(link)


def _same(path: Path, told: Facts) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return [status.st_size, status.st_mtime_ns] == told[:2]


def rescued(home: bytes, copy: bytes, rank: int) -> bytes:
    """What is missing at the end of a worker's log, from its node's stdout, whose lines begin with the rank.

    If the two do not overlap, only a line break, so that the mark of the next generation begins a new line: a node's
    stdout is a copy that may have gaps.
    """
    tag = f"[rank {rank}] ".encode()
    text = b"\n".join(line.removeprefix(tag) for line in copy.split(b"\n") if line.startswith(tag))
    text += b"\n" * copy.endswith(b"\n")
    known = home.rpartition(b"\n" + MARK)[2].partition(b"\n")[2] if MARK in home else home
    end = known[-OVERLAP:]
    at = text.rfind(end) if end else -1
    lacking = text[at + len(end) :] if at >= 0 else b""
    return lacking + b"\n" * (not (home + lacking).endswith(b"\n") and bool(home + lacking))
