"""Runs the `git` command: without what a repository's own configuration names, for a limited time and output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

from orchestrate.files.folder import content

COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # SHA-1 or SHA-256
# Variables that git sets for hooks: they would lead it to another repository, or to another repository's index.
OF_HOOKS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
# Programs that a repository's own configuration could name are not run.
PLAIN = (
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never"),
    *("-c", "safe.bareRepository=explicit", "-c", "fetch.unpackLimit=1"),
    *("-c", "gc.auto=0", "-c", "maintenance.auto=false"),  # in the background, without limits
    *("-c", "core.packedGitLimit=512m", "-c", "core.packedGitWindowSize=32m"),
)
PIECE = 1 << 16  # bytes per read
MAX_OUTPUT = 1 << 20  # bytes
QUICK = 5.0  # seconds; a huge repository must not delay the job
PARTS = ("objects", "refs", "HEAD", "packed-refs", "config")  # of `.git`
NAMING = ("commondir", "objects/info/alternates")  # files that name another repository
MAX_LOOKED_AT, LONG = 1_000_000, 200  # entries of the folders in `.git` with paths of as many characters
# With limits: of memory, in KiB, since to compare a file of empty lines takes 26 times its size; and of the size of a
# file, in blocks of 512 bytes, or in some shells of 1024.
LIMITED = ("sh", "-c", f'ulimit -v 2097152; ulimit -f {8 << 21}; exec "$@"', "sh")


class Late(OSError):
    """Git did not finish in time."""


def run(
    command: list[str],
    env: dict[str, str],
    most: int,
    seconds: float,
    folder: Path | None = None,
    umask: int = -1,
    errors: bool = False,
) -> tuple[int, bytes]:
    """Run git; return its exit code and the first `most` bytes of its output, after which it is killed.

    With `errors`, the last `most` bytes of its output and its errors. The processes that it starts end with it. Raises
    Late after some seconds, and FileNotFoundError without git.
    """
    found, late = bytearray(), threading.Event()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        umask=umask,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.DEVNULL,
        start_new_session=True,
    ) as git:

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(git.pid, signal.SIGKILL)

        def give_up() -> None:
            late.set()
            kill()

        limit = threading.Timer(seconds, give_up)
        limit.start()
        try:
            assert git.stdout
            while errors or len(found) < most:
                piece = git.stdout.read1(PIECE)  # type: ignore[attr-defined]
                if not piece:
                    break
                found += piece
                del found[: max(0, len(found) - most) if errors else 0]
            if not errors and len(found) >= most:
                kill()
            git.wait()
        except BaseException:  # Ctrl-C
            kill()
            raise
        finally:
            limit.cancel()
    if late.is_set():
        raise Late(f"git did not finish within {seconds:g} s")
    return git.returncode, bytes(found if errors else found[:most])


def output(arguments: list[str], folder: Path, env: dict[str, str], most: int = MAX_OUTPUT) -> bytes:
    """Return the first `most` bytes of what git prints, without connections; raises OSError if it fails or is late."""
    own = environment() | {"GIT_ALLOW_PROTOCOL": "none"} | env
    code, found = run([*LIMITED, "git", *PLAIN, *arguments], own, most, QUICK, folder)
    if code and len(found) < most:
        raise OSError(f"git failed with exit code {code}")
    return found


def environment() -> dict[str, str]:
    """Return the variables for git, which fetches no missing objects: a repository could name a program for that."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    return kept | {"GIT_NO_LAZY_FETCH": "1"}


def repository_of(tree: Path, env: dict[str, str]) -> Path | None:
    """Return the repository of a working tree if it names that tree, since `.git` may have come with a project.

    That of a linked working tree has a file with the path of `.git`, and that of a submodule a setting. Raises OSError.
    """
    git = tree / ".git"
    if git.is_symlink() or git.is_dir():
        return None if git.is_symlink() or leads_elsewhere(git) else git
    there = Path(os.fsdecode(output(["rev-parse", "--absolute-git-dir"], tree, env)).rstrip("\n"))
    found = []
    with contextlib.suppress(OSError, ValueError):
        found.append((there / content(there / "gitdir").rstrip("\r\n")).parent)
    with contextlib.suppress(OSError):
        setting = output(["config", "--file", str(there / "config"), "core.worktree"], tree, env)
        found.append(there / os.fsdecode(setting).rstrip("\n"))
    shared = there
    with contextlib.suppress(FileNotFoundError):  # of a linked working tree, whose own folder is in the repository
        shared = (there / content(there / "commondir").rstrip("\r\n")).resolve()
        found = [path for path in found if there.resolve().parent == shared / "worktrees"]
    return there if tree.resolve() in [path.resolve() for path in found] and not leads_elsewhere(shared) else None


def leads_elsewhere(git: Path) -> bool:
    """Whether a repository, given by its `.git`, has parts of another one: by a file that names it, or by links.

    Too many files count as another one's; raises OSError if they cannot be listed.
    """
    if any(os.path.lexists(git / name) for name in NAMING) or any((git / name).is_symlink() for name in PARTS):
        return True
    left, pending = MAX_LOOKED_AT, [str(git / top) for top in ("objects", "refs")]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                left -= 1 + len(entry.path) // LONG
                if left < 0 or entry.is_symlink():
                    return True
                if entry.is_dir():
                    pending.append(entry.path)
    return False
