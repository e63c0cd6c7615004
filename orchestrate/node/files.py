"""Files of a node that shares no folder with the orchestrator: the orchestrator uploads some and downloads others.

Bytes are encoded as base64. Holes are not sent, since a sparse file may be larger than any disk; downloaded logs have
no holes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import stat
import tarfile
import tempfile
from typing import BinaryIO

from orchestrate.node.messages.protocol import Changes, Piece, Uploaded
from orchestrate.node.trees import clear, data, opened, walk

PIECE = 1 << 19  # bytes of one message
LOGS, WORK = "logs", "work"
Facts = list[int]  # size, time of change in nanoseconds, inode, mode


class Files:
    """The state of the folders of a node."""

    def __init__(self) -> None:
        self.uploaded: dict[str, Facts] = {}  # uploaded files, by path
        self.tags: dict[str, str] = {}  # the digest of the last upload, by folder
        self.bases: dict[str, int] = {}  # by how many bytes the downloaded log is longer than the local one
        self.incoming: BinaryIO | None = None

    def upload(self, folder: str, data: str, offset: int, tag: str) -> Uploaded:
        """Unpack the next piece of a tar file; raises OSError or tarfile.TarError if it cannot be unpacked."""
        if not offset or self.incoming is None:
            if self.incoming:
                self.incoming.close()  # an upload that was not completed
            self.incoming = tempfile.TemporaryFile()  # noqa: SIM115 (the last piece closes it)
        if self.incoming.tell() != offset:
            raise OSError("a piece is missing")
        self.incoming.write(base64.b64decode(data, validate=True))
        if not tag:
            return Uploaded(self.tags)
        file, self.incoming = self.incoming, None
        if digest(file) != tag:
            file.close()
            raise OSError("the upload is damaged: its digest differs")
        os.makedirs(folder, exist_ok=True)
        with file:
            # What workers wrote in earlier generations replaces this node's, except in their working directory.
            if left := clear(folder, keep=[name for name in (LOGS, WORK) if real_folder(f"{folder}/{name}")]):
                raise OSError(f"cannot empty {folder}: {left[0]} cannot be removed")
            _unpack(file, folder)
        self.uploaded = {path: known for path, known in self.uploaded.items() if not path.startswith(f"{folder}/")}
        self.uploaded |= {f"{folder}/{path}": facts(status) for path, status in walk(folder)}
        self.tags[folder] = tag
        return Uploaded(self.tags)

    def follow(self, folder: str, rank: int, length: int) -> None:
        """Record the length of a worker's downloaded log, when the worker starts."""
        path = f"{LOGS}/rank-{rank}.log"
        here = 0
        with contextlib.suppress(OSError):
            here = os.lstat(f"{folder}/{path}").st_size
        self.bases[path] = length - here

    def changes(self, folder: str, have: dict[str, int]) -> Changes:
        """List changes in a folder; `have` is how many bytes of each log are already downloaded."""
        logs, ends, files, links = {}, {}, {}, {}
        for path in self.bases.keys() & have.keys():  # a node may have had another rank before
            with contextlib.suppress(OSError), open(opened(f"{folder}/{path}"), "rb") as file:
                start = max(0, have[path] - self.bases[path])
                offset, text = data(file, start, PIECE)
                if text:
                    self.bases[path] -= offset - start  # the downloaded log has no hole here
                    logs[path] = base64.b64encode(text).decode()
                ends[path] = max(0, os.fstat(file.fileno()).st_size + self.bases[path])
        for path, status in walk(folder):
            if self.uploaded.get(f"{folder}/{path}") == facts(status):
                continue
            if stat.S_ISLNK(status.st_mode):
                with contextlib.suppress(OSError):
                    links[path] = os.readlink(f"{folder}/{path}")
            elif not path.startswith(f"{LOGS}/"):
                files[path] = facts(status)
        uploaded = (path.removeprefix(f"{folder}/") for path in self.uploaded if path.startswith(f"{folder}/"))
        gone = [path for path in uploaded if not os.path.lexists(f"{folder}/{path}")]
        return Changes(logs, files, links, gone, ends)

    def read(self, folder: str, path: str, offset: int) -> Piece:
        """Read the next piece of a file, skipping a hole; raises OSError if it has gone or is not a regular file."""
        name = f"{folder}/{path}"
        try:
            descriptor = opened(name)
        except PermissionError:  # this user owns the file, but its mode does not allow reading
            os.chmod(name, 0o600)
            descriptor = opened(name)
        with open(descriptor, "rb") as file:
            offset, piece = data(file, offset, PIECE)
            known = facts(os.fstat(file.fileno()))
            return Piece(base64.b64encode(piece).decode(), offset, known)


def digest(file: BinaryIO) -> str:
    """The SHA-256 of a file; seeks to the start of the file afterwards."""
    found = hashlib.sha256()
    file.seek(0)
    while piece := file.read(PIECE):
        found.update(piece)
    file.seek(0)
    return found.hexdigest()


def facts(status: os.stat_result) -> Facts:
    """Facts that change when the file changes."""
    return [status.st_size, status.st_mtime_ns, status.st_ino, stat.S_IMODE(status.st_mode)]


def real_folder(path: str) -> bool:
    """Whether a path is a folder, and not a link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def _unpack(file: BinaryIO, folder: str) -> None:
    """Unpack the files, folders and links of a tar file, without set-ID bits or write permission for others."""
    with tarfile.open(fileobj=file) as archive:
        archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # since 3.9.17; rejects paths that lead out
        entries = [entry for entry in archive if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()]
        for entry in entries:
            entry.mode &= 0o755
        archive.extractall(folder, entries)
