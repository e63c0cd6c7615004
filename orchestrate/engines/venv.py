"""Virtual environments with a job's packages, for local processes; cached by interpreter and list of packages.

An environment sees the packages of this interpreter, too, so torch is not installed again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from orchestrate.console import print_message
from orchestrate.engines.build_output import follow
from orchestrate.errors import ResourceError
from orchestrate.host import owners, private
from orchestrate.plan.plan import pluralize
from orchestrate.spec import requirements

CACHE = "environments"
DONE = "orchestrate-complete"  # file of an environment whose packages are installed
ELSEWHERE = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")  # variables that make pip install somewhere else
PARENT = "orchestrate-parent.pth"


def python(lines: list[str]) -> Path:
    """Return the interpreter of the environment with these packages, which may not exist yet."""
    key = json.dumps([sys.prefix, sys.version, _parents(), lines])
    return (
        private.cache(CACHE) / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:16] / "bin" / "python"
    )


def _parents() -> list[str]:
    """Return the folders with the packages of this interpreter."""
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def create(lines: list[str]) -> None:
    """Create the environment with these packages unless it exists; raises ResourceError if that fails."""
    interpreter = python(lines)
    folder = interpreter.parents[1]
    requirements.variables(lines)
    try:
        with owners.filling(CACHE, folder.with_suffix(".lock")):
            if not ((folder / DONE).exists() and interpreter.exists()):
                print_message(f"installing {pluralize(len(lines), 'package')} in {folder} (once)")
                shutil.rmtree(folder, ignore_errors=True)
                _install(folder, interpreter, lines)
                (folder / DONE).touch()
    except OSError as error:
        hint = "set XDG_CACHE_HOME to another folder"
        raise ResourceError(f"cannot create {folder}: {error.strerror}", hint) from None


def _install(folder: Path, interpreter: Path, lines: list[str]) -> None:
    own = importlib.util.find_spec("pip") is None  # else it uses this interpreter's, which saves seconds
    create = [sys.executable, "-I", "-m", "venv", *([] if own else ["--without-pip"]), str(folder)]
    _run(create, "create a virtual environment", "install Python's venv and pip")
    if own and sys.version_info < (3, 12):  # its setuptools, which is old, would hide the one of this interpreter
        uninstall = [str(interpreter), "-I", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"]
        _run(uninstall, "prepare a virtual environment", "install Python's venv and pip")
    below = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    Path(below, PARENT).write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in _parents()))
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(lines) + "\n")
    command = [
        str(interpreter),
        "-I",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--requirement",
        str(listed),
    ]
    _run(command, "install the packages", "check the names and versions", requirements.mask(lines))


def _run(command: list[str], what: str, hint: str, hide: Callable[[str], str] = str) -> None:
    """Run a command; raises ResourceError if it fails, and prints its output only then."""
    env = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        last = follow(process, hide)
    if process.returncode:
        print_message("\n".join(last))
        raise ResourceError(f"could not {what}: see the output above", hint)
