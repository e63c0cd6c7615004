"""The object stores that a job uses, opened and checked; most jobs have none."""

from __future__ import annotations

from collections.abc import Callable

from orchestrate.console import during, phase, print_message
from orchestrate.errors import StorageBusy, StorageLost
from orchestrate.plan.plan import pluralize
from orchestrate.record.report import Copied
from orchestrate.spec.folders import is_url
from orchestrate.spec.sizes import format_bytes
from orchestrate.spec.spec import JobSpec


def check(spec: JobSpec) -> None:
    """Check the URLs of a job's object stores; sends no request.

    Raises UsageError, StorageError, and ResourceError if their library is missing.
    """
    if urls := list(filter(None, (spec.checkpoints, spec.output, *_data(spec)))):
        from orchestrate.storage.store import open_store  # only here: it takes time to import

        for url in urls:
            open_store(url)


def prepare(spec: JobSpec) -> None:
    """Check the stores of a job, which must answer, and fetch its data into a cache; raises like `check`."""
    check(spec)
    for url in filter(None, (spec.checkpoints, spec.output)):
        _reach(url)
    for url in _data(spec):
        _fetch(url)


def _data(spec: JobSpec) -> list[str]:
    return [url for url in spec.data.values() if is_url(url)]


def _reach(url: str) -> None:
    from orchestrate.storage.fetch import never, retry
    from orchestrate.storage.store import open_store

    with during(f"connecting to {url}"):
        retry(open_store(url).reach, never, _lost(), StorageBusy)


def _fetch(url: str) -> None:
    from orchestrate.storage.dataset import fetch
    from orchestrate.storage.store import open_store

    text = f"fetching {url}"

    def progress(files: int, size: int) -> None:
        phase(f"{text}: {pluralize(files, 'file')}, {_amount(size)}")

    with during(text):
        files, size = fetch(open_store(url), progress, _lost())
    what = f"fetched {pluralize(files, 'file')} ({_amount(size)}) of {url}"
    print_message(what if files else f"{url} has not changed")


def _lost() -> Callable[[StorageLost], None]:
    """Return a function that prints the first of the errors after which a request is tried again."""
    warned: list[StorageLost] = []

    def lost(error: StorageLost) -> None:
        if not warned:
            warned.append(error)
            print_message(f"{error}; trying again for two minutes")

    return lost


def _amount(size: int) -> str:
    return format_bytes(size) if size >= 1 << 20 else pluralize(size, "byte")


class NoCopies:
    """No object stores."""

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Fetch checkpoints before the first worker starts, unless `stopped()`, and begin to copy new ones.

        Raises StorageError.
        """

    def check(self) -> None:
        """Warn once about each problem."""

    def end(self, refused: str = "") -> list[Copied]:
        """Copy the rest, unless `refused` is why not; return the state of each copy."""
        return []

    def publish(self) -> None:
        """Copy the report and the other files of the run directory next to the output; raises OrchestrateError."""
