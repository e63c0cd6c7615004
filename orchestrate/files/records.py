"""Records of the jobs and clusters that this account has made, kept outside of every project.

A run directory can have come with a project, through `git clone` for example, and a job may be able to read those of
other jobs. So commands act on a run directory only if it has a record, and only the record has keys and secrets.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pwd
import secrets as tokens
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from orchestrate.errors import EngineError, UsageError
from orchestrate.files import private
from orchestrate.files.folder import content, write_whole
from orchestrate.files.mountinfo import paths
from orchestrate.node.trees import FOLDER

FOREIGN = "it was moved or copied, or made by another user, on another machine or by an older version of orchestrate"
STATE = (".local", "state", "orchestrate")  # of a home folder; XDG_STATE_HOME names another place for the first two


@dataclass(frozen=True)
class Record:
    """The record of a job or cluster; it is valid only for the run directory with this inode."""

    run: str  # the real path of its run directory
    inode: int  # without the device number, which can change at a reboot
    machine: str  # host name: several machines can share a home folder
    key: str  # the key for connections to its nodes, in hexadecimal digits; empty once it has ended
    secrets: dict[str, str]  # values of env that are left out of job.yaml
    events: str  # the key that signs the lines of events.jsonl, in hexadecimal digits
    files: dict[str, list[str]] = field(default_factory=dict)  # name of a file: digests of its last two versions


def make(run: Path, key: bytes = b"", secrets: Mapping[str, str] | None = None) -> None:
    """Create the record of a new run directory; raises UsageError if no folder for records can be written.

    Also removes records whose run directories have gone.
    """
    status = run.lstat()
    machine = socket.gethostname()
    record = Record(str(_real(run)), status.st_ino, machine, key.hex(), {**(secrets or {})}, tokens.token_hex(32))
    why = "no folder for it"
    for place in places():
        try:
            private.make(place)
            with private.opened(place) as folder:
                _prune(folder)
                return _write(record, folder)
        except OSError as error:
            why = f"{error.strerror}: {place}"
    raise UsageError(f"no record of {run} can be kept: {why}", "set XDG_STATE_HOME to a folder of yours")


def find(run: Path) -> Record | None:
    """The record of a run directory; None if this account has not made that directory."""
    found = _look(run)
    return found[1] if found else None


def need(run: Path) -> Record:
    """The record of a run directory; raises UsageError if this account has not made that directory."""
    if record := find(run):
        return record
    raise UsageError(
        f"{run} has no record: {FOREIGN}",
        "if you have moved or copied it, use it where it was made; otherwise, start the job or the cluster again",
    )


def end(run: Path) -> None:
    """Remove the key of a job that has ended; raises OSError. The secrets stay, so that `logs` can hide them."""
    if found := _look(run):
        with private.opened(found[0]) as folder:
            _write(replace(found[1], key=""), folder)


def write(path: Path, text: str) -> None:
    """Write a file of a run directory, and record its digest: a project could bring another file in its place.

    Raises OSError.
    """
    if found := _look(path.parent):
        record, digest = found[1], _digest(text)
        states = [*record.files.get(path.name, [])[-1:], digest]  # valid until the new file is written
        with private.opened(found[0]) as folder:
            _write(replace(record, files={**record.files, path.name: states}), folder)
    write_whole(path, text)


def written(record: Record, name: str, text: str) -> bool:
    """Whether a file of a run directory is unchanged since we have written it."""
    return _digest(text) in record.files.get(name, [])


def inode_in(run: Path, name: str) -> int:
    """The inode of a folder in a run directory of this account; raises OSError if that was replaced."""
    record = find(run)
    folder = os.open(run, FOLDER)
    try:
        if record is None or os.fstat(folder).st_ino != record.inode:
            raise FileNotFoundError(errno.ENOENT, "not made by this account", str(run))
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    finally:
        os.close(folder)


def forget(run: Path) -> None:
    """Remove the record of a run directory, if there is one."""
    for place in places():
        with contextlib.suppress(OSError), private.opened(place) as folder:
            os.unlink(_name(_real(run)), dir_fd=folder)


def places() -> Iterator[Path]:
    """The folders for records, the preferred one first."""
    home = Path(os.path.expanduser("~"))  # some accounts have no home folder
    if os.path.isabs(state := os.environ.get("XDG_STATE_HOME", "")):
        yield Path(state, STATE[-1])
    if home.is_dir():
        yield home.joinpath(*STATE)
    with contextlib.suppress(EngineError):
        yield private.temporary() / "records"


def kept(code: Path) -> set[Path]:
    """The real paths of folders for records, of this account and of others, that could be below `code`.

    Folders that are not their account's own do not count: by a link, other users would decide what nodes see.
    """
    found = {Path(os.path.realpath(folder)) for folder in places()}
    for entry in pwd.getpwall():
        folder = Path(os.path.realpath(Path(entry.pw_dir, *STATE)))
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == entry.pw_uid:
                found.add(folder)
    temporary = Path(os.path.realpath(private.TEMPORARY))
    # They are listed only if need be: any user can make any number of them.
    if any(path.is_relative_to(code) for path in paths(temporary)):
        found.update(temporary.glob("orchestrate-*"))
    return found


def _look(run: Path) -> tuple[Path, Record] | None:
    """The record of a run directory, and the folder of that record."""
    with contextlib.suppress(OSError):
        status = run.lstat()
        here = (str(_real(run)), status.st_ino)
        for place in places() if stat.S_ISDIR(status.st_mode) else ():
            with contextlib.suppress(OSError, ValueError, TypeError), private.opened(place) as folder:
                record = _read(_name(here[0]), folder)
                if (record.run, record.inode) == here:
                    return place, record
    return None


def _real(run: Path) -> Path:
    """The path of a run directory with links in its parent resolved."""
    return Path(os.path.realpath(run.parent), run.name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _name(run: Path | str) -> str:
    return f"{hashlib.sha256(os.fsencode(run)).hexdigest()}.json"


def _read(name: str, folder: int) -> Record:
    """Read a record; raises OSError, ValueError or TypeError if the file is invalid."""
    return Record(**json.loads(content(name, folder)))


def _write(record: Record, folder: int) -> None:
    write_whole(_name(record.run), json.dumps(asdict(record)), folder)


def _prune(folder: int) -> None:
    """Remove the records of this machine whose run directories have gone."""
    for name in os.listdir(folder):
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = _read(name, folder)
            if record.machine == socket.gethostname() and not os.path.lexists(record.run):
                os.unlink(name, dir_fd=folder)
