"""Fetching of the newest complete copy from an object store into a job folder, before the job starts.

Manifests and content are untrusted: nothing is written outside of the folder or through a link, and nothing appears
under its name before all of it is verified.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TypeVar

from orchestrate.clock import SYSTEM, wait_until
from orchestrate.errors import StorageError, StorageLost
from orchestrate.files.folder import Folder
from orchestrate.node.trees import remove
from orchestrate.storage.base import Store
from orchestrate.storage.manifest import Damaged, Entry, Manifest, checked, contents, intact
from orchestrate.storage.parallel import Stopped, each

log = logging.getLogger(__name__)

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
RETRY_INTERVAL = 2.0  # seconds until a file is tried again after an outage
PATIENCE = 120.0  # seconds to try a file again; the job has not started yet, so nothing is lost if fetching fails
WITH_PROGRESS = 100.0  # seconds of an attempt that must have read something: without data, it ends earlier
Progress = Callable[[int, int], None]
T = TypeVar("T")


def never() -> bool:
    """Never stop."""
    return False


def restore(
    store: Store,
    folder: Folder,
    below: str,
    stopped: Callable[[], bool] = never,
    progress: Progress = lambda files, size: None,
    warn: Callable[[str], None] = log.warning,
) -> Manifest | None:
    """Fetch the newest manifest's files, or those of the one before if something is damaged; return which.

    `warn` gets each damage. Returns None if nothing was ever copied there; otherwise like `fetch`.
    """
    problems: list[Damaged] = []
    found = None
    for manifest in intact(store, retry(lambda: contents(store), stopped), problems):
        try:
            fetch(store, manifest, folder, below, stopped, progress)
            found = manifest
            break
        except Damaged as error:
            problems.append(Damaged(str(error), error.hint))
    return checked(store, found, problems, warn)


def fetch(
    store: Store,
    manifest: Manifest,
    folder: Folder,
    below: str,
    stopped: Callable[[], bool] = never,
    progress: Progress = lambda files, size: None,
) -> None:
    """Fetch the files of a manifest into the folder `below` of `folder`, which must be empty or not exist.

    Call it before nodes write there. Files appear all at once, with the times of the manifest and the owner of the
    folder. `progress` is called with the number of files and bytes fetched so far, from several threads.
    Raises Damaged if the content is not the manifest's, StorageError, and Stopped soon after `stopped()`.
    """
    parent, _, name = below.rpartition("/")
    work = f".{name}.fetching"
    fetched, counting = [0, 0], threading.Lock()

    def take(entry: Entry) -> None:
        retry(lambda: _fetch(store, entry, folder, work, stopped), stopped)
        with counting:
            fetched[0], fetched[1] = fetched[0] + 1, fetched[1] + entry.size
            progress(fetched[0], fetched[1])

    try:
        _discard(folder, work)
        try:
            each(take, manifest.files, stopped)
            _place(folder, work, below, manifest)
        except BaseException:
            _discard(folder, work)
            raise
    except OSError as error:
        full = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        why = "it is not empty" if full else error.strerror
        raise StorageError(f"cannot fetch {store.url} into {folder.path / below}: {why}") from error


def _fetch(store: Store, entry: Entry, folder: Folder, work: str, stopped: Callable[[], bool]) -> None:
    """Fetch one file into the hidden folder; raises Damaged, StorageError, OSError, Stopped."""
    parent, _, name = f"{work}/{entry.path}".rpartition("/")
    with folder.opened(parent, make=True) as descriptor:
        with contextlib.suppress(FileNotFoundError):  # of an earlier attempt
            os.unlink(name, dir_fd=descriptor)
        file = os.fdopen(os.open(name, NEW, 0o666, dir_fd=descriptor), "wb")
    digest, size = hashlib.sha256(), 0
    with file:
        for piece in store.read(entry.key):
            if stopped():
                raise Stopped
            size += len(piece)
            if size > entry.size:
                break
            digest.update(piece)
            file.write(piece)
        if size != entry.size or digest.hexdigest() != entry.sha256:
            raise Damaged(f"{store.url}/{entry.key} is damaged: its content differs from the manifest")
        file.flush()
        with contextlib.suppress(OverflowError):  # this file system cannot store the time
            os.utime(file.fileno(), ns=(entry.mtime_ns, entry.mtime_ns))


def retry(
    action: Callable[[], T],
    stopped: Callable[[], bool],
    lost: Callable[[StorageLost], None] = lambda error: None,
    fails: type[StorageLost] = StorageLost,
) -> T:
    """Return the result of `action`, which is tried again after an outage that `fails` with this error.

    `lost` gets each of them. Raises StorageLost after PATIENCE, and Stopped.
    """
    until = 0.0
    while True:
        began = SYSTEM.monotonic()
        try:
            return action()
        except fails as error:
            now = SYSTEM.monotonic()
            if not until or now - began > WITH_PROGRESS:
                until = now + PATIENCE
            elif now > until:
                raise
            lost(error)
        if wait_until(stopped, RETRY_INTERVAL, SYSTEM, 0.1):
            raise Stopped


def _place(folder: Folder, work: str, below: str, manifest: Manifest) -> None:
    """Give the hidden folder the owner and mode of the one it replaces, and rename it."""
    parent, _, name = below.rpartition("/")
    with folder.opened(below, make=True) as old, folder.opened(work, make=True) as new:
        status = os.fstat(old)
        os.fchmod(new, stat.S_IMODE(status.st_mode))
    folders = {path for entry in manifest.files for path in PurePosixPath(entry.path).parents}
    for path in sorted(map(str, folders)):
        with folder.opened(f"{work}/{path}" if path != "." else work) as descriptor:
            _own(descriptor, status)
    for entry in manifest.files:
        with folder.open(f"{work}/{entry.path}") as file:
            _own(file.fileno(), status)
    with folder.opened() as top, folder.opened(parent) as target:
        os.rename(work, name, src_dir_fd=top, dst_dir_fd=target)


def _own(descriptor: int, like: os.stat_result) -> None:
    with contextlib.suppress(PermissionError):  # only root may give files away
        os.fchown(descriptor, like.st_uid, like.st_gid)


def _discard(folder: Folder, work: str) -> None:
    with contextlib.suppress(FileNotFoundError), folder.opened() as top:
        os.lstat(work, dir_fd=top)
        if left := remove(top, work):
            raise OSError(errno.ENOTEMPTY, "could not remove all of it", left[0])
