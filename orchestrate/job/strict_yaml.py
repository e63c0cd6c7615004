"""YAML as job files use it: plain values, small files, and an error with line and column for everything else."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from orchestrate.errors import UsageError

MAX_FILE = 1 << 20  # bytes of a job file
DEEPEST = 10  # levels of lists and mappings; a job file needs four
KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:bool")
TEXT = "tag:yaml.org,2002:str"


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key is a word that stands once, and nothing an alias (so that a small file stays small).

    A plain value is null, true or false, or a decimal number; dates, octal numbers and the like are text.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag in KEPT]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, words: tuple[str, ...]) -> None:
        """`words` are the keys whose values are text, whatever they look like."""
        super().__init__(text)
        self.words, self.depth = words, 0

    def compose_node(self, parent: Any, index: int) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        tag, mark = getattr(event, "tag", None), event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, "aliases are not read", mark)
        if tag not in (None, "!", TEXT):
            name = str(tag).replace("tag:yaml.org,2002:", "!!")
            raise yaml.MarkedYAMLError(None, None, f"the tag {shown(name)} is not supported", mark)
        if self.depth == DEEPEST:
            problem = f"lists and mappings are nested more than {DEEPEST} deep"
            raise yaml.MarkedYAMLError(None, None, problem, mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key is a word", key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {shown(key.value)} stands twice", key.start_mark)
            seen.add(key.value)
            key.tag = TEXT
            if key.value in self.words or key.value.startswith("env."):
                _as_text(value)
        return super().construct_mapping(node, deep)


# No more digits than any key takes: Python refuses to read thousands of them, or takes minutes.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"-?(0|[1-9][0-9]{0,17})$"), list("-0123456789")
)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"-?((0|[1-9][0-9]{0,17})\.[0-9]{0,30}|\.[0-9]{1,30})$"), list("-.0123456789")
)


def _as_text(node: Any) -> None:
    """Read the words below a YAML node as they stand: `1.10` is no number there, and `yes` no truth."""
    if isinstance(node, yaml.ScalarNode):
        node.tag = TEXT
    for child in node.value if isinstance(node, (yaml.SequenceNode, yaml.MappingNode)) else ():
        _as_text(child[1] if isinstance(child, tuple) else child)


def shown(value: object) -> str:
    """A value as an error message quotes it: on one line, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def parse(text: str, words: tuple[str, ...] = (), all_text: bool = False) -> tuple[Any, dict[str, yaml.Mark] | None]:
    """The value of a YAML document, and where the keys of a mapping are; None and None where there is no document.

    Values below the keys `words` are text; with `all_text`, all values are. Raises yaml.MarkedYAMLError.
    """
    loader = None
    try:
        loader = _StrictLoader(text, words)
        node = loader.get_single_node()
        if all_text:
            _as_text(node)
        if node is None:
            return None, None
        value = loader.construct_document(node)
    except yaml.MarkedYAMLError:
        raise
    except yaml.reader.ReaderError as error:
        problem = f"the character U+{error.character:04X} is not allowed"
        raise yaml.MarkedYAMLError(None, None, problem, _mark(text, error.position)) from None
    except (ValueError, OverflowError):  # an escape such as "\UFFFFFFFF", or a version of thousands of digits
        mark = loader.get_mark() if loader else None
        raise yaml.MarkedYAMLError(None, None, "an escape or number is out of range", mark) from None
    keys = node.value if isinstance(node, yaml.MappingNode) else []
    return value, {key.value: key.start_mark for key, _ in keys}


def _mark(text: str, index: int) -> yaml.Mark:
    lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", text[:index])
    return yaml.Mark("", index, len(lines) - 1, len(lines[-1]), None, 0)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe that has no writer, too."""
    return os.open(path, flags | os.O_NONBLOCK)


def read(path: Path) -> str:
    """The text of a job file; raises UsageError for what is no text, no file, or too large."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"cannot read job file {path}: not a regular file", "write the job to a file")
            content = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read job file {path}: {why}", "check the path") from None
    if len(content) > MAX_FILE:
        raise UsageError(f"{path} is larger than 1 MiB", "a job file holds settings; keep data in other files")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text", "a job file is YAML in UTF-8") from None
