"""`schema`: the JSON Schema of job files."""

from __future__ import annotations

import json

from orchestrate import errors
from orchestrate.cli.args import Args
from orchestrate.cli.parser import Parser
from orchestrate.console import out


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `schema`."""
    parser.description = (
        "Print the JSON Schema of job files. Editors use it to complete and validate files that start with "
        "`# yaml-language-server: $schema=PATH`."
    )


def run(args: Args) -> int:
    """Print the JSON Schema of job files."""
    from orchestrate.spec.schema import schema

    out(json.dumps(schema(), indent=2, ensure_ascii=False))
    return errors.SUCCEEDED
