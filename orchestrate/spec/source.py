"""The source of a job: a folder, or a revision of a Git repository that is checked out once into a cache.

Only the standard library and the `git` command are used. A checkout is a folder per commit, which is never changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote_to_bytes

from orchestrate.console import during, print_message
from orchestrate.dataclass import dataclass
from orchestrate.errors import ResourceError, UsageError
from orchestrate.files.folder import ENTER, ROOT
from orchestrate.host import owners, private, writable
from orchestrate.spec import redact
from orchestrate.spec.spec import JobSpec

GIT, FILE = "git+", "file://"
CACHE = "sources"  # with a folder per repository: `git`, and a checkout per commit
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # SHA-1 or SHA-256
READABLE = 0o022  # umask: nodes may run as another user; the cache itself is private
FETCH_TIMEOUT = 600  # seconds
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
    if scheme == "file" and host:  # git would ignore it
        raise UsageError("source: a file:// URL has no host", "use git+file:///PATH")
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
        if not Path(os.path.realpath(folder)).is_relative_to(top.resolve()):  # a link of the repository, or a loop
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
    try:
        owners.cache(CACHE)
        if COMMIT.fullmatch(repository.revision) and (cache / repository.revision).is_dir():
            return cache / repository.revision
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
    url = repository.url
    if url.startswith(FILE):
        # Git follows links in a repository, and reads it by its path, which must be the one that is checked.
        path = os.fsdecode(unquote_to_bytes(url.removeprefix(FILE)))
        if not path.startswith("/") or "\0" in path:
            raise UsageError(f"source: {url} names no path", "use git+file:///PATH")
        writable.resolved(f"{path}/.git", fixed=True)
        url = FILE + quote(os.fsencode(path))
    _git("init", "--quiet", "--bare", str(bare))  # changes nothing if that was done
    there = f"--git-dir={bare}"
    _git(there, "fetch", "--quiet", "--depth=1", "--no-tags", "--", url, repository.revision)
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
            env=environment() | SAFE,
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


def environment() -> dict[str, str]:
    """Return the variables for git, which fetches no missing objects: a repository could name a program for that."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    return kept | {"GIT_NO_LAZY_FETCH": "1"}
