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
from orchestrate.files import private, records
from orchestrate.files.folder import content, unlinked, visited, write_whole
from orchestrate.files.paths import runs_around
from orchestrate.node.trees import identity

FOLDER = "writable"


def note(folders: Iterable[Path]) -> None:
    """Remember folders, given by their real paths, by path and identity; raises UsageError if that is not possible."""
    for path in folders:
        text = f"{identity(unlinked(path))} {path}"
        name = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        for place in records.places():
            with contextlib.suppress(OSError):
                private.make(place / FOLDER)
                with private.opened(place / FOLDER) as folder:
                    write_whole(name, text, folder)
                    break
        else:
            raise UsageError(f"cannot keep a record of {path}", "set XDG_STATE_HOME to a folder that you own")


def known() -> Iterator[tuple[str, Path]]:
    """Yield the identity that each folder had, by which it is found if you have renamed it, and its path."""
    for place in records.places():
        with contextlib.suppress(OSError), private.opened(place / FOLDER) as folder:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError, ValueError):
                    there, _, path = content(name, folder).partition(" ")
                    yield there, Path(path)


def resolved(text: str, fixed: bool = False) -> Path:
    """Return what a path leads to; raises UsageError if a link on the way may be one that a job has made.

    With `fixed`, also if a job could put something else in its place until it is used.
    """
    *way, found = visited(Path(text))
    earlier = [*known()]
    renamed = {there for there, _ in earlier}
    jobs = {path for _, path in earlier} | runs_around(way)
    jobs |= {step for step in way if os.path.lexists(step) and identity(step.lstat()) in renamed}
    for folder in jobs:
        if any(folder in step.parents for step in way) and not found.is_relative_to(folder):
            why = f"{text} leads to {found}, out of {folder}, where a job may have made the link"
            raise UsageError(why, f"name {found}, if that is what you mean")
        if fixed and folder in found.parents:
            why = f"{text} is in {folder}, where a job could put another folder in its place"
            raise UsageError(why, "use one that is not below a folder that jobs can write")
    return found
