"""Mounts of nodes, in the form of a Compose file, and masks that hide parts of them.

Masks hide run directories, records, `.git` and files excluded by .dockerignore in the code folder.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrate.engines.docker.ignored import ignored
from orchestrate.errors import EngineError, UsageError
from orchestrate.files.folder import unlinked
from orchestrate.files.paths import is_run, is_text
from orchestrate.host import records
from orchestrate.host.mountinfo import is_kernels, kernels, paths
from orchestrate.node.command import of_python
from orchestrate.node.trees import identity

CODE, JOB = "/workspace", "/job"  # paths in nodes of the code folder and the job folder
ALWAYS_HIDDEN = ("runs", ".git")
# Compiled copies of files next to them.
COMPILED = ("__pycache__", "*.pyc", "*.pyo", "*.py[co]", "*.py[cod]", "*$py.class")
MAX_ENTRIES = 50_000  # entries of the code folder to check for sockets, which takes 0.1 s
MAX_MASKS = 4096  # masks of a node; mounting as many takes 1 s


def bind(source: Path, target: str) -> dict[str, Any]:
    """Return a mount of an existing folder, in a form in which Compose accepts any path."""
    return {"type": "bind", "source": str(source), "target": target, "bind": {"create_host_path": False}}


def identities(run: Path, code: Path, at: str = JOB) -> dict[str, str]:
    """Return the identities of both folders by their paths in nodes, `at` for `run`.

    For the current folder, it is that of the folder itself, even if its path leads elsewhere by now. Raises EngineError
    if `run` was replaced.
    """
    try:
        found = {at: records.identity_in(run.parent, run.name)}
        with contextlib.suppress(FileNotFoundError):  # Compose reports it
            found[CODE] = identity(os.stat(".") if os.path.realpath(code) == os.getcwd() else unlinked(code))
        return found
    except OSError as error:
        raise EngineError(
            f"cannot mount {error.filename or run} in nodes: {error.strerror}", "start it again"
        ) from None


def check_link(script: str, code: Path) -> None:
    """Raise UsageError if the script is a link that leads out of the code folder, or may, as an absolute path does."""
    path = code / script
    if path.is_symlink():
        target = path.readlink()
        if target.is_absolute() or not path.resolve().is_relative_to(code.resolve()):
            raise UsageError(
                f"nodes cannot follow the link {script} to {target}",
                "use a relative link to a file in this folder (ln -sr), a copy, or --engine process",
            )


def node_mounts(run: Path, code: Path, chdir: str = "", at: str = JOB) -> list[dict[str, Any]]:
    """Return the mount of a job's or cluster's files, `at` this path, and the masks in its code folder.

    Raises EngineError for a path that cannot be mounted, and UsageError like `masks`.
    """
    for path in (str(run), str(code)):
        if not is_text(path):
            raise EngineError(f"{ascii(path)} cannot be mounted: its name is not UTF-8", "use another folder")
    hidden = masks(code, run.parent.parent, CODE, chdir)
    names = {mount["target"].removeprefix(f"{CODE}/") for mount in hidden}
    more = [*islice(special(code, names), max(0, MAX_MASKS + 1 - len(names)))]
    if len(hidden) + len(more) > MAX_MASKS:
        raise UsageError(
            f"{code} has more than {MAX_MASKS} sockets, pipes, run directories and files to hide, which is the limit",
            "list their folders in .dockerignore, or use another folder",
        )
    above = [{"type": "tmpfs", "target": JOB, "read_only": True}] if at != JOB else []
    return [*above, bind(run, at), *hidden, *(mask(code, name, CODE, folder) for name, folder in more)]


def masks(code: Path, runs: Path, place: str, chdir: str = "") -> list[dict[str, Any]]:
    """Return mounts, in the long form of a Compose file, that hide parts of a code folder that is mounted at `place`.

    Raises UsageError like `hidden`.
    """
    return [mask(code, name, place, _is_folder(code / name)) for name in hidden(code, runs, chdir)]


def hidden(code: Path, runs: Path, chdir: str = "") -> list[str]:
    """Return the paths in a code folder that nodes must not see.

    `runs` is the real path of the folder of all jobs, which need not exist; `chdir` is where workers start. Raises
    UsageError if there are too many paths, or the runs are not in a separate folder.
    """
    check_code_folder(code, runs)
    kept = set(paths(*records.kept(code)))
    if code in kept:
        raise UsageError(f"{code} contains keys and secrets of jobs, which nodes could read", "use another folder")
    folders = (*paths(runs), *filter(_exists, kept | kernels()))
    jobs = {str(folder.relative_to(code)) for folder in folders if folder.is_relative_to(code)}
    # Without links, since nodes would not find a mask at the end of one.
    start = os.path.relpath(os.path.realpath(code / chdir), os.path.realpath(code))
    starts = {"", start} if start.partition("/")[0] != ".." else {""}
    always = {os.path.normpath(os.path.join(folder, name)) for folder in starts for name in ALWAYS_HIDDEN}
    excluded = sorted(islice(ignored(code, COMPILED, jobs | always), MAX_MASKS + 1))
    if len(excluded) > MAX_MASKS:
        raise UsageError(
            f".dockerignore excludes more than {MAX_MASKS} files and folders of {code}, which is the limit",
            "exclude their folders instead",
        )
    found = {*excluded, *jobs, *(name for name in always if _exists(code / name))}
    masked: list[str] = []
    for name in sorted(found, key=lambda name: name.replace("/", "\0")):  # so that the content of a folder follows it
        if not masked or not name.startswith(f"{masked[-1]}/"):
            masked.append(name)
    return masked


def check_script(mounts: list[dict[str, Any]], command: tuple[str, ...], chdir: str = "") -> None:
    """Raise UsageError if a mount hides the script of a command: Python would run an empty file without an error."""
    for path in _scripts(command, chdir):
        for mount in mounts:
            if f"{CODE}/{path}/".startswith(f"{mount['target']}/"):
                name = mount["target"].removeprefix(f"{CODE}/")
                hint = (
                    "remove it from .dockerignore, or add an exception (!); .git, runs and folders of jobs stay hidden"
                )
                raise UsageError(f"nodes cannot see the script: {name} is hidden", hint)


def special(code: Path, hidden: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yield what nodes must not see wherever it is in a folder, and whether it is a folder.

    That is run directories, and sockets, pipes and devices, through which nodes could talk to processes of this
    machine. Checks a limited number of entries, those near the top first, but not in folders that are hidden anyway.
    """
    pending, left = deque([""]), MAX_ENTRIES
    while pending and left > 0:
        folder = pending.popleft()
        with contextlib.suppress(OSError), os.scandir(code / folder) as found:
            entries = [*islice(found, left)]
            left -= len(entries)
            if folder and is_run(entry.name for entry in entries):
                yield folder, True
                continue
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if name in hidden or entry.is_symlink():
                    continue
                if entry.is_dir():
                    pending.append(name)
                elif not entry.is_file():
                    yield name, False


def check_code_folder(code: Path, runs: Path) -> None:
    """Raise UsageError for a code folder in which something that must be hidden cannot be."""
    if runs == code:
        raise UsageError(f"{runs} is the code folder, and run directories need a separate folder", "use --runs runs")
    if code == Path("/") or is_kernels(code):
        raise UsageError(f"{code} cannot be the code folder: it is a system folder", "use another folder")


def _scripts(command: tuple[str, ...], chdir: str) -> list[str]:
    """Return the files that a command may run in the folder `chdir`, as paths in the code folder."""
    if command[:1] != ("-m",):
        given = [] if of_python(command) else [word for word in command[1:] if not word.startswith("-")]  # bash go.sh
        return [os.path.normpath(os.path.join(chdir, word)) for word in (*command[:1], *given[:1])]
    path = os.path.normpath(os.path.join(chdir, command[1].replace(".", "/")))
    return [f"{path}.py", f"{path}/__main__.py"]


def _is_folder(path: Path) -> bool:
    """Whether to mask a path as a folder; the folder of jobs may not exist yet."""
    return os.path.isdir(path) or not os.path.exists(path)


def mask(code: Path, name: str, place: str, folder: bool) -> dict[str, Any]:
    """Return a mount that hides `name` in a folder that is mounted at `place`; raises UsageError for an odd name."""
    if not is_text(name):
        raise UsageError(f"cannot hide {ascii(name)}: its name is not UTF-8", "rename it")
    target = f"{place}/{name}"
    if folder:
        return {"type": "tmpfs", "target": target, "read_only": True, "tmpfs": {"size": 4096, "mode": 0o555}}
    return {**bind(Path(os.devnull), target), "read_only": True}


def is_mask(mount: dict[str, Any]) -> bool:
    """Whether a mount hides something."""
    return str(mount.get("source", os.devnull)) == os.devnull


def _exists(path: Path) -> bool:
    """Whether there is something to hide; links cannot lead out of a node."""
    return os.path.exists(path) and not path.is_symlink()
