"""The format of a copy in an object store.

    files/PATH=sha256-DIGEST    the content of one file; never changed, since its key depends on the content
    manifests/SEQUENCE.json     a complete set of files; written after all of them, only once for each number

Everything read from a store is untrusted: another job, or anyone with access to the bucket, may have written it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Annotated, Any

from orchestrate.dataclass import dataclass
from orchestrate.errors import StorageError, StorageRefused
from orchestrate.files.folder import MAX_DEPTH
from orchestrate.files.typed import decode, encode
from orchestrate.node.messages import checks
from orchestrate.node.trees import hidden
from orchestrate.storage.base import Store
from orchestrate.storage.scan import MAX_FILES, MAX_PATH, MAX_SIZE, MAX_TIME

log = logging.getLogger(__name__)

VERSION = 1
FILES, MANIFESTS = "files", "manifests"
MAX_SEQUENCE = 10**11  # of twelve digits; a copy makes some thousands a day
MAX_MANIFEST = 64 << 20  # bytes in memory; enough for MAX_FILES paths of usual length
LEAST = "-" * 240  # what a file has in a manifest besides its path, at least
MAX_VALUES = 20 * MAX_FILES  # texts, commas and opening brackets in a manifest; each file has fourteen
MAX_TRIED = 10  # manifests; a copy has two
MAX_NAME = 255  # bytes of a file's name, as on Linux; characters of the name of a job or process
MAX_SHOWN = 150  # characters of each name in a key: with the digest, a folder can store it, and 1,024 bytes in S3
MAX_KEY = 600  # characters of the path in a key
MAX_LENGTH = len(FILES) + MAX_KEY + 80  # of a key
NUMBER = re.compile(rf"{MANIFESTS}/([0-9]{{12}})\.json")
OBJECT = re.compile(rf"{FILES}/[A-Za-z0-9._=/-]+=sha256-[0-9a-f]{{64}}")


class Damaged(StorageError):
    """A manifest, or a file that it names, is not what was written."""


def _path(value: Any) -> str:
    """A relative path that leads out of no folder, with no name that is left out of a copy."""
    if wrong := checks.text(value):
        return wrong
    try:
        long = len(value.encode()) > MAX_PATH or any(len(name.encode()) > MAX_NAME for name in value.split("/"))
    except UnicodeEncodeError:
        long = True
    names = value.split("/")
    if long or len(names) > MAX_DEPTH or any(name == "" or hidden(name) for name in names):
        return f" must be a relative path, not {checks.shown(value)}"
    return ""


def _name(value: Any) -> str:
    """Text that can be displayed in a line."""
    right = isinstance(value, str) and len(value) <= MAX_NAME and value.isprintable()
    return "" if right else " must be a short text that can be printed"


def _digest(value: Any) -> str:
    """The hexadecimal digits of a SHA-256."""
    right = isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value)
    return "" if right else " must be 64 hexadecimal digits"


def _nanoseconds(value: Any) -> str:
    """A time that a file system can store."""
    return "" if type(value) is int and abs(value) <= MAX_TIME else " must be a time in nanoseconds"


@dataclass(frozen=True)
class Entry:
    """One file of a manifest: path, key of its content, size in bytes, modification time, SHA-256."""

    path: Annotated[str, _path]
    key: str
    size: Annotated[int, checks.up_to(MAX_SIZE)]
    mtime_ns: Annotated[int, _nanoseconds]
    sha256: Annotated[str, _digest]


@dataclass(frozen=True)
class Manifest:
    """A complete set of files, with its number, the job that wrote it and the time, in seconds since the epoch."""

    version: int
    sequence: Annotated[int, checks.up_to(MAX_SEQUENCE)]
    job: Annotated[str, _name]
    writer: Annotated[str, _name]  # unique for each process, so that it recognizes its own manifests
    time: Annotated[float, checks.time]
    files: tuple[Entry, ...]

    def text(self) -> bytes:
        """The object in the store."""
        fields = encode(self)
        return json.dumps({"manifest": fields, "sha256": _checksum(fields)}).encode()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


@dataclass
class Contents:
    """What a store holds: the numbers of manifests, and the size in bytes of each object by key."""

    sequences: set[int]
    objects: dict[str, int]


def key_of(path: str, sha256: str) -> str:
    """The key of a file's content: readable, unambiguous, and safe in every store.

    The path may be shortened: only the digest identifies the content.
    """
    names = (re.sub(r"[^A-Za-z0-9._-]", lambda odd: _escaped(odd[0]), name)[:MAX_SHOWN] for name in path.split("/"))
    return f"{FILES}/{'/'.join(names)[:MAX_KEY].rstrip('/')}=sha256-{sha256}"


def check_paths(paths: Iterable[str], below: str) -> None:
    """Raise StorageRefused for files of the folder `below` that no manifest can name, before they are copied."""
    if checks.memory(json.dumps(dict.fromkeys(paths, LEAST)).encode()) > MAX_MANIFEST:
        raise StorageRefused(f"{below} has too many files with long paths to copy")


def check(text: bytes, sequence: int, below: str) -> None:
    """Raise StorageRefused unless a new manifest of `below` can be read: a damaged one would end the copy."""
    if checks.memory(text) > MAX_MANIFEST:
        raise StorageRefused(f"{below} has too many files with long paths to copy")
    try:
        _decoded(text, sequence)
    except ValueError as error:
        raise StorageRefused(f"{below} cannot be copied: {error}") from None


def manifest_key(sequence: int) -> str:
    """The key of a manifest."""
    return f"{MANIFESTS}/{sequence:012}.json"


def sequences(store: Store) -> set[int]:
    """Return the numbers of all manifests, intact or not; raises StorageError."""
    found = {int(match[1]) for key, _ in store.list(MANIFESTS) if (match := NUMBER.fullmatch(key))}
    return {number for number in found if number <= MAX_SEQUENCE}  # a higher one leaves no number for the next


def contents(store: Store) -> Contents:
    """List a store, without objects that are not part of a copy; raises StorageError."""
    return Contents(sequences(store), {key: size for key, size in store.list(FILES) if _is_ours(key)})


def _is_ours(key: str) -> bool:
    """Whether `key_of` could have returned a key."""
    return len(key) <= MAX_LENGTH and OBJECT.fullmatch(key) is not None


def read(store: Store, sequence: int) -> Manifest:
    """Read a manifest; raises Damaged if it is not intact, StorageError."""
    key, text = manifest_key(sequence), bytearray()
    for piece in store.read(key):
        text += piece
        if len(text) > MAX_MANIFEST:
            raise Damaged(f"{store.url}/{key} is larger than {MAX_MANIFEST >> 20} MiB")
    try:
        return _decoded(bytes(text), sequence)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = str(error) if isinstance(error, ValueError) else "it has an unknown format"
        raise Damaged(f"{store.url}/{key} is damaged: {why}") from None


def newest(store: Store, there: Contents | None = None) -> Manifest | None:
    """Return the newest manifest whose files all exist; None if nothing was ever copied to the store.

    Raises Damaged if there are manifests but none is intact, StorageError.
    """
    problems: list[Damaged] = []
    return checked(store, next(intact(store, there or contents(store), problems), None), problems)


def checked(
    store: Store, found: Manifest | None, problems: list[Damaged], warn: Callable[[str], None] = log.warning
) -> Manifest | None:
    """Return the manifest that was found after some problems; raises Damaged if there are only problems."""
    for problem in problems:
        warn(f"{problem}; using an older copy" if found else str(problem))
    if found is None and problems:
        hint = "restore it from a backup, or use another prefix to start without it"
        raise Damaged(f"{store.url} has no intact copy: {problems[0]}", hint)
    return found


def intact(store: Store, there: Contents, problems: list[Damaged]) -> Iterator[Manifest]:
    """Yield the manifests whose files all exist in full, newest first; adds what is wrong with others to `problems`.

    The content of files is not read. Raises StorageError.
    """
    for sequence in sorted(there.sequences, reverse=True)[:MAX_TRIED]:
        try:
            manifest = read(store, sequence)
            for entry in manifest.files:
                if there.objects.get(entry.key) != entry.size:
                    raise Damaged(f"{store.url}/{entry.key} is missing, or has another size")
        except Damaged as error:
            problems.append(Damaged(str(error), error.hint))  # the traceback of `error` holds the whole text
        else:
            yield manifest


def _decoded(text: bytes, sequence: int) -> Manifest:
    if not text.isascii() or checks.memory(text) > MAX_MANIFEST:
        raise ValueError("it is too large, or not ASCII")
    checks.limit_values(text, MAX_VALUES)
    stored = json.loads(text)
    fields = stored["manifest"]
    if stored["sha256"] != _checksum(fields):
        raise ValueError("its checksum differs")
    if fields["version"] != VERSION:
        raise ValueError("another version of orchestrate wrote it")
    if len(fields["files"]) > MAX_FILES:
        raise ValueError(f"it names more than {MAX_FILES:,} files")
    manifest = decode(fields, Manifest)
    paths = {entry.path for entry in manifest.files}
    # Sorted so that a folder comes just before what is in it. All folders of all paths would take far more memory.
    ordered = sorted(path.replace("/", "\0") for path in paths)
    nested = any(after.startswith(f"{before}\0") for before, after in pairwise(ordered))
    if len(paths) + sum(_new_folders(before, after) for before, after in pairwise(["", *ordered])) > MAX_FILES:
        raise ValueError(f"it names more than {MAX_FILES:,} files and folders")
    if manifest.sequence != sequence or len(paths) < len(manifest.files) or nested:
        raise ValueError("its number is wrong, or paths exclude each other")
    if any(entry.key != key_of(entry.path, entry.sha256) for entry in manifest.files):
        raise ValueError("a key does not match its file")
    return manifest


def _new_folders(before: str, after: str) -> int:
    """The number of folders of a path that are not those of the one before it, in a sorted list with NUL for `/`."""
    return after.count("\0", len(os.path.commonprefix([f"{before}\0", after])))


def _checksum(fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _escaped(character: str) -> str:
    return "".join(f"={byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))
