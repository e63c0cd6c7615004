"""A job whose ranks run tests, and the requests to it: files in its job folder, so that engines do not differ."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrate import console
from orchestrate.api.function import Program
from orchestrate.api.job import Cluster, Job, JobFailed
from orchestrate.errors import OrchestrateError
from orchestrate.files.paths import WORK, log
from orchestrate.node.messages import checks
from orchestrate.plan import imports
from orchestrate.record import run_dir
from orchestrate.record.events import WorkerEnded
from orchestrate.testing.reports import Ran, masked

START_LIMIT = 120.0  # seconds in which all ranks must have collected the tests
PATIENCE = 2.0  # seconds that other ranks get after one has failed: most have failed as well, or wait for it
SHORTEST, LONGEST = 0.001, 0.02  # seconds between two looks for results
LOOK = 0.25  # seconds between two looks at the job
MAX_MESSAGES = 4 << 10  # last characters of the messages that an error refers to
MAX_STACKS, MAX_OUTPUT = 1 << 16, 1 << 14  # bytes of the stacks of a rank, and of what it has printed
MAX_RESULT, MAX_VALUES = 16 << 20, 500_000  # bytes and values of a result of a rank
SCRIPT = Path(__file__).with_name("rank.py")
# Nodes end soon if pytest was killed.
DEFAULTS = {"gpus": "none", "max_restarts": 0, "hang_after": None, "grace": 1, "keep": "30s"}


class Broken(Exception):
    """The ranks cannot run another test; the message says why."""


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Make a folder the current one: it is the code folder of jobs; messages are left out."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as messages:
            yield
    except OrchestrateError as error:
        if "above" not in str(error):
            raise
        shown = messages.getvalue()[-MAX_MESSAGES:]
        why = next((line for line in reversed(shown.splitlines()) if line.startswith("ERROR: ")), "see below")
        what = str(error).replace("see the output above", why)
        raise OrchestrateError(f"{what}\n{shown}", error.hint) from None
    finally:
        os.chdir(before)


Read = Callable[[Any, Callable[[str], str]], Ran]  # checks what a rank has written, without secrets; raises ValueError


class World:
    """Ranks that run tests, until one of them does not end a test."""

    def __init__(
        self, root: Path, cluster: Cluster, settings: Mapping[str, Any], tests: Mapping[str, Any], read: Read
    ) -> None:
        """Start the ranks, with the current folder `root` as their code folder; raises OrchestrateError."""
        files = {"rank.py": SCRIPT.read_bytes(), "tests.json": json.dumps(tests, default=str).encode()}
        program, options = Program(imports.COPIED[1:], files), {"name": "tests", **settings}
        self._job: Job = cluster._start(program, (), options, bound=True, tell=False)
        self.left: dict[int, int] = {}  # exit codes of ranks that have ended, although they were asked for another test
        self._folder, self._read = self._job._paths.folder, read
        spec, plan = run_dir.load(self._job._paths)
        self._hide = spec.mask()
        self.size, self._roots = plan.world_size, (f"{root}/", f"{plan.placement.job_dir}/{WORK}/")
        self._number, self._logged = 0, dict[int, int]()  # the request, and bytes in the log of each rank before it
        self.entered: set[int] = set()  # ranks whose fixtures were ready, in the last test
        self._seen: dict[int, tuple[int, int]] = {}  # inode and time of the last result of each rank that was read
        try:
            self._store = self._ready()
        except BaseException:  # the next ranks would wait for the end of these
            self.kill()
            raise

    def _ready(self) -> Mapping[str, int]:
        """Wait until all ranks have collected the tests; raises OrchestrateError."""
        try:
            ready = self._results(time.monotonic() + START_LIMIT)
        except Broken as error:
            raise OrchestrateError(str(error), f"see {self._job.run_dir}") from None
        if not self.whole(ready):
            what = self.why_ended() or f"ranks did not collect the tests within {START_LIMIT:g} s"
            raise OrchestrateError(what, f"see {self._job.run_dir}")
        return ready[0].store

    def run(self, item: str, following: str | None, limit: float) -> dict[int, Ran]:
        """Run a test; return what each rank has reported.

        Ranks that have not ended it are left out: the job or the time limit is over, or another rank has failed, and
        they did not end within PATIENCE after it. Raises Broken.
        """
        self._number += 1
        self._logged = {rank: self._log_size(rank) for rank in range(self.size)}
        request = {"number": self._number, "test": {"item": item, "next": following, **self._store}}
        try:
            self._folder.write("test.json", json.dumps(request))
        except OSError as error:
            raise Broken(f"the ranks cannot be asked for the test: {error}") from None
        found = self._results(time.monotonic() + limit)
        self._store = found[0].store if 0 in found else {}
        return found

    def _results(self, deadline: float) -> dict[int, Ran]:
        found, self.entered, self._seen = dict[int, Ran](), set(), {}
        delay, look, ended = SHORTEST, time.monotonic() + LOOK, False
        while True:
            left = [rank for rank in range(self.size) if rank not in found or not found[rank].done]
            new = {rank: ran for rank in left if (ran := self._result(rank))}
            self.entered |= {*new}
            new = {rank: ran for rank, ran in new.items() if ran.done or ran.failure()}
            now, first = time.monotonic(), not any(each.failure() for each in found.values())
            if first and any(each.failure() for each in new.values()):
                deadline = min(deadline, now + PATIENCE)
            found |= new
            if self.whole(found) or ended or now > deadline:
                return found
            if now > look:
                ended, look = bool(self._job.outcome), now + LOOK
                before, self.left = self.left, self._ended()
                if self.left.keys() - before:
                    deadline = min(deadline, now + PATIENCE)
            time.sleep(delay)
            delay = min(delay * 1.1, LONGEST)

    def whole(self, found: Mapping[int, Ran]) -> bool:
        """Return whether all ranks have ended a test."""
        return len(found) == self.size and all(each.done for each in found.values())

    def _result(self, rank: int) -> Ran | None:
        try:
            with self._folder.open(f"results/{self._number}-{rank}.json") as file:
                status = os.fstat(file.fileno())
                before, self._seen[rank] = self._seen.get(rank), (status.st_ino, status.st_mtime_ns)
                if before == self._seen[rank]:  # what it has reported so far, which was read
                    return None
                text = file.read(MAX_RESULT)
            checks.limit_values(text, MAX_VALUES)
            return self._read(json.loads(text), self._hide)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise Broken(f"the result of rank {rank} cannot be read: {error}") from None

    def _ended(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended."""
        ends = [event for event in run_dir.history(self._job._paths) if isinstance(event, WorkerEnded)]
        return {event.rank: event.exit_code for event in ends}

    def why_ended(self) -> str:
        """Return why the job has ended; empty if it has not, or was stopped."""
        if not self._job.outcome:
            return ""
        try:
            self._job.wait()
        except JobFailed as error:
            return str(error).partition("root cause: ")[2]
        return "the ranks have ended"

    def end(self) -> None:
        """End the ranks, with the fixtures of their session."""
        with contextlib.suppress(OSError):
            self._folder.write("test.json", json.dumps({"number": self._number + 1, "test": None}))
        deadline = time.monotonic() + PATIENCE
        while not self._job.outcome and time.monotonic() < deadline:
            time.sleep(LONGEST)
        if not self._job.outcome:
            self.kill()

    def kill(self) -> dict[int, str]:
        """End the ranks as they are; return their stacks, by rank."""
        with contextlib.redirect_stderr(io.StringIO()):
            self._job.stop()
        return {rank: text for rank in range(self.size) if (text := self._stacks(rank))}

    def output(self, rank: int) -> str:
        """Return the end of what a rank has printed in the last test, without the line that names it."""
        with contextlib.suppress(OSError), self._job._paths.folder.open(log(rank)) as file:
            first, last = self._logged.get(rank, 0), os.fstat(file.fileno()).st_size - MAX_OUTPUT
            file.seek(max(first, last))
            text = masked(file.read(MAX_OUTPUT).decode(errors="replace"), self._hide)
            head, _, rest = text.partition("\n")
            if first < last:
                return f"[the rest is in {self._job._paths.log(rank)}]\n{rest}"
            return rest if head.startswith("== ") else text
        return ""

    def _log_size(self, rank: int) -> int:
        with contextlib.suppress(OSError), self._job._paths.folder.open(log(rank)) as file:
            return os.fstat(file.fileno()).st_size
        return 0

    def _stacks(self, rank: int) -> str:
        """Return what a rank has written on SIGTERM; the folder has been moved by then."""
        with contextlib.suppress(OSError), self._job._paths.folder.open(f"results/stacks-{rank}") as file:
            text = console.clean(file.read(MAX_STACKS).decode(errors="replace"))
            return self._hide(functools.reduce(lambda found, folder: found.replace(folder, ""), self._roots, text))
        return ""


def path_below(root: Path) -> Sequence[str]:
    """Return the folders below `root` in which this process searches modules, relative to it."""
    found = [Path(each or ".").resolve() for each in sys.path]
    below = [each for each in found if each.is_relative_to(root) and not each.is_relative_to(Path(sys.prefix))]
    return [*dict.fromkeys(str(each.relative_to(root)) for each in below)]
