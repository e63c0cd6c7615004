"""What a script will import, as far as its source tells: so that nodes can import it ahead of time."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from orchestrate.folder import regular
from orchestrate.spec import JobSpec

TORCH = ("torch", "torch.distributed")
DYNAMO = "torch._dynamo"  # which the constructors of DDP and of the optimizers import: half a second to two
NEEDS_DYNAMO = re.compile(
    r"\boptim\b|DistributedDataParallel|\bDDP\b|FullyShardedDataParallel|\bfully_shard\b|torch\.compile"
)
MOST_FILES = 200
LARGEST, MOST_BYTES = 1 << 20, 8 << 20  # bytes of a file that is read, and of all of them


def preload(spec: JobSpec, folder: Path) -> tuple[str, ...]:
    """The modules that nodes import before there is any worker; none where workers get fresh interpreters.

    Those are torch's, where the script or a file of `folder` that it imports does import torch, and those of the job
    file. What a script imports is read from its source and never run.
    """
    if not spec.warm:
        return ()
    texts = _sources(spec.command, folder)
    torch = [*TORCH] if any(_imported(text) & {"torch"} for text in texts) else []
    if torch and any(NEEDS_DYNAMO.search(text) for text in texts):
        torch.append(DYNAMO)
    return (*torch, *(name for name in spec.preload if name not in torch))


def _sources(command: tuple[str, ...], folder: Path) -> list[str]:
    """The text of the script, and of all files below `folder` that it imports, directly or not."""
    first = folder / command[0] if command[0] != "-m" else _file(command[1], folder, "__main__.py")
    waiting, seen = [first], {first}
    texts: list[str] = []
    left = MOST_BYTES
    while waiting and len(texts) < MOST_FILES:
        path = waiting.pop()
        text = _text(path, min(left, LARGEST)) if path else ""
        texts.append(text)
        left -= len(text)
        for name in sorted(_imported(text, whole=True)):
            found = _file(name, folder) or (path and _file(name, path.parent))
            if found and found not in seen:
                seen.add(found)
                waiting.append(found)
    return texts


def _text(path: Path, most: int) -> str:
    """The text of a source, or of the file that a link leads to; none of one that is larger, or no regular file."""
    try:
        with regular(path.resolve()) as file:
            content = file.read(most + 1)
        return content.decode() if len(content) <= most else ""
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a circle
        return ""


def _imported(text: str, whole: bool = False) -> set[str]:
    """The modules that a source names in its imports: the first parts of their names, or the `whole` names."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: it is nested too deeply
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names if whole else {name.partition(".")[0] for name in names}


def _file(module: str, folder: Path, package: str = "__init__.py") -> Path | None:
    """The file of a module below a folder, if it is there; of a package, the one named so."""
    base = folder.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / package):
        if path.is_file():
            return path
    return None
