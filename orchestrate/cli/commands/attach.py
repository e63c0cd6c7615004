"""`attach`: follow a job until it ends; take over if it has no supervisor."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading

from orchestrate.cli import display, find, options, result, signals, waiting
from orchestrate.cli.parser import Parser
from orchestrate.console import print_message
from orchestrate.engines import choice
from orchestrate.record import lock, run_dir
from orchestrate.record.logs import rest
from orchestrate.show.feed import Feed
from orchestrate.show.follow import follow
from orchestrate.supervise import launch, stores

KEYS = "Ctrl-C detaches; the job continues"


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `attach`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    options.add_stdout_options(parser)
    parser.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)  # of stdin: of a Python program


def run(args: argparse.Namespace) -> int:
    """Follow a job until it ends, supervise it if it has no supervisor, and print the report."""
    paths = find.paths_of(args)
    spec, plan = run_dir.load(paths)
    follower = rest(paths, spec, plan)
    result.prepare(args)
    display.style_of(args, plan)  # its options may be wrong
    while not (data := run_dir.ended(paths)):
        if supervisor := lock.holder(paths):
            if not options.quiet(args):
                print_message(f"following {paths.root.name}, supervised by {supervisor} (Ctrl-C detaches)")
            now = run_dir.load(paths)[1]
            with display.shown(args, now, paths, KEYS) as shown, waiting.detaching(paths.root.name):
                follow(paths, spec, now, shown, follower, args.clock)
            continue
        if run_dir.ended(paths):
            continue
        stores.check(spec)  # before this process is responsible for the job
        if not options.quiet(args):
            print_message(f"supervising {paths.root.name}")
        engine, stops = choice.of_plan(spec, plan), signals.count(spec)
        if args.until_eof:
            threading.Thread(target=_stop_at_eof, daemon=True).start()
        try:
            with display.shown(args, plan, paths) as shown:
                data = launch.supervise(paths, engine, stops, Feed(paths, spec, plan, shown, follower))
            break
        except BlockingIOError:  # another process took the lock first
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert data
    return result.show(args, paths.root.name, data)


def _stop_at_eof() -> None:
    """Request to stop once the process that has started this one has ended."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 16):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
