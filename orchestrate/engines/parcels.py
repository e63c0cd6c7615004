"""Files that are sent to nodes that share no folder with us: the code, and files of earlier generations."""

from __future__ import annotations

import base64
import contextlib
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from orchestrate import records
from orchestrate.engines.ignored import kept
from orchestrate.engines.links import ANSWERS, Link
from orchestrate.engines.mirror import OWN
from orchestrate.errors import EngineError, ResourceError
from orchestrate.node.files import LOGS, PIECE, digest
from orchestrate.node.trees import hidden

MOST_CODE = 256 << 20  # bytes
NO_CODE = ("runs", "__pycache__", "node_modules")  # folders without code of the project
UNPACKS = 600.0  # seconds that a node may take to unpack an upload


def mine(home: Path) -> list[Path]:
    """The files and links that nodes have written to a job's folder, except logs."""
    found = []
    for path in home.rglob("*"):
        parts = path.relative_to(home).parts
        if (
            not any(map(hidden, parts))
            and parts[0] not in OWN
            and parts[0] != LOGS
            and (path.is_symlink() or path.is_file())
        ):
            found.append(path)
    return found


@contextlib.contextmanager
def packed(folder: Path, paths: Iterable[Path]) -> Iterator[tuple[BinaryIO, str]]:
    """Files of a folder as a tar file, and its digest; raises EngineError if they cannot be read."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            with tarfile.open(fileobj=file, mode="w") as archive:
                for path in sorted(paths):
                    archive.add(path, str(path.relative_to(folder)), recursive=False)
        except OSError as error:
            raise EngineError(f"{folder} cannot be sent to the nodes: {error}") from None
        yield file, digest(file)


def give(link: Link, folder: str, file: BinaryIO, tag: str) -> None:
    """Send a tar file that a node unpacks in a folder; `tag` is its SHA-256.

    Raises EngineError if the node fails, ConnectionError if it has gone.
    """
    size, start = os.fstat(file.fileno()).st_size, 0
    while True:
        piece, offset = base64.b64encode(os.pread(file.fileno(), PIECE, start)).decode(), start
        start += PIECE
        last = start >= size
        facts = {"folder": folder, "data": piece, "offset": offset, "tag": tag if last else ""}
        link.converse("put", patience=UNPACKS if last else ANSWERS, **facts)
        if last:
            return


def code_files(folder: Path) -> list[Path]:
    """The files of a folder of code, except hidden ones, jobs, records, venvs and what .dockerignore excludes.

    Raises UsageError if .dockerignore cannot be read, ResourceError if the files are too large.
    """
    found, size = [], 0
    secret = records.kept(folder)
    for name in kept(folder, NO_CODE):
        path, parts = folder / name, Path(name).parts
        if not path.is_file() or any(map(path.is_relative_to, secret)):
            continue
        if any(folder.joinpath(*parts[:count], "pyvenv.cfg").exists() for count in range(1, len(parts))):
            continue
        found.append(path)
        size += path.stat().st_size
        if size > MOST_CODE:
            raise ResourceError(
                f"{folder} holds more than {MOST_CODE >> 20} MB, and nodes on other hosts get a copy of it",
                "exclude what they do not need in .dockerignore; keep data on a volume or in the image",
            )
    return found
