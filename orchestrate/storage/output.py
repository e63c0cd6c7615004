"""Copying all files of a job to an object store once it has ended, under their own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from orchestrate.errors import StorageError, StorageLost, StorageRefused
from orchestrate.files.folder import Folder
from orchestrate.node.ranks import FENCE
from orchestrate.storage.base import PART, Store
from orchestrate.storage.content import Content, Progress
from orchestrate.storage.parallel import each
from orchestrate.storage.scan import Facts, named, scan

RECORD = "orchestrate"  # folder in the output with the report, the events and other files of the run directory
MAX_FAILURES = 10  # files that the store refuses until the others are not tried


def upload(
    store: Store, folder: Folder, prefix: str, done: set[str], stopped: Callable[[], bool], progress: Progress
) -> dict[str, str]:
    """Copy the files of a folder, which nothing writes anymore, to keys `prefix/PATH`; return what is skipped, and why.

    Adds the paths that are copied to `done`, and leaves out those that are in it, so that a call can continue another;
    `progress` counts them.
    Raises StorageError once the other files are copied, StorageRefused at once, OSError, and Stopped soon after
    `stopped()`.
    """
    found = scan(folder, "")
    found.files.pop(FENCE, None)
    for path in [*found.files]:
        if not path.isprintable():  # no key of a store may contain it
            found.skipped[named(path)] = "its name has characters that cannot be printed"
        elif path.partition("/")[0] == RECORD:
            found.skipped[named(path)] = "its name is that of the record of the job"
        else:
            continue
        del found.files[path]
    refused: list[StorageError] = []
    progress.limit({path: facts.size for path, facts in found.files.items()})

    def take(path: str) -> None:
        content = Content(folder, path, found.files[path], stopped, partial(progress.read, path))
        try:
            _put(store, f"{prefix}/{path}", content.facts, content.all())
        except StorageLost:
            raise
        except StorageError as error:
            refused.append(error)
            if len(refused) > MAX_FAILURES:
                raise StorageRefused(str(error), error.hint) from None
        else:
            done.add(path)
            progress.copied(path)

    each(take, [path for path in sorted(found.files) if path not in done], stopped)
    if refused:
        raise refused[0]
    return found.skipped


def _put(store: Store, key: str, facts: Facts, pieces: Iterator[bytes]) -> None:
    if facts.size <= PART:
        store.put(key, b"".join(pieces))
    else:
        store.put_stream(key, facts.size, pieces)
