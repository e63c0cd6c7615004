"""Copies in object stores: checkpoints are fetched before a job and copied while it runs, its output at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrate.clock import Stall
from orchestrate.console import during, phase, shortened
from orchestrate.errors import OrchestrateError, StorageConflict, StorageError, StorageRefused
from orchestrate.files.folder import MAX_FILE, regular
from orchestrate.files.paths import CHECKPOINTS
from orchestrate.record import events
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder
from orchestrate.record.report import Copied
from orchestrate.spec.spec import JobSpec
from orchestrate.storage.content import Changed, Progress, Unreadable
from orchestrate.storage.fetch import restore
from orchestrate.storage.mirror import Mirror
from orchestrate.storage.output import RECORD, upload
from orchestrate.storage.parallel import Stopped, each, stoppable
from orchestrate.storage.store import open_store
from orchestrate.supervise.open_stores import NoCopies

NO_PROGRESS = 120.0  # seconds without progress at the end of a job until copying is given up
RETRY_INTERVAL = 2.0  # seconds until a failed copy of output is tried again
POLL_INTERVAL = 0.05  # seconds
MAX_WARNINGS, MAX_WARNING = 20, 500  # different ones, and characters of each: a job can name files in them


@dataclass
class StoreCopies(NoCopies):
    """One or two object stores."""

    spec: JobSpec
    paths: JobPaths
    stops: Callable[[], int]  # number of stop requests so far
    emit: Recorder
    mirror: Mirror | None = None
    warned: set[str] = field(default_factory=set)
    copying: tuple[Progress, Callable[[], bool]] | None = None  # of the output: what is copied, and whether to stop

    def begin(self, stopped: Callable[[], bool]) -> None:
        """Fetch the newest checkpoints if no worker has ever started, and begin to copy; raises OrchestrateError.

        Waits while the store does not respond, for two minutes, and no longer once `stopped()`. Files that exist before
        any worker has started were fetched by an earlier supervisor, which did not get any further.
        """
        if not self.spec.checkpoints:
            return
        store, folder = open_store(self.spec.checkpoints), self.paths.folder
        started = any(isinstance(event, events.GenerationStarting) for event in self.emit.events)
        if not started and not folder.entries(CHECKPOINTS):
            damages: list[str] = []
            with during(f"fetching checkpoints from {store.url}"), contextlib.suppress(Stopped):
                found = stoppable(stopped, restore, store, folder, CHECKPOINTS, stopped, warn=damages.append)
                for damage in damages:
                    self._warn(damage)
                if found:
                    self.emit(events.CheckpointsFetched(store.url, len(found.files), found.size, found.job))
        self.mirror = Mirror(store, folder, CHECKPOINTS, self.paths.root.name)
        self.mirror.start()

    def check(self) -> None:
        """Warn once about each problem."""
        if self.mirror and (error := self.mirror.state.error):
            self._warn(f"checkpoints are not copied: {error}")

    def end(self, refused: str = "") -> list[Copied]:
        """Copy the rest, unless `refused` is why not; return the state of each copy.

        Gives up after a stop request, or after two minutes without progress.
        """
        if refused:
            if self.mirror:
                self.mirror.close(0)
            stores = {"checkpoints": self.spec.checkpoints, "output": self.spec.output}
            return [Copied(what, url, 0, refused, "", []) for what, url in stores.items() if url]
        found = [self._end_mirror(self.mirror)] if self.mirror else []
        return found + ([self._copy_output()] if self.spec.output else [])

    def publish(self) -> None:
        """Copy the report and the other files of the run directory next to the output; raises OrchestrateError."""
        if self.spec.output:
            store, paths, hide = open_store(self.spec.output), self.paths, self.spec.mask()
            files = (paths.report, paths.page, paths.events, paths.spec, paths.plan, paths.patch)
            progress, over = self.copying or self._copying()  # no second patience with a store that is too slow

            def put(path: Path) -> None:
                if path == paths.spec:  # it has the command as it is; YAML may escape and fold a secret
                    text = self.spec.to_yaml(hide)
                else:
                    with regular(path) as file:  # a project can have put a link there
                        text = hide(file.read(MAX_FILE).decode(errors="surrogateescape"))
                store.put(f"{paths.root.name}/{RECORD}/{path.name}", text.encode(errors="surrogateescape"))
                progress.copied(path.name)

            try:
                stoppable(over, each, put, filter(Path.exists, files), over)
            except Stopped:
                raise StorageError(f"{store.url} has not stored all of the record in time") from None

    def _warn(self, text: str) -> None:
        text = shortened(self.spec.mask()(text), MAX_WARNING)
        if text not in self.warned and len(self.warned) < MAX_WARNINGS:
            self.warned.add(text)
            self.emit(events.WarningIssued(text))

    def _over(self, progress: Progress) -> Callable[[], bool]:
        """Return a function that is true once copying is to end: after another stop request, or without progress."""
        stops, stall = self.stops(), Stall(self.emit.clock, NO_PROGRESS)
        return lambda: self.stops() > stops or stall.seen(progress.count)

    def _copying(self) -> tuple[Progress, Callable[[], bool]]:
        progress = Progress()
        return progress, self._over(progress)

    def _end_mirror(self, mirror: Mirror) -> Copied:
        over = self._over(mirror.progress)
        mirror.finish()
        while not mirror.finished and not over():
            phase(f"copying checkpoints to {mirror.store.url}: {mirror.state.pending_bytes >> 20} MiB left")
            self.emit.clock.sleep(POLL_INTERVAL)
        phase("")
        state = mirror.close(0)
        error, hint = "" if state.complete else state.error, state.hint
        if state.complete and state.committed is None:  # for example, Lightning saves to lightning_logs/ by default
            error, hint = "the script has saved none", "let the script save its checkpoints to $JOB_DIR/checkpoints"
        return Copied("checkpoints", mirror.store.url, state.files, error, hint, [*state.skipped])

    def _copy_output(self) -> Copied:
        try:
            store = open_store(self.spec.output)
        except OrchestrateError as failure:
            return Copied("output", self.spec.output, 0, str(failure), failure.hint, [])
        name = self.paths.root.name
        self.copying = progress, over = self._copying()
        done: set[str] = set()
        skipped: dict[str, str] = {}
        error = StorageError("copying was stopped")
        with during(f"copying output to {store.url}/{name}"):
            while not over():
                try:
                    skipped = stoppable(over, upload, store, self.paths.folder, name, done, over, progress)
                    error = StorageError("")
                    break
                except Stopped:
                    break
                except (StorageConflict, StorageRefused) as failure:
                    error = failure
                    break
                except (StorageError, OSError, Changed, Unreadable) as failure:
                    error = failure if isinstance(failure, StorageError) else StorageError(str(failure))
                self.emit.clock.sleep(RETRY_INTERVAL)
        notes = [f"{path}: {why}" for path, why in skipped.items()]
        return Copied("output", f"{store.url}/{name}", len(done), str(error), error.hint, notes)
