"""Checks of the script before a job is created."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
from pathlib import Path

from orchestrate.console import print_message, quoted
from orchestrate.errors import UsageError
from orchestrate.files.folder import regular
from orchestrate.node.command import of_python
from orchestrate.plan.imports import COPIED
from orchestrate.spec import command
from orchestrate.spec.spec import JobSpec

SHELLS = ("sh", "bash", "zsh")
SYNTAX = "use -- SCRIPT ARGS, or -- -m MODULE ARGS"
MAX_NAMES = 10_000  # files of a folder that are compared with the name of a script that does not exist


def check_script(spec: JobSpec) -> JobSpec:
    """Check that the script exists; return the spec with a path relative to the folder in which workers start.

    A name without a slash, or a path outside the folder, may also be a program in the image. Raises UsageError.
    """
    top = Path.cwd().resolve()
    here = _start(spec.chdir, top)
    spec = dataclasses.replace(spec, chdir=str(here.relative_to(top)) if here != top else "")
    script, *words = spec.command
    if not script:
        raise UsageError("the script name is empty", SYNTAX)
    if launcher := command.other_launcher(spec.command):
        raise UsageError(
            f"{launcher} starts workers of its own, which know nothing of the other nodes",
            "leave it out: python -m orchestrate run SCRIPT.py ARGS",
        )
    if script in COPIED:  # it will be in the job folder
        return spec
    if script.startswith("-"):
        _check_module(script, words, here)
        return spec
    path, exists = _path(script, here)
    if not exists:
        _check_words(script)
    if _is_program(spec, path, exists, top):
        _check_program(script, words, here)
        return spec
    _check_file(script, path, exists, top, here)
    _check_batch_script(path)
    is_python = of_python(spec.command)
    if not is_python and not os.access(path, os.X_OK):
        interpreter = "bash" if path.suffix == ".sh" else "python"
        raise UsageError(
            f"{script} is neither a .py file nor executable",
            f"chmod +x {script}, or run it with an interpreter: -- {interpreter} {script}",
        )
    relative = os.path.relpath(path, here)
    # Otherwise Python takes it for an option, and a program without a slash is searched in PATH.
    relative = f"./{relative}" if relative.startswith("-") or not is_python else relative
    return dataclasses.replace(spec, command=(relative, *words))


def _check_module(flag: str, words: list[str], here: Path) -> None:
    """Raise UsageError unless the command is `-m MODULE`."""
    if flag != "-m" or not words:
        raise UsageError(f"expected a script or -m MODULE, got {flag}", SYNTAX)
    if words[0].endswith(".py") and os.path.isfile(here / words[0]):
        raise UsageError(f"-m takes a module, but {words[0]} is a file", "remove -m")


def _check_words(script: str) -> None:
    """Raise UsageError for a script and its arguments in one word."""
    first, *words = script.split()
    if words and first.endswith((".py", ".sh")):
        separate = shlex.join([first, *words])
        raise UsageError(f"the script {quoted(script)} does not exist", f"write its arguments apart: {separate}")


def _path(script: str, here: Path) -> tuple[Path, bool]:
    """Return the path of a script, and whether it is a file; raises UsageError for a folder."""
    try:
        given = here / script
        exists = given.resolve().is_file()
        path = given.parent.resolve() / given.name if given.name else given.resolve()  # a link stays one
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or not encodable
        raise UsageError(f"the script {quoted(script)} cannot be read: {error}", "check the path") from None
    if path.is_dir():
        module = ".".join(Path(script).parts) or "PACKAGE"
        raise UsageError(f"the script {script} is a folder", f"to run a module in it: -- -m {module}.MODULE")
    return path, exists


def _is_program(spec: JobSpec, path: Path, exists: bool, top: Path) -> bool:
    """Whether the command is a program of the image or of this machine, and not a file in the code folder `top`."""
    script = spec.command[0]
    if of_python(spec.command):
        return False
    elsewhere, bare = not path.is_relative_to(top), "/" not in script
    if not exists:
        return elsewhere or bare
    return os.access(path, os.X_OK) and (elsewhere or (bare and shutil.which(script) is not None))


def _check_file(script: str, path: Path, exists: bool, top: Path, here: Path) -> None:
    """Raise UsageError unless a script is a file that nodes see."""
    if not exists:
        near = _near(path)
        hint = f"did you mean {Path(script).with_name(near)}?" if near else f"paths are relative to {here}"
        if script.startswith("examples/") and not path.parent.is_dir():
            hint = "the examples are in the repository, not in the package; python -m orchestrate run trains one"
        raise UsageError(f"the script {script} does not exist", hint)
    if not path.is_relative_to(top):
        raise UsageError(
            f"the script {script} is outside {top}, the folder that nodes see",
            f"run from its folder: cd {path.parent}",
        )


def _near(path: Path) -> str:
    """Return the file whose name is most similar to one that does not exist; empty if none is."""
    import difflib  # only here: it takes time to import

    names = sorted(os.listdir(path.parent)[:MAX_NAMES]) if path.parent.is_dir() else []
    return next(iter(difflib.get_close_matches(path.name, names, 1, 0.8)), "")


def _check_batch_script(path: Path) -> None:
    """Raise UsageError for a batch script of Slurm, which would start one job for each worker."""
    if path.suffix == ".py":
        return
    from orchestrate.spec import from_sbatch  # only here: it takes time to import

    with contextlib.suppress(OSError), regular(path) as file:
        if found := from_sbatch.job_file(file.read(from_sbatch.MAX_SIZE).decode(errors="replace")):
            hint = "save what is printed on standard output, which is the same job, as job.yaml, and run that"
            raise UsageError(f"{path.name} is a batch script of Slurm", hint, found)


def _start(chdir: str, top: Path) -> Path:
    """Return the folder in the code folder `top` in which workers start; raises UsageError."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # a loop of links, or not encodable
        start = (top / chdir).resolve()
        if start.is_dir() and start.is_relative_to(top):
            return start
    raise UsageError(f"chdir: {quoted(chdir)} is no folder in {top}", "use a path relative to that folder")


def _check_program(shell: str, words: list[str], here: Path) -> None:
    """Raise UsageError for a shell with a script that does not exist, and for a script without its suffix."""
    if not shutil.which(shell):
        if (here / f"{shell}.py").is_file():
            raise UsageError(f"the script {shell} does not exist", f"did you mean {shell}.py?")
        for count in range(1, len(words) + 1):
            if (here / (path := " ".join([shell, *words[:count]]))).is_file():
                raise UsageError(f"the script {shell} does not exist", f"quote the path: {shlex.quote(path)}")
        if "." in shell and "/" not in shell and (near := _near(here / shell)):
            raise UsageError(f"the script {shell} does not exist", f"did you mean {near}?")
        if "/" not in shell and (near := _near(here / f"{shell}.py")):
            print_message(f"{shell} is not a file, so it must be a program of the image; did you mean {near}?")
    if Path(shell).name in SHELLS and words and not words[0].startswith(("-", "/")) and not (here / words[0]).exists():
        raise UsageError(f"the script {words[0]} does not exist", f"paths are relative to {here}")
