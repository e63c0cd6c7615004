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
from orchestrate.files.folder import content, write_whole

FOLDER = "writable"


def note(folders: Iterable[Path]) -> None:
    """Remember folders, given by their real paths; raises UsageError if that is not possible."""
    for path in folders:
        name = hashlib.sha256(os.fsencode(path)).hexdigest()
        for place in records.places():
            with contextlib.suppress(OSError):
                private.make(place / FOLDER)
                with private.opened(place / FOLDER) as folder:
                    write_whole(name, str(path), folder)
                    break
        else:
            raise UsageError(f"cannot keep a record of {path}", "set XDG_STATE_HOME to a folder that you own")


def known() -> Iterator[Path]:
    """Yield all folders."""
    for place in records.places():
        with contextlib.suppress(OSError), private.opened(place / FOLDER) as folder:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError, ValueError):
                    yield Path(content(name, folder))
