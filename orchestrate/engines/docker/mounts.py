"""What nodes see of this machine: mounts in the form of a Compose file, and masks that hide parts of them.

In the folder of code, run directories, records, `.git` and what .dockerignore excludes are hidden.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from orchestrate.engines.docker.ignored import ignored
from orchestrate.errors import EngineError, UsageError
from orchestrate.files import records
from orchestrate.files.mountinfo import is_kernels, kernels, paths
from orchestrate.files.paths import is_text
from orchestrate.node.command import of_python

CODE, JOB = "/workspace", "/job"  # where nodes see the code, and the folder that they write to
PATHS = ("source", "target")  # of a mount
ALWAYS = ("runs", ".git")
COMPILED = (
    "__pycache__",
    "*.pyc",
    "*.pyo",
    "*.py[co]",
    "*.py[cod]",
    "*$py.class",
)  # compiled copies of files next to them
MAX_ENTRIES = 50_000  # entries of a folder of code among which sockets are looked for; that takes a tenth of a second
MAX_MASKS = 4096  # masks of a node; mounting that many takes a second


def bind(source: Path, target: str) -> dict[str, Any]:
    """A mount of an existing folder, in the form in which Compose accepts any path."""
    return {"type": "bind", "source": str(source), "target": target, "bind": {"create_host_path": False}}


def inodes(run: Path, code: Path) -> dict[str, int]:
    """The inodes of both folders, by their paths in nodes; raises EngineError if `run` is not the one that was made.

    For the current folder it is that of the folder itself, even if its path leads elsewhere by now.
    """
    try:
        found = {JOB: records.inode_in(run.parent, run.name)}
        with contextlib.suppress(FileNotFoundError):  # Compose reports it
            found[CODE] = os.stat("." if os.path.realpath(code) == os.getcwd() else code).st_ino
        return found
    except OSError as error:
        raise EngineError(
            f"cannot mount {error.filename or run} in nodes: {error.strerror}", "start it again"
        ) from None


def document(mounts: list[dict[str, Any]], more: dict[str, Any]) -> str:
    """A Compose file that adds these mounts to every node, and `more`; Compose expands no variables in it."""
    volumes = [{key: literal(value) if key in PATHS else value for key, value in mount.items()} for mount in mounts]
    services = dict.fromkeys(("master", "trainer"), {"volumes": volumes, **more})
    return yaml.safe_dump({"services": services}, allow_unicode=True)


def literal(text: str) -> str:
    """Text in which Compose finds no variables."""
    return text.replace("$", "$$")


def of_nodes(run: Path, code: Path, command: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The mount of a job's or cluster's files, and the masks in its folder of code.

    Raises EngineError for a path that cannot be mounted, UsageError as `masks` does.
    """
    for path in (str(run), str(code)):
        if not is_text(path):
            raise EngineError(f"{ascii(path)} cannot be mounted: its name is not UTF-8", "use another folder")
    hidden = masks(code, run.parent.parent, CODE, command)
    names = {mount["target"].removeprefix(f"{CODE}/") for mount in hidden}
    doors = [*islice(_doors(code, names), max(0, MAX_MASKS + 1 - len(names)))]
    if len(hidden) + len(doors) > MAX_MASKS:
        raise UsageError(
            f"{code} has more than {MAX_MASKS} sockets, pipes and files to hide, the most that a node can hide",
            "name the folders that they are in in .dockerignore, or use another folder",
        )
    return [bind(run, JOB), *hidden, *(_mask(code, name, CODE, folder=False) for name in doors)]


def masks(code: Path, runs: Path, place: str, command: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The mounts, in the long form of a Compose file, that hide things in a folder of code, mounted at `place`.

    `runs` is the real path of the folder of all jobs, which need not exist yet. Raises UsageError if there are too
    many, the runs are not in a separate folder, or the script of `command` would be hidden: Python would run an empty
    file, without an error.
    """
    apart(code, runs)
    kept = set(paths(*records.kept(code)))
    if code in kept:
        raise UsageError(f"{code} holds the keys and secrets of jobs, and nodes would see it", "use another folder")
    folders = (*paths(runs), *filter(_there, kept | kernels()))
    jobs = {str(folder.relative_to(code)) for folder in folders if folder.is_relative_to(code)}
    named = sorted(islice(ignored(code, COMPILED), MAX_MASKS + 1))
    if len(named) > MAX_MASKS:
        raise UsageError(
            f".dockerignore names more than {MAX_MASKS} files and folders of {code}, the most that a node can hide",
            "name the folders that they are in",
        )
    found = {*named, *jobs, *(name for name in ALWAYS if _there(code / name))}
    whole: list[str] = []
    for name in sorted(found, key=lambda name: name.replace("/", "\0")):  # what is in a folder comes right after it
        if whole and name.startswith(f"{whole[-1]}/"):
            continue
        whole.append(name)
        if any(f"{path}/".startswith(f"{name}/") for path in _scripts(command)):
            hint = "remove it from .dockerignore, or add an exception (!); runs and .git are always hidden"
            raise UsageError(f"nodes do not see {name}, where the script is", hint)
    return [_mask(code, name, place, _as_folder(code / name)) for name in whole]


def _doors(code: Path, hidden: Collection[str]) -> Iterator[str]:
    """The sockets, pipes and devices in a folder of code: a node could talk through them to processes of this machine.

    Looks at a limited number of entries, those near the top first, and not in folders that are hidden anyway.
    """
    waiting, room = deque([""]), MAX_ENTRIES
    while waiting and room > 0:
        folder = waiting.popleft()
        with contextlib.suppress(OSError), os.scandir(code / folder) as entries:
            for entry in islice(entries, room):
                room -= 1
                name = f"{folder}/{entry.name}" if folder else entry.name
                if name in hidden or entry.is_symlink():
                    continue
                if entry.is_dir():
                    waiting.append(name)
                elif not entry.is_file():
                    yield name


def apart(code: Path, runs: Path) -> None:
    """Raise UsageError for a folder of code in which something would be seen that cannot be hidden."""
    if runs == code:
        raise UsageError(f"{runs} holds the code that nodes see, and jobs cannot be there, too", "--runs runs")
    if code == Path("/") or is_kernels(code):
        raise UsageError(f"nodes cannot be given {code} as their code: it is the system's own", "use another folder")


def _scripts(command: tuple[str, ...]) -> list[str]:
    """The files that a command may run, by their paths in the folder of code."""
    if command[:1] != ("-m",):
        given = [] if of_python(command) else [word for word in command[1:] if not word.startswith("-")]  # bash go.sh
        return [os.path.normpath(word) for word in (*command[:1], *given[:1])]
    path = command[1].replace(".", "/")
    return [f"{path}.py", f"{path}/__main__.py"]


def _as_folder(path: Path) -> bool:
    """Whether to hide it as a folder; that of jobs may not exist yet."""
    return os.path.isdir(path) or not os.path.exists(path)


def _mask(code: Path, name: str, place: str, folder: bool) -> dict[str, Any]:
    if not is_text(name):
        raise UsageError(f"cannot hide {ascii(name)}: its name is not UTF-8", "rename it")
    target = f"{place}/{name}"
    if folder:
        return {"type": "tmpfs", "target": target, "read_only": True, "tmpfs": {"size": 4096, "mode": 0o555}}
    return {"type": "bind", "source": os.devnull, "target": target, "read_only": True}


def _there(path: Path) -> bool:
    """Whether there is something to hide; a link cannot lead out of a node."""
    return os.path.exists(path) and not path.is_symlink()
