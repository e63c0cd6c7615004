"""Secrets that nodes get as files: their values, read when a job starts."""

from __future__ import annotations

import dataclasses
import os

from orchestrate.errors import UsageError
from orchestrate.files.folder import ROOT
from orchestrate.host import writable
from orchestrate.spec.inputs import OF_SHELL
from orchestrate.spec.spec import JobSpec

MAX_SIZE = 128 << 10  # bytes of all secrets, which are a part of each request to start a worker
UNSHOWN = "its path is not shown, since it could be the secret itself"
HINT = "use env for a variable of this shell, or the path of a file"  # without the source: it may be the secret itself
SUFFIX = "_FILE"  # of the variable with the path of a secret's file, as in official images


def with_contents(spec: JobSpec) -> JobSpec:
    """Return the spec with the values of its secret files; raises UsageError for one that cannot be read."""
    contents = {name: _read(name, source) for name, source in spec.files.items()}
    if sum(len(content.encode(errors="surrogateescape")) for content in contents.values()) > MAX_SIZE:
        raise UsageError(f"the secrets are larger than {MAX_SIZE >> 10} KiB", "mount a folder for larger files")
    return dataclasses.replace(spec, contents=contents)


def variables(spec: JobSpec, folder: str) -> dict[str, str]:
    """Return the variables with the paths of the secret files, which are in a folder of nodes."""
    return {f"{name}{SUFFIX}": f"{folder}/{name}" for name in spec.contents}


def _read(name: str, source: str) -> str:
    if source == OF_SHELL:
        if not os.environ.get(name):
            state = "is empty" if name in os.environ else "is not set"
            raise UsageError(f"secrets.{name}: {name} {state} in this shell", f"export {name}, or {HINT}")
        return os.environ[name]
    try:
        with ROOT.open(str(writable.resolved(source))) as file:
            return file.read(MAX_SIZE + 1).decode(errors="surrogateescape")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"secrets.{name}: cannot read its file: {why} ({UNSHOWN})", HINT) from None
