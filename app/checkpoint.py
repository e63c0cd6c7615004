"""Checkpoints that are complete or absent, written while training continues.

    checkpoints/step-00000188/state.pt         tensors, numbers and names; `torch.load(weights_only=True)` reads it
    checkpoints/step-00000188/manifest.json    its size and SHA-256, and the manifest's own SHA-256; written last
    checkpoints/last, checkpoints/best         links for users; the reader relies on manifests only

A save writes to a hidden folder: the files, then the manifest, then fsync, then one rename. Whenever the process or
the machine dies, the newest folder whose manifest matches its files is a valid checkpoint.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

STEP = re.compile("step-[0-9]{1,18}")
MAX_FAILED_SAVES = 3  # in a row, on a full disk for example, before training ends
_PIECE = 1 << 20  # bytes

torch.serialization.set_crc32_options(False)  # the manifest's SHA-256 makes CRC-32 redundant


class Checkpoints:
    """The checkpoints of one job; only rank 0 saves."""

    def __init__(self, folder: Path, keep: int = 2, over: Callable[[], bool] = lambda: False) -> None:
        """Keep the newest `keep` checkpoints and the best; the first save creates `folder`.

        `over()` returns whether a newer generation saves here: a worker presumed dead must not change anything.
        """
        self.folder, self.keep, self.over = folder, keep, over
        self.misses, self.damaged = 0, set[Path]()
        self.copies = _Copies()
        self.thread: threading.Thread | None = None

    def save(self, state: dict[str, Any], step: int, **facts: Any) -> bool:
        """Copy `state` and write it in the background; `facts` go into the manifest, `score` selects the best.

        Blocks only for the copy. Returns False and skips the save if the previous one is still running.
        Raises OSError after `MAX_FAILED_SAVES` failed saves in a row.
        """
        if self.thread is not None and self.thread.is_alive():
            print(f"checkpoint at step {step} skipped: the previous one is still being written", flush=True)
            return False
        self.wait()
        copy = self.copies.of(state)
        self.thread = threading.Thread(target=self._write, args=(copy, step, facts))
        self.thread.start()
        return True

    def wait(self) -> None:
        """Wait until the current save, if any, is durable."""
        if self.thread is not None:
            self.thread.join()
        if self.misses >= MAX_FAILED_SAVES:
            raise OSError(f"{self.misses} checkpoints in a row could not be written to {self.folder}")

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08}"

    def all(self) -> list[tuple[Path, dict[str, Any]]]:
        """Folder and manifest of each committed checkpoint, oldest first; other files are not read."""
        found = []
        for path in self._folders():
            with contextlib.suppress(OSError, ValueError):
                found.append((path, read_manifest(path)))
        return found

    def newest(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """State and manifest of the newest valid checkpoint; damaged ones are skipped with a message."""
        self._recover()
        for path in reversed(self._folders()):
            try:
                return load(path)
            except Exception as error:  # whatever is wrong with it, an older one may be valid
                print(f"checkpoint {path.name} is damaged, trying the previous one: {error}", flush=True)
                self.damaged.add(path)
        return None

    def _recover(self) -> None:
        """Restore a checkpoint that was moved aside for a replacement that was never completed."""
        for old in self.folder.glob(".step-*.old"):
            path = old.with_name(old.name[1:].removesuffix(".old"))
            if not path.exists():
                old.rename(path)

    def _folders(self) -> list[Path]:
        """The folders of checkpoints by step, valid or not."""
        found = [path for path in self.folder.glob("step-*") if STEP.fullmatch(path.name) and not path.is_symlink()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def _write(self, state: dict[str, Any], step: int, facts: dict[str, Any]) -> None:
        try:
            self.commit(state, step, facts)
            self.misses = 0
        except (OSError, RuntimeError) as error:  # torch raises the latter on a full disk, which must not end training
            self.misses += 1
            print(f"checkpoint at step {step} could not be written: {error}", flush=True)

    def commit(self, state: dict[str, Any], step: int, facts: dict[str, Any]) -> None:
        """Write a complete checkpoint, and remove older ones; raises OSError, and RuntimeError on a full disk."""
        if self.over():
            return print(f"checkpoint at step {step} skipped: a newer generation saves here", flush=True)
        final = self.path(step)
        work = self.folder / f".{final.name}.{os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._recover()
        for stale in self.folder.glob(".step-*"):
            shutil.rmtree(stale, ignore_errors=True)
        work.mkdir()
        with (work / "state.pt").open("wb") as file, _Hashed(file) as hashed:
            torch.save(state, hashed)
            _durable(file)
        files = {"state.pt": {"size": hashed.size, "sha256": hashed.digest()}}
        with (work / "manifest.json").open("wb") as file:
            manifest = {"step": step, **facts, "files": files}
            file.write(json.dumps({**manifest, "sha256": _digest(manifest)}, indent=2).encode())
            _durable(file)
        _durable_folder(work)
        if self.over():
            return shutil.rmtree(work, ignore_errors=True)
        if final.exists():  # from before a resume
            final.rename(self.folder / f".{final.name}.old")
        work.rename(final)
        self.damaged.discard(final)
        _durable_folder(self.folder)
        self._tidy(step)

    def _tidy(self, step: int) -> None:
        """Point `last` and `best` at their checkpoints; only then remove those that are neither new nor best.

        Those of later steps do not count: training went on before them, since they are damaged.
        """
        known = [item for item in self.all() if item[1]["step"] <= step and item[0] not in self.damaged]
        scored = [item for item in known if item[1].get("score") is not None]
        kept = known[-self.keep :]
        links = {"last": known[-1]}
        if scored:
            links["best"] = max(scored, key=lambda item: (item[1]["score"], item[1]["step"]))
        for name, (path, _) in links.items():
            fresh = self.folder / f".step-{name}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(path.name)
            fresh.replace(self.folder / name)
        _durable_folder(self.folder)
        for path in [path for path, _ in known] + list(self.folder.glob(".step-*")):
            if path not in [item[0] for item in [*kept, *links.values()]]:
                stale = self.folder / f".{path.name.lstrip('.')}.gone"  # which the next save removes, too
                path.rename(stale)
                shutil.rmtree(stale, ignore_errors=True)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """State (on the CPU) and manifest of one checkpoint folder; raises ValueError or OSError if it is damaged.

    No code in the file is run: it is verified against its manifest, then read with `weights_only`, which is safe since
    torch 2.10 (CVE-2025-32434, CVE-2026-24747).
    """
    manifest = read_manifest(path)
    expected = manifest["files"]["state.pt"]
    with (path / "state.pt").open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE):
            digest.update(piece)
        if (file.tell(), digest.hexdigest()) != (expected["size"], expected["sha256"]):
            raise ValueError(f"{path}/state.pt does not match its manifest")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True), manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in a checkpoint folder; raises ValueError or OSError if it is damaged."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        whole = manifest.pop("sha256") == _digest(manifest) and type(manifest["step"]) is int
        whole = whole and (manifest.get("score") is None or math.isfinite(manifest["score"]))
    except (AttributeError, LookupError, TypeError, RecursionError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"{path}/manifest.json is damaged")
    return dict(manifest)


def _digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, independent of its formatting."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class _Hashed:
    """A file that a second thread hashes while it is written and synced."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self._hash = file, 0, hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)  # one thread: pieces are hashed in order

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def write(self, piece: memoryview) -> int:
        self.size += len(piece)
        # A large piece is a tensor of our own copy, unchanged until the next save; a small one may be reused by torch.
        self._pool.submit(self._hash.update, piece if len(piece) >= _PIECE else bytes(piece))
        return self.file.write(piece)

    def flush(self) -> None:
        self.file.flush()

    def digest(self) -> str:
        """The hash of everything written; call it last."""
        self._pool.shutdown()
        return self._hash.hexdigest()


class _Copies:
    """Deep copies of states on the CPU, each in the memory of the previous one.

    Tensors on a GPU are copied to pinned memory, which is several times faster than other memory; all these copies are
    started before the first is waited for.
    """

    def __init__(self) -> None:
        self.buffers: dict[tuple[Any, ...], Tensor] = {}  # the last copy of each tensor, by its path in the state
        self.streams: set[Any] = set()  # CUDA streams with copies in progress
        self.pins = True  # until the system refuses to pin memory

    def of(self, state: Any) -> Any:
        """Return the complete copy; `state` may change afterwards."""
        copy = self._start_copy(state, ())
        while self.streams:
            self.streams.pop().synchronize()
        return copy

    def _start_copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._start_copy(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._start_copy(item, (*path, i)) for i, item in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        buffer = self.buffers.get(path)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            self.buffers[path] = buffer = self._memory(value)
        if value.is_cuda:
            self.streams.add(torch.cuda.current_stream(value.device))  # after the kernels that compute the tensor
        return buffer.copy_(value.detach(), non_blocking=True)

    def _memory(self, value: Tensor) -> Tensor:
        """Memory for a copy of `value`; pinned if `value` is on a GPU and the system allows it."""
        if value.is_cuda and self.pins:
            try:
                return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            except RuntimeError as error:
                self.pins = False
                print(f"checkpoints are copied without pinned memory: {str(error).splitlines()[0]}", flush=True)
        return torch.empty(value.shape, dtype=value.dtype)


def _durable(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _durable_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
