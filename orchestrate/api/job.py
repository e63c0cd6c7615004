"""Jobs from Python: `orchestrate.run`, `submit` and `cluster`.

Settings are the keys of a job file, as keyword arguments. Messages go to stderr, as those of the command line. Every
job is supervised by a process of its own, so it is the same job for `python -m orchestrate logs`, `ps` or `stop`.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrate import console
from orchestrate.api import cluster as clusters
from orchestrate.api import function, prepare, request
from orchestrate.api import resume as resumed
from orchestrate.api import stop as stopped
from orchestrate.dataclass import dataclass
from orchestrate.engines import registry
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.host import owners, records
from orchestrate.plan.imports import CALLED
from orchestrate.record import events, lock, logs, report, run_dir
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.show.follow import follow
from orchestrate.show.format import Printer, Style
from orchestrate.show.screen import Display, Screen
from orchestrate.show.tracking import PlainScreen

Target = str | os.PathLike[str] | Callable[..., Any] | function.Program
_one_at_a_time = threading.RLock()  # the current folder is that of all threads
INTERVAL = 0.1  # seconds between two looks at a running job
TURN_INTERVAL = 0.01  # seconds between two looks whether the job before has ended
ENDING = 5.0  # seconds between two jobs of a cluster, in which no supervisor has it
KEEP = "10m"  # for which a cluster stays up without a job: its program may have been killed


@dataclass(frozen=True)
class Result:
    """How a job has ended."""

    report: Mapping[str, Any]  # the content of report.json
    run_dir: Path
    values: Sequence[Any] = ()  # what the function has returned on each rank; empty for a script

    def __repr__(self) -> str:
        """Return it without the report."""
        return f"<Result of {self.run_dir.name}: {report.text(dict(self.report)).splitlines()[0]}>"

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the last value of each metric."""
        found: Mapping[str, float] = self.report["final_metrics"]
        return found


class JobFailed(OrchestrateError):
    """A job that has not succeeded; the message says why, with the last lines of the first rank that failed."""

    def __init__(self, result: Result) -> None:
        super().__init__(report.text(dict(result.report)), f"see {result.run_dir}")
        self.result = result

    def __reduce__(self) -> tuple[type[JobFailed], tuple[Result]]:
        """Return how to copy it, also to another process."""
        return JobFailed, (self.result,)


class Job:
    """A job of this account, running or not."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        """`run_dir` is the run directory, such as `runs/train-4f2a91`; raises UsageError if it is not one."""
        given = Path(run_dir)
        if not given.exists() and given.name == str(given):  # its id
            given = "runs" / given
        root = owners.check(given.absolute())
        if why := owners.foreign(root):
            raise UsageError(f"{root} is not one of your run directories: {why}")
        records.need(root)
        self._paths = JobPaths(root)

    def __repr__(self) -> str:
        """Return it with its state."""
        return f"<Job {self.id}: {self.outcome or 'running'}>"

    @property
    def id(self) -> str:
        """The name of the job."""
        return self._paths.root.name

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._paths.root

    @property
    def outcome(self) -> str | None:
        """`succeeded`, `failed`, `stopped` or `lost`; None while the job is running."""
        data = run_dir.ended(self._paths)
        return str(Outcome(data["outcome"]).value) if data else None

    def wait(self, timeout: float | None = None) -> Result:
        """Return the result once the job has ended.

        Raises JobFailed if it has not succeeded, TimeoutError after `timeout` seconds, and OrchestrateError if the job
        has no supervisor, so that it will not end.
        """
        until = time.monotonic() + timeout if timeout is not None else float("inf")
        while not (data := run_dir.ended(self._paths)):
            if not lock.supervisor(self._paths) and not run_dir.ended(self._paths):
                run_dir.unsupervised(self._paths)
            if time.monotonic() > until:
                raise TimeoutError(f"{self.id} is still running after {timeout:g} s")
            time.sleep(INTERVAL)
        spec, plan = run_dir.load_for_display(self._paths)
        succeeded, values = data["outcome"] == Outcome.SUCCEEDED, list[Any]()
        if spec.command[0] == CALLED:
            with contextlib.nullcontext() if succeeded else contextlib.suppress(OrchestrateError):
                values = function.values(self._paths.folder, plan.world_size)
        result = Result(data, self._paths.root, values)
        if not succeeded:
            raise JobFailed(result)
        return result

    def stop(self) -> None:
        """Stop the job, and return once nothing of it is left; raises OrchestrateError if something is."""
        spec, plan = run_dir.load(self._paths)
        stopped.stop(self._paths, [registry.of_plan(spec, plan)])

    def resume(self) -> None:
        """Continue a job that has ended without success, with its files; raises UsageError for any other."""
        with _place_kept():
            prepared = resumed.resume(self._paths)
        with prepared.claim:
            prepare.hand_over(prepared)

    def logs(self, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Yield the lines of one rank, or of all ranks with their names; with `follow`, until the job ends."""
        spec, plan = run_dir.load_for_display(self._paths)
        shown = Printer(plan, Style(ranks=None if rank is None else frozenset({rank}), prefixes=rank is None))
        reader, running = logs.rest(self._paths, spec, plan, None), True
        while running:
            running = follow and run_dir.runs(self._paths)
            for text in shown.texts(reader.blocks(end=not running)):
                yield from text.split("\n")
            if running:
                time.sleep(INTERVAL)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what happens, as in events.jsonl, until the job ends."""
        seen, running = 0, True
        while running:
            running = run_dir.runs(self._paths)
            found = run_dir.history(self._paths)
            yield from map(events.to_line, found[seen:])
            seen = len(found)
            if running:
                time.sleep(INTERVAL)

    def _follow(self) -> None:
        """Show the job until it ends."""
        spec, plan = run_dir.load(self._paths)
        screen: Screen = PlainScreen(plan, self._paths, spec.mask())
        display = Display(console.print_message, partial(console.stream, colored=False), Style(), screen)
        follow(self._paths, spec, plan, display, past=True)


class Cluster:
    """Nodes that stay up between jobs, each of which they start in half a second; a context manager."""

    def __init__(self, runs: str | os.PathLike[str] = "runs", **settings: Any) -> None:
        """Start the nodes, for jobs of this program; `settings` are those of all jobs. Raises OrchestrateError."""
        self._runs, self._turn, self._pid = owners.check(Path(runs)), threading.Lock(), os.getpid()
        self._settings = {name: value for name, value in settings.items() if name not in ("keep", "name")}
        kept = {} if settings.get("engine") == "swarm" else {"keep": KEEP}
        with _place_kept():
            spec = request.spec_of(kept | settings)
            self._engine = registry.select_engine(spec)
            self._made, _ = clusters.start(self._engine, spec, self._runs, private=True)

    @property
    def name(self) -> str:
        """The name of the cluster."""
        return self._made.name

    def run(self, target: Target, /, *args: Any, quiet: bool = False, **options: Any) -> Result:
        """Run a job on the cluster, once the one before has ended; as `orchestrate.run`."""
        return _result(self._start(target, args, options, bound=True, tell=not quiet), quiet)

    def submit(self, target: Target, /, *args: Any, **options: Any) -> Job:
        """Start a job on the cluster, once the one before has ended; as `orchestrate.submit`."""
        return self._start(target, args, options, bound=False, tell=False)

    def _start(self, target: Target, args: Sequence[Any], options: Mapping[str, Any], bound: bool, tell: bool) -> Job:
        with self._turn:
            until = time.monotonic() + ENDING
            while (held := lock.supervisor(self._made.paths)) or (jobs := self._made.jobs()):
                if held:  # also for a moment after its job has ended
                    until = time.monotonic() + ENDING
                elif time.monotonic() > until:
                    run_dir.unsupervised(jobs[0])
                time.sleep(TURN_INTERVAL)
            return _started(target, args, self._runs, self.name, self._settings | dict(options), bound, tell)

    def down(self) -> None:
        """Stop a job that is running on the nodes, and remove them; raises OrchestrateError if something is left."""
        if not self._made.paths.nodes.is_dir():  # already
            return
        for paths in self._made.jobs():
            Job(paths.root).stop()
        while lock.supervisor(self._made.paths):  # the supervisor of a job that has just ended
            time.sleep(INTERVAL)
        clusters.take_down(self._engine, self._made, grace=30)

    def __enter__(self) -> Cluster:
        """Return the cluster."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Remove the nodes, unless this is a forked child of the process that has started them."""
        if os.getpid() != self._pid:
            return
        try:
            self.down()
        except OrchestrateError as failure:
            if not error:
                raise
            console.print_message(f"warning: {failure}")  # the program's own error is more important


def run(
    target: Target, /, *args: Any, runs: str | os.PathLike[str] = "runs", quiet: bool = False, **options: Any
) -> Result:
    """Run a job until it ends, and return its result.

    `target` is a script, or `-m` followed by a module, with their arguments, as on the command line; or a function that
    other processes can import, which is called with `args` and those keyword arguments that are no settings of a job.
    What workers print is printed, unless `quiet`. Raises JobFailed if the job does not succeed, and OrchestrateError if
    it cannot start. Ctrl-C, and the end of this process, stop the job.
    """
    return _result(_started(target, args, Path(runs), "", options, bound=True, tell=not quiet), quiet)


def submit(target: Target, /, *args: Any, runs: str | os.PathLike[str] = "runs", **options: Any) -> Job:
    """Start a job and return it; it outlives this process. The arguments are those of `run`, without `quiet`."""
    return _started(target, args, Path(runs), "", options, bound=False, tell=False)


def _result(job: Job, quiet: bool) -> Result:
    """Show a job until it ends, unless `quiet`, and return its result; Ctrl-C stops it."""
    try:
        if not quiet:
            job._follow()
        result = job.wait()
    except JobFailed:  # it has ended
        raise
    except BaseException:
        stopped.ask(job._paths)
        raise
    if not quiet:
        console.print_message(report.text(dict(result.report)))
    return result


def _started(
    target: Target, args: Sequence[Any], runs: Path, on: str, options: Mapping[str, Any], bound: bool, tell: bool
) -> Job:
    if not callable(target) and not isinstance(target, (str, os.PathLike, function.Program)):
        raise UsageError(f"{console.quoted(target)} cannot be run", "pass a script, or a function")
    folder, start = owners.check(runs), Path.cwd().resolve()
    with contextlib.ExitStack() as claim:
        with _place_kept():
            if isinstance(target, function.Program):
                program = target
            elif callable(target):
                settings, kwargs = function.split(target, options)
                program = function.program(target, args, kwargs, start / str(settings.get("chdir", "")))
                options = {"name": target.__name__.strip("_")} | settings
            else:
                program = function.Program([os.fspath(target), *map(str, args)], {})
            spec = request.spec_of({**options, "command": [*program.command]})
            if spec.stdin:
                raise UsageError("stdin is not supported for jobs from Python", "write a file, and pass its path")
            prepared = prepare.prepare(spec, folder, on)
            claim.enter_context(prepared.claim)
            prepared.create({name: io.BytesIO(text) for name, text in program.files.items()})
        if tell:
            console.print_message(prepared.plan)
        prepare.hand_over(prepared, bound)
    return Job(prepared.paths.root)


@contextlib.contextmanager
def _place_kept() -> Iterator[None]:
    """Return to the current folder: a job's code folder becomes the current one while the job is prepared."""
    with _one_at_a_time:
        here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield
        finally:
            os.fchdir(here)
            os.close(here)
