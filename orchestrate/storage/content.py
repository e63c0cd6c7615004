"""Reading local files that may change, or become something else, at any time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

from orchestrate.files.folder import Folder
from orchestrate.storage.parallel import Stopped
from orchestrate.storage.scan import GONE, Facts, named

PIECE = 1 << 20  # bytes per read


class Changed(Exception):
    """A file is no longer what the scan found."""


class Unreadable(Exception):
    """A file cannot be read, for example because of its mode."""


class Progress:
    """Counts what is read of files and which are copied, in a number that grows as long as copying makes progress."""

    def __init__(self) -> None:
        self.count = 0
        self._most: Mapping[str, int] | None = None
        self._read: dict[str, int] = {}  # bytes by path, in the attempt that got furthest
        self._copied: set[str] = set()
        self._changing = threading.Lock()

    def limit(self, sizes: Mapping[str, int]) -> None:
        """Count from now on only these files and their bytes, each once: something that writes on could never end."""
        with self._changing:
            if self._most is None:
                self._most = sizes

    def read(self, path: str, total: int) -> None:
        """Count the bytes of a file that were read so far."""
        with self._changing:
            if self._most is None:
                self.count += 1
            # A file is read for its digest, and then to be copied.
            elif (more := min(total, 2 * self._most.get(path, 0)) - self._read.get(path, 0)) > 0:
                self._read[path] = self._read.get(path, 0) + more
                self.count += more

    def copied(self, path: str) -> None:
        """Count a file."""
        with self._changing:
            if self._most is None:
                self.count += 1
            elif path in self._most and path not in self._copied:
                self._copied.add(path)
                self.count += 1


class Content:
    """The content of one file as a scan found it; methods raise Changed if it differs, Unreadable and Stopped."""

    def __init__(
        self,
        folder: Folder,
        path: str,
        facts: Facts,
        stopped: Callable[[], bool],
        moved: Callable[[int], None] = lambda total: None,
    ) -> None:
        """`moved` is called after each piece with the number of bytes that were read so far, by all methods."""
        self.folder, self.path, self.facts, self.stopped, self.moved = folder, path, facts, stopped, moved
        self.total = 0

    def digest(self) -> str:
        """Return the SHA-256."""
        found = hashlib.sha256()
        for piece in self.all():
            found.update(piece)
        return found.hexdigest()

    def pieces(self, sha256: str) -> Iterator[bytes]:
        """Yield the content; raises Changed instead of yielding the end if it is not the one with this SHA-256."""
        found, last = hashlib.sha256(), b""
        for piece in self.all():
            found.update(piece)
            if last:
                yield last
            last = piece
        if found.hexdigest() != sha256:
            raise Changed(f"{named(self.path)} changed while it was copied")
        yield last

    def all(self) -> Iterator[bytes]:
        """Yield the content, in pieces; raises Changed instead of yielding the end if it changes meanwhile."""
        with self._open() as file:
            left = self.facts.size
            while left and (piece := self._read(file, min(left, PIECE))):
                left -= len(piece)
                self.total += len(piece)
                self.moved(self.total)
                yield piece
            if left or Facts.of(os.fstat(file.fileno())) != self.facts:
                raise Changed(f"{named(self.path)} changed while it was copied")

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        try:
            file = self.folder.open(self.path)
        except OSError as error:
            if error.errno in GONE:
                raise Changed(f"{named(self.path)} was removed or replaced before it was copied") from None
            raise Unreadable(f"{named(self.path)} cannot be read: {error.strerror}") from None
        with file:
            # From then on, the next write to memory that is mapped to it changes its times.
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
            if Facts.of(os.fstat(file.fileno())) != self.facts:
                raise Changed(f"{named(self.path)} changed before it was copied")
            yield file

    def _read(self, file: BinaryIO, most: int) -> bytes:
        if self.stopped():
            raise Stopped
        try:
            return file.read(most)
        except OSError as error:
            raise Unreadable(f"{named(self.path)} cannot be read: {error.strerror}") from None
