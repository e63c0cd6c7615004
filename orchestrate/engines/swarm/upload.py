"""Uploads to nodes on other machines: the code, and files of earlier generations."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from orchestrate.engines.base import never
from orchestrate.engines.connection import ANSWER_TIMEOUT, NodeConnection, one_at_a_time
from orchestrate.engines.docker.ignored import kept
from orchestrate.engines.docker.mounts import check_code_folder
from orchestrate.engines.swarm.sync import OWN
from orchestrate.errors import EngineError, EngineLost, ResourceError
from orchestrate.files.folder import ROOT
from orchestrate.files.work import VENV
from orchestrate.host import records
from orchestrate.host.mountinfo import paths
from orchestrate.node.files import LOGS, PIECE, digest
from orchestrate.node.messages import protocol
from orchestrate.node.trees import data, hidden

MAX_CODE = 256 << 20  # bytes
NO_CODE = ("runs", "__pycache__", "node_modules")  # folders without project code
MAX_PARTS = 100_000  # parts of a file with holes; their list is kept in memory
UNPACK_TIMEOUT = 600.0  # seconds for a node to unpack an upload


def written_files(folder: Path) -> list[Path]:
    """Return the files and links that nodes have written to a job folder, except logs."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if (
            not any(map(hidden, parts))
            and parts[0] not in OWN
            and parts[0] != LOGS
            and (path.is_symlink() or path.is_file())
        ):
            found.append(path)
    return found


@contextlib.contextmanager
def packed(
    folder: Path, paths: Iterable[Path], run: Path, stopped: Callable[[], bool] = never
) -> Iterator[tuple[BinaryIO, str]]:
    """Pack files of a folder into a tar file and yield it with its digest; raises ResourceError if that fails.

    Raises EngineError once `stopped()`. The tar file is on the disk of the run directory `run`, which is most likely to
    have enough space.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=run))
            with tarfile.open(fileobj=file, mode="w") as archive:
                for path in sorted(paths):
                    if stopped():
                        raise EngineError("the files are not sent: the job ends")
                    _add(archive, path, str(path.relative_to(folder)), run)
                    archive.members.clear()  # type: ignore[attr-defined]  # it keeps facts of each
            file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing writes buffered data to a disk that is full
                stack.close()
            raise ResourceError(f"cannot send {folder} to the nodes: {error}", f"check free space: df {run}") from None
        yield file, digest(file)


def _add(archive: tarfile.TarFile, path: Path, name: str, run: Path) -> None:
    """Add a file or link; raises OSError.

    Of a file with holes only the parts are added, in format 0.1 of GNU tar, which tarfile unpacks.
    """
    entry = archive.gettarinfo(path, name)
    if not entry.isreg():
        return archive.addfile(entry)
    with ROOT.open(str(path)) as file:
        if entry.size <= os.fstat(file.fileno()).st_blocks * 512:
            return archive.addfile(entry, file)
        with tempfile.TemporaryFile(dir=run) as dense:
            parts = _parts(file, dense, entry.size)
            if len(parts) > MAX_PARTS:
                raise OSError(f"{name} has more than {MAX_PARTS} parts between holes")
            numbers = ",".join(f"{offset},{length}" for offset, length in [*parts, (entry.size, 0)])
            entry.pax_headers = {"GNU.sparse.size": str(entry.size), "GNU.sparse.map": numbers}
            entry.size = dense.tell()
            dense.seek(0)
            archive.addfile(entry, dense)


def _parts(file: BinaryIO, dense: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Copy the first `size` bytes of a file without its holes; return offset and length of each part.

    These are at most one more than can be sent.
    """
    found: list[tuple[int, int]] = []
    end = 0
    while len(found) <= MAX_PARTS:
        start, piece = data(file, end, PIECE)
        piece = piece[: max(0, size - start)]  # the file may have grown
        if not piece:
            break
        dense.write(piece)
        follows = found and start == end
        begin = found.pop()[0] if follows else start
        end = start + len(piece)
        found.append((begin, end - begin))
    return found


def send_archive(
    link: NodeConnection, folder: str, file: BinaryIO, tag: str, stopped: Callable[[], bool] = never
) -> None:
    """Send a tar file for a node to unpack in a folder; `tag` is its SHA-256.

    Raises EngineError if the node fails, ConnectionError if it is gone, and soon after `stopped()`.
    """
    size, start = os.fstat(file.fileno()).st_size, 0
    while True:
        piece, offset = base64.b64encode(os.pread(file.fileno(), PIECE, start)).decode(), start
        start += PIECE
        last = start >= size
        request = protocol.Upload(folder, piece, offset, tag if last else "")
        link.converse(request, protocol.Uploaded, UNPACK_TIMEOUT if last else ANSWER_TIMEOUT, stopped)
        if last:
            return


def has_archive(link: NodeConnection, folder: str, tag: str) -> bool:
    """Whether the last archive that a node has unpacked in a folder is the one with this tag."""
    return link.converse(protocol.GetStatus(), protocol.Status).tags.get(folder) == tag


def send_written(
    here: Path,
    folder: str,
    scratch: Path,
    each: Callable[[Callable[[NodeConnection], None]], object],
    stopped: Callable[[], bool],
) -> None:
    """Send a job's files from `here` to its `folder` on each node, unless the node has all of them.

    `each` calls a function with a connection to each node; `scratch` is for an archive.
    """
    files = written_files(here)
    if not files:
        return
    facts = {str(path.relative_to(here)): path.stat() for path in files if not path.is_symlink()}
    wanted = {path: [status.st_size, status.st_mtime_ns] for path, status in facts.items()}
    large = threading.RLock()
    with packed(here, files, scratch, stopped) as (file, digest):

        def has_all(link: NodeConnection) -> bool:
            """Whether the node has these files and no others: it wrote all of them."""
            with contextlib.ExitStack() as held:
                admit = one_at_a_time(large, held)
                there = link.converse(protocol.GetChanges(folder, {}), protocol.Changes, admit=admit).files
                return {path: facts[:2] for path, facts in there.items()} == wanted

        def act(link: NodeConnection) -> None:
            if not has_all(link) and not has_archive(link, folder, digest):
                send_archive(link, folder, file, digest, stopped)

        each(act)


def on_each(
    nodes: Iterable[str], reach: Callable[[str], NodeConnection], act: Callable[[NodeConnection], None]
) -> dict[str, EngineError]:
    """Call `act` with a new connection to each node, in parallel; return the errors by node.

    Raises EngineLost.
    """

    def visit(node: str) -> EngineError | None:
        try:
            with contextlib.closing(reach(node)) as link:
                act(link)
        except EngineLost:
            raise
        except (EngineError, OSError) as error:
            return error if isinstance(error, EngineError) else EngineError(f"cannot send files to {node}: {error}")
        return None

    with ThreadPoolExecutor(8) as pool:
        nodes = list(nodes)
        return {node: error for node, error in zip(nodes, pool.map(visit, nodes)) if error}


def code_files(folder: Path, runs: Path) -> list[Path]:
    """Return the files of a code folder, except hidden ones, jobs, records, venvs and files excluded by .dockerignore.

    `runs` is the folder of all jobs. Raises UsageError if that is the code folder, or .dockerignore cannot be read, and
    ResourceError if the files are too large.
    """

    @functools.cache
    def closed(parts: tuple[str, ...]) -> bool:
        """Whether a folder is, or is in, a virtual environment."""
        if not parts:
            return False
        names: list[str] = []
        with contextlib.suppress(OSError):  # it has been removed meanwhile
            names = os.listdir(folder.joinpath(*parts))
        return VENV in names or closed(parts[:-1])

    check_code_folder(folder, runs)
    found, size = [], 0
    secret = {*paths(*records.kept(folder), runs)}
    outside = {str(path.relative_to(folder)) for path in secret if path.is_relative_to(folder)}
    for name in kept(folder, NO_CODE, outside):
        path = folder / name
        if not os.path.isfile(path) or closed(Path(name).parts[:-1]):
            continue
        found.append(path)
        size += path.stat().st_size
        if size > MAX_CODE:
            raise ResourceError(
                f"{folder} has more than {MAX_CODE >> 20} MB, the limit for copies to other hosts",
                "exclude unneeded files in .dockerignore; keep data on a volume or in the image",
            )
    return found
