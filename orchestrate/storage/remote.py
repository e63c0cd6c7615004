"""Object stores elsewhere: S3 and compatible ones, Google Cloud Storage, Azure."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from orchestrate.errors import ResourceError, StorageBusy, StorageError, StorageLost, UsageError
from orchestrate.spec.redact import Mask
from orchestrate.storage.base import PART, VARIABLES, Store, Version
from orchestrate.storage.parallel import interruptible, started

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MAX_PARTS = 9_000  # of one upload; S3 accepts 10,000, so the parts of a large file are larger
PARTS_AT_ONCE = 4  # parts of one file that are in memory and on their way
REQUEST_TIMEOUT = timedelta(minutes=5)  # of a part or a small file: a slow uplink must be able to send it
LIST_TIMEOUT = 120.0  # seconds until the next thousand objects, of which pages may have none
DELETE_TIMEOUT = 10.0  # seconds; copies wait for it
READ_TIMEOUT = timedelta(minutes=1)  # without a byte of an answer
DOWNLOAD_TIMEOUT = timedelta(days=7)  # of a whole file of any size; READ_TIMEOUT detects a server that is gone
# Few retries here: the callers retry too, can be stopped while they wait, and report the error.
RETRY = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
ANSWER = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
DENIED = re.compile(r"\b(401|403) |AccessDenied|SignatureDoesNotMatch|InvalidAccessKeyId|ExpiredToken")
NO_CREDENTIALS = "169.254.169.254"  # where the library looks for a cloud machine's own credentials when none are set
BUSY = re.compile(r": 5\d\d |429 ")
LOST = re.compile(rf"error sending request|HTTP error|timed? ?out|{BUSY.pattern}", re.IGNORECASE)
MISSING = ("NoSuchKey", "404 Not Found", "not found: No such file")
LOST_HINT = "check the network, and the endpoint if you have set one (AWS_ENDPOINT_URL)"
HOST = re.compile(r" https?://(?:[^/\s@]*@)?([^/\s]+)")
CAUSE = re.compile(r"[Cc]onnection \w+|dns error|timed out|invalid peer certificate: \w+", re.ASCII)  # in the details


class Remote(Store):
    """Objects that the library obstore reads and writes."""

    def __init__(self, url: str, writer: ObjectStore, reader: ObjectStore) -> None:
        super().__init__(url)
        self._writer, self._reader, self._turn = writer, reader, threading.Lock()
        self._late: dict[str, Future[Any]] = {}  # requests that were not answered in time, by their kind

    def put(self, key: str, data: bytes) -> None:
        """Store a small object."""
        import obstore

        with self._errors(key):
            interruptible(obstore.put, self._writer, key, data, use_multipart=False)

    def put_stream(self, key: str, size: int, chunks: Iterator[bytes]) -> None:
        """Store an object in parts; uses memory for `PARTS_AT_ONCE` of them. Those with large parts take turns."""
        import obstore

        part = max(PART, -(-size // MAX_PARTS))
        with self._turn if part > PART else contextlib.nullcontext(), self._errors(key):
            options: Any = {"chunk_size": part, "max_concurrency": PARTS_AT_ONCE}
            interruptible(obstore.put, self._writer, key, chunks, use_multipart=True, **options)

    def create(self, key: str, data: bytes) -> None:
        """Store a small object unless the key exists."""
        import obstore
        from obstore import exceptions

        with self._errors(key):
            try:
                interruptible(obstore.put, self._writer, key, data, mode="create")
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return
            except exceptions.BaseError as error:
                if not isinstance(error, exceptions.NotSupportedError) and "NotImplemented" not in str(error):
                    raise
                interruptible(obstore.put, self._writer, key, data)

    def read(self, key: str) -> Iterator[bytes]:
        """Read an object in pieces."""
        import obstore

        with self._errors(key):
            pieces = iter(interruptible(obstore.get, self._reader, key).stream(min_chunk_size=1 << 20))
            while (piece := interruptible(next, pieces, None)) is not None:
                yield bytes(piece)

    def all(self, below: str) -> Iterator[Version]:
        """List the objects."""
        import obstore

        with self._errors(below):
            listed = iter(obstore.list(self._reader, below, chunk_size=1000))
            while (found := self._limited("listed its objects", LIST_TIMEOUT, next, listed, None)) is not None:
                for each in found:
                    tag = f"{each['size']} {each['e_tag']} {each['last_modified']}"
                    yield Version(each["path"], each["size"], tag)

    def _limited(self, what: str, seconds: float, request: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer to a request; raises StorageLost if it does not come in time, or has no end."""
        if what in self._late and not self._late[what].done():
            raise StorageLost(f"{self.url} still has not {what}", LOST_HINT)
        task = started(request, *arguments)
        if not wait([task], seconds).done:
            self._late[what] = task  # it cannot be ended, and no second one must run
            raise StorageLost(f"{self.url} has not {what} within {seconds:g} s", LOST_HINT)
        return task.result()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects."""
        import obstore

        for key in keys:
            with self._errors(key), contextlib.suppress(FileNotFoundError):
                self._limited("deleted an object", DELETE_TIMEOUT, obstore.delete, self._writer, key)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Raise the library's errors as StorageError."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:  # ValueError for a key that no store accepts
            raise explained(self.url, key, str(error)) from None  # the cause may contain credentials


def connect(url: str, parts: SplitResult) -> Remote:
    """Connect to the objects below a URL of these parts; raises StorageError, and ResourceError without obstore."""
    try:
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise ResourceError(f"{url} needs the package obstore", "pip install 'torch-orchestrate[storage]'") from error
    try:
        return Remote(url, _connect(parts, REQUEST_TIMEOUT), _connect(parts, DOWNLOAD_TIMEOUT))
    except (BaseError, OSError, ValueError) as error:
        raise explained(url, "", str(error)) from None


def _connect(parts: SplitResult, timeout: timedelta) -> ObjectStore:
    from obstore import store

    prefix = parts.path.strip("/") or None
    client: Any = {"timeout": timeout, "read_timeout": READ_TIMEOUT if timeout is DOWNLOAD_TIMEOUT else timeout}
    retry: Any = RETRY
    if parts.scheme == "gs":
        return store.GCSStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
    if parts.scheme == "az":
        return store.AzureStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
    config: Any = {}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        config, client["allow_http"] = {"endpoint": endpoint}, _may_use_http(endpoint)
    return store.S3Store(parts.netloc, prefix=prefix, config=config, client_options=client, retry_config=retry)


def _may_use_http(endpoint: str) -> bool:
    """Whether an S3 endpoint is one without TLS that may be used; raises UsageError if it must not be."""
    parts = urlsplit(endpoint)
    if parts.scheme == "https":
        return False
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError("AWS_ENDPOINT_URL must be a URL such as https://HOST:PORT")
    with contextlib.suppress(ValueError):
        if parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname).is_loopback:
            return True
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() not in ("true", "1"):
        hint = "use https://, or set AWS_ALLOW_HTTP=true to send the files without encryption"
        raise UsageError(f"AWS_ENDPOINT_URL names {parts.hostname} without TLS", hint)
    return True


def explained(url: str, key: str, text: str) -> StorageError:
    """The error for a library's message: what failed, why and the next step, without secrets of the environment."""
    scheme = url.partition(":")[0]
    where = f"{url}/{key}" if key else url
    text, _, details = text.partition("\n\nDebug source")
    answer = ANSWER.search(text)
    reason = ": ".join(filter(None, answer.groups())) if answer else text.partition(" - ")[2] or text
    if NO_CREDENTIALS in text:
        return StorageError(f"no credentials for {url}", f"set {VARIABLES[scheme]}")
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return StorageError(f"{url}: the bucket does not exist", "create it, or correct the URL")
    if any(part in text for part in MISSING):
        return StorageError(f"{where} does not exist", "check the URL; if it was removed meanwhile, run again")
    if DENIED.search(text):
        return StorageError(f"{where}: access denied ({_safe(reason)})", f"check {VARIABLES[scheme]}")
    if LOST.search(text):
        host, cause = HOST.search(text), CAUSE.search(details)
        server = _safe(host[1]) if host else "the object store"
        why = _safe(cause[0] if cause else reason)
        if BUSY.search(text):
            return StorageBusy(f"{url}: {server} is overloaded or failing ({why})", LOST_HINT)
        return StorageLost(f"{url}: {server} does not respond ({why})", LOST_HINT)
    return StorageError(f"{where}: {_safe(reason)}", f"check {VARIABLES[scheme]}")


def _safe(text: str) -> str:
    """A part of a message without queries and passwords of URLs, and without secrets of the environment."""
    text = re.sub(r"\?\S*|//[^/@\s]*@", "…", text.removeprefix("Generic ").strip().rstrip("."))
    return " ".join(Mask(os.environ)(text)[:300].split())
