"""The job that a command line describes."""

from __future__ import annotations

import shlex

from orchestrate.api import request
from orchestrate.cli.args import Args
from orchestrate.cli.arguments import flags
from orchestrate.console import called, print_message
from orchestrate.errors import UsageError
from orchestrate.files.paths import hidden
from orchestrate.node.command import launcher
from orchestrate.spec import values
from orchestrate.spec.command import ignored
from orchestrate.spec.layers import read_file, read_set
from orchestrate.spec.spec import APP, JobSpec
from orchestrate.supervise.notify import is_url

OURS = ("--detach", "--dry-run", "--engine", "--nodes", "--nproc-per-node", "--trainers")  # that change what is run


def spec_of(args: Args) -> JobSpec:
    """Return the spec of the job that the command line describes; raises like `request.spec_of`."""
    options = read_set(args.set) | flags(args) | ({"command": args.script} if args.script is not None else {})
    of_file = read_file(args.file) if args.file else {}
    if (target := str(of_file.get("on_event") or "")) and not is_url(target):
        raise UsageError("on_event in a job file must be a URL", "pass a command with --on-event, since it runs here")
    script = args.script or []
    for word in script[1:] if not launcher(script) else ():  # a launcher's flags are its own
        if word.partition("=")[0] in OURS:
            usage = f"{called()} {args.command} [options] {shlex.quote(script[0])} …"
            if word == "--dry-run" and not args.separated:
                hint = f"{usage}; if it is an option of the script, write -- before the script"
                raise UsageError(f"{word} comes after the script", hint)
            print_message(f"warning: {word} comes after the script, and so is an argument of the script ({usage})")
    spec = request.spec_of(of_file, options)
    command = options.get("command") or of_file.get("command") or ()
    for flag, instead in ignored(values.command.parse(command) if command else APP).items():
        print_message(f"warning: torchrun's {flag} has no effect: {instead}")
    runs_command = args.command not in ("up", "doctor")
    default = spec.command == APP and "command" not in of_file and "command" not in options
    if runs_command and default and (spec.source or hidden()):
        what = (
            "although source is set" if spec.source else "and `app` in this folder would run instead of the default job"
        )
        raise UsageError(f"no script given, {what}", f"python -m orchestrate {args.command} SCRIPT.py")
    return spec
