"""Files of nodes that are copied to this machine, with fake nodes."""

import base64
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrate.clock import SYSTEM, Clock
from orchestrate.engines.swarm.sync import FileSync
from orchestrate.errors import EngineError
from orchestrate.node.files import PIECE
from orchestrate.node.messages import protocol
from support.waiting import eventually


class FakeNode:
    """A connection to a fake node that has these files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.times: dict[str, int] = {}
        self.links: dict[str, str] = {}
        self.gone: list[str] = []
        self.logs: dict[str, bytes] = {}
        self.refused: set[str] = set()
        self.requests: list[str] = []
        self.changes: dict[str, bytes] = {}  # files that are replaced while they are read
        self.closed = self.dead = False
        self.ended = threading.Event()

    def facts(self, path: str) -> list[int]:
        return [len(self.files[path]), self.times.get(path, 1), 1, 0o644]

    def converse(self, request: Any, answer: type, **_: object) -> Any:
        assert request.folder == "job"
        if self.dead:
            raise ConnectionError
        if isinstance(request, protocol.GetChanges):
            have = request.have
            files = {name: self.facts(name) for name in self.files}
            more = {log: text[have.get(log, 0) :][:10] for log, text in self.logs.items()}
            logs = {log: base64.b64encode(text).decode() for log, text in more.items() if text}
            ends = {log: len(text) for log, text in self.logs.items()}
            return protocol.Changes(logs, files, dict(self.links), list(self.gone), ends)
        path, offset = request.path, request.offset
        self.requests.append(path)
        if path in self.refused:
            raise EngineError("node error: it cannot be read")
        data = self.files[path][offset : offset + PIECE]
        if path in self.changes:
            self.files[path], self.times[path] = self.changes.pop(path), 2
        return protocol.Piece(base64.b64encode(data).decode(), offset, self.facts(path))

    def close(self) -> None:
        self.closed = True

    def interrupt(self) -> None:
        self.ended.set()


def sync_master(folder: Path, connect: Callable[[str], Any], clock: Clock = SYSTEM) -> FileSync:
    """Start to copy the files of the master, to which `connect` connects."""
    return FileSync(folder, "job", {"master": [0]}, connect, clock)


def target_of(link: Path) -> str:
    """The target of a link, which each round creates again."""

    def read() -> str:
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(link)
        return ""

    return eventually(read)
