"""The node's program as nodes can read it: the installed one, or a copy of it."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from orchestrate.errors import EngineError
from orchestrate.files.paths import NODE, PACKAGE
from orchestrate.host import owners, private, users
from orchestrate.plan import container
from orchestrate.spec.spec import JobSpec

TARGET = str(Path(container.PROGRAM).parent)  # path in nodes
CACHE = "program"  # with a folder for each content


def files() -> list[Path]:
    """Return the files of the program.

    With `__init__.py`, so that an `orchestrate` that the image has installed is not taken for this one.
    """
    return [PACKAGE / "__init__.py", *sorted(NODE.rglob("*.py"))]


def folder(spec: JobSpec) -> Path:
    """Return the folder to mount at TARGET: a copy if nodes run as a user who cannot read the installed program.

    That is so if root has installed it with the umask 077. Raises EngineError if the copy cannot be made.
    """
    user = users.nodes_of(spec.user)
    if not user or all(users.can_read(path, *user) for file in files() for path in (file.parent, file)):
        return PACKAGE
    try:
        return _copied()
    except OSError as error:
        why = f"nodes run as user {user[0]}, who cannot read {PACKAGE}, and it cannot be copied: {error}"
        raise EngineError(why, f"chmod -R a+rX {PACKAGE}; or --set user=root") from None


def _copied() -> Path:
    """Return the copy of the program in the cache, which only this user can change; raises OSError."""
    contents = {path.relative_to(PACKAGE): path.read_bytes() for path in files()}
    cache = owners.cache(CACHE)
    copy = cache / hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
    private.make(cache)
    if not copy.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            for name, content in contents.items():
                path = Path(fresh, copy.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o644)
                path.parent.chmod(0o755)
            try:
                Path(fresh, copy.name).rename(copy)
            except OSError:
                if not copy.is_dir():  # made by another process meanwhile
                    raise
    return copy
