"""`resume`: another generation of a job that has ended, with the files of its run directory."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
from pathlib import Path
from typing import NoReturn

from orchestrate.api.script import check_script
from orchestrate.cli import display, find, options, result, signals
from orchestrate.cli.parser import Parser
from orchestrate.console import print_message, quoted
from orchestrate.engines.ports import port
from orchestrate.errors import UsageError
from orchestrate.files.paths import code_folder
from orchestrate.host import records, users
from orchestrate.plan.plan import Plan, plan
from orchestrate.record import lock, run_dir
from orchestrate.record.events import JobResumed
from orchestrate.record.history import History
from orchestrate.record.logs import rest
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.show.feed import Feed
from orchestrate.spec import source, worktree
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch, stores


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `resume`."""
    options.add_job_name(parser, latest=True)
    options.add_runs(parser)
    options.add_stdout_options(parser)
    parser.add_argument("--set", type=_refuse, help=argparse.SUPPRESS)


def _refuse(setting: str) -> NoReturn:
    """Raise UsageError for a setting, which a job that is resumed cannot change."""
    raise UsageError(
        f"resume: {quoted(setting)} cannot be set: a job is resumed with the settings that it was started with",
        "start a new job, whose script can load the checkpoints of this one",
    )


def run(args: argparse.Namespace) -> int:
    """Continue a job that was stopped, failed or was lost, and return its exit code.

    Its image and GPUs are checked again, and its code folder is copied again, except for files that workers wrote.
    """
    paths = find.paths_of(args)
    _check(paths)
    spec, last = run_dir.load(paths)
    try:
        source.go_to(Path(last.placement.code))
    except OSError as error:
        hint = "restore the folder (a link is not followed), or start a new job"
        raise UsageError(f"cannot enter the job's code folder {last.placement.code}: {error.strerror}", hint) from None
    _check_user(spec, last, paths)
    display.style_of(args, last)  # its options may be wrong
    check_script(spec)
    stores.prepare(spec)
    engine, name = find.engine_of(spec, last), paths.root.name
    engine.prepare(spec, paths.shared)
    inventory, placement = engine.inventory(spec, paths.shared, run_image=True)
    placement = dataclasses.replace(placement, revision=worktree.revision(code_folder(spec.command))())
    try:
        with lock.held(paths):
            _check(paths)  # again: another process may have resumed the job meanwhile
            record = launch.recorder(paths, hide=spec.mask())
            ended = History(record.events).ended
            number = ended[-1].generation + 1 if ended else 0
            wanted = plan(spec, inventory, placement, name, port(placement.network, number), number)
            records.reopen(paths.root, secrets.token_bytes(32))
            run_dir.keep(paths, wanted, spec)
            run_dir.keep_changes(spec, wanted, paths)
            record(JobResumed())
            record.close()
            paths.page.unlink(missing_ok=True)
            records.remove(paths.report)  # from here on, the job has not ended
    except BlockingIOError:
        _check(paths)
        raise
    if not options.quiet(args):
        print_message(str(wanted))
    follower, stops = rest(paths, spec, wanted, last=0), signals.count(spec)
    with display.shown(args, wanted, paths) as shown:
        data = launch.supervise(paths, engine, stops, Feed(paths, spec, wanted, shown, follower))
    return result.show(args, name, data)


def _check_user(spec: JobSpec, last: Plan, paths: JobPaths) -> None:
    """Raise UsageError if nodes would run as another user than before, who cannot write to the job folder."""
    user, owner = users.nodes_of(spec.user), paths.shared.stat().st_uid
    if last.engine != "process" and user and user[0] != owner:
        raise UsageError(
            f"the files of {paths.root.name} belong to user {owner}, but its nodes would run as user {user[0]}",
            "resume it as it was started: with or without sudo",
        )


def _check(paths: JobPaths) -> None:
    """Raise UsageError for a job that cannot be resumed."""
    name, data = paths.root.name, run_dir.ended(paths)
    records.need(paths.root)
    if not data:
        state = f"is supervised by {supervisor}" if (supervisor := lock.holder(paths)) else "has no supervisor"
        raise UsageError(f"{name} has not ended: it {state}", f"python -m orchestrate attach {name}")
    if data["outcome"] == Outcome.SUCCEEDED:
        raise UsageError(f"{name} has succeeded", "start a new job; its script can load the checkpoints of this one")
    if data["left_behind"]:
        raise UsageError(f"not all nodes of {name} were removed", f"python -m orchestrate stop {name}")
