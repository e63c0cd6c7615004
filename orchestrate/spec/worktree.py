"""The commit of the Git repository that a folder is in, and what has changed in its files since then.

A repository may be one that a job can write to, so git is told nothing by it but its objects and its index.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.files.folder import regular
from orchestrate.host import private, writable
from orchestrate.spec.git import COMMIT, output, repository_of
from orchestrate.spec.redact import MARGIN, Mask
from orchestrate.spec.source import CACHE

MAX_CHANGES = 1 << 20  # bytes
MAX_INDEX = 256 << 20  # bytes of an index, which has 10 MB for 100,000 files
MAX_ENTRIES, MAX_SHARED = 10_000, 2  # entries of its folder, and parts of a split index
MAX_PATHS = 64 << 20  # bytes of the paths in an index
OUTSIDE = re.compile(rb"(^|[/\0])(\.|\.\.|\.git)?[/\0]")  # a path that leads out of the working tree
DIFF = ("diff", "--no-ext-diff", "--no-textconv")
# Settings on which it depends whether a file is changed; none names a program.
SETTINGS = r"^core\.(filemode|symlinks|autocrlf|eol|ignorecase)$"
ERRORS = OSError, ValueError, UsageError  # no git, or no repository that may be asked
FORMATS = {40: "[core]\nrepositoryformatversion = 0\n"}  # by the length of a commit
FORMATS[64] = "[core]\nrepositoryformatversion = 1\n[extensions]\nobjectformat = sha256\n"


def revision(folder: Path) -> Callable[[], str]:
    """Look up the commit of a folder in the background; the result returns it.

    `-dirty` follows it if tracked files are changed; it is empty for a folder without a repository.
    """
    cache = private.cache(CACHE).resolve()
    parts = folder.resolve().relative_to(cache).parts if folder.resolve().is_relative_to(cache) else ()
    if len(parts) > 1:
        return lambda: parts[1]
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_status(folder)), daemon=True)
    thread.start()

    def result() -> str:
        thread.join()
        return found[0] if found else ""

    return result


def changes(folder: Path, hide: Mask) -> str:
    """Return what differs in tracked files of a repository from its commit, as `git diff` prints it, without secrets.

    It has at most 1 MiB.

    It is empty if there is no repository or no difference, or if that cannot be found out in time.
    """
    try:
        with _repository(folder) as (commit, env):
            # Git does not check the paths of an index.
            paths = output(["ls-files", "-z"], Path(env["GIT_WORK_TREE"]), env, MAX_PATHS)
            if len(paths) == MAX_PATHS or OUTSIDE.search(paths):
                return ""
            found = output([*DIFF, "--no-color", "--ignore-submodules=all", commit], folder, env, MAX_CHANGES + MARGIN)
    except ERRORS:
        return ""
    return hide.first(found, MAX_CHANGES) + "\n(and more)\n" * (len(found) > MAX_CHANGES)


def _status(folder: Path) -> str:
    try:
        with _repository(folder) as (commit, env):
            changed = output([*DIFF, "--name-only", "--ignore-submodules=dirty", commit], folder, env, 1)
    except ERRORS:
        return ""
    return f"{commit}-dirty" if changed else commit


@contextlib.contextmanager
def _repository(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the commit of the repository that a folder is in, and variables for git to compare its working tree.

    With them git reads its objects and a copy of its index, but no configuration: that names programs, and a job that
    can write there could change it between two looks at it. Its working tree is the folder with `.git`, whatever the
    configuration says. Raises OSError and ValueError if there is no such repository, and UsageError if a job could have
    written it.
    """
    here = folder.resolve()
    tree = next((path for path in (here, *here.parents) if os.path.lexists(path / ".git")), None)
    if tree is None:
        raise FileNotFoundError(errno.ENOENT, "no repository", str(folder))
    env = {"GIT_WORK_TREE": str(tree), "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    if not (found := repository_of(tree, env)):
        raise ValueError(f"{tree / '.git'} leads to a repository with another working tree")
    asked = ["rev-parse", "HEAD", "--absolute-git-dir", "--git-path", "objects", "--git-path", "index"]
    commit, git, objects, index = os.fsdecode(output(asked, folder, env)).splitlines()
    if os.path.realpath(git) != os.path.realpath(found):
        raise ValueError(f"git uses {git} instead of {found}")
    for path in (tree / ".git", folder / objects, folder / index):
        writable.resolved(str(path), fixed=True)
    if not COMMIT.fullmatch(commit):
        raise ValueError("an unknown kind of commit")
    settings = ""
    with contextlib.suppress(OSError):  # there are none
        set_there = output(["config", "-z", "--get-regexp", SETTINGS], folder, env).decode()
        pairs = (line.partition("\n") for line in set_there.split("\0"))
        settings = "".join(f"[core]\n{name[5:]} = {value}\n" for name, _, value in pairs if value.isalpha())
    with tempfile.TemporaryDirectory() as own:
        for name in ("objects", "refs"):
            Path(own, name).mkdir()
        Path(own, "HEAD").write_text(f"{commit}\n")
        Path(own, "config").write_text(FORMATS[len(commit)] + settings)
        # Git may write to the index, which a job may have replaced by a link.
        there = Path(os.path.realpath(folder / index)).parent
        with os.scandir(there) as entries:
            names = [entry.name for entry in islice(entries, MAX_ENTRIES) if entry.name.startswith("sharedindex.")]
        for name in ("index", *names[:MAX_SHARED]):
            _copy(there / name, Path(own, name))
        yield (
            commit,
            {
                "GIT_DIR": own,
                "GIT_WORK_TREE": str(tree),
                "GIT_OBJECT_DIRECTORY": str(folder / objects),
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": os.devnull,
                "HOME": own,  # of a git before 2.32, for which its configuration is elsewhere
                "XDG_CONFIG_HOME": own,
            },
        )


def _copy(index: Path, copy: Path) -> None:
    with regular(index) as file:
        status = os.fstat(file.fileno())
        if status.st_size > MAX_INDEX:
            raise ValueError("the index of the repository is too large")
        with copy.open("wb") as target:
            shutil.copyfileobj(file, target)
    # Git reads a file again that could have changed in the second in which the index was written.
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
