"""Copying of a folder that nodes write to an object store, while the job runs and at its end.

Each round scans the folder, uploads files that are not in the store yet, and then writes a manifest with the set of
files that the scan found. Content is stored under keys that depend on it, so nothing that a manifest names ever
changes, and whatever an interrupted round has uploaded is used by the next one, also of another process.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from orchestrate.dataclass import dataclass, replace
from orchestrate.errors import StorageConflict, StorageError, StorageRefused
from orchestrate.files.folder import Folder
from orchestrate.node.messages.checks import shown
from orchestrate.storage import manifest as manifests
from orchestrate.storage.base import PART, Store
from orchestrate.storage.content import Changed, Content, Progress, Unreadable
from orchestrate.storage.manifest import Damaged, Entry, Manifest
from orchestrate.storage.parallel import Stopped, each
from orchestrate.storage.scan import Facts, Scan, scan

log = logging.getLogger(__name__)

SCAN_INTERVAL = 2.0  # seconds between rounds; a file must not change for so long before it is copied
MIN_INTERVAL = 0.25  # the same in seconds if files change all the time, which halves it in each round
FIRST_RETRY, MAX_RETRY = 1.0, 30.0  # seconds until a failed round is retried, which double with each failure
LAST_RETRY = 2.0  # seconds at most between retries once the job has ended, as its end waits for the copy
MAX_DELETING = 5.0  # seconds for deleting objects, in a round
MAX_FAILED = 3  # objects that cannot be deleted, in a round


@dataclass(frozen=True)
class State:
    """The state of a mirror; numbers of files and bytes that this process has uploaded and has yet to upload."""

    files: int = 0
    pending_files: int = 0
    pending_bytes: int = 0
    skipped: tuple[str, ...] = ()  # paths that are not copied, with the reason
    error: str = ""  # why the last round failed
    hint: str = ""
    committed: float | None = None  # time of the newest manifest, in seconds since the epoch
    complete: bool = False  # whether all files are copied; only once nothing writes anymore


class Mirror:
    """Copies the folder `below` of `folder` to a store, in a thread after `start()`, or by calls of `sync()`."""

    def __init__(
        self, store: Store, folder: Folder, below: str, job: str, whole: bool = True, interval: float = SCAN_INTERVAL
    ) -> None:
        """`job` is the id of the job, for the message to another writer.

        With `whole`, a manifest has all files, and is written once none of them has changed between two scans.
        Otherwise files that are being written keep their previous version in it, or are left out.
        """
        self.store, self.folder, self.below, self.job, self.whole = store, folder, below, job, whole
        self.interval = interval
        self._writer = secrets.token_hex(8)
        self._state, self._changing = State(), threading.Lock()
        self._last: Scan | None = None
        self._copied: dict[str, Facts] | None = None  # the files of the last scan, if the newest manifest has them all
        self._objects: dict[str, int] | None = None  # size by key of what the store has; None before the first list
        self._newest: Manifest | None = None
        self._before: Manifest | None = None  # the manifest before the newest
        self._sequences: set[int] = set()  # of manifests in the store
        self._unwanted: OrderedDict[str, None] = OrderedDict()  # keys of objects to delete, from the last on
        self._uploaded: set[str] = set()  # keys of objects that no manifest names yet
        self._digests: dict[str, tuple[Facts, str]] = {}  # of files that this process has read
        self.progress = Progress()
        self._closing, self._aborted = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> State:
        """The current state; never blocks for a request."""
        return self._state

    def start(self) -> None:
        """Copy in the background until `close`, retrying whatever fails."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest, as nothing writes to the folder anymore; `finished` tells when that is done."""
        self._closing.set()

    @property
    def finished(self) -> bool:
        """Whether the thread has ended, since everything is copied, or the rest never can be."""
        return self._thread is None or not self._thread.is_alive()

    def close(self, timeout: float) -> State:
        """Copy the rest, for at most `timeout` seconds, and stop. Call it once nothing writes to the folder anymore.

        The copy is complete if the state says so; otherwise the state has the error, and another mirror can continue.
        """
        self._closing.set()
        if self._thread:
            self._thread.join(timeout)
        self._aborted.set()
        if not self._state.complete and not self._state.error:
            self._update(error="copying was stopped before all files were copied")
        return self.state

    def sync(self, stopped: Callable[[], bool], final: bool = False) -> bool:
        """Copy what has settled since the last call; return whether a manifest has all files.

        `final` means that nothing writes anymore: no second call is needed to find out what has settled.
        Raises StorageError, Changed or Unreadable for a file, OSError, and Stopped soon after `stopped()`.
        """
        self._resume()
        before = scan(self.folder, self.below) if final else self._last
        if final and before:
            self.progress.limit({path: facts.size for path, facts in before.files.items()})
        self._last = now = scan(self.folder, self.below)
        settled = {path: facts for path, facts in now.files.items() if before and before.files.get(path) == facts}
        same = before is not None and now.files == before.files
        if not same and self.whole:
            self._update(pending_files=len(now.files), pending_bytes=_size(now.files))
            return False
        complete, unreadable = same and now.files == self._copied, list[str]()
        if not complete:
            self._forget(now.files)
            manifests.check_paths(now.files, self.below)
            entries, unreadable = self._upload(settled, stopped)
            entries += self._previous(now, settled)
            self._commit(tuple(sorted(entries, key=lambda entry: entry.path)))
            complete = same and len(entries) == len(now.files)
            self._copied = now.files if complete else None
        skipped = *(f"{path}: {why}" for path, why in now.skipped.items()), *unreadable
        self._update(complete=complete and final, skipped=skipped, error="", hint="")
        return complete

    # --- one round

    def _resume(self) -> None:
        """Find out what earlier processes have copied."""
        if self._objects is not None:
            return
        there = manifests.contents(self.store)
        self._newest = manifests.newest(self.store, there)
        self._sequences, self._objects = there.sequences, there.objects
        self._update(committed=self._newest and self._newest.time)

    def _upload(self, files: dict[str, Facts], stopped: Callable[[], bool]) -> tuple[list[Entry], list[str]]:
        """Upload files that the store does not have; return the entries, and errors of files that cannot be read."""
        old = {entry.path: entry for entry in self._newest.files} if self._newest else {}
        found: list[Entry] = []
        unreadable: list[str] = []
        self._update(pending_files=len(files), pending_bytes=_size(files))

        def take(path: str) -> None:
            moved = partial(self.progress.read, path)
            content = Content(self.folder, f"{self.below}/{path}", files[path], stopped, moved)
            try:
                found.append(self._entry(path, content, old.get(path)))
            except Unreadable as error:
                if self.whole:
                    raise
                unreadable.append(str(error))
            self.progress.copied(path)
            with self._changing:
                state, size = self._state, files[path].size
                self._state = replace(
                    state, pending_files=state.pending_files - 1, pending_bytes=state.pending_bytes - size
                )

        each(take, files, stopped)
        return found, unreadable

    def _forget(self, files: Mapping[str, Facts]) -> None:
        """Forget files that are gone; delete what rounds that have failed uploaded, and no file has anymore."""
        self._digests = {path: known for path, known in self._digests.items() if path in files}
        if self._uploaded:
            still = {manifests.key_of(path, digest) for path, (_, digest) in self._digests.items()}
            self._delete(self._uploaded - still)
            self._uploaded &= still

    def _entry(self, path: str, content: Content, old: Entry | None) -> Entry:
        """Upload a file unless the store has its content; return its entry."""
        assert self._objects is not None
        digest, size = self._digest(path, content, old), content.facts.size
        key = manifests.key_of(path, digest)
        if self._objects.get(key) != size:
            pieces = content.pieces(digest)
            if size <= PART:
                self.store.put(key, b"".join(pieces))
            else:
                self.store.put_stream(key, size, pieces)
            with self._changing:
                self._objects[key] = size
                self._uploaded.add(key)
                self._unwanted.pop(key, None)
                self._state = replace(self._state, files=self._state.files + 1)
        return Entry(path, key, size, content.facts.mtime_ns, digest)

    def _digest(self, path: str, content: Content, old: Entry | None) -> str:
        """Return the SHA-256 of a file, which is read only if it may have changed since it was last read."""
        facts, known = self._digests.get(path, (None, ""))
        if facts != content.facts:
            then = (old.size, old.mtime_ns) if old and not facts else None  # once read, times of change are known
            now = content.facts.size, content.facts.mtime_ns
            known = old.sha256 if old and then == now else content.digest()
            self._digests[path] = content.facts, known
        return known

    def _previous(self, now: Scan, settled: dict[str, Facts]) -> list[Entry]:
        """The entries of the newest manifest for files that are being written."""
        old = self._newest.files if self._newest else ()
        return [entry for entry in old if entry.path in now.files and entry.path not in settled]

    def _commit(self, entries: tuple[Entry, ...]) -> None:
        """Write the next manifest, then remove what only old ones name; raises StorageConflict after another writer.

        Does nothing if there is nothing new. An empty folder never replaces files: it may be a mistake.
        """
        if not entries or self._is_newest(entries):
            return
        for sequence in sorted(manifests.sequences(self.store) - self._sequences):
            self._adopt(sequence)  # our own of an earlier attempt, whose answer was lost
        if not self._is_newest(entries):
            sequence = max(self._sequences, default=0) + 1
            manifest = Manifest(manifests.VERSION, sequence, self.job, self._writer, time.time(), entries)
            manifests.check(text := manifest.text(), sequence, self.below)
            self.store.create(manifests.manifest_key(sequence), text)
            self._adopt(sequence)
        self._uploaded.clear()
        self._delete(self._objects or (), self._sequences - {manifest.sequence for manifest in self._kept})

    def _is_newest(self, entries: tuple[Entry, ...]) -> bool:
        return self._newest is not None and self._newest.files == entries

    def _adopt(self, sequence: int) -> None:
        """Read a manifest that must be ours, and count it as written; raises StorageConflict for another writer's."""
        hint = "stop one of them, or use another prefix"
        try:
            manifest = manifests.read(self.store, sequence)
        except Damaged:
            raise StorageConflict(f"{self.store.url}: another program also writes there", hint) from None
        if manifest.writer != self._writer:
            raise StorageConflict(f"{self.store.url}: job {shown(manifest.job)} also writes there", hint)
        self._sequences.add(sequence)
        self._before, self._newest = self._newest, manifest
        self._update(committed=manifest.time)

    @property
    def _kept(self) -> list[Manifest]:
        """The newest manifest and, in case that one is damaged, the one before."""
        return [manifest for manifest in (self._newest, self._before) if manifest]

    def _delete(self, keys: Iterable[str], sequences: Iterable[int] = ()) -> None:
        """Delete manifests, and those of `keys` that no kept one names.

        These are what this process has listed or uploaded: another writer's new files are not its own to judge.
        """
        assert self._objects is not None
        named = {entry.key for manifest in self._kept for entry in manifest.files}
        self._unwanted |= dict.fromkeys({*keys} - named)
        for key in self._unwanted.keys() - named:
            self._objects.pop(key, None)  # first: if the answer is lost, it may be gone
        try:
            for sequence in sorted(sequences):
                self.store.delete([manifests.manifest_key(sequence)])
                self._sequences.remove(sequence)
        except StorageError as error:  # retried with the next ones
            log.debug("old manifests of %s are not removed yet: %s", self.store.url, error)
            return
        failed, until = 0, time.monotonic() + MAX_DELETING
        for key in [*reversed(self._unwanted)]:
            if self._aborted.is_set() or time.monotonic() > until:
                break  # new files are more important; the rest is deleted in the next rounds, or by the next job
            try:
                if key not in named:  # or it was uploaded again
                    self.store.delete([key])
                del self._unwanted[key]
            except StorageError as error:
                log.debug("%s is not removed yet: %s", key, error)
                self._unwanted.move_to_end(key, last=False)  # it may never be: others are next
                failed += 1
                if failed == MAX_FAILED:
                    break

    # --- the thread

    def _run(self) -> None:
        retry, interval = FIRST_RETRY, self.interval
        while not self._aborted.is_set():
            final = self._closing.is_set()
            try:
                complete = self.sync(self._aborted.is_set, final)
                if complete and final:
                    return
                interval = self.interval if complete else max(MIN_INTERVAL, interval / 2)
                delay, retry = interval, FIRST_RETRY
            except Stopped:
                return
            except Exception as error:  # also a bug: the copy that exists is still good, and the next round may work
                self._failed(error)
                if isinstance(error, StorageConflict) or (final and isinstance(error, StorageRefused)):
                    return
                delay, retry = retry, min(2 * retry, MAX_RETRY)
            if final:
                self._aborted.wait(min(delay, LAST_RETRY))
            else:
                self._closing.wait(delay)

    def _failed(self, error: Exception) -> None:
        expected = isinstance(error, (StorageError, Changed, Unreadable, OSError))
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        if text != self._state.error:
            log.warning("%s", text, exc_info=not expected)
        self._update(error=text, hint=getattr(error, "hint", ""))

    def _update(self, **changes: Any) -> None:
        with self._changing:
            self._state = replace(self._state, **changes)


def _size(files: dict[str, Facts]) -> int:
    return sum(facts.size for facts in files.values())
