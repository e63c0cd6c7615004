"""Records of the jobs and clusters that this account created, kept outside of all projects.

A run directory may have come with a project, for example by `git clone`, and a job may be able to read those of other
jobs. So commands act on a run directory only if it has a record, and only the record contains keys and secrets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pwd
import secrets as tokens
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from orchestrate.dataclass import dataclass, field
from orchestrate.errors import EngineError, UsageError
from orchestrate.files.folder import content, gone, write_whole
from orchestrate.host import private
from orchestrate.host.mountinfo import paths
from orchestrate.node.trees import FOLDER, identity

KEY = "key"  # file with the key of the account
FOREIGN = "it was moved or copied, or created by another user or on another machine"
STATE = (".local", "state", "orchestrate")  # in a home directory; XDG_STATE_HOME replaces the first two
KEPT = 7 * 86400.0  # seconds for which a record without its run directory is kept in any case
LOOKED_AT = 16  # records per new job: enough to remove old ones faster than new ones come, however many there are


@dataclass(frozen=True)
class Record:
    """The record of a job or cluster; it is valid only for the run directory with this inode."""

    run: str  # real path of the run directory
    inode: int  # without the device number, which can change at a reboot
    machine: str  # host name: several machines can share a home directory
    key: str  # hexadecimal key for connections to nodes; empty once the job has ended
    secrets: dict[str, str]  # values of env that are not in job.yaml, and contents of secret files (`file:NAME`)
    events: str  # hexadecimal key that signs the lines of events.jsonl
    files: dict[str, list[str]] = field(default_factory=dict)  # by name: digests of the version there and the next one


_inodes: dict[Path, int] = {}  # what `inode` has returned: it is asked for each file of nodes that is opened


def make(run: Path, key: bytes = b"", secrets: Mapping[str, str] | None = None) -> None:
    """Create the record of a new run directory; raises UsageError if it cannot be written.

    Also removes records whose run directories no longer exist, if they are among those that it looks at.
    """
    status = run.lstat()
    machine = socket.gethostname()
    record = Record(str(_real_path(run)), status.st_ino, machine, key.hex(), {**(secrets or {})}, tokens.token_hex(32))
    _inodes.pop(run, None)
    why = "no folder for records"
    for place in places():
        try:
            private.make(place)
            with private.opened(place) as folder:
                _prune(folder)
                return _write(record, folder)
        except OSError as error:
            why = f"{error.strerror}: {place}"
    raise UsageError(f"cannot write the record of {run}: {why}", "set XDG_STATE_HOME to a folder that you own")


def find(run: Path) -> Record | None:
    """Return the record of a run directory; None if this account did not create it."""
    found = _find(run)
    return found[1] if found else None


def place(run: Path) -> Path:
    """Return the folder that has the record of a run directory, or would have it."""
    found = _find(run)
    return found[0] if found else next(places())


def runs(name: str = "") -> list[Path]:
    """Return the run directories that this account created, in any folder; with `name`, those of that name.

    Reads all records.
    """
    found = set()
    for place in places():
        with contextlib.suppress(OSError), private.opened(place) as folder:
            for file in os.listdir(folder):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    found.add(Path(_read(file, folder).run))
    return [run for run in sorted(found) if name in ("", run.name) and find(run)]


def need(run: Path) -> Record:
    """Return the record of a run directory; raises UsageError if this account did not create it."""
    if record := find(run):
        return record
    raise UsageError(
        f"{run} has no record: {FOREIGN}",
        "if you moved or copied it, use the original path; otherwise, start the job or cluster again",
    )


def inode(run: Path) -> int:
    """Return the inode of a run directory that this account has created, whatever has its path now; 0 without one."""
    if run not in _inodes:
        for place in places():
            with contextlib.suppress(OSError, ValueError, TypeError), private.opened(place) as folder:
                _inodes[run] = _read(_file_name(_real_path(run)), folder).inode
                break
    return _inodes.get(run, 0)


def replaced(run: Path) -> bool:
    """Whether something else has the path of a run directory, such as a link that `git pull` has put there."""
    try:
        status = run.lstat()
    except OSError:
        return False
    return not stat.S_ISDIR(status.st_mode) or inode(run) not in (0, status.st_ino)


@contextlib.contextmanager
def pinned(run: Path) -> Iterator[Path]:
    """Yield a path of a run directory at which nothing else can be put, to use in a `with` block.

    Raises OSError if something else has the run directory's own path.
    """
    folder = os.open(run, FOLDER)
    try:
        if inode(run) not in (0, os.fstat(folder).st_ino):
            raise OSError(errno.ESTALE, "it was replaced by another one", str(run))
        yield Path(f"/proc/self/fd/{folder}") if sys.platform == "linux" else run
    finally:
        os.close(folder)


def put(path: Path, text: str) -> None:
    """Write a file of a run directory; raises OSError, also if that was replaced."""
    with pinned(path.parent) as run:
        write_whole(run / path.name, text)


def drop(path: Path) -> None:
    """Remove a file of a run directory, if it is there; raises OSError, also if that was replaced."""
    with pinned(path.parent) as run:
        (run / path.name).unlink(missing_ok=True)


def end(run: Path) -> None:
    """Remove the key of a job that has ended; raises OSError. The secrets stay, so that `logs` can hide them."""
    if found := _find(run):
        with private.opened(found[0]) as folder:
            _write(replace(found[1], key=""), folder)


def reopen(run: Path, key: bytes) -> None:
    """Set the key of a job that continues after its end; raises OSError, and UsageError without a record."""
    need(run)
    if found := _find(run):
        with private.opened(found[0]) as folder:
            _write(replace(found[1], key=key.hex()), folder)


def write(path: Path, text: str) -> None:
    """Write a file of a run directory, and record its digest, to detect a replacement by a project.

    Raises OSError.
    """
    if found := _find(path.parent):
        record, old = found[1], ""
        with contextlib.suppress(OSError, ValueError):
            old = content(path)
        states = [_digest(old)] if written(record, path.name, old) else []  # valid until the new file is written
        with private.opened(found[0]) as folder:
            _write(replace(record, files={**record.files, path.name: [*states, _digest(text)]}), folder)
    put(path, text)


def remove(path: Path) -> None:
    """Remove a file that `write` has written, which is not used if a project puts it back; raises OSError."""
    drop(path)
    if found := _find(path.parent):
        files = {name: digests for name, digests in found[1].files.items() if name != path.name}
        with private.opened(found[0]) as folder:
            _write(replace(found[1], files=files), folder)


def written(record: Record, name: str, text: str) -> bool:
    """Whether a file of a run directory is unchanged since it was written."""
    return _digest(text) in record.files.get(name, [])


def identity_in(run: Path, name: str) -> str:
    """Return the identity of a folder in a run directory of this account; raises OSError if that was replaced."""
    record = find(run)
    folder = os.open(run, FOLDER)
    try:
        if record is None or os.fstat(folder).st_ino != record.inode:
            raise FileNotFoundError(errno.ENOENT, "not created by this account", str(run))
        return identity(os.stat(name, dir_fd=folder, follow_symlinks=False))
    finally:
        os.close(folder)


def forget(run: Path) -> None:
    """Remove the record of a run directory, if it exists."""
    _inodes.pop(run, None)
    for place in places():
        with contextlib.suppress(OSError), private.opened(place) as folder:
            os.unlink(_file_name(_real_path(run)), dir_fd=folder)


def account_key() -> bytes:
    """Return a random key of this account, which is created once; raises UsageError if it cannot be kept."""
    for place in places():
        with contextlib.suppress(OSError):
            private.make(place)
            with private.opened(place) as folder:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(KEY, flags, 0o600, dir_fd=folder), "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # another process may be creating it
                    if found := file.read(64):
                        return found
                    file.write(new := tokens.token_hex(32).encode())
                    return new
    raise UsageError("cannot keep a key of this account", "set XDG_STATE_HOME to a folder that you own")


def places() -> Iterator[Path]:
    """Yield the folders for records, the preferred one first."""
    home = Path(os.path.expanduser("~"))  # some accounts have no home directory
    if os.path.isabs(state := os.environ.get("XDG_STATE_HOME", "")):
        yield Path(state, STATE[-1])
    if home.is_dir():
        yield home.joinpath(*STATE)
    with contextlib.suppress(EngineError):
        yield private.temporary() / "records"


def kept(code: Path) -> set[Path]:
    """Return the real paths of folders for records, of this and other accounts, that could be below `code`.

    Folders that their account does not own are ignored: links there would let other users decide what nodes see.
    """
    found = {Path(os.path.realpath(folder)) for folder in places()}
    for entry in pwd.getpwall():
        folder = Path(os.path.realpath(Path(entry.pw_dir, *STATE)))
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == entry.pw_uid:
                found.add(folder)
    temporary = Path(os.path.realpath(private.TEMPORARY))
    # Listed only if necessary: any user can create any number of them.
    if any(path.is_relative_to(code) for path in paths(temporary)):
        found.update(temporary.glob("orchestrate-*"))
    return found


def _find(run: Path) -> tuple[Path, Record] | None:
    """Return the folder of a run directory's record, and the record."""
    with contextlib.suppress(OSError):
        status = run.lstat()
        here = (str(_real_path(run)), status.st_ino)
        for place in places() if stat.S_ISDIR(status.st_mode) else ():
            with contextlib.suppress(OSError, ValueError, TypeError), private.opened(place) as folder:
                record = _read(_file_name(here[0]), folder)
                if (record.run, record.inode) == here:
                    return place, record
    return None


def _real_path(run: Path) -> Path:
    """Return the path of a run directory, with links in its parent resolved."""
    return Path(os.path.realpath(run.parent), run.name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _file_name(run: Path | str) -> str:
    return f"{hashlib.sha256(os.fsencode(run)).hexdigest()}.json"


def _read(name: str, folder: int) -> Record:
    """Read a record; raises OSError, ValueError or TypeError if the file is invalid."""
    return Record(**json.loads(content(name, folder)))


def _write(record: Record, folder: int) -> None:
    write_whole(_file_name(record.run), json.dumps(asdict(record)), folder)


def _prune(folder: int) -> None:
    """Remove the records of this machine whose run directories were removed, of some that are chosen at random.

    A directory on a disk that is away, or whose nodes may still run, is not missed before some days have passed.
    """
    names = os.listdir(folder)
    for name in tokens.SystemRandom().sample(names, min(LOOKED_AT, len(names))):
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = _read(name, folder)
            if record.machine == socket.gethostname() and gone(record.run):
                old = time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > KEPT
                if old or (not record.key and _has_content(Path(record.run).parent)):
                    os.unlink(name, dir_fd=folder)


def _has_content(path: Path) -> bool:
    """Return whether there is anything in a folder: in that of a disk that is away, there is not."""
    with os.scandir(path) as entries:
        return any(entries)
