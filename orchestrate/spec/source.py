"""The source of a job: a folder, or a revision of a Git repository that is checked out once into a cache.

Only the standard library and the `git` command are used. A checkout is a folder per commit, which is never changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote_to_bytes

from orchestrate.console import during, print_message
from orchestrate.dataclass import dataclass
from orchestrate.errors import ResourceError, UsageError
from orchestrate.files import folder as folders
from orchestrate.files.folder import ENTER, ROOT
from orchestrate.host import owners, private, writable
from orchestrate.spec import git, redact
from orchestrate.spec.git import COMMIT, LIMITED, PLAIN, environment
from orchestrate.spec.spec import JobSpec

GIT, FILE = "git+", "file://"
CACHE = "sources"  # with a folder per repository: `git`, and a checkout per commit
READABLE = 0o022  # umask: nodes may run as another user; the cache itself is private
FETCH_TIMEOUT = 600  # seconds
MAX_FILES, MAX_NAMES = 200_000, 64 << 20  # files of a revision, and bytes of the list with their paths
MAX_BYTES = 8 << 30  # of its files
ATTRIBUTES = "* -text -eol -ident -working-tree-encoding\n"  # which could make files many times larger than that
SIZE = re.compile(rb"(?:^|\0)\d+ blob [0-9a-f]+ +(\d+)\t")  # in `git ls-tree --long`
MAX_ERRORS = 1 << 16  # bytes of git's messages, of which a server sends as many as it likes
# Only protocols that cannot run programs on this machine, no prompts, and messages in English.
SAFE = {"GIT_ALLOW_PROTOCOL": "https:ssh:file", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}


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
    if ":" in host.rpartition("@")[0] or redact.KNOWN_FORMATS.search(f"{scheme}://{host}"):
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
        with owners.filling(CACHE, cache / "lock"):
            return _fetch(repository, cache)
    except FileNotFoundError:
        raise ResourceError("source: no git command on PATH", "install git") from None
    except git.Late as error:
        raise ResourceError(f"source: {error}", "check the network") from None
    except OSError as error:
        raise ResourceError(f"source: cannot write to {cache}: {error.strerror}", "set XDG_CACHE_HOME") from None


def _fetch(repository: Repository, cache: Path) -> Path:
    """Fetch a revision and check it out unless that was done; the caller has locked the cache.

    A revision that cannot be used, or is not complete, leaves nothing.
    """
    url, there, fresh, exact = repository.url, cache / "git", cache / "fresh", list[str]()
    if url.startswith(FILE):
        # Git follows links in a repository, and reads it by its path, which must be the one that is checked.
        path = os.fsdecode(unquote_to_bytes(url.removeprefix(FILE)))
        if not path.startswith("/") or "\0" in path:
            raise UsageError(f"source: {url} names no path", "use git+file:///PATH")
        writable.resolved(f"{path}/.git", fixed=True)
        url, exact = FILE + quote(os.fsencode(_own(Path(path)))), ["--upload-pack=git-upload-pack --strict"]
    for left in there.glob("*.lock"):  # by a git that was killed
        left.unlink()
    bare = f"--git-dir={there}"
    try:
        _git("init", "--quiet", "--bare", str(there))  # changes nothing if that was done
        (there / "info").mkdir(exist_ok=True)
        (there / "info" / "attributes").write_text(ATTRIBUTES)
        _git(bare, "fetch", "--quiet", "--depth=1", "--no-tags", *exact, "--", url, repository.revision)
        commit = _git(bare, "rev-parse", "FETCH_HEAD^{commit}")
        folder = cache / commit
        if not folder.is_dir():
            _check_size(bare, commit)
            _remove(fresh)  # of an interrupted run
            fresh.mkdir()
            fresh.chmod(0o755)
            _git(bare, f"--work-tree={fresh}", "checkout", "--quiet", "--force", commit, "--", ".")
            (there / "index").unlink(missing_ok=True)  # otherwise, the next checkout takes files for deleted
            fresh.rename(folder)
        return folder
    except BaseException:
        for left in (there, fresh):
            _remove(left)
        raise


def _remove(left: Path) -> None:
    with contextlib.suppress(OSError):
        folders.remove(left)


def _check_size(there: str, commit: str) -> None:
    """Raise ResourceError for a revision with too many or too large files: some KiB of a repository can have any."""
    command = [*LIMITED, "git", *PLAIN, there, "ls-tree", "-r", "--long", "-z", commit]
    code, listed = git.run(command, environment() | SAFE, MAX_NAMES, FETCH_TIMEOUT)
    sizes = [int(size) for size in SIZE.findall(listed)]
    if code or listed.count(b"\0") > MAX_FILES or sum(sizes) > MAX_BYTES:
        most = f"{MAX_FILES:,} files, {MAX_BYTES >> 30} GiB, or {MAX_NAMES >> 20} MiB of names"
        raise ResourceError(f"source: {commit[:12]} has more than {most}", "use a repository with the code of the job")


def _own(folder: Path) -> Path:
    """Return the repository of a folder, which may have come from anybody, or the folder if it is a bare one.

    Raises UsageError if parts of it are elsewhere: in another folder, or in a repository whose objects it uses.
    """
    try:
        if os.path.lexists(folder / ".git"):
            found = git.repository_of(folder, {"GIT_CEILING_DIRECTORIES": str(folder.parent)})
        else:
            found = None if git.leads_elsewhere(folder) else folder
    except FileNotFoundError:  # it is no repository, as git will say
        return folder / ".git" if os.path.lexists(folder / ".git") else folder
    except (OSError, ValueError) as error:
        raise UsageError(f"source: {folder} cannot be read: {error}", "check the repository") from None
    if not found:
        hint = "use that folder; or, in this one, git repack -a -d, then remove .git/objects/info/alternates"
        raise UsageError(f"source: {folder} has parts of the repository of another folder", hint)
    return found


def _git(*arguments: str) -> str:
    """Run git, and return its output; raises ResourceError."""
    command, env = [*LIMITED, "git", *PLAIN, *arguments], environment() | SAFE
    code, found = git.run(command, env, MAX_ERRORS, FETCH_TIMEOUT, umask=READABLE, errors=True)
    if code:
        hint = "check the URL, the revision (a commit needs all of its 40 digits), and your access to the repository"
        raise ResourceError(f"source: git: {_why(found.decode(errors='replace'))}", hint)
    return found.decode(errors="replace").strip()


def _why(output: str) -> str:
    """Return git's error, after what ssh has printed, and without the advice that follows it."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = next((number for number, line in enumerate(lines) if line.startswith(("fatal:", "error:"))), len(lines) - 1)
    return "; ".join(lines[max(0, last - 1) : last + 1]) or "it failed"
