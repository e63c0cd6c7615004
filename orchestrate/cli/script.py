"""Checks of the script before a job is created."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.node.command import of_python
from orchestrate.spec import command, strict_yaml
from orchestrate.spec.spec import JobSpec

SHELLS = ("sh", "bash", "zsh")


def check_script(spec: JobSpec) -> JobSpec:
    """Check that the script exists; return the spec with a path relative to the folder in which workers start.

    A name without a slash, or a path outside the folder, may also be a program in the image. Raises UsageError.
    """
    top, script = Path.cwd().resolve(), spec.command[0]
    here = _start(spec.chdir, top)
    spec = dataclasses.replace(spec, chdir=str(here.relative_to(top)) if here != top else "")
    is_python = of_python(spec.command)
    if not script:
        raise UsageError("the script name is empty", "use -- SCRIPT ARGS, or -- -m MODULE ARGS")
    if launcher := command.other_launcher(spec.command):
        raise UsageError(
            f"{launcher} starts workers of its own, which know nothing of the other nodes",
            "leave it out: python -m orchestrate run SCRIPT.py ARGS",
        )
    if script.startswith("-"):
        if script != "-m" or len(spec.command) < 2:
            raise UsageError(
                f"expected a script or -m MODULE, got {script}", "use -- SCRIPT ARGS, or -- -m MODULE ARGS"
            )
        module = spec.command[1]
        if module.endswith(".py") and os.path.isfile(here / module):
            raise UsageError(f"-m takes a module, but {module} is a file", "remove -m")
        return spec
    try:
        given = here / script
        path = given.resolve()
        found = path.is_file()
        path = given.parent.resolve() / given.name if given.name else path  # a link stays one
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or not encodable
        raise UsageError(f"the script {strict_yaml.shown(script)} cannot be read: {error}", "check the path") from None
    inside = path.is_relative_to(top)
    if path.is_dir():
        module = ".".join(Path(script).parts) or "PACKAGE"
        raise UsageError(f"the script {script} is a folder", f"to run a module in it: -- -m {module}.MODULE")
    program = (
        not is_python and os.access(path, os.X_OK) and (not inside or ("/" not in script and shutil.which(script)))
    )
    if program or (not is_python and not found and (not inside or "/" not in script)):
        _check_program(spec, here)
        return spec
    if not found:
        raise UsageError(f"the script {script} does not exist", f"paths are relative to {here}")
    if not inside:
        raise UsageError(
            f"the script {script} is outside {top}, the folder that nodes see",
            f"run from its folder: cd {path.parent}",
        )
    if not is_python and not os.access(path, os.X_OK):
        interpreter = "bash" if path.suffix == ".sh" else "python"
        raise UsageError(
            f"{script} is neither a .py file nor executable",
            f"chmod +x {script}, or run it with an interpreter: -- {interpreter} {script}",
        )
    relative = os.path.relpath(path, here)
    # Otherwise Python takes it for an option, and a program without a slash is searched in PATH.
    relative = f"./{relative}" if relative.startswith("-") or not is_python else relative
    return dataclasses.replace(spec, command=(relative, *spec.command[1:]))


def _start(chdir: str, top: Path) -> Path:
    """Return the folder in the code folder `top` in which workers start; raises UsageError."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a loop of links, or not encodable
        start = (top / chdir).resolve()
        if start.is_dir() and start.is_relative_to(top):
            return start
    raise UsageError(f"chdir: {strict_yaml.shown(chdir)} is no folder in {top}", "use a path relative to that folder")


def _check_program(spec: JobSpec, here: Path) -> None:
    """Raise UsageError for a shell with a script that does not exist, and for a script without its suffix."""
    shell, *words = spec.command
    if (here / f"{shell}.py").is_file() and not shutil.which(shell):
        raise UsageError(f"the script {shell} does not exist", f"did you mean {shell}.py?")
    if Path(shell).name in SHELLS and words and not words[0].startswith(("-", "/")) and not (here / words[0]).exists():
        raise UsageError(f"the script {words[0]} does not exist", f"paths are relative to {here}")
