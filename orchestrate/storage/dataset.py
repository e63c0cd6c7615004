"""Data of a job in an object store: fetched into a cache before the job starts, and again only what has changed.

Names in a store are untrusted: nothing is written outside of the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from orchestrate.errors import StorageBusy, StorageError, StorageLost
from orchestrate.files.folder import content, write_whole
from orchestrate.host import owners
from orchestrate.spec.folders import cached_data
from orchestrate.storage.base import MAX_LEVELS, Store, Version
from orchestrate.storage.fetch import Progress, never, retry
from orchestrate.storage.parallel import each

FILES = "files"  # the folder that nodes see
INDEX = "index.json"  # version of each file
PART = "fetching-"  # start of the names of files that are being fetched


def fetch(
    store: Store, progress: Progress, lost: Callable[[StorageLost], None] = lambda error: None
) -> tuple[int, int]:
    """Make the cache of a store's URL equal to the store; return the number of files and bytes that were fetched.

    `progress` is called with these numbers so far, and `lost` with each error after which a request is tried again,
    both from several threads. Raises StorageError.
    """
    folder = cached_data(store.url).parent
    try:
        with owners.filling("data", folder / "lock"):
            return _update(store, folder, progress, lost)
    except OSError as error:
        raise StorageError(f"cannot fetch {store.url} into {folder}: {error.strerror}", "set XDG_CACHE_HOME") from None


def _update(store: Store, folder: Path, progress: Progress, lost: Callable[[StorageLost], None]) -> tuple[int, int]:
    versions = retry(lambda: [*store.versions()], never, lost, StorageBusy)
    wanted = {version.key: version for version in versions if not version.key.endswith("/")}
    above = {folder for key in wanted for folder in _folders(store, key) if folder in wanted}
    for key in [key for key in above if not wanted[key].size]:
        del wanted[key]  # the marker of a folder, as the web pages of stores create it
    if not wanted:
        raise StorageError(f"{store.url} has no objects", "check the URL")
    for key in wanted:
        if not key.isprintable() or not {"", ".", ".."}.isdisjoint(key.split("/")):
            raise StorageError(f"{store.url} has the object {ascii(key[:100])}, which is not a path", "rename it")
        if key in above:
            raise StorageError(f"{store.url} has the object {ascii(key)}, and others below that name", "rename it")
    top = folder / FILES
    _make(top)
    _remove_others(folder, wanted)
    have = {key: tag for key, tag in _index(folder).items() if key in wanted and _size(top / key) == wanted[key].size}
    counts, counting = [0, 0], threading.Lock()

    def take(version: Version) -> None:
        retry(lambda: _fetch(store, version, top), never, lost)
        with counting:
            have[version.key] = version.tag
            counts[:] = counts[0] + 1, counts[1] + version.size
            progress(*counts)

    changed = [version for key, version in wanted.items() if have.get(key) != version.tag]
    try:
        each(take, changed, never)
    finally:
        with counting:
            write_whole(str(folder / INDEX), json.dumps(have))
    return counts[0], counts[1]


def _folders(store: Store, key: str) -> Iterator[str]:
    """Yield the folders that a key is in; raises StorageError if these are too many."""
    if key.count("/") > MAX_LEVELS:
        raise StorageError(f"{store.url} has an object in more than {MAX_LEVELS} folders: {key[:100]!a}", "rename it")
    return (key[: match.start()] for match in re.finditer("/", key))


def _index(folder: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, str] = json.loads(content(folder / INDEX))
        return found
    return {}


def _size(path: Path) -> int:
    """Bytes of a regular file; -1 if there is none."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG((status := path.lstat()).st_mode):
            return status.st_size
    return -1


def _remove_others(folder: Path, wanted: Collection[str]) -> None:
    """Remove files that are not in the store anymore, folders without files, and parts of an interrupted run."""
    for part in folder.glob(f"{PART}*"):
        part.unlink()
    top = folder / FILES
    for path, _, names in os.walk(top, topdown=False):
        below = path.removeprefix(str(top)).lstrip("/")
        for name in names:
            if os.path.join(below, name) not in wanted:
                os.unlink(os.path.join(path, name))
        if below:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)


def _make(folder: Path) -> None:
    """Create a folder and missing parents that nodes of another user can enter, whatever the umask."""
    if not folder.is_dir():
        _make(folder.parent)
        with contextlib.suppress(FileExistsError):  # by another thread
            folder.mkdir()
        folder.chmod(0o755)


def _fetch(store: Store, version: Version, top: Path) -> None:
    """Fetch one file; a job that reads an earlier version keeps that. Raises StorageError if its size is another."""
    target, left = top / version.key, version.size
    _make(target.parent)
    fresh = top.parent / f"{PART}{threading.get_ident()}"
    try:
        with open(fresh, "wb") as file:
            for piece in store.read(version.key):
                left -= len(piece)
                if left < 0:
                    break
                file.write(piece)
        if left:
            raise StorageError(f"{store.url}/{version.key} changed while it was fetched", "start the job again")
        fresh.chmod(0o644)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
