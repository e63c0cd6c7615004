"""The files of nodes that share no folder with us: what they write comes home.

It is the nodes' word that names the files, and the nodes run other people's code: nothing is written outside of the
job's folder, nor over what the orchestrator itself keeps there, nor through a link.
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

OFTEN = 0.2  # seconds between two looks at the nodes
OVERLAP = 256  # bytes that are looked for
AGAIN = 5.0  # seconds until what could not come home is tried again
FULL = (errno.ENOSPC, errno.EDQUOT)
TURN = 0.5  # seconds for which a node's files are fetched before its logs have their turn
OWN = {FENCE}  # what the orchestrator keeps in a job's folder


class _Fetch:
    """A file that is on its way, under a hidden name."""

    def __init__(self, home: Path, path: str, told: Facts) -> None:
        self.path, self.told, self.target = path, told, home / path
        self.target.parent.mkdir(parents=True, exist_ok=True)
        # a name may have 255 bytes, which leave no room for more
        self.temporary = self.target.with_name(f".{hashlib.sha256(os.fsencode(path)).hexdigest()}.coming")
        self.temporary.unlink(missing_ok=True)
        self.file = self.temporary.open("xb")

    def keep(self) -> None:
        """Have it in its place, with the time of change that it has on its node, and executable where it is there."""
        self.file.close()
        if self.told[3] & 0o100:
            mode = self.temporary.stat().st_mode
            self.temporary.chmod(mode | (mode & 0o444) >> 2)
        os.utime(self.temporary, ns=(self.told[1], self.told[1]))
        self.temporary.replace(self.target)

    def drop(self) -> None:
        """Have nothing of it."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)


@dataclass(eq=False)
class _Node:
    """What has come home from one node."""

    name: str
    logs: list[str]  # paths
    link: Link | None = None
    files: dict[str, Facts] = field(default_factory=dict)  # and links, with no facts
    failed: dict[str, tuple[Facts, float]] = field(default_factory=dict)  # which could not come home as they were; when
    fetching: _Fetch | None = None
    heard: bool = False  # whether it has answered when we looked last


class Mirror:
    """Brings home the files of a job while it runs, in the background."""

    def __init__(
        self, home: Path, folder: str, ranks: dict[str, list[int]], connect: Callable[[str], Link | None]
    ) -> None:
        """Bring home `folder` of these nodes from now on, and the logs of their ranks; an earlier node's files win.

        `connect` makes a connection to a node, or none where that does not run; it raises EngineError.
        """
        self.home, self.folder, self.connect = home, folder, connect
        self.nodes = [_Node(name, [f"{LOGS}/rank-{rank}.log" for rank in own]) for name, own in ranks.items()]
        self.owners: dict[str, int] = {}  # path: the number of the node that it comes from
        self.owning = threading.Lock()  # while that changes, or a file by it
        self.errors: dict[str, Exception] = {}  # path: why it is not here
        self.looks = 0  # at all nodes, that have begun
        self.changed = threading.Condition()
        self.closing = False
        self.called = 0.0  # when somebody last asked for all that there is
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def catch_up(self, timeout: float, stopped: Callable[[], bool] = never) -> bool:
        """Return when all that nodes have written before the call is here, or cannot be had; else False.

        At most `timeout` seconds pass, and nothing is waited for once `stopped()`.
        """
        with self.changed:
            self.called = time.monotonic()
            until = self.looks + 2  # the look that goes on may have begun before the call
            while not (done := self.looks >= until or self.closing):
                if stopped() or time.monotonic() > self.called + timeout:
                    break
                self.changed.wait(OFTEN)
            return done

    def lacks_space(self) -> None:
        """Raise an OSError where the disk at home was full."""
        for path, error in self.errors.copy().items():  # which the thread goes on with
            if isinstance(error, OSError) and error.errno in FULL:
                raise OSError(error.errno, error.strerror, path)

    def come_home(self, timeout: float) -> None:
        """Have all files here; raises EngineError where some cannot be, which then stay on their nodes."""
        if not self.catch_up(timeout):
            raise EngineError(f"not all files came home within {timeout:g} s")
        errors = self.errors.copy()
        for path, why in errors.items():
            raise EngineError(f"{counted(len(errors), 'file')} did not come home, such as {path}: {why}")

    def silent(self) -> set[str]:
        """The nodes that have not answered when we looked last."""
        return {node.name for node in self.nodes if not node.heard}

    def close(self) -> None:
        """Bring home no more."""
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
        """Bring home what is new on a node; whether there is more."""
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
            if not more:  # what has taken the place of others is here
                self._tidy(node, news)
            return more or any(said)
        except Exception:  # the node has gone, or talks nonsense: the next look, if there is one, begins anew
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
        """Have what is new in a log; whether that has worked."""
        try:
            descriptor = os.open(self.home / path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            with os.fdopen(descriptor, "ab") as file:
                file.write(base64.b64decode(data))
        except OSError as error:  # the disk is full, say; half of a piece is gone on with
            self.errors[path] = error
            return False
        self.errors.pop(path, None)
        return True

    def _fetch(self, node: _Node, files: dict[str, Facts]) -> bool:
        """Some pieces of the files that differ from what is here, the oldest first; whether there is more."""
        wanted, now = {}, time.monotonic()
        for path in node.failed.keys() - files.keys():  # it is not there any more
            del node.failed[path]
            self.errors.pop(path, None)
        for path, told in files.items():
            failed, when = node.failed.get(path, ([], 0.0))
            waits = told == failed and when > max(self.called, now - AGAIN)
            if told != node.files.get(path) and not waits and self._ours(node, path):
                if _same(self.home / path, told):  # brought by an earlier supervisor
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
            except (OSError, EngineError) as error:  # this one cannot be had; others may
                node.failed[path] = files.get(path, []), time.monotonic()
                self.errors[path] = error
            if node.fetching:
                node.fetching.drop()
            node.fetching = None
        return True

    def _piece(self, node: _Node, fetch: _Fetch) -> bool:
        """Fetch the next piece of a file; whether there is no more to come."""
        assert node.link
        piece = node.link.converse("read", folder=self.folder, path=fetch.path, offset=fetch.file.tell())
        data = base64.b64decode(piece["data"])
        fetch.file.write(data)
        if piece["facts"] != fetch.told:  # it was changed meanwhile; the next look sees it as it is then
            return True
        if len(data) == PIECE:
            return False
        with self.owning:
            if self.owners.get(fetch.path) == self.nodes.index(node):  # and no earlier node has taken it over
                fetch.keep()
                node.files[fetch.path] = fetch.told
        return True

    def _ours(self, node: _Node, path: str) -> bool:
        """Whether a file may come home from this node: no earlier one has it, and its name does no harm."""
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
                self.nodes[owner].files.pop(path, None)  # its own comes home again once there is no other
            return number <= owner

    def _make_way(self, node: _Node, files: dict[str, Any]) -> None:
        """Remove a file where the node now has a folder of that name, and the files of a folder that now is a file."""
        for path in [path for path in node.files if path not in files]:
            if any(other.startswith(f"{path}/") for other in files) or any(
                str(folder) in files for folder in PurePosixPath(path).parents
            ):
                self._remove(node, path)

    def _tidy(self, node: _Node, news: dict[str, Any]) -> None:
        """Remove what the node has removed, and have its links."""
        number = self.nodes.index(node)
        mine = {path for path, owner in [*self.owners.items()] if owner == number}
        for path in mine - news["files"].keys() - news["links"].keys():
            if path in node.files:
                self._remove(node, path)
            else:  # it has not come home
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
                    folder.rmdir()  # if nothing else is in it


def _link(link: Path, there: str) -> None:
    """Have a link to `there`; who reads it meanwhile finds this one or the one before."""
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
    """What the end of a worker's log at home lacks, out of its node's stdout, where each line stands behind its rank.

    Where the two do not overlap, only the end of the last line, on which the next generation's mark must not follow: a
    node's stdout is a copy that may have gaps.
    """
    tag = f"[rank {rank}] ".encode()
    text = b"\n".join(line.removeprefix(tag) for line in copy.split(b"\n") if line.startswith(tag))
    text += b"\n" * copy.endswith(b"\n")
    known = home.rpartition(b"\n" + MARK)[2].partition(b"\n")[2] if MARK in home else home
    end = known[-OVERLAP:]
    at = text.rfind(end) if end else -1
    lacking = text[at + len(end) :] if at >= 0 else b""
    return lacking + b"\n" * (not (home + lacking).endswith(b"\n") and bool(home + lacking))
