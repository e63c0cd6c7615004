"""The folders that this account has mounted writable in nodes, in any job: links in them may be a job's.

They are kept where the records are, one file each, since a link stays when its job is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.files.folder import content, unlinked, visited, write_whole
from orchestrate.files.paths import runs_around
from orchestrate.host import private, records
from orchestrate.node.trees import identity

FOLDER = "writable"


def found(path: Path) -> str:
    """Return the identity of a file or folder, given by its real path; raises UsageError if it or the way is gone."""
    try:
        return identity(unlinked(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be mounted: {error.strerror}", "check the path") from None


def note(folders: Iterable[Path]) -> None:
    """Remember folders, given by their real paths, by path and identity; raises UsageError if that is not possible."""
    for path in folders:
        text = f"{found(path)} {path}"
        name = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        for place in records.places():
            with contextlib.suppress(OSError):
                private.make(place / FOLDER)
                with private.opened(place / FOLDER) as folder:
                    write_whole(name, text, folder)
                    break
        else:
            raise UsageError(f"cannot keep a record of {path}", "set XDG_STATE_HOME to a folder that you own")


def known() -> Iterator[tuple[Path, str, Path]]:
    """Yield the path of each folder, the identity by which it is found if you have renamed it, and its record."""
    for place in records.places():
        with contextlib.suppress(OSError), private.opened(place / FOLDER) as folder:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError, ValueError):
                    there, _, path = content(name, folder).partition(" ")
                    yield Path(path), there, place / FOLDER / name


def resolved(text: str, fixed: bool = False) -> Path:
    """Return what a path leads to; raises UsageError if a link on the way may be one that a job has made.

    With `fixed`, also if a job could put something else in its place until it is used.
    """
    try:
        *way, end = visited(Path(text))
    except OSError as error:
        raise UsageError(f"{text}: {error.strerror}", "check the path") from None
    paths, renamed = dict[Path, Path](), dict[str, Path]()
    for path, there, record in known():
        paths[path] = renamed[there] = record
    for step in way:
        if os.path.lexists(step) and (there := identity(step.lstat())) in renamed:
            paths[step] = renamed[there]
    for folder in [*paths, *runs_around(way)]:
        if any(folder in step.parents for step in way) and not end.is_relative_to(folder):
            why = f"{text} leads to {end}, out of {folder}, where a job may have made the link"
            raise UsageError(why, f"name {end}, if that is what you mean")
        if fixed and folder in end.parents:
            why = f"{text} is in {folder}, where a job could put another folder in its place"
            forget = f"; if no job can write there anymore: rm {paths[folder]}" if folder in paths else ""
            raise UsageError(why, f"use one that is not below a folder that jobs can write{forget}")
    return end
