"""Which jobs of this machine use its GPUs, or wait for them: files in a folder of each account, which all can read.

A claim counts while the process that has made it lives and holds the lock of its file, so that a dead one needs no
daemon to end it. Other accounts can only read the file, and so hold no lock that looks like that of a claim. Accounts
that share GPUs can see and delay each other's jobs; no claim can do more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrate.dataclass import dataclass
from orchestrate.host import owners, private
from orchestrate.host.processes import myself, named
from orchestrate.host.users import account
from orchestrate.node.trees import FOLDER

log = logging.getLogger(__name__)

TOP, PREFIX = private.TEMPORARY, "orchestrate-gpus-"  # where all accounts find the folders: PREFIX and a user id
CORES = "cores"  # claimed by jobs with pinned workers, in place of GPUs
MAX_CLAIMS, MAX_SIZE = 1000, 16 << 10  # claims of an account that are read, and bytes of each
MAX_NAMES = 256  # resources in a claim: more than a machine has
DECISION_TIMEOUT = 5.0  # seconds to wait for other jobs that decide; an account that holds the lock forever is ignored
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
JOB, RESOURCE = re.compile(r"[a-z0-9][a-z0-9-]{0,99}"), re.compile(r"[\w/-]{1,100}", re.ASCII)


@dataclass(frozen=True)
class Claim:
    """What a job uses or waits for, as UUIDs of GPUs or `CORES`."""

    job: str
    uses: tuple[str, ...]
    among: tuple[str, ...]  # what it waits for a part of; empty if it does not wait
    count: int  # how many of these
    uid: int  # of its account
    since: float  # Unix time at which it was made or last changed, in nanoseconds; accounts cannot set it back
    runs: str = ""  # digest of its job's folder: other accounts can read claims

    def __str__(self) -> str:
        """Describe the job in messages."""
        return self.job if self.uid == os.geteuid() else f"{self.job} of {owners.person(self.uid)}"


def wanted(among: tuple[str, ...], count: int) -> str:
    """Describe what a job waits for."""
    if among == (CORES,):
        return "the cores"
    part = f"{count if count > 1 else 'one'} of " if count < len(among) else ""
    return f"{part}{len(among)} GPU{'s' if len(among) > 1 else ''}"


def needs(engine: str, gpus: tuple[str, ...], pin: bool) -> tuple[str, ...]:
    """Return what a job claims of this machine: its GPUs, or the cores if it pins workers to them."""
    return () if engine in ("swarm", "slurm") else gpus or (CORES,) * pin


def found() -> list[Claim]:
    """Return the claims of living processes, in the order in which they were made."""
    claims: list[Claim] = []
    for folder, uid in _folders():
        with os.scandir(folder) as entries:  # not a list: another account can make millions of names
            for entry in islice(entries, MAX_CLAIMS):
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                    if claim := _read(entry.name, folder, uid):
                        claims.append(claim)
    return sorted(claims, key=lambda claim: (claim.since, claim.job))


def users(job: str, claims: list[Claim] | None = None) -> dict[str, Claim]:
    """Return what other jobs than this one use, by the claims that there are now, or were."""
    known = found() if claims is None else claims
    return {resource: claim for claim in known if claim.job != job for resource in claim.uses}


def waiting(runs: Path | None = None) -> list[Claim]:
    """Return the claims of this account's jobs that wait, in one folder or in all, in the order of the queue."""
    own = [one for one in found() if one.among and one.uid == os.geteuid()]
    return own if runs is None else [one for one in own if one.runs == _short(runs)]


def _short(runs: Path) -> str:
    return hashlib.sha256(os.fsencode(runs)).hexdigest()[:16]


def process(job: str) -> int:
    """Return the process of this account that has made the claim of a job; 0 if there is none."""
    with contextlib.suppress(OSError), _own() as folder:
        for name in os.listdir(folder):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                data = _content(name, folder, os.geteuid())[0] if name.startswith(f"{job}.") else None
                if data and (pid := named(str(data["process"]))):
                    return pid
    return 0


class Ticket:
    """The claim of a job, of this process; usable in a `with` block, which ends it."""

    def __init__(self, job: str, runs: Path = Path()) -> None:
        """Claim nothing yet; `runs` is the folder of the job."""
        self.job, self.runs, self.file, self.name = job, _short(runs), -1, ""
        self.problem = ""  # why claims cannot be made here
        self.content: tuple[tuple[str, ...], tuple[str, ...], int] = (), (), 0

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        """End the claim."""
        if self.file >= 0:
            with contextlib.suppress(OSError), _own() as folder:
                os.unlink(self.name, dir_fd=folder)
            os.close(self.file)
            self.file = -1

    def inherit(self) -> None:
        """Claim what another process has claimed for the job, which may let go from here on."""
        for claim in found():
            if claim.job == self.job and claim.uses and claim.uid == os.geteuid():
                self._write(claim.uses)

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return bool(self.content[1])

    def enqueue(self, among: tuple[str, ...], count: int) -> None:
        """Take a place in the queue for `count` of some resources; it is kept while they are among the first ones."""
        if not {*among} <= {*self.content[1]}:
            with _deciding():
                self._write((), among, count)

    def take(self, uses: tuple[str, ...], known: Mapping[str, Claim] | None = None, queued: bool = False) -> bool:
        """Claim resources, unless other jobs use one that is not among the `known` ones, if these are given.

        With `queued`, none of them may be in use, and no other job may have waited for them before. Returns whether
        they are claimed, or cannot be: then `problem` says why.
        """
        if not uses:
            return True
        with _deciding():
            if known is not None:
                used = {*users(self.job)} - (set() if queued else known.keys())
                if not used.isdisjoint(uses) or queued and self.ahead(uses):
                    return False
            self._write(uses)
        return True

    def ahead(self, among: tuple[str, ...]) -> list[Claim]:
        """Return the claims of jobs that have waited for some of these resources for longer."""
        claims = [claim for claim in found() if not {*among}.isdisjoint(claim.among) or claim.job == self.job]
        own = next((place for place, claim in enumerate(claims) if claim.job == self.job), len(claims))
        return claims[:own]

    def _write(self, uses: tuple[str, ...], among: tuple[str, ...] = (), count: int = 0) -> None:
        if self.content == (uses, among, count):
            return
        known = {"job": self.job, "runs": self.runs, "uses": uses, "among": among, "count": count}
        text = json.dumps(known | {"process": myself()}).encode()
        try:
            if self.file < 0:
                self._create(text)
            else:
                os.ftruncate(self.file, os.pwrite(self.file, text, 0))
            self.content = uses, among, count
        except OSError as error:
            self.problem = f"{TOP / PREFIX}{os.geteuid()}: {error.strerror}"
            log.warning("no GPUs are claimed: %s", self.problem)

    def _create(self, text: bytes) -> None:
        self.name = f"{self.job}.{secrets.token_hex(4)}"
        with _own() as folder:
            file = os.open(f".{self.name}", NEW, 0o600, dir_fd=folder)
            try:
                _lock(file, exclusive=True)
                os.pwrite(file, text, 0)
                os.fchmod(file, 0o644)
                os.rename(f".{self.name}", self.name, src_dir_fd=folder, dst_dir_fd=folder)  # others see it locked
            except BaseException:
                os.close(file)
                os.unlink(f".{self.name}", dir_fd=folder)
                raise
        self.file = file


def _folders() -> Iterator[tuple[int, int]]:
    """Open the folder of each account, one after the other; yield it with the account. Others cannot write there."""
    seen: set[int] = set()
    with os.scandir(TOP) as found:  # which tells folders from the many files that an account may make there
        names = sorted(one.name for one in found if one.name.startswith(PREFIX) and one.is_dir(follow_symlinks=False))
    for name in names:
        with contextlib.suppress(OSError):
            folder = os.open(TOP / name, FOLDER)
            try:
                status = os.fstat(folder)
                known = status.st_uid == os.geteuid() or account(status.st_uid)  # one account can have many ids
                if known and status.st_uid not in seen and not status.st_mode & 0o022:
                    seen.add(status.st_uid)
                    yield folder, status.st_uid
            finally:
                os.close(folder)


@contextlib.contextmanager
def _own() -> Iterator[int]:
    """Open this account's folder, which is created if there is none; raises OSError."""
    for number in range(2):
        for folder, uid in _folders():
            if uid == os.geteuid():
                yield folder
                return
        if not number:
            path = TOP / f"{PREFIX}{os.geteuid()}"
            try:
                path.mkdir()
            except FileExistsError:  # of another account
                path = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=TOP))
            path.chmod(0o755)
    raise FileNotFoundError(errno.ENOENT, "its folder has gone")


@contextlib.contextmanager
def _deciding() -> Iterator[None]:
    """Let other jobs wait, as far as they can, until this one has decided what it claims."""
    folder = os.open(TOP, FOLDER)
    try:
        until = time.monotonic() + DECISION_TIMEOUT
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.02)
        yield
    finally:
        os.close(folder)


def _lock(file: int, exclusive: bool = False) -> None:
    """Lock an open file, exclusively only if it is open for writing; raises OSError if another process has the lock."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))  # struct flock of Linux


def _content(name: str, folder: int, uid: int) -> tuple[Any, os.stat_result | None]:
    """Read the file of a claim; None for one whose process is gone, which is removed. Raises OSError, ValueError."""
    file = os.open(name, READ, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SIZE or status.st_uid != uid:
            return None, None
        try:
            _lock(file)
        except BlockingIOError:
            return json.loads(os.pread(file, MAX_SIZE, 0)), status
        if uid == os.geteuid():
            os.unlink(name, dir_fd=folder)
        return None, None
    finally:
        os.close(file)


def _read(name: str, folder: int, uid: int) -> Claim | None:
    """Read a claim; None for one whose process is gone, which is removed. Raises OSError, ValueError and the like."""
    data, status = (None, None) if name.startswith(".") else _content(name, folder, uid)
    return _claim(data, status) if data and status else None


def _claim(data: dict[str, Any], status: os.stat_result) -> Claim:
    uses, among, count = tuple(data["uses"]), tuple(data["among"]), data["count"]
    names = *uses, *among
    if not JOB.fullmatch(data["job"]) or len(names) > MAX_NAMES or not all(map(RESOURCE.fullmatch, names)):
        raise ValueError("no claim")
    if type(count) is not int or not 0 <= count <= len(among):
        raise ValueError("no count")
    since = status.st_ctime_ns if among else math.inf
    return Claim(data["job"], uses, among, count, status.st_uid, since, str(data.get("runs", "")))
