"""The command line."""

from __future__ import annotations

import contextlib
import errno
import os

from orchestrate import console, errors
from orchestrate.cli.args import Args
from orchestrate.cli.arguments import parse
from orchestrate.cli.options import module, quiet
from orchestrate.cli.table import COMMANDS
from orchestrate.clock import SYSTEM, Clock
from orchestrate.console import print_message
from orchestrate.errors import EngineError, OrchestrateError, UsageError
from orchestrate.patience import Abandoned


def main(argv: list[str], clock: Clock = SYSTEM) -> int:
    """Run a command and return its exit code. Flushes all output, since the process ends without cleanup.

    Commands wait on `clock`, the attribute of their arguments.
    """
    console.prepare()
    code = _run_guarded(argv, clock)
    if failure := console.finish():
        print_message(f"error: could not write all output: {failure}")
        console.finish()
        code = code or errors.FAILED
    return code


def _run_guarded(argv: list[str], clock: Clock) -> int:
    """Run a command; report errors and return the exit code."""
    try:
        return _command(argv, clock)
    except OrchestrateError as error:
        print_message(f"error: {error}")
        of_slurm = any(word in ("slurm", "--engine=slurm") or word.startswith("slurm.") for word in argv)
        check = (
            f"python -m orchestrate doctor {'--engine slurm checks the cluster' if of_slurm else 'checks this machine'}"
        )
        starts = isinstance(error, EngineError) and argv[0] in ("run", "up", "resume")
        hints = [error.hint] * bool(error.hint) + [check] * (starts and "doctor" not in error.hint)
        if hints:
            print_message(f"hint: {'; '.join(hints)}")
        console.stream(error.file) if error.file else None
        return error.exit_code
    except (KeyboardInterrupt, Abandoned):
        print_message("stopped")
        return errors.INTERRUPTED
    except SystemExit as end:  # argparse printed the help or version, or a user detached from a job
        return end.code if isinstance(end.code, int) else errors.SUCCEEDED
    except console.Closed:
        return errors.SUCCEEDED
    except OSError as error:  # a full disk, a file of another user
        print_message(f"error: {error.strerror or error}" + f": {error.filename}" * bool(error.filename))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print_message("hint: free disk space, and try again")
        return errors.FAILED


def _command(argv: list[str], clock: Clock) -> int:
    args = parse(argv)
    args.clock = clock
    from orchestrate.files import log_file, sandbox  # --help needs none of what follows

    with log_file.shown("debug" if args.verbose else os.environ.get("LOGLEVEL", "")):
        try:
            return _dispatch(args)
        finally:
            sandbox.end()


def _in_junit(args: Args) -> contextlib.AbstractContextManager[None]:
    """Write an error of a `with` block to the file of `--junit-xml`, too, if it is given."""
    if not args.junit_xml:
        return contextlib.nullcontext()
    from orchestrate.cli import result  # only here: it takes time to import

    return result.prepared(args)


def _dispatch(args: Args) -> int:
    if quiet(args):
        console.mute()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists", "cd to an existing folder") from None
    if hasattr(args, "runs"):
        from orchestrate.cli.find import resolve_runs  # with what a job is: --help needs none of it

        with _in_junit(args):
            resolve_runs(args)
    about = COMMANDS[args.command]
    if args.script is not None and not about.script and not about.inside:
        raise UsageError(f"{args.command} does not take a script", f"python -m orchestrate {args.command} --help")
    code: int = module(args.command).run(args)
    return code
