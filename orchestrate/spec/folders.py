"""Folders and files of this machine that a job names: `data`, `mounts`, `dockerfile` and others."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from orchestrate.dataclass import dataclass
from orchestrate.errors import UsageError
from orchestrate.host import private, writable
from orchestrate.spec.inputs import MOUNT, OF_SHELL
from orchestrate.spec.source import GIT
from orchestrate.spec.spec import JobSpec
from orchestrate.spec.values import STORAGE_URL

FILE_URL = "file://"
DATA = "/data"  # folder in containers with a folder for each name of `data`
KINDS = {"folder": stat.S_ISDIR, "regular file": stat.S_ISREG}


@dataclass(frozen=True)
class Mount:
    """A folder or file of this machine, and its path in nodes."""

    source: str  # absolute
    target: str  # absolute
    writable: bool


def with_absolute(spec: JobSpec) -> JobSpec:
    """Return the spec with absolute paths, so that it means the same in any folder; raises UsageError for bad paths."""
    data = {name: path if is_url(path) else _data(name, path) for name, path in spec.data.items()}
    mounts = [_absolute(text) for text in spec.mounts]
    files = spec.files.items()
    secrets = {name: source if source == OF_SHELL else _inside(source, f"secrets.{name}") for name, source in files}
    return dataclasses.replace(
        spec,
        source=spec.source if not spec.source or spec.source.startswith(GIT) else _inside(spec.source, "source"),
        data=data,
        mounts=mounts,
        secrets=spec.secrets | secrets,
        dockerfile=spec.dockerfile and _inside(spec.dockerfile, "dockerfile"),
        services=spec.services and _existing(_inside(spec.services, "services"), "services", "regular file"),
    )


def _data(name: str, text: str) -> str:
    path = unquote(text.removeprefix(FILE_URL)) if text.startswith(FILE_URL) else text
    return _existing(path, f"data.{name}", "folder")


def _path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text))


def _inside(text: str, key: str) -> str:
    """Return an absolute path; raises UsageError if a relative one leads out of the current folder by a link.

    The link may have come with a project, whose code would get to see what its user did not name.
    """
    path = _path(text)
    if not text.startswith(("/", "~")) and (real := led_out(path)):
        raise UsageError(
            f"{key}: {text} leads to {real}, out of the current folder", f"name {real}, if that is what you mean"
        )
    return path


def check_again(spec: JobSpec) -> None:
    """Raise UsageError if a link leads a file or folder of a job that continues out of the current folder."""
    for key, path in (("services", spec.services), ("dockerfile", spec.dockerfile)):
        if path and (real := led_out(path)):
            raise UsageError(f"{key}: {path} leads to {real}, out of the current folder", "start a new job")


def led_out(path: str) -> str:
    """Return where a path in the current folder leads, if that is outside of it; empty for others."""
    here, real = Path.cwd(), Path(os.path.realpath(path))
    return str(real) if Path(path).is_relative_to(here) and not real.is_relative_to(here) else ""


def _absolute(text: str) -> str:
    source, target, mode = _parts(text)
    found = _existing(source, "mounts")
    if mode == "rw":  # by its real path, in place of which a project cannot put a link later
        _inside(source, "mounts")
        found = str(writable.resolved(found))
    return f"{found}:{target}:{mode}"


def _parts(text: str) -> tuple[str, str, str]:
    match = re.fullmatch(MOUNT, text)
    assert match
    return match[1], match[2] or "/", match[3] or "ro"


def _existing(path: str, key: str, kind: str = "") -> str:
    """Return an absolute path; raises UsageError if it does not exist, or is not the `kind` of KINDS."""
    found, hint = _path(path), "check the path; relative paths start at the current folder"
    try:
        mode = os.stat(found).st_mode
    except OSError as error:
        raise UsageError(f"{key}: {found}: {error.strerror}", hint) from None
    if kind and not KINDS[kind](mode):
        raise UsageError(f"{key}: {found} is not a {kind}", hint)
    return found


def is_url(path: str) -> bool:
    """Whether the data of a job is in an object store, and not in a folder."""
    return re.match(STORAGE_URL, path) is not None and not path.startswith(FILE_URL)


def cached_data(url: str) -> Path:
    """Return the folder in which data of an object store is cached."""
    return private.cache("data") / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16] / "files"


def without_stores(spec: JobSpec) -> JobSpec:
    """Return the spec without data of object stores, which is in no folder of this machine before it is fetched."""
    return dataclasses.replace(spec, data={name: path for name, path in spec.data.items() if not is_url(path)})


def data_folders(spec: JobSpec) -> dict[str, str]:
    """Return the folder on this machine of each entry of `data`."""
    return {name: str(cached_data(path)) if is_url(path) else path for name, path in spec.data.items()}


def data_paths(spec: JobSpec) -> dict[str, str]:
    """Return the path in containers of each folder of `data`."""
    return {name: f"{DATA}/{name}" for name in spec.data}


def data_variables(paths: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in which workers find the paths of a job's data, by name."""
    return {f"DATA_{name.upper()}": path for name, path in paths.items()}


def mounts(spec: JobSpec) -> list[Mount]:
    """Return what to mount in containers, besides the code folder and the job folder."""
    data = [Mount(source, f"{DATA}/{name}", writable=False) for name, source in data_folders(spec).items()]
    others = [_parts(text) for text in spec.mounts]
    return data + [Mount(source, os.path.normpath(target), mode == "rw") for source, target, mode in others]
