"""What an object store can do: `remote.py` is S3 and others, `local.py` a folder of this machine."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from orchestrate.errors import StorageError

PART = 5 << 20  # bytes of a part of an upload: the least that S3 accepts, so that little memory is used
MAX_OBJECTS = 1_000_000  # that are listed; more are not the copy of a job
MAX_LEVELS = 64  # folders around an object that is listed
MAX_NAMES = 256 << 20  # bytes that their names and versions take in memory
VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
    ' (from a profile: eval "$(aws configure export-credentials --format env)")',
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "the permissions of the folder",
}


class Version(NamedTuple):
    """An object as it is now."""

    key: str
    size: int  # bytes
    tag: str  # differs if the object has been replaced


class Store(ABC):
    """The objects below a URL; keys are relative to it. Methods raise StorageError, or StorageLost during an outage."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Store a small object, replacing one with the same key."""

    @abstractmethod
    def put_stream(self, key: str, size: int, chunks: Iterator[bytes]) -> None:
        """Store an object of `size` bytes; it appears only once `chunks` ends without an exception.

        Exceptions of `chunks` are raised unchanged, except OSError and ValueError.
        """

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Store a small object unless the key exists; a store without conditional writes replaces it.

        Returns in either case: only reading the object shows whose it is, also after a lost answer.
        """

    @abstractmethod
    def read(self, key: str) -> Iterator[bytes]:
        """Yield the content of an object in pieces of a few MiB; raises StorageError if it does not exist."""

    @abstractmethod
    def all(self, below: str) -> Iterator[Version]:
        """Yield all objects in a folder, in no order, however many there are."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that do not exist are ignored."""

    def versions(self, below: str = "") -> Iterator[Version]:
        """Yield all objects in a folder, in no order; raises StorageError if these are too many."""
        size = 0
        for count, version in enumerate(self.all(below), 1):
            size += sys.getsizeof(version.key) + sys.getsizeof(version.tag)
            if count > MAX_OBJECTS or size > MAX_NAMES:
                what = f"{MAX_OBJECTS:,} objects, or names of more than {MAX_NAMES >> 20} MiB"
                raise StorageError(f"{self.url} holds more than {what}", "use an empty prefix")
            yield version

    def reach(self) -> None:
        """Check that the objects can be listed."""
        next(self.versions(), None)

    def list(self, below: str) -> Iterator[tuple[str, int]]:
        """Yield key and size in bytes of all objects in a folder, in no order."""
        yield from ((version.key, version.size) for version in self.versions(below))
