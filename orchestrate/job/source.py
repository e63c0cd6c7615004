"""The source of a job: a folder, or a revision of a Git repository that is checked out once into a cache.

Only the standard library and the `git` command are used. A checkout is a folder per commit, which is never changed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from orchestrate.console import during, print_message
from orchestrate.errors import ResourceError, UsageError
from orchestrate.files import private, writable
from orchestrate.files.folder import ENTER, ROOT, regular
from orchestrate.job import redact
from orchestrate.job.spec import JobSpec

GIT, FILE = "git+", "file://"
CACHE = "sources"  # with a folder per repository: `git`, and a checkout per commit
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # SHA-1 or SHA-256
READABLE = 0o022  # umask: nodes may run as another user; the cache itself is private
FETCH_TIMEOUT = 600  # seconds
MAX_CHANGES = 1 << 20  # bytes
MAX_INDEX, MAX_SHARED = 256 << 20, 2  # bytes of an index, which has 10 MB for 100,000 files, and parts of a split one
MAX_OUTPUT = 1 << 20  # bytes of git's other output
STATUS_TIMEOUT = 5.0  # seconds; a huge repository must not delay the job
# Only protocols that cannot run programs on this machine, no prompts, and messages in English.
SAFE = {"GIT_ALLOW_PROTOCOL": "https:ssh:file", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
# Variables that git sets for hooks: they would lead it to another repository, or to another repository's index.
OF_HOOKS = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR", "GIT_NAMESPACE"}
# Programs that a repository's own configuration could name are not run.
PLAIN = (
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never"),
    *("-c", "safe.bareRepository=explicit"),
    *("-c", "core.packedGitLimit=512m", "-c", "core.packedGitWindowSize=32m"),
)
# With a limit of memory, in KiB: to compare a file of empty lines takes 26 times its size.
LIMITED = ("sh", "-c", 'ulimit -v 2097152; exec "$@"', "sh")
DIFF = ("diff", "--no-ext-diff", "--no-textconv")
# Settings on which it depends whether a file is changed; none names a program.
SETTINGS = r"^core\.(filemode|symlinks|autocrlf|eol|ignorecase)$"
FORMATS = {40: "[core]\nrepositoryformatversion = 0\n"}  # by the length of a commit
FORMATS[64] = "[core]\nrepositoryformatversion = 1\n[extensions]\nobjectformat = sha256\n"


@dataclass(frozen=True)
class Repository:
    """A revision of a Git repository, and a folder in it."""

    url: str
    revision: str  # HEAD if the source names none
    folder: str

    @property
    def cache(self) -> Path:
        """The folder with its checkouts."""
        return private.cache(CACHE) / hashlib.sha256(self.url.encode()).hexdigest()[:16]


def parsed(source: str) -> Repository:
    """Parse `git+URL[@REVISION][#FOLDER]`; raises UsageError for a folder outside the repository, or a password."""
    url, _, folder = source.removeprefix(GIT).partition("#")
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    path, _, revision = path.partition("@")
    if ".." in PurePosixPath(folder).parts or folder.startswith("/"):
        raise UsageError(f"source: {folder} is not a folder of the repository", "use a path relative to its top")
    if ":" in host.rpartition("@")[0] or redact.KNOWN_FORMATS.search(host):
        raise UsageError("source: the URL contains a password or token", "use a credential helper of git, or SSH")
    if revision.startswith("-"):
        raise UsageError("source: a revision cannot start with a hyphen", "use a branch, a tag or a commit")
    return Repository(f"{scheme}://{host}{slash}{path}", revision or "HEAD", folder)


def enter(spec: JobSpec) -> None:
    """Make the job's source the current folder, after it is checked out; raises UsageError or ResourceError."""
    if not spec.source:
        return
    if spec.source.startswith(GIT):
        repository = parsed(spec.source)
        top = check_out(repository)
        print_message(f"source: {repository.url} at {top.name[:12]}")
        folder = top / repository.folder
        if not folder.resolve().is_relative_to(top.resolve()):  # a link of the repository
            raise UsageError(f"source: {repository.folder} leads out of the repository", "use another folder")
    else:
        folder = Path(spec.source)
    try:
        go_to(writable.resolved(str(folder)))
    except OSError as error:
        raise UsageError(f"source: cannot enter {_shown(spec.source, folder)}: {error.strerror}", _hint(spec)) from None


def go_to(folder: Path) -> None:
    """Make a folder the current one; raises OSError if a link is on the way, which a job may have put there."""
    with ROOT.opened(str(folder), mode=ENTER) as opened:
        os.fchdir(opened)


def _shown(source: str, folder: Path) -> str:
    """A source for display: as a path, or the folder of a repository as its URL names it."""
    return f"the folder {parsed(source).folder} of {parsed(source).url}" if source.startswith(GIT) else str(folder)


def _hint(spec: JobSpec) -> str:
    return "use git+file:///PATH for a repository" if re.search(r"\w:/", spec.source) else "check the path"


@during("fetching the source")
def check_out(repository: Repository) -> Path:
    """Return the folder with a revision, fetched unless it is a commit that is there; raises ResourceError."""
    cache = repository.cache
    if COMMIT.fullmatch(repository.revision) and (cache / repository.revision).is_dir():
        return cache / repository.revision
    try:
        private.make(cache)
        with open(cache / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be fetching it
            return _fetch(repository, cache)
    except FileNotFoundError:
        raise ResourceError("source: no git command on PATH", "install git") from None
    except OSError as error:
        raise ResourceError(f"source: cannot write to {cache}: {error.strerror}", "set XDG_CACHE_HOME") from None


def _fetch(repository: Repository, cache: Path) -> Path:
    """Fetch a revision and check it out unless that was done; the caller has locked the cache."""
    bare = cache / "git"
    for left in bare.glob("*.lock"):  # by a git that was killed
        left.unlink()
    if repository.url.startswith(FILE):
        # Git follows links in a repository, and reads it by its path.
        writable.resolved(f"{unquote(repository.url.removeprefix(FILE))}/.git", fixed=True)
    _git("init", "--quiet", "--bare", str(bare))  # changes nothing if that was done
    there = f"--git-dir={bare}"
    _git(there, "fetch", "--quiet", "--depth=1", "--no-tags", "--", repository.url, repository.revision)
    commit = _git(there, "rev-parse", "FETCH_HEAD^{commit}")
    folder = cache / commit
    if not folder.is_dir():
        fresh = cache / f".{commit}"
        shutil.rmtree(fresh, ignore_errors=True)  # of an interrupted run
        fresh.mkdir()
        fresh.chmod(0o755)
        _git(there, f"--work-tree={fresh}", "checkout", "--quiet", "--force", commit, "--", ".")
        (bare / "index").unlink(missing_ok=True)  # otherwise, the next checkout takes files for deleted
        fresh.rename(folder)
    return folder


def _git(*arguments: str) -> str:
    """Run git, and return its output; raises ResourceError."""
    command = ["git", *PLAIN, *arguments]
    try:
        done = subprocess.run(
            command,
            env=_environment() | SAFE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FETCH_TIMEOUT,
            umask=READABLE,
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(f"source: git did not finish within {FETCH_TIMEOUT} s", "check the network") from None
    if done.returncode:
        hint = "check the URL, the revision (a commit needs all of its 40 digits), and your access to the repository"
        raise ResourceError(f"source: git: {_why(done.stderr.decode(errors='replace'))}", hint)
    return done.stdout.decode(errors="replace").strip()


def _why(output: str) -> str:
    """Return git's error, after what ssh has printed, and without the advice that follows it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = next((number for number, line in enumerate(lines) if line.startswith(("fatal:", "error:"))), len(lines) - 1)
    return "; ".join(lines[max(0, last - 1) : last + 1]) or "it failed"


def _environment() -> dict[str, str]:
    """Return the variables for git, which fetches no missing objects: a repository could name a program for that."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    return kept | {"GIT_NO_LAZY_FETCH": "1"}


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


def changes(folder: Path) -> str:
    """Return what differs in tracked files of a repository from its commit, as `git diff` prints it; at most 1 MiB.

    It is empty if there is no repository or no difference, or if that cannot be found out in time.
    """
    try:
        with _repository(folder) as (commit, env):
            found = _output([*DIFF, "--no-color", "--ignore-submodules=all", commit], folder, env, MAX_CHANGES + 1)
    except (OSError, ValueError):
        return ""
    text = found[:MAX_CHANGES].decode(errors="replace")
    return text if len(found) <= MAX_CHANGES else f"{text}\n(and more)\n"


def _status(folder: Path) -> str:
    try:
        with _repository(folder) as (commit, env):
            changed = _output([*DIFF, "--name-only", "--ignore-submodules=dirty", commit], folder, env, 1)
    except (OSError, ValueError):  # no git, or no repository
        return ""
    return f"{commit}-dirty" if changed else commit


@contextlib.contextmanager
def _repository(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the commit of the repository that a folder is in, and variables for git to compare its working tree.

    With them git reads its objects and a copy of its index, but no configuration: that names programs, and a job that
    can write there could change it between two looks at it. Its working tree is the folder with `.git`, whatever the
    configuration says. Raises OSError and ValueError if there is no such repository.
    """
    here = folder.resolve()
    tree = next((path for path in (here, *here.parents) if os.path.lexists(path / ".git")), None)
    if tree is None:
        raise FileNotFoundError(errno.ENOENT, "no repository", str(folder))
    env = {"GIT_WORK_TREE": str(tree)}
    told = _output(["rev-parse", "HEAD", "--git-path", "objects", "--git-path", "index"], folder, env, MAX_OUTPUT)
    commit, objects, index = os.fsdecode(told).splitlines()
    if not COMMIT.fullmatch(commit):
        raise ValueError("an unknown kind of commit")
    settings = ""
    with contextlib.suppress(OSError):  # there are none
        set_there = _output(["config", "-z", "--get-regexp", SETTINGS], folder, env, MAX_OUTPUT).decode()
        pairs = (line.partition("\n") for line in set_there.split("\0"))
        settings = "".join(f"[core]\n{name[5:]} = {value}\n" for name, _, value in pairs if value.isalpha())
    with tempfile.TemporaryDirectory() as private:
        for name in ("objects", "refs"):
            Path(private, name).mkdir()
        Path(private, "HEAD").write_text(f"{commit}\n")
        Path(private, "config").write_text(FORMATS[len(commit)] + settings)
        # Git may write to the index, which a job may have replaced by a link.
        there = Path(os.path.realpath(folder / index)).parent
        for name in ("index", *islice((path.name for path in there.glob("sharedindex.*")), MAX_SHARED)):
            _copy(there / name, Path(private, name))
        yield (
            commit,
            {
                "GIT_DIR": private,
                "GIT_WORK_TREE": str(tree),
                "GIT_OBJECT_DIRECTORY": str(folder / objects),
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": os.devnull,
                "HOME": private,  # of a git before 2.32, for which its configuration is elsewhere
                "XDG_CONFIG_HOME": private,
            },
        )


def _copy(index: Path, copy: Path) -> None:
    with regular(index) as file, copy.open("wb") as target:
        if os.fstat(file.fileno()).st_size > MAX_INDEX:
            raise ValueError("the index of the repository is too large")
        shutil.copyfileobj(file, target)


def _output(arguments: list[str], folder: Path, env: dict[str, str], most: int) -> bytes:
    """Return the first `most` bytes of what git prints; raises OSError if it fails or takes long."""
    command = [*LIMITED, "git", *PLAIN, *arguments]
    env = _environment() | {"GIT_ALLOW_PROTOCOL": "none"} | env
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, env=env, **streams) as git:
        limit = threading.Timer(STATUS_TIMEOUT, git.kill)
        limit.start()
        try:
            assert git.stdout
            found: bytes = git.stdout.read(most)
            if len(found) == most:
                git.kill()
            git.wait()
        finally:
            limit.cancel()
    if git.returncode and len(found) < most:
        raise OSError(errno.EIO, f"git failed, or did not finish within {STATUS_TIMEOUT:g} s")
    return found
