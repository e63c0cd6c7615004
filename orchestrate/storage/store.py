"""Object stores, by their URLs."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from orchestrate.errors import UsageError
from orchestrate.storage.base import VARIABLES, Store

SCHEMES = ("s3", "gs", "az", "file")
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
PREFIX = re.compile(r"(/[A-Za-z0-9!_.*'()=+,-]+)*")  # means the same in every store and in a URL


def open_store(url: str) -> Store:
    """Connect to the objects below a URL, with the credentials of the environment; sends no request yet.

    A folder is created if it does not exist. Raises UsageError, StorageError, and ResourceError without obstore.
    """
    parts, url = parsed(url), url.rstrip("/")
    if parts.scheme == "file":
        from orchestrate.storage.local import Local

        return Local(url, parts.path)
    from orchestrate.storage.remote import connect  # only here: it takes time to import

    return connect(url, parts)


def parsed(url: str) -> SplitResult:
    """Split a URL into its parts; raises UsageError, without credentials in the message."""
    examples = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER"
    try:
        parts = urlsplit(url)
    except ValueError:
        raise UsageError("invalid storage URL", f"use {examples}") from None
    if parts.scheme not in SCHEMES:
        raise UsageError("a storage URL must start with s3://, gs://, az:// or file://", f"use {examples}")
    # Only the scheme is repeated. A secret may contain a slash, so all of a bucket's URL is searched.
    odd = "@" in parts.netloc if parts.scheme == "file" else {"@", ":"} & {*parts.netloc, *parts.path}
    if odd or parts.query or parts.fragment:
        hint = f"set {VARIABLES[parts.scheme]} in the environment"
        raise UsageError(f"a {parts.scheme}:// URL must not contain credentials or any of @ : ? #", hint)
    local = parts.scheme == "file"
    segments = parts.path.rstrip("/").split("/")
    wrong_place = bool(parts.netloc) if local else not BUCKET.fullmatch(parts.netloc)
    wrong_path = len(segments) < 2 if local else not PREFIX.fullmatch(parts.path.rstrip("/"))
    if wrong_place or wrong_path or {".", ".."} & set(segments) or not url.isprintable():
        raise UsageError(f"invalid storage URL {ascii(url[:200])}", f"use {examples}")
    return parts
