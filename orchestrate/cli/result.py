"""The result of a job: what a command prints of it, and its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrate import errors
from orchestrate.cli import signals
from orchestrate.cli.args import Args
from orchestrate.console import out, print_message, stream
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.folder import write_whole
from orchestrate.host import writable
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.record.report import text
from orchestrate.spec.folders import led_out
from orchestrate.supervise.context import BY_MAX_RUN, BY_REQUEUES

EXIT_CODES = {Outcome.SUCCEEDED: errors.SUCCEEDED, Outcome.FAILED: errors.FAILED, Outcome.LOST: errors.LOST}


def exit_code(data: dict[str, Any]) -> int:
    """Return the exit code of a command for a job with this report."""
    if data["outcome"] == Outcome.STOPPED:
        limited = str(data["reason"]).startswith((BY_MAX_RUN, BY_REQUEUES))
        return errors.TIMED_OUT if limited else errors.INTERRUPTED
    return EXIT_CODES[data["outcome"]]


def prepare(args: Args) -> None:
    """Open the folder of `--junit-xml` before a job could put something else in its place; raises UsageError."""
    if not (file := args.junit_xml) or args.junit_folder is not None:
        return
    if args.detach:
        raise UsageError("--junit-xml needs the end of the job", "use attach JOB --junit-xml FILE later")
    if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
        raise UsageError(f"--junit-xml: {file} is not a file", "choose another name")
    if real := led_out(str(Path.cwd() / file.parent)) if not file.is_absolute() else "":
        raise UsageError(f"--junit-xml: {file.parent} is a link to {real}", "name that folder, if it is what you mean")
    folder = writable.resolved(str(file.parent), fixed=True)
    try:
        os.makedirs(folder, exist_ok=True)
        args.junit_folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"--junit-xml: {folder}: {error.strerror}", "choose another folder") from None
    with contextlib.suppress(FileNotFoundError):  # of an earlier job: this one may not end
        os.unlink(file.name, dir_fd=args.junit_folder)


@contextlib.contextmanager
def prepared(args: Args) -> Iterator[None]:
    """Prepare `--junit-xml` for a `with` block, and write an error in it there; raises UsageError."""
    prepare(args)
    try:
        yield
    except OrchestrateError as error:
        if args.junit_xml:
            from orchestrate.record.junit import not_run  # only here: it imports an XML library

            hint = f"\nhint: {error.hint}" if error.hint else ""
            write_whole(args.junit_xml.name, not_run(_named(args), f"{error}{hint}"), args.junit_folder, mode=0o644)
        raise


def _named(args: Args) -> str:
    """Return the name of a job, or for one that has none yet, that of its script or job file."""
    script = next((word for word in args.script or () if word != "-m"), None)
    return args.job or vars(args).get("name") or Path(script or args.file or "job").stem


def show(args: Args, name: str, data: dict[str, Any]) -> int:
    """Print the report of a job, write it as JUnit XML on request, and return the exit code; raises OSError."""
    signals.end_at_once()
    print_message(text(data))
    saved, stopped = data.get("checkpoints"), data["outcome"] == Outcome.STOPPED
    if (stopped or (saved and data["outcome"] != Outcome.SUCCEEDED)) and not data.get("left_behind"):
        how = "continues from its last checkpoint" if saved else "runs it again in its run directory"
        print_message(f"hint: python -m orchestrate resume {args.shown / name} {how}")
    print_message(args.shown / name)
    if args.print_path:
        stream(args.shown / name)
    if args.junit_xml:
        from orchestrate.record.junit import junit  # only here: it imports an XML library

        write_whole(args.junit_xml.name, junit(data), args.junit_folder, mode=0o644)
    if args.json:
        stream(json.dumps({"run_directory": str(args.shown / name), **data}, indent=2))
    return exit_code(data)


def detached(args: Args, paths: JobPaths) -> int:
    """Print the run directory of a job whose supervisor runs in the background; return the exit code."""
    run = args.shown / paths.root.name
    print_message(f"hint: python -m orchestrate attach {run.name} follows it; supervisor log: {run / 'supervisor.log'}")
    out(run)
    return errors.SUCCEEDED
