"""Parse the command of a job, including torchrun's, whose flags set keys of the job. Pure."""

from __future__ import annotations

import argparse
import re
from pathlib import PurePath
from typing import Any, NoReturn

from orchestrate.errors import UsageError
from orchestrate.node.command import LAUNCHERS, PYTHON, begins, named

RUN, LAUNCH = "torch.distributed.run", "torch.distributed.launch"
# Flags of torchrun (torch 2.15) that are ignored, and what to use instead; empty if what they ask for is done anyway.
LOGS, FILES = "--ranks selects what is printed", "logs of all ranks are in the run directory"
IGNORED_FLAGS = {
    **dict.fromkeys(["--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank"], ""),
    **dict.fromkeys(["--master-addr", "--master-port", "--local-addr", "--monitor-interval", "--start-method"], ""),
    **dict.fromkeys(["--duplicate-stderr-filters", "--duplicate-stdout-filters", "--local-ranks-filter"], LOGS),
    **dict.fromkeys(["--log-dir", "--redirects", "--tee", "--logs-specs", "--log-line-prefix-template"], FILES),
    "--event-log-handler": "events.jsonl has the events",
    "--numa-binding": "--set pin=true binds workers to cores",
    "--role": "ROLE_NAME is default",
    "--shutdown-timeout": "--set grace=30s sets that time",
    "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP stop a job",
}
SHORT_FLAGS = {"--redirects": "-r", "--tee": "-t"}
HINT = "use the options of run instead: run [options] -- SCRIPT ARGS"


def read(words: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the command that each worker runs, and the job-file keys that it sets.

    `python SCRIPT.py` becomes `SCRIPT.py`, for which a worker can be forked; so does `torchrun FLAGS SCRIPT.py`, whose
    flags set the numbers of nodes, workers and restarts. Raises UsageError for flags that are not supported.
    """
    if found := _flags(words):
        return _torchrun(found)
    rest = _after_python(words)
    if rest and (rest[0] == "-m" or (rest[0].endswith(".py") and not rest[0].startswith("-"))):
        return rest, {}
    return words, {}


def ignored(words: tuple[str, ...]) -> dict[str, str]:
    """Return the flags of torchrun in a command that have no effect, each with what to use instead."""
    found = _flags(words)
    return {flag: IGNORED_FLAGS[flag] for flag in found.ignored if IGNORED_FLAGS[flag]} if found else {}


def other_launcher(words: tuple[str, ...]) -> str:
    """Return the launcher that a command runs, if its workers would know nothing of other nodes; otherwise empty."""
    start = begins(words)
    joins = LAUNCHERS.get(start)
    return "" if joins and any(word.partition("=")[0] == joins for word in words) else named(start)


def _after_python(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words after `python` or `python -u`; empty for another command."""
    if not PYTHON.fullmatch(words[0]):
        return ()
    return words[2:] if words[1:2] == ("-u",) else words[1:]


def _flags(words: tuple[str, ...]) -> argparse.Namespace | None:
    """Return the flags of a command that is torchrun's; None for any other. Raises UsageError."""
    rest = _after_python(words)
    if PurePath(words[0]).name == "torchrun":
        return _parsed(words[1:], legacy=False)
    if rest[:2] in (("-m", RUN), ("-m", LAUNCH)):
        return _parsed(rest[2:], legacy=rest[1] == LAUNCH)
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"torchrun: {message}", HINT)


class _Ignored(argparse.Action):
    """Keeps the name of an option."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.ignored = [*namespace.ignored, str(self.metavar)]


def _parsed(words: tuple[str, ...], legacy: bool) -> argparse.Namespace:
    """Parse torchrun's flags, or those of its `legacy` form, which passes the script its local rank as an argument."""
    parser = _Parser(prog="torchrun", add_help=False)
    parser.add_argument("--nnodes", type=_nodes, default={})
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=_workers, default={})
    parser.add_argument("--max-restarts", "--max_restarts")
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--no-python", "--no_python", action="store_true")
    parser.add_argument("--virtual-local-rank", "--virtual_local_rank", action="store_true")
    parser.add_argument("--run-path", "--run_path", action="store_true")  # a node always starts a process
    if legacy:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    for flag in IGNORED_FLAGS:
        names = {flag, f"--{flag[2:].replace('-', '_')}"} | ({SHORT_FLAGS[flag]} if flag in SHORT_FLAGS else set())
        parser.add_argument(*sorted(names), dest="ignored", metavar=flag, action=_Ignored, default=())
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser.parse_args(words, argparse.Namespace(local_rank=legacy))


def _torchrun(found: argparse.Namespace) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return what torchrun would run, and the keys that its flags set."""
    rest = tuple(found.words)
    if rest[:1] == ("--",):
        rest = rest[1:]
    if not rest:
        raise UsageError("torchrun: no script to run", "expected: torchrun FLAGS SCRIPT ARGS")
    if rest[0].startswith("-"):
        raise UsageError(f"torchrun: option {rest[0]} is not supported", HINT)
    keys = {**({"trainers": 0} if found.standalone else {}), **found.nnodes, **found.nproc_per_node}
    if found.max_restarts is not None:
        keys["max_restarts"] = found.max_restarts
    if found.virtual_local_rank:
        keys["virtual_local_rank"] = True
    if found.local_rank and not found.use_env:
        rest = (rest[0], "--local-rank=$LOCAL_RANK", *rest[1:])
    if found.module:
        return ("-m", *rest), keys
    if found.no_python or rest[0].endswith(".py"):
        return read(rest)[0], keys
    return ("python", *rest), keys


def _nodes(text: str) -> dict[str, Any]:
    """Parse `4`, or `1:4` for a job that can continue with fewer nodes."""
    least, _, most = text.rpartition(":")
    if not re.fullmatch("[1-9][0-9]{0,5}", most) or not re.fullmatch("([1-9][0-9]{0,5})?", least):
        raise argparse.ArgumentTypeError(f"expected a number of nodes such as 4 or 1:4, not {text!a}")
    return {"trainers": int(most) - 1} | ({"min_trainers": int(least) - 1} if least and least != most else {})


def _workers(text: str) -> dict[str, Any]:
    """Parse a number; `auto` or a kind of device leaves the number of workers to the default."""
    return {} if text in ("auto", "gpu", "cpu", "xpu") else {"nproc_per_node": text}
