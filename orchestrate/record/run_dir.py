"""The files of a job: create, load, move out of a cluster, remove."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, NoReturn

from orchestrate.errors import OrchestrateError, Unsupervised, UsageError
from orchestrate.files import folder
from orchestrate.files.folder import content
from orchestrate.files.paths import JOB, as_name
from orchestrate.host import owners, records, users
from orchestrate.host.records import Record
from orchestrate.node.messages import checks
from orchestrate.node.trees import clear
from orchestrate.plan.plan import Plan, read_plan
from orchestrate.record import lock, recorder, report
from orchestrate.record.events import Event
from orchestrate.record.paths import JobPaths
from orchestrate.spec import strict_yaml
from orchestrate.spec.layers import layer, resolve
from orchestrate.spec.redact import redacted, secret_names
from orchestrate.spec.spec import APP, JobSpec

FILE = "file:"  # before the name of a secret that is a file, in the record


def new_paths(spec: JobSpec, runs: Path) -> JobPaths:
    """The paths of a new job such as `mnist-4f2a91`: the job's name, and six random characters."""
    while os.path.lexists(found := runs / f"{slug(spec)}-{secrets.token_hex(3)}"):  # of a thousand jobs, two in 3 %
        pass
    return JobPaths(found)


def slug(spec: JobSpec) -> str:
    """The name of a job, with the characters that Docker, DNS and file systems accept."""
    scripts = [word for word in spec.command[:2] if word.endswith((".py", ".sh"))]
    module = spec.command[0] == "-m"
    name = spec.name or (spec.command[1] if module else Path(scripts[0] if scripts else spec.command[0]).stem)
    name = "digits" if not spec.name and spec.command == APP else name
    return as_name(name)[:32].strip("-") or "job"


def create(spec: JobSpec, plan: Plan, paths: JobPaths, held: contextlib.ExitStack | None = None) -> None:
    """Create the run directory of a job or cluster, or nothing at all; raises UsageError if it cannot be written.

    Others see it only once `held`, if given, has its lock.
    """
    cluster = plan.placement.cluster
    owner = users.nodes_of(spec.user) if plan.contained else None
    theirs = os.path.lexists(paths.root)  # another job's
    hidden = {name: spec.env[name] for name in secret_names(spec.env, spec.secrets)}
    hidden |= {f"{FILE}{name}": content for name, content in spec.contents.items()}
    try:
        owners.make(paths.root.parent)
        if cluster == plan.job_id:
            paths.create_cluster(owner, hidden)
        else:
            paths.create(cluster, owner, hidden, plan.placement.has_work)
        if held:
            held.enter_context(lock.held(paths))
        records.write(paths.spec, dataclasses.replace(spec, env=redacted(spec.env, spec.secrets)).to_yaml())
        keep(paths, plan, spec)
    except BaseException as error:  # including Ctrl-C
        for path in () if theirs else (paths.folder.path, paths.root):  # on a cluster, the former is not in the latter
            with contextlib.suppress(OSError):
                folder.remove(path)
        if not theirs:
            records.forget(paths.root)
        if not isinstance(error, OSError):
            raise
        raise UsageError(
            f"cannot write to {paths.root}: {error.strerror}", "use --runs to select another folder"
        ) from None


def on_cluster(runs: Path, cluster: str) -> list[JobPaths]:
    """The jobs of this account whose files are in the folder of a cluster; links of a project do not count."""
    return [paths for paths in linked(runs, cluster) if records.find(paths.root)]


def linked(runs: Path, cluster: str) -> list[JobPaths]:
    """The run directories, of jobs of this account or not, with a link to the folder of a cluster."""
    return [paths for run in sorted(runs.glob("*")) if (paths := JobPaths(run)).cluster == cluster]


def move_from_cluster(paths: JobPaths) -> None:
    """Move the files of a job from its cluster's folder to its run directory, where they replace a link.

    They are moved before they are checked, since nodes do not see the new place: a node may have replaced them.
    Raises OSError; if they could not be moved, they are still where they were, and the link is kept.
    """
    cluster, there = paths.cluster, paths.folder.path
    if not cluster:
        return
    for run in (paths.root, paths.root.parent / cluster):
        if why := owners.foreign(run):
            raise OSError(errno.EPERM, f"{run} is not one of your run directories: {why}")
    if not (record := records.find(paths.root)):
        raise OSError(errno.EPERM, f"{paths.root} has no record: {records.FOREIGN}")
    if cluster != _planned_cluster(paths, record):
        raise OSError(errno.EPERM, f"{paths.shared} was replaced: the job did not run on {cluster}")
    moved = _on_the_way(paths)
    folder.renew(there.parent, 0o755)  # a job can have taken our rights to it, and to its own folder
    folder.grant_access(str(there))
    lost = None
    try:
        if not os.path.lexists(moved):  # else this was interrupted before
            there.rename(moved)
        if moved.is_symlink() or not moved.is_dir():
            moved.unlink()
            raise OSError(errno.ENOTDIR, "the nodes have replaced the job's folder")
    except (FileNotFoundError, NotADirectoryError) as error:  # the former: a node has moved it away
        lost = error
        moved.mkdir()
    paths.shared.unlink()
    moved.rename(paths.shared)
    others = {other.root.name for other in linked(paths.root.parent, cluster)}
    clear(str(there.parent), keep=others)  # what the job has created next to its folder
    if lost:
        raise lost


def _planned_cluster(paths: JobPaths, record: Record) -> str:
    """Return the cluster in the plan of a job; empty if there is none, or the plan was replaced."""
    with contextlib.suppress(OSError, ValueError):
        if records.written(record, paths.plan.name, text := content(paths.plan)):
            return read_plan(text, {}).placement.cluster
    return ""


def _finish_move(paths: JobPaths) -> None:
    """Give a job the files that were moved from its cluster by a process that was killed just before their last step.

    Raises OSError.
    """
    if not os.path.lexists(paths.shared) and records.find(paths.root):
        moved = _on_the_way(paths)
        if moved.is_dir() and not moved.is_symlink():
            moved.rename(paths.shared)


def _on_the_way(paths: JobPaths) -> Path:
    """Return where the files of a job are while they are moved: a name that no project can know, and bring."""
    return paths.root / f".{JOB}-{hashlib.sha256(records.need(paths.root).events.encode()).hexdigest()[:16]}"


def remove(paths: JobPaths) -> None:
    """Remove a job's files and its record; raises OrchestrateError if that fails."""
    try:
        folder.remove(paths.root)
    except OSError as error:
        raise OrchestrateError(f"cannot remove {paths.root}: {error}", "check who owns the files in it") from None
    records.forget(paths.root)


def keep(paths: JobPaths, plan: Plan, spec: JobSpec) -> None:
    """Save the plan of the newest generation."""
    records.write(paths.plan, plan.to_json(spec.mask()) + "\n")


def load(paths: JobPaths) -> tuple[JobSpec, Plan]:
    """Load the spec and newest plan of a job or cluster of this account; raises UsageError if its files are invalid."""
    return _read(paths, None if owners.foreign(paths.root) else records.need(paths.root))


def load_for_display(paths: JobPaths) -> tuple[JobSpec, Plan]:
    """Like `load`, but only for display: a job that has ended may come from anywhere, such as copied results."""
    return load(paths) if records.find(paths.root) or not ended(paths) else _read(paths, None)


def _read(paths: JobPaths, record: Record | None) -> tuple[JobSpec, Plan]:
    """Read the spec and newest plan from a run directory, and add the values of secrets from the record."""
    try:
        if why := owners.foreign(paths.root):
            raise ValueError(why)
        hidden = record.secrets if record else {}
        texts = {paths.spec: strict_yaml.read(paths.spec), paths.plan: content(paths.plan)}
        env = {f"env.{name}": value for name, value in hidden.items() if not name.startswith(FILE)}
        contents = {name.removeprefix(FILE): value for name, value in hidden.items() if name.startswith(FILE)}
        spec = dataclasses.replace(resolve(_layer(texts[paths.spec], paths.spec), env), contents=contents)
        plan = read_plan(texts[paths.plan], spec.env)
        if plan.job_id != paths.root.name:
            raise ValueError(f"its plan belongs to {plan.job_id!r}")
        if record:
            _finish_move(paths)
        if not os.path.lexists(seen := paths.nodes if plan.placement.cluster == plan.job_id else paths.shared):
            raise ValueError(f"{seen.name} is missing")
        linked = paths.cluster and paths.cluster == plan.placement.cluster
        for path in (paths.nodes, paths.sockets, *([] if linked else [paths.shared])):  # which nodes mount
            if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
                raise ValueError(f"{path.name} is not a folder")
        for path, text in texts.items():
            if record and not records.written(record, path.name, text):
                raise ValueError(f"{path.name} has been changed")
        return spec, plan
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{paths.root} does not contain a job that can continue: {error}", "start the job again"
        ) from None


_layer = functools.lru_cache(maxsize=4)(layer)  # a command reads its job several times


def keep_changes(spec: JobSpec, plan: Plan, paths: JobPaths) -> None:
    """Write what differs in the code folder from its Git commit, without secrets; raises OSError."""
    from orchestrate.spec import worktree

    records.drop(paths.patch)  # of an earlier generation
    if plan.placement.revision.endswith("-dirty") and (
        text := worktree.changes(Path(plan.placement.code), spec.mask())
    ):
        records.put(paths.patch, text)


def history(paths: JobPaths) -> list[Event]:
    """Return the events of a job so far, not verified if it is a copy, such as copied results, which may say anything.

    Raises UsageError if they are damaged.
    """
    record = records.find(paths.root)
    try:
        return recorder.read(content(paths.events).encode(), bytes.fromhex(record.events) if record else None)[0]
    except FileNotFoundError:  # the job has just been created
        return []
    except (OSError, ValueError) as error:
        raise UsageError(f"{paths.events} is damaged: {error}", f"python -m orchestrate rm {paths.root.name}") from None


def runs(paths: JobPaths) -> bool:
    """Whether a job has a supervisor, and has not ended."""
    return bool(lock.supervisor(paths)) and not ended(paths)


def unsupervised(paths: JobPaths) -> NoReturn:
    """Raise Unsupervised for a job without a supervisor, since no result will be reported."""
    name = paths.root.name
    raise Unsupervised(
        f"{name} has no supervisor, so no result will be reported", f"python -m orchestrate attach {name}"
    )


def ended(paths: JobPaths) -> dict[str, Any] | None:
    """The report of a job that has ended, or None; for a job of this account, only the one written at its end."""
    try:
        text = content(paths.report)
        checks.limit_values(text.encode(errors="replace"), checks.MAX_VALUES)
        data = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return None
    record = records.find(paths.root)
    return data if report.readable(data) and (not record or records.written(record, paths.report.name, text)) else None
