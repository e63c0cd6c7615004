"""Python packages of a job: lines of a requirements file, as pip reads them.

https://pip.pypa.io/en/stable/reference/requirements-file-format/
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.files.folder import ENTER, ROOT, content
from orchestrate.host import writable
from orchestrate.spec.redact import Mask, is_secret

OPTIONS = (
    *("--index-url", "-i", "--extra-index-url", "--find-links", "-f", "--trusted-host"),
    *("--pre", "--prefer-binary", "--no-binary", "--only-binary", "--require-hashes"),
)
LOCATIONS = ("--index-url", "-i", "--extra-index-url", "--find-links", "-f")
INCLUDE = re.compile(r"(?:-r|--requirement)[ =]?\s*(\S+)")
USER = re.compile(r"://[^/?#@\s]*@")
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")  # pip replaces only these
LOCAL = re.compile(r"[^\s;@\[]*/|\.{1,2}$|~|.*\.(whl|tar\.gz|zip)$", re.IGNORECASE)
FILE = re.compile(r"(.*[\s@+=])?file:", re.IGNORECASE)
LOCALLY = "installs from a local folder: nodes can import your current folder without that"
REMOTE = re.compile(r"([^\s;@]+\s*@\s*)?((git\+)?(https?|ssh)://|\$\{)", re.IGNORECASE)
MAX_FILES, MAX_LINES, MAX_SIZE = 100, 10_000, 4 << 20  # files, and lines and characters of all


def read(path: Path) -> list[str]:
    """Return the requirements of a file and of the files that it includes; raises UsageError with file and line.

    All must be in the current folder, or if the file is elsewhere, in its folder, wherever links lead: they may have
    come with a project, and the build of an image, or an index, would get to see what is in any other file.
    """
    found: list[str] = []
    here = Path.cwd()
    inside = (here,) if Path(os.path.abspath(path)).is_relative_to(here) else (path.parent.resolve(), here)
    if not _is_inside(path, inside):
        raise UsageError(f"cannot read {path}: it is a link out of its folder", f"use its target: {path.resolve()}")
    _read(path, inside, found, {})
    return found


def _is_inside(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders)


def _read(path: Path, inside: tuple[Path, ...], found: list[str], seen: dict[Path, tuple[int, int]]) -> None:
    """Add the requirements of a file to those that were found, unless it is in `seen`: characters and lines of each."""
    try:
        real = writable.resolved(str(path))
        if real in seen:
            return
        with ROOT.opened(str(real.parent), mode=ENTER) as folder:
            text = content(real.name, folder)
        lines = _lines(text)
        seen[real] = len(text), len(lines)
        if sum(size for size, _ in seen.values()) > MAX_SIZE:
            raise ValueError(f"the files that include one another are larger than {MAX_SIZE >> 20} MiB")
        if len(seen) > MAX_FILES:
            raise ValueError(f"more than {MAX_FILES} files include one another")
        if sum(count for _, count in seen.values()) > MAX_LINES:
            raise ValueError(f"the files that include one another have more than {MAX_LINES} lines")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}", "check the path") from None
    for number, line in lines:
        try:
            if not (include := INCLUDE.fullmatch(line)):
                found.append(checked(line))
            elif not _is_inside(path.parent / include[1], inside):
                raise ValueError(f"{include[1]} is not read: it is outside of {inside[0]}")
            else:
                _read(path.parent / include[1], inside, found, seen)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}", "change the line or remove it") from None


def _lines(text: str) -> list[tuple[int, str]]:
    """Split a file into lines with their numbers, without comments, continued lines joined."""
    found: list[tuple[int, str]] = []
    pending, first = list[str](), 0
    for number, line in enumerate([*text.splitlines(), ""], 1):  # the last line may end with a backslash
        first = first if pending else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            pending.append(line[:-1] + " ")
            continue
        if stripped := re.sub(r"(^|\s)#.*", "", "".join([*pending, line])).strip():
            found.append((first, stripped))
        pending.clear()
    return found


def checked(line: str) -> str:
    """Return a line; raises ValueError if it cannot be installed on every node, or contains a secret."""
    option = re.split(r"[ =]", line, maxsplit=1)[0]
    rest = line[len(option) :].lstrip(" =")
    if line.startswith("-"):
        if option in ("-e", "--editable"):
            raise ValueError(f"{option} {LOCALLY}")
        if option not in OPTIONS:
            raise ValueError(f"{option} is not supported")
        if option in LOCATIONS and not REMOTE.match(rest):
            raise ValueError(f"{line} names a local folder, which nodes do not have")
        if any(word.startswith("-") for word in line.split()[1:]):
            raise ValueError("a line has one option: write each on its own line")
    elif FILE.match(line) or LOCAL.match(line) and not REMOTE.match(line):
        raise ValueError(f"{line.split()[0]} {LOCALLY}")
    if is_secret("", VARIABLE.sub("", line)):
        raise ValueError("a URL contains a password: write ${NAME} instead, and set NAME in your environment")
    # pip keeps the URL of a package, without what is before its @.
    if not line.startswith("-") and ("@" in line or "://" in line) and VARIABLE.search(USER.sub("", line)):
        raise ValueError("a variable after the host of a URL would be stored with the package: write ${NAME}@HOST")
    return line


def variables(lines: list[str]) -> list[str]:
    """Return the environment variables that lines refer to; raises UsageError if one is not set."""
    names = sorted({name for line in lines for name in VARIABLE.findall(line)})
    for name in names:
        if name not in os.environ:
            raise UsageError(f"the packages need ${{{name}}}, which is not set in this shell", f"export {name}=VALUE")
    return names


def mask(lines: Iterable[str]) -> Mask:
    """Return a mask of the values of the environment variables that lines refer to."""
    values = {name: os.environ.get(name, "") for line in lines for name in VARIABLE.findall(line)}
    return Mask(values, values)
