"""`help`: the documentation in the terminal."""

from __future__ import annotations

import os
import pydoc
import shutil
import sys

from orchestrate import console, errors
from orchestrate.cli import options
from orchestrate.cli.args import Args
from orchestrate.cli.parser import EXPORTS, Parser
from orchestrate.cli.table import COMMANDS
from orchestrate.errors import UsageError, did_you_mean
from orchestrate.files.paths import PROJECT

MAX_WIDTH = 100  # columns that are easy to read


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `help`."""
    text = "a command, a key of the job file, or a page (PAGE.md if a command has its name); without it, list them"
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help=text)
    parser.add_argument("target", nargs="?", choices=[*EXPORTS], help="the target of an export")


def topics() -> list[str]:
    """Return the names of the pages."""
    return sorted(path.stem for path in PROJECT.glob("docs/*.md"))


def run(args: Args) -> int:
    """Print the help of a command, the description of a key, or a page."""
    if not args.topic:
        options.parser("").print_help()
        console.out(f"\npages ({console.called()} help PAGE):")
        console.out("  " + ", ".join(topics()))
    elif args.topic in COMMANDS:
        shown = options.parser(args.topic).subparser(args.topic)
        (shown.subparser(args.target) if args.target and args.topic == "export" else shown).print_help()
        if args.topic in topics():
            console.out(f"\nmore: {console.called()} help {args.topic}.md")
    else:
        _show(_page(args.topic))
    return errors.SUCCEEDED


def _page(topic: str) -> str:
    """Return a page, or the description of a key; raises UsageError if there is neither."""
    from orchestrate.spec.spec import FIELDS, description

    topic = topic.partition("#")[0].removesuffix(".md")  # as in a link
    key = "trainers" if topic == "nodes" else topic.replace("-", "_")
    about = f"{key}: {description(key)}\n" if key in FIELDS else ""
    if topic in topics():
        return f"{about}\n" * bool(about) + (PROJECT / "docs" / f"{topic}.md").read_text(encoding="utf-8")
    if about:
        return about
    hint = did_you_mean(topic, [*COMMANDS, *topics(), *FIELDS]) or f"{console.called()} help lists what there is"
    raise UsageError(f"no help on {console.quoted(topic)}", hint)


def _show(text: str) -> None:
    """Print Markdown; on a terminal formatted, with the user's pager."""
    if not (sys.stdout and sys.stdout.isatty()):
        return console.out(text.removesuffix("\n"))
    from orchestrate.show.document import formatted  # only here: it imports rich

    os.environ.setdefault("LESS", "-FRX")  # as git does: formatted text, and none of the keys for one screen
    pydoc.pager(formatted(text, min(MAX_WIDTH, shutil.get_terminal_size().columns)))
