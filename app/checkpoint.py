"""Checkpoints that are whole or absent, written while training goes on.

    checkpoints/step-00000188/state.pt         tensors, numbers and names; `torch.load(weights_only=True)` reads it
    checkpoints/step-00000188/manifest.json    its size and SHA-256, and one of the manifest itself; written last
    checkpoints/last, checkpoints/best         links for people; a reader trusts manifests alone

A save happens in a hidden folder: files, manifest, everything made durable, then one rename. Whenever the process or
the machine dies, the newest folder whose manifest agrees with its files is a good checkpoint.
"""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MISSES = 3  # saves that may fail one after another, for a full disk say, before the training ends
_PIECE = 1 << 20  # bytes

torch.serialization.set_crc32_options(False)  # SHA-256 finds what CRC-32 would, and more


class Checkpoints:
    """The checkpoints of one job; one worker (rank 0) saves."""

    def __init__(self, folder: Path, keep: int = 2, over: Callable[[], bool] = lambda: False) -> None:
        """Keep the newest `keep` and the best; `folder` is made at the first save.

        `over()` tells that somebody else saves here now: a worker that was thought dead must change nothing.
        """
        self.folder, self.keep, self.over = folder, keep, over
        self.misses = 0
        self.copies = _Copies()
        self.thread: threading.Thread | None = None

    def save(self, state: dict[str, Any], step: int, **facts: Any) -> bool:
        """Copy `state` and write it in the background; `facts` go into the manifest, `score` decides the best.

        The caller is held for the copy alone. False where the last save still runs: then this one is left out.
        Raises OSError after `MISSES` saves in a row have failed.
        """
        if self.thread is not None and self.thread.is_alive():
            print(f"checkpoint at step {step} left out: the last one is still being written", flush=True)
            return False
        self.wait()
        copy = self.copies.of(state)
        self.thread = threading.Thread(target=self._write, args=(copy, step, facts))
        self.thread.start()
        return True

    def wait(self) -> None:
        """Return when the save that runs, if any, is durable."""
        if self.thread is not None:
            self.thread.join()
        if self.misses >= MISSES:
            raise OSError(f"{self.misses} checkpoints in a row could not be written to {self.folder}")

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08}"

    def all(self) -> list[tuple[Path, dict[str, Any]]]:
        """Folder and manifest of each committed checkpoint, the oldest first; its other files are not looked at."""
        found = []
        for path in self._folders():
            with contextlib.suppress(OSError, ValueError):
                found.append((path, read_manifest(path)))
        return found

    def newest(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """State and manifest of the newest good checkpoint; a damaged one is passed over, with a message."""
        self._mend()
        for path in reversed(self._folders()):
            try:
                return load(path)
            except Exception as error:  # whatever is wrong with it, an older one may be good
                print(f"checkpoint {path.name} is damaged, trying the one before: {error}", flush=True)
        return None

    def _mend(self) -> None:
        """Put back a checkpoint that was moved out of the way of one that never came."""
        for old in self.folder.glob(".step-*.old"):
            path = old.with_name(old.name[1:].removesuffix(".old"))
            if not path.exists():
                old.rename(path)

    def _folders(self) -> list[Path]:
        """The folders of checkpoints, by step, whatever is in them."""
        found = [path for path in self.folder.glob("step-*") if path.name[5:].isdigit() and not path.is_symlink()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def _write(self, state: dict[str, Any], step: int, facts: dict[str, Any]) -> None:
        try:
            self._commit(state, step, facts)
            self.misses = 0
        except (OSError, RuntimeError) as error:  # a full disk, which torch calls so, must not end the training at once
            self.misses += 1
            print(f"checkpoint at step {step} could not be written: {error}", flush=True)

    def _commit(self, state: dict[str, Any], step: int, facts: dict[str, Any]) -> None:
        if self.over():
            return print(f"checkpoint at step {step} left out: a newer generation saves here", flush=True)
        final = self.path(step)
        work = self.folder / f".{final.name}.{os.getpid()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mend()
        for rubbish in self.folder.glob(".step-*"):
            shutil.rmtree(rubbish, ignore_errors=True)
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
        _durable_folder(self.folder)
        self._tidy()

    def _tidy(self) -> None:
        """Point `last` and `best` at their checkpoints; only then remove what is neither new nor best."""
        known = self.all()
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
                shutil.rmtree(path, ignore_errors=True)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """State (on the CPU) and manifest of one checkpoint folder; raises ValueError or OSError where it is damaged.

    Nothing that the file contains is run: it is compared with its manifest, then read with `weights_only`, which is
    safe from torch 2.10 on (CVE-2025-32434, CVE-2026-24747).
    """
    manifest = read_manifest(path)
    expected = manifest["files"]["state.pt"]
    with (path / "state.pt").open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE):
            digest.update(piece)
        if (file.tell(), digest.hexdigest()) != (expected["size"], expected["sha256"]):
            raise ValueError(f"{path}/state.pt is not what its manifest says")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True), manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """What the manifest in a checkpoint's folder says; raises ValueError or OSError where it is damaged."""
    manifest = json.loads((path / "manifest.json").read_text())
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise ValueError(f"{path}/manifest.json is damaged")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    """The SHA-256 of what a manifest says, however it is written."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class _Hashed:
    """A file that is hashed by a second thread while it is written and made durable."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self._hash = file, 0, hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)  # one thread: pieces are hashed in their order

    def __enter__(self) -> "_Hashed":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def write(self, piece: memoryview) -> int:
        self.size += len(piece)
        # A large piece is a tensor of our own copy, which stays as it is until the next save; a small one may not.
        self._pool.submit(self._hash.update, piece if len(piece) >= _PIECE else bytes(piece))
        return self.file.write(piece)

    def flush(self) -> None:
        self.file.flush()

    def digest(self) -> str:
        """The hash of all that was written; to be asked for at the end."""
        self._pool.shutdown()
        return self._hash.hexdigest()


class _Copies:
    """Deep copies of states on the CPU, each in the memory of the one before.

    A GPU writes to memory that is pinned, which it does several times as fast as to other memory; the copies of all
    its tensors are under way before the first is waited for.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[Any, ...], Tensor] = {}  # the last copy of each tensor, by its place in the state
        self.streams: set[Any] = set()  # of GPUs, in which tensors are being copied
        self.pins = True  # until the system refuses

    def of(self, state: Any) -> Any:
        """Return the copy when it is complete; `state` may change from then on."""
        copy = self._begun(state, ())
        while self.streams:
            self.streams.pop().synchronize()
        return copy

    def _begun(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._begun(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._begun(item, (*path, i)) for i, item in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        old = self.held.get(path)
        if old is None or old.shape != value.shape or old.dtype != value.dtype:
            self.held[path] = old = self._memory(value)
        if value.is_cuda:
            self.streams.add(torch.cuda.current_stream(value.device))  # after what computes the tensor
        return old.copy_(value.detach(), non_blocking=True)

    def _memory(self, value: Tensor) -> Tensor:
        """A place for a copy of `value`, pinned for that of a GPU while the system allows it."""
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
