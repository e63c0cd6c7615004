"""The job that a command line describes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from orchestrate.cli import defaults
from orchestrate.cli.arguments import flags
from orchestrate.cli.script import check_script
from orchestrate.console import print_message
from orchestrate.errors import UsageError
from orchestrate.files.paths import hidden
from orchestrate.node.command import launcher
from orchestrate.spec import folders, requirements, secret_files, source
from orchestrate.spec.layers import read_file, read_set, resolve
from orchestrate.spec.redact import HIDDEN
from orchestrate.spec.spec import APP, JobSpec, unencodable
from orchestrate.supervise.notify import is_url

OURS = ("--detach", "--dry-run", "--engine", "--nodes", "--nproc-per-node", "--trainers")  # that change what is run


def spec_of(args: argparse.Namespace) -> JobSpec:
    """Return the spec of the job that the command line describes."""
    options = read_set(args.set) | flags(args) | ({"command": args.script} if args.script is not None else {})
    of_file = read_file(args.file) if args.file else {}
    layers = [defaults.layer(), of_file, options]
    if (target := str(of_file.get("on_event") or "")) and not is_url(target):
        raise UsageError("on_event in a job file must be a URL", "pass a command with --on-event, since it runs here")
    spec = resolve(*layers)
    if name := next((name for name, value in spec.env.items() if value == HIDDEN), ""):
        raise UsageError(
            f"env.{name} is {HIDDEN}, the placeholder for a secret in job.yaml",
            f"export {name}, and use -e {name}; or set it in your own job file",
        )
    runs_command = args.command not in ("up", "doctor")
    spec = secret_files.with_contents(folders.with_absolute(_with_requirements(spec)))
    source.enter(spec)
    default = spec.command == APP and "command" not in {key for layer in layers for key in layer}
    if runs_command and default and (spec.source or hidden()):
        what = (
            "although source is set" if spec.source else "and `app` in this folder would run instead of the default job"
        )
        raise UsageError(f"no script given, {what}", f"python -m orchestrate {args.command} SCRIPT.py")
    script = args.script or []
    for word in script[1:] if not launcher(script) else ():  # a launcher's flags are its own
        if word.partition("=")[0] in OURS:
            print_message(f"warning: {word} comes after the script, and so is an argument of the script")
    if why := unencodable(spec):
        raise UsageError(why, "export LC_ALL=C.UTF-8")
    return check_script(spec)


def _with_requirements(spec: JobSpec) -> JobSpec:
    """Replace the requirements file by its lines, so that the job does not depend on the file any longer."""
    if not spec.requirements:
        return spec
    lines = [*requirements.read(Path(spec.requirements)), *spec.pip]
    return dataclasses.replace(spec, requirements="", pip=lines)
