"""What nodes see of this machine: mounts in the form of a Compose file, and masks over what is not theirs to see.

Of the folder of code they see neither the files of jobs, nor the history, nor what .dockerignore names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from docker.utils.build import PatternMatcher

from orchestrate.errors import EngineError, UsageError
from orchestrate.paths import is_text

ALWAYS = ("runs", ".git")
COMPILED = (
    "__pycache__",
    "*.pyc",
    "*.pyo",
    "*.py[co]",
    "*.py[cod]",
    "*$py.class",
)  # hold what the files beside them do
CODE, JOB = "/workspace", "/job"  # where nodes see them
MOST = 256  # mounts of a container


def bind(source: Path, target: str) -> dict[str, Any]:
    """A mount of a folder that is there; in this form Compose takes any path."""
    return {"type": "bind", "source": str(source), "target": target, "bind": {"create_host_path": False}}


def of_nodes(run: Path, code: Path, command: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The mounts of nodes that see the folder `run`, one of those of a job or cluster, and run `command` in `code`.

    Raises UsageError as `masks` does, EngineError where a path cannot be mounted.
    """
    for path in (str(run), str(code)):
        if not is_text(path):
            raise EngineError(f"{ascii(path)} cannot be mounted: its name is not UTF-8", "use another folder")
    return [bind(run, JOB), *masks(code, run.parent.parent, CODE, command)]


def document(mounts: list[dict[str, Any]]) -> str:
    """A Compose file, beside the project's own, that gives every node these mounts; Compose looks up no variable."""
    literal = {"volumes": [{key: _literally(value) for key, value in mount.items()} for mount in mounts]}
    return yaml.safe_dump({"services": {"master": literal, "trainer": literal}}, allow_unicode=True)


def _literally(value: Any) -> Any:
    return value.replace("$", "$$") if isinstance(value, str) else value


def masks(code: Path, runs: Path, place: str, command: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The mounts, in the long form of a Compose file, that hide things in a folder of code, mounted at `place`.

    `runs` is the folder of all jobs. Raises UsageError where there are too many, the runs are not in a folder of their
    own, or the script of `command` would be hidden: Python would run an empty one, without an error.
    """
    if runs == code:
        raise UsageError(f"{runs} holds the code that nodes see, and jobs cannot be there, too", "--runs runs")
    names = [*ALWAYS, *([str(runs.relative_to(code))] if runs.is_relative_to(code) else [])]
    found = sorted({*(name for name in names if _there(code / name)), *ignored(code)})
    whole = [name for name in found if not any(name.startswith(f"{other}/") for other in found)]
    if len(whole) > MOST:
        raise UsageError(
            f".dockerignore names {len(whole)} files and folders of {code}, and a node can hide {MOST}",
            "name the folders that they are in",
        )
    for name in whole:
        if any(f"{path}/".startswith(f"{name}/") for path in _scripts(command)):
            hint = "remove it from .dockerignore, or add an exception (!); runs and .git are always hidden"
            raise UsageError(f"nodes do not see {name}, where the script is", hint)
    return [_mask(code / name, f"{place}/{name}") for name in whole]


def _scripts(command: tuple[str, ...]) -> list[str]:
    """The files that a command may run, by their paths in the folder of code."""
    if command[:1] != ("-m",):
        return list(command[:1])
    path = command[1].replace(".", "/")
    return [f"{path}.py", f"{path}/__main__.py"]


def _mask(path: Path, place: str) -> dict[str, Any]:
    if path.is_dir():
        return {"type": "tmpfs", "target": place, "read_only": True, "tmpfs": {"size": 4096, "mode": 0o555}}
    return {"type": "bind", "source": os.devnull, "target": place, "read_only": True}


def _there(path: Path) -> bool:
    """Whether there is something to hide; a link leads nowhere in a node but to what is in it anyway."""
    return path.exists() and not path.is_symlink()


def ignored(code: Path) -> Iterator[str]:
    """What .dockerignore names, by its path: folders as a whole, if no exception (`!`) is for something in them."""
    try:
        lines = (code / ".dockerignore").read_text(errors="replace").splitlines()
    except OSError:
        return
    patterns = [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]
    patterns = [line for line in patterns if line.rpartition("/")[2] not in COMPILED]
    if not patterns:
        return
    matcher = PatternMatcher(patterns)
    deepest = float("inf") if any("**" in line for line in patterns) else max(line.count("/") for line in patterns)
    kept = [line[1:].lstrip("/") for line in patterns if line.startswith("!")]
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for entry in os.scandir(code / folder):
            path, real = folder + entry.name, entry.is_dir(follow_symlinks=False)
            exceptions = real and any(line.startswith((f"{path}/", "*")) for line in kept)
            if matcher.matches(path) and not exceptions:  # type: ignore[arg-type]  # the stub is wrong
                if not entry.is_symlink():
                    yield path
            elif real and (path.count("/") < deepest or exceptions):
                waiting.append(f"{path}/")
