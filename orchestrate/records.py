"""Records: what this user's account knows of the jobs and clusters that it has made, outside of every project.

All that is in a run directory can have come with a project, by `git clone` say, and a job may read what is in another
one. So a run directory is acted on only if there is a record of it, and keys and secrets are in the record alone.
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

from orchestrate import private
from orchestrate.errors import EngineError, UsageError
from orchestrate.folder import content, write_whole
from orchestrate.node.trees import FOLDER

STATE = (".local", "state", "orchestrate")  # of a home folder; XDG_STATE_HOME names another place for the first two


@dataclass(frozen=True)
class Record:
    """One job or cluster; it is that of a run directory only while the directory is the very one that was made."""

    run: str  # its run directory, by its real path
    inode: int  # without the device, which can have another number after a reboot
    machine: str  # by its name; several can share a home folder
    key: str  # what both sides of a connection to a node know, and no worker, in hexadecimal; empty once it has ended
    secrets: dict[str, str]  # the values of env that job.yaml does not have
    events: str  # the key of events.jsonl, in hexadecimal
    files: dict[str, list[str]] = field(default_factory=dict)  # digests of the last two states of files, by name


def make(run: Path, key: bytes = b"", secrets: Mapping[str, str] | None = None) -> None:
    """Make the record of a run directory that was just made; raises UsageError where no place takes one.

    Records whose run directories have gone are removed.
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
    """The record of a run directory; None where this account has not made that very directory."""
    found = _look(run)
    return found[1] if found else None


def need(run: Path) -> Record:
    """The record of a run directory; raises UsageError where this account has not made that very directory."""
    if record := find(run):
        return record
    raise UsageError(
        f"{run} was not made on this machine by you",
        "if you have moved or copied it, use it where it was made; otherwise, start the job or the cluster again",
    )


def end(run: Path) -> None:
    """Drop the key of a job that has ended; raises OSError. Its secrets stay: `logs` shows `***` in their place."""
    if found := _look(run):
        with private.opened(found[0]) as folder:
            _write(replace(found[1], key=""), folder)


def write(path: Path, text: str) -> None:
    """Write a file of a run directory whole, and note what it is: a project could bring another one in its place.

    Raises OSError.
    """
    if found := _look(path.parent):
        record, digest = found[1], _digest(text)
        states = [*record.files.get(path.name, [])[-1:], digest]  # until it is written, the earlier state is there
        with private.opened(found[0]) as folder:
            _write(replace(record, files={**record.files, path.name: states}), folder)
    write_whole(path, text)


def written(record: Record, name: str, text: str) -> bool:
    """Whether a file of a run directory is as we have written it."""
    return _digest(text) in record.files.get(name, [])


def inode_in(run: Path, name: str) -> int:
    """The inode of a folder in a run directory that this account has made; raises OSError where that is another one."""
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
    """The folders that records may be in, the preferred one first."""
    home = Path(os.path.expanduser("~"))  # which some accounts do not have
    if os.path.isabs(state := os.environ.get("XDG_STATE_HOME", "")):
        yield Path(state, STATE[-1])
    if home.is_dir():
        yield home.joinpath(*STATE)
    with contextlib.suppress(EngineError):
        yield private.temporary() / "records"


def kept() -> set[Path]:
    """The real paths of all folders of records, this account's and those of others, which no node is to see."""
    homes = {entry.pw_dir for entry in pwd.getpwall()}
    theirs = (*(Path(home, *STATE) for home in homes), *private.TEMPORARY.glob("orchestrate-*"))
    return {Path(os.path.realpath(folder)) for folder in (*places(), *theirs)}


def _look(run: Path) -> tuple[Path, Record] | None:
    """The record of a run directory, and the folder that it is in."""
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
    """The path of a run directory without links on the way to it."""
    return Path(os.path.realpath(run.parent), run.name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _name(run: Path | str) -> str:
    return f"{hashlib.sha256(os.fsencode(run)).hexdigest()}.json"


def _read(name: str, folder: int) -> Record:
    """A record; raises OSError, ValueError or TypeError for a file that is none."""
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
