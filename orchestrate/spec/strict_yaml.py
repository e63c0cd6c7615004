"""The YAML of job files: plain values and small files; anything else is an error with line and column."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from orchestrate.console import quoted
from orchestrate.errors import UsageError
from orchestrate.files.folder import regular

MAX_FILE = 1 << 20  # bytes of a job file
MAX_VALUES = 20_000  # of a document; PyYAML takes 0.1 ms for each
MAX_DEPTH = 10  # levels of lists and mappings; a job file needs four
KEPT_TAGS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:bool")
TEXT_TAG = "tag:yaml.org,2002:str"


class _StrictLoader(yaml.SafeLoader):
    """YAML with unique scalar keys and without aliases (which could expand a small file).

    A plain value is null, true, false or a decimal number; dates, octal numbers and the like are text.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag in KEPT_TAGS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, text_keys: tuple[str, ...]) -> None:
        """`text_keys` are the keys whose values are always text, also as `KEY.NAME`."""
        super().__init__(text)
        self.text_keys, self.depth, self.values = text_keys, 0, 0

    def compose_node(self, parent: Any, index: int) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        tag, mark = getattr(event, "tag", None), event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, "aliases are not supported", mark)
        if tag not in (None, "!", TEXT_TAG):
            name = str(tag).replace("tag:yaml.org,2002:", "!!")
            raise yaml.MarkedYAMLError(None, None, f"the tag {quoted(name)} is not supported", mark)
        if self.depth == MAX_DEPTH:
            problem = f"lists and mappings are nested more than {MAX_DEPTH} deep"
            raise yaml.MarkedYAMLError(None, None, problem, mark)
        self.values += 1
        if self.values > MAX_VALUES:
            raise yaml.MarkedYAMLError(None, None, f"there are more than {MAX_VALUES:,} values", mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "keys must be scalars", key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"duplicate key {quoted(key.value)}", key.start_mark)
            seen.add(key.value)
            key.tag = TEXT_TAG
            if key.value.partition(".")[0] in self.text_keys:
                _as_text(value)
        return super().construct_mapping(node, deep)


# No more digits than any key needs: for thousands of them, Python raises an error or takes minutes.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"-?(0|[1-9][0-9]{0,17})$"), list("-0123456789")
)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"-?((0|[1-9][0-9]{0,17})\.[0-9]{0,30}|\.[0-9]{1,30})$"), list("-.0123456789")
)


def _as_text(node: Any) -> None:
    """Treat all scalars below a YAML node as text: `1.10` is not a number there, and `yes` not a boolean."""
    if isinstance(node, yaml.ScalarNode):
        node.tag = TEXT_TAG
    for child in node.value if isinstance(node, (yaml.SequenceNode, yaml.MappingNode)) else ():
        _as_text(child[1] if isinstance(child, tuple) else child)


def parse(
    text: str, text_keys: tuple[str, ...] = (), all_text: bool = False
) -> tuple[Any, dict[str, yaml.Mark] | None]:
    """Parse a YAML document: return its value and the locations of a mapping's keys, or None and None if it is empty.

    Values below `text_keys` are text; with `all_text`, all values are. Raises yaml.MarkedYAMLError.
    """
    loader = None
    try:
        loader = _StrictLoader(text, text_keys)
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


def read(path: Path) -> str:
    """Read a job file; raises UsageError if it is not UTF-8, not a regular file, or too large.

    A link out of its folder may have come with a project, to have another file quoted in an error.
    """
    try:
        real = Path(os.path.realpath(path))
        if path.is_symlink() and not any(real.is_relative_to(folder.resolve()) for folder in (path.parent, Path())):
            raise UsageError(f"cannot read job file {path}: it is a link out of its folder", f"use its target: {real}")
        with regular(real) as file:
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
