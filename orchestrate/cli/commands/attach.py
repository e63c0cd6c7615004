"""`attach`: follow a job until it ends; take over if it has no supervisor."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable

from orchestrate import errors
from orchestrate.cli import display, find, options, result, signals, waiting
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.clock import Clock, wait_until
from orchestrate.console import clean, print_message
from orchestrate.engines import registry
from orchestrate.engines.base import Engine
from orchestrate.errors import Unsupervised, UsageError
from orchestrate.files.folder import content
from orchestrate.host import slurm
from orchestrate.record import lock, run_dir, slurm_job
from orchestrate.record.logs import rest
from orchestrate.record.paths import JobPaths
from orchestrate.show.feed import Feed
from orchestrate.show.follow import follow
from orchestrate.supervise import launch, open_stores
from orchestrate.supervise.context import Requeued

KEYS = "Ctrl-C detaches; the job continues"
LAST_WORDS = 300  # characters of what a batch script has printed, in an error
RECORDED_AFTER = 60.0  # seconds after which the command that has submitted a job has recorded its number
SHOWN_AFTER = 5.0  # seconds after which another machine sees what was written to a shared folder


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `attach`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    options.add_stdout_options(parser)
    parser.add_argument("--batch", action="store_true", help=argparse.SUPPRESS)  # as the batch script of Slurm
    parser.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)  # of stdin: of a Python program


def run(args: Args) -> int:
    """Follow a job until it ends, supervise it if it has no supervisor, and print the report."""
    paths = find.paths_of(args)
    if args.batch and not wait_until(lambda: slurm_job.is_own(paths), RECORDED_AFTER, args.clock, 0.1):
        if not paths.root.is_dir():
            what = f"this machine does not see the run directory {paths.root}"
            raise UsageError(what, "start jobs in a folder that all machines share")
        what = f"{paths.root.name} was not submitted as this job of Slurm, but as {slurm_job.of(paths) or 'none'}"
        raise UsageError(what, f"python -m orchestrate attach {paths.root.name}, on a login node")
    if args.batch:
        slurm_job.take_log(paths)
    return until_end(args, paths)


def until_end(args: Args, paths: JobPaths) -> int:
    """Do so for the job with these files, and return its exit code."""
    spec, plan = run_dir.load(paths)
    follower = rest(paths, spec, plan)
    result.prepare(args)
    display.style_of(args, plan)  # its options may be wrong
    followed: lock.Supervisor | slurm_job.Batch | None = None
    while not (data := run_dir.ended(paths)):
        if supervisor := lock.supervisor(paths):
            followed = supervisor
            if not options.quiet(args):
                print_message(f"following {paths.root.name}, supervised by {supervisor} (Ctrl-C detaches)")
            if isinstance(supervisor, slurm_job.Batch) and not options.quiet(args):
                with waiting.detaching(paths.root.name):
                    waiting.in_queue(supervisor, args.clock)
            now = run_dir.load(paths)[1]
            with display.shown(args, now, paths, KEYS) as shown, waiting.detaching(paths.root.name):
                follow(paths, spec, now, shown, follower, args.clock, queued=False)
            continue
        if run_dir.ended(paths):
            continue
        submitted = slurm_job.of(paths)
        if plan.engine == "slurm" and not (submitted and slurm.is_inside(submitted.id)):
            if isinstance(followed, slurm_job.Batch):
                if not wait_until(lambda: run_dir.ended(paths), SHOWN_AFTER, args.clock, 0.2):
                    _left_the_queue(paths, followed)
            else:
                _submit(paths, args.clock)
            continue
        open_stores.check(spec)  # before this process is responsible for the job
        if not options.quiet(args):
            print_message(f"supervising {paths.root.name}, which has no supervisor: Ctrl-C stops it")
        engine = registry.of_plan(spec, plan)
        stops, evicted = _requests(signals.count(spec), submitted, engine)
        if args.until_eof:
            threading.Thread(target=_stop_at_eof, daemon=True).start()
        try:
            with display.shown(args, plan, paths) as shown:
                feed = Feed(paths, spec, plan, shown, follower)
                data = launch.supervise(paths, engine, stops, feed, evicted=evicted)
            if submitted and slurm.is_inside(submitted.id):
                slurm_job.stay_ended(submitted)
            break
        except Requeued:
            if not (submitted and slurm_job.requeue(submitted)):
                _submit(paths, args.clock)
            return errors.SUCCEEDED
        except BlockingIOError:  # another process took the lock first
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert data
    if followed and not paths.page.exists():
        log = args.shown / paths.root.name / paths.supervisor_log.name
        print_message(f"warning: {paths.page.name} could not be written: see {log}")
    return result.show(args, paths.root.name, data)


def _submit(paths: JobPaths, clock: Clock) -> None:
    """Submit a job to Slurm again, unless another command does."""
    from orchestrate.api.submit import submit  # only here: it takes time to import

    spec, plan = run_dir.load(paths)
    try:
        with lock.held(paths, supervises=False):
            if not lock.supervisor(paths):
                submit(registry.of_plan(spec, plan), spec, plan, paths)
    except BlockingIOError:
        clock.sleep(0.2)


def _left_the_queue(paths: JobPaths, followed: slurm_job.Batch) -> None:
    """Record the end of a job that was canceled in the queue; raise Unsupervised for one whose end is unknown."""
    state = slurm_job.last_state(followed)
    if state != "CANCELLED":
        said = ""
        with contextlib.suppress(OSError, ValueError):
            text = clean(content(slurm_job.early_log(paths)).strip())
            said = f": {run_dir.load(paths)[0].mask().part(text, max(0, len(text) - LAST_WORDS))}"
        what = f"{followed} has left the queue{f' ({state})' * bool(state)}, and has not recorded its result{said}"
        hint = "python -m orchestrate doctor --engine slurm checks whether machines see this folder"
        raise Unsupervised(what, f"{hint}; attach {paths.root.name} submits it again")
    from orchestrate.api import stop  # only here: it takes time to import

    print_message(f"{followed} was canceled")
    stop.stop(paths, [registry.select_engine(run_dir.load(paths)[0])])


def _requests(
    count: Callable[[], int], submitted: slurm_job.Batch | None, engine: Engine
) -> tuple[Callable[[], int], Callable[[], bool]]:
    """Return the number of requests to stop so far, and whether the scheduler has made them to end the allocation."""

    @functools.cache
    def is_evicted() -> bool:
        return submitted is not None and slurm_job.is_evicted(submitted)

    def evicted() -> bool:
        return bool(count()) and is_evicted() or getattr(engine, "evicted", False)

    return lambda: 0 if evicted() else count(), evicted


def _stop_at_eof() -> None:
    """Request to stop once the process that has started this one has ended."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 16):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
