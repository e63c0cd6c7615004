"""What nodes that share no folder with us are sent: the code, and what earlier generations have written."""

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
NO_CODE = ("runs", "__pycache__", "node_modules")  # folders that hold none of a project's code
UNPACKS = 600.0  # seconds that a node may take to unpack what it got


def mine(home: Path) -> list[Path]:
    """What nodes have written in a job's folder, but for logs: files and links."""
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
    """Files of a folder as a tar file, and its digest; raises EngineError where they cannot be read."""
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
    """Have a node unpack a tar file in a folder; `tag` is its SHA-256.

    Raises EngineError where the node cannot, ConnectionError where it has gone.
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
    """The files of a folder of code: all but hidden ones, jobs, their records, venvs and what .dockerignore names.

    Raises UsageError where .dockerignore cannot be read, ResourceError where they are too large to be sent about.
    """
    found, size = [], 0
    secret = records.kept()
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
                "name in .dockerignore what they do not need; data belongs on a volume or in the image",
            )
    return found
