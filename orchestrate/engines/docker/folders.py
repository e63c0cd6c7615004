"""Mounts of the folders that a job names (`data`, `mounts`), and what may not be mounted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrate.engines.docker import mounts
from orchestrate.errors import UsageError
from orchestrate.files.paths import JOB, SYSTEM, is_text
from orchestrate.host import private, records, users, writable
from orchestrate.host.mountinfo import is_kernels, kernels, paths
from orchestrate.spec.folders import Mount
from orchestrate.spec.folders import mounts as wanted_mounts
from orchestrate.spec.spec import JobSpec

ONLY_DATA = "mount a subfolder that contains only data"
# Paths in nodes that have another meaning, also in an image of the project.
TAKEN = (
    *("/proc", "/sys", "/dev", "/run", "/var/run", "/etc", "/tmp", "/usr", "/lib", "/lib64", "/bin", "/sbin"),
    *("/opt/orchestrate", mounts.CODE, mounts.JOB),
)


def given_mounts(spec: JobSpec, runs: Path) -> list[dict[str, Any]]:
    """Return the mounts of `data` and `mounts`, with masks for the sockets, pipes and devices in them.

    `runs` is the folder of all jobs. Raises UsageError for a source that nodes must not see or cannot read, and for a
    target that is in use.
    """
    found: list[dict[str, Any]] = []
    targets: list[str] = []
    for mount in wanted_mounts(spec):
        source = _source(mount)
        _check_source(source, runs, spec, mount.writable)
        if mount.writable and any(source in (each, *each.parents) or each in source.parents for each in _caches()):
            hint = "mount a folder in it that is not orchestrate's, or read-only"
            raise UsageError(f"{source} cannot be mounted writable: orchestrate runs programs from its cache", hint)
        _check_target(mount, targets)
        targets.append(mount.target)
        found.append({**mounts.bind(source, mount.target), "read_only": not mount.writable})
        found += _masks(source, mount.target) if source.is_dir() else []
    return found


def note_writable(spec: JobSpec) -> None:
    """Remember the folders that nodes can write; raises UsageError."""
    writable.note(_source(mount) for mount in wanted_mounts(spec) if mount.writable)


def identities(spec: JobSpec) -> dict[str, str]:
    """Return the identity of each source of a mount, by its path in nodes, and note those that nodes can write.

    A node that finds another identity there starts no worker: a job may have put a link in place of a source. Raises
    UsageError.
    """
    note_writable(spec)
    return {mount.target: writable.found(_source(mount)) for mount in wanted_mounts(spec)}


def _source(mount: Mount) -> Path:
    """Return what a mount's source leads to; raises UsageError if a link may be a job's, or has become one."""
    source = writable.resolved(mount.source)
    if mount.writable and str(source) != mount.source:  # a project has put a link in its place since the job started
        raise UsageError(f"{mount.source} leads to {source} now", "start the job again, if that is what you mean")
    return source


def _check_source(source: Path, runs: Path, spec: JobSpec, written: bool) -> None:
    if not is_text(str(source)):
        raise UsageError(f"{ascii(str(source))} cannot be mounted: its name is not UTF-8", "rename it")
    if source == Path("/") or is_kernels(source) or any(source.is_relative_to(folder) for folder in SYSTEM):
        raise UsageError(f"{source} cannot be mounted: it is a system folder", ONLY_DATA)
    if not source.is_dir() and not source.is_file():
        raise UsageError(f"{source} cannot be mounted: it is neither a folder nor a file", "mount its folder")
    secret = {*paths(*records.kept(source)), *(() if _is_output(source, runs) else paths(runs))}
    if any(source.is_relative_to(path) or path.is_relative_to(source) for path in secret if path.exists()):
        raise UsageError(f"{source} cannot be mounted: it has files of jobs, which may contain secrets", ONLY_DATA)
    if any(path.is_relative_to(source) for path in kernels()):
        raise UsageError(f"{source} cannot be mounted: a kernel file system is mounted in it", "mount a folder in it")
    user = users.nodes_of(spec.user)
    if user and not users.can_read(source, *user):
        raise UsageError(
            f"nodes run as user {user[0]}, who cannot read {source}", f"chmod -R a+rX {source}; or --set user=root"
        )
    if user and written and not users.can_write(source, *user):
        raise UsageError(
            f"nodes run as user {user[0]}, who cannot write to {source}",
            f"chown -R {user[0]}:{user[1]} {source}; or mount it read-only, without :rw; or --set user=root",
        )


def _caches() -> tuple[Path, ...]:
    """Return the folder of all caches, by the path that is used and by its real one."""
    cache = private.cache("")
    return cache, cache.resolve()


def _is_output(source: Path, runs: Path) -> bool:
    """Whether a folder has only files that nodes wrote: it is in the job folder of a run directory."""
    return source.is_relative_to(runs) and source.relative_to(runs).parts[1:2] == (JOB,)


def _check_target(mount: Mount, earlier: list[str]) -> None:
    target = Path(mount.target)
    if mount.target == "/" or any(target.is_relative_to(path) or Path(path).is_relative_to(target) for path in TAKEN):
        raise UsageError(
            f"{mount.source} cannot be mounted at {target}: that path is in use", "use a path such as /models"
        )
    for other in earlier:
        if target.is_relative_to(other) or Path(other).is_relative_to(target):
            where = str(target) if other == mount.target else f"{other} and {target}, one inside the other"
            raise UsageError(f"two folders are mounted at {where}", "use another path for one of them")


def _masks(source: Path, target: str) -> Iterator[dict[str, Any]]:
    special = [*islice(mounts.special(source, ()), mounts.MAX_MASKS + 1)]
    if len(special) > mounts.MAX_MASKS:
        raise UsageError(
            f"{source} has more than {mounts.MAX_MASKS} sockets, pipes and run directories", "mount a folder in it"
        )
    return (mounts.mask(source, name, target, folder) for name, folder in special)
