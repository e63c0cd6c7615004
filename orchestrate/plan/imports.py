"""Find what a script imports, from its source and without running it.

`preload.py` calls this in a separate process (`bounded.py`), so it has few imports, for a fast start.
"""

from __future__ import annotations

import ast
import os
import re

from orchestrate.node.trees import opened

CALL = "call.py"  # in a job folder: calls a Python function, if the job is one
CALLED = f"$JOB_DIR/{CALL}"  # as the script of a command
COPIED = (CALLED, "$JOB_DIR/rank.py")  # scripts of ours that are in the job folder; the second runs tests
NEEDS_DYNAMO = re.compile(
    r"\boptim\b|DistributedDataParallel|\bDDP\b|FullyShardedDataParallel|\bfully_shard\b|torch\.compile"
)
FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers")  # they import torch
PACKAGES = ("torch", "ray", *FRAMEWORKS)
TRAITS = {  # what a script may do with torch.distributed, and how that looks in a line of its source
    "group": r"\binit_process_group\b",
    "parallel": r"\bDistributedDataParallel\b|\bDDP\(|\bFullyShardedDataParallel\b|\bfully_shard\b",
    "spawn": r"\b(?:mp|multiprocessing)\.spawn\(",
    "address": r"""environ\[\s*["']MASTER_(?:ADDR|PORT)["']\s*\]\s*=(?!=)|["']tcp://(?:localhost|127\.0\.0\.1)\b""",
    "file": r"""["']file://|\bFileStore\(""",
}
LAUNCHED = re.compile("RANK|TORCHELASTIC|is_torchelastic_launched|not in os.environ")  # in scripts for launchers
MAX_FILES = 200
MAX_FILE, MAX_BYTES = 1 << 20, 8 << 20  # maximum bytes of a file that is read, and of all of them


def uses(command: list[str], folder: str) -> list[str]:
    """Which of PACKAGES a script imports, itself or in a file in `folder` that it imports.

    Also `torch._dynamo`, if a file uses what needs Dynamo; and `spawn` and `address`, of TRAITS, if no file reads RANK.
    """
    found, sources = set[str](), _sources(command, folder)
    for _, text, names in sources:
        found |= {name.partition(".")[0] for name in names} & {*PACKAGES}
        found |= {"torch._dynamo"} if NEEDS_DYNAMO.search(text) else set()
    alone = not any(LAUNCHED.search(text) for _, text, _ in sources)
    return sorted(found | ({"spawn", "address"} & _traits(sources, folder).keys() if alone else set()))


def traits(command: list[str], folder: str) -> dict[str, str]:
    """Return FILE:LINE of the first place of each of TRAITS in a script, or in a file in `folder` that it imports."""
    return _traits(_sources(command, folder), folder)


def _traits(sources: list[tuple[str, str, set[str]]], folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, text, _ in sources:
        for number, line in enumerate(text.splitlines(), 1):
            for name, pattern in TRAITS.items():
                if name not in found and re.search(pattern, line.partition("#")[0]):
                    found[name] = f"{os.path.relpath(path, folder)}:{number}"
    return found


def _sources(command: list[str], folder: str) -> list[tuple[str, str, set[str]]]:
    """Path, text and imports of the script and of all files below `folder` that it imports, directly or indirectly."""
    first = f"{folder}/{command[0]}" if command[0] != "-m" else _file(command[1], folder, "__main__.py")
    if command[0] == CALLED:  # a function, as FILE:NAME
        first = f"{folder}/{command[1].rpartition(':')[0]}"
    waiting, seen = [first], {first}
    found: list[tuple[str, str, set[str]]] = []
    left = MAX_BYTES
    while waiting and len(found) < MAX_FILES:
        path = waiting.pop()
        text = _text(path, min(left, MAX_FILE)) if path else ""
        names = _imported(text)
        found.append((path, text, names))
        left -= len(text)
        for name in sorted(names):
            file = _file(name, folder) or (path and _file(name, os.path.dirname(path)))
            if file and file not in seen:
                seen.add(file)
                waiting.append(file)
    return found


def _text(path: str, most: int) -> str:
    """Read a source file, following links; empty if it is larger than `most` bytes or not a regular file."""
    try:
        with open(opened(os.path.realpath(path)), "rb") as file:
            content = file.read(most + 1)
        return content.decode() if len(content) <= most else ""
    except (OSError, ValueError):
        return ""


def _imported(text: str) -> set[str]:
    """Names in a source's imports: modules, and names that may be submodules."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _file(module: str, folder: str, package: str = "__init__.py") -> str:
    """Path of a module below a folder, or empty if it does not exist; for a package, its file `package`."""
    base = os.path.join(folder, *module.split("."))
    return next((path for path in (f"{base}.py", f"{base}/{package}") if os.path.isfile(path)), "")
