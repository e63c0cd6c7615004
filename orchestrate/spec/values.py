"""Kinds of values in a job file: a parser for each, and the same as a JSON Schema for editors. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrate.console import quoted
from orchestrate.dataclass import dataclass
from orchestrate.node.ranks import CONTRACT
from orchestrate.spec.causes import ACTIONS, CAUSES, CONDITIONS
from orchestrate.spec.patterns import flaw
from orchestrate.spec.sizes import UNLIMITED, parse_size

MAX_TRAINERS = 1000  # a Linux bridge takes 1023 ports
MAX_WORKERS = 1024  # per node
MAX_GPUS = 1024  # per job
MAX_BYTES = (1 << 63) - 1  # of memory; the range of the engine's integers
MIN_MEMORY = 64 << 20  # bytes per node; less does not start Python, and usually lacks its unit, such as 4
MAX_RULES, MAX_PATTERN = 100, 1000
SHELL = ("&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1")  # words that only a shell understands
MAX_CONSTRAINTS, MAX_CONSTRAINT = 100, 500

MAX_VARIABLE = 128 << 10  # bytes of name and value: MAX_ARG_STRLEN of Linux (include/uapi/linux/binfmts.h)
_WHOLE = r"-?(0|[1-9][0-9]{0,17})"  # Python takes minutes for a million digits
VISIBLE = r"[^\s\x00-\x1f\x7f-\x9f]"  # neither white space nor a control character
_DAY = 86400
_DURATION = r"([0-9]{1,18}(?:\.[0-9]{1,30})?)\s*([smhd]?)"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
MODULE = r"[A-Za-z_]\w*(\.\w+)*"
Schema = dict[str, Any]
TEXT: Schema = {"type": ["string", "number"]}


@dataclass(frozen=True)
class Kind:
    """A kind of value: how it is parsed, and its schema."""

    parse: Callable[[Any], Any]  # converts a value; raises ValueError with a description of valid values
    schema: Schema  # draft 7; if the parser is more lenient, the documented form


def kind(schema: Schema) -> Callable[[Callable[[Any], Any]], Kind]:
    """Decorate the parser of a kind."""
    return lambda parse: Kind(parse, schema)


def one_of(words: Iterable[str]) -> Schema:
    """Schema of one of these values."""
    return {"enum": list(words)}


def matching(pattern: str, **more: Any) -> Schema:
    """Schema of text that matches a pattern as a whole."""
    return {**TEXT, "pattern": f"^(?:{pattern})$", **more}


def either(*schemas: Schema) -> Schema:
    """Schema of a value that matches any of these schemas."""
    return {"anyOf": list(schemas)}


def list_of(item: Schema, **more: Any) -> Schema:
    """Schema of a list, or of its items in one string."""
    return either({"type": "array", "items": item, **more}, {"type": "string"})


def integer(low: int, high: int) -> Kind:
    """A whole number from `low` to `high`."""

    @kind({"type": "integer", "minimum": low, "maximum": high})
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(_WHOLE, str(value)) or not low <= int(value) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(value)

    return parse


def choice(*names: str) -> Kind:
    """One of these names."""

    @kind(one_of(names))
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(value)

    return parse


def text(pattern: str, meaning: str) -> Kind:
    """Text, or a number as text, that matches a pattern; `meaning` describes it in errors."""

    @kind(matching(pattern))
    def parse(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not re.fullmatch(pattern, str(value)):
            raise ValueError(meaning)
        return str(value)

    return parse


@kind(either({"type": "string", "minLength": 1}, {"type": "array", "items": TEXT, "minItems": 1}))
def command(value: Any) -> tuple[str, ...]:
    """A command line, as a string or a list."""
    meaning = "a script or -m MODULE, with arguments; one string, or a list of strings"
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:  # an unterminated quotation
        raise ValueError(f"{meaning} ({error})") from None
    if isinstance(value, str) and (operator := next((word for word in words if word in SHELL), "")):
        raise ValueError(f"{meaning}; {operator} needs a shell: use sh -c '…'")
    if not isinstance(words, (list, tuple)) or not words or not all(isinstance(w, (str, int, float)) for w in words):
        raise ValueError(meaning)
    return tuple(str(word) for word in words)


@kind(either(command.schema, {"type": "array", "maxItems": 0}, one_of([""])))
def optional_command(value: Any) -> tuple[str, ...]:
    """A command line, or nothing."""
    return tuple(command.parse(value)) if value not in ("", [], ()) else ()


@kind(either(one_of(("auto", "all", "none")), integer(1, MAX_GPUS).schema))
def gpus(value: Any) -> str | int:
    """`auto`, `all`, `none`, or a number of GPUs."""
    if value in ("auto", "all", "none"):
        return str(value)
    try:
        return int(integer(1, MAX_GPUS).parse(value))
    except ValueError:
        raise ValueError(f"auto, all, none or a whole number from 1 to {MAX_GPUS}") from None


def duration(longest: str, most: float) -> Kind:
    """A duration of at most `most` seconds; `longest` is the same limit for errors."""

    @kind(matching(_DURATION, exclusiveMinimum=0, maximum=most))
    def parse(value: Any) -> float:
        match = re.fullmatch(_DURATION, str(value).strip())
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": _DAY}[match[2]] if match else 0.0
        if isinstance(value, bool) or not 0.001 <= seconds <= most:
            raise ValueError(f"a duration such as 90s, 30m, 2h or 1d, from 1 ms to {longest}")
        return seconds

    return parse


@kind(
    {
        "type": "object",
        "propertyNames": {"pattern": f"^{VARIABLE}$", "not": {"enum": sorted(CONTRACT)}},
        "additionalProperties": {"type": ["string", "number", "boolean"], "maxLength": MAX_VARIABLE - len("A=")},
    }
)
def env(value: Any) -> dict[str, str]:
    """A mapping of names to values; errors do not contain values, which may be secrets."""
    if not isinstance(value, Mapping):
        raise ValueError("a mapping of names to values")
    for name, content in value.items():
        if not re.fullmatch(VARIABLE, str(name)):
            raise ValueError(f"a mapping of names to values; {quoted(name)} is not a valid name")
        if not isinstance(content, (str, int, float)):
            raise ValueError(f"a mapping of names to values; the value of {name} is neither text nor a number")
        if len(f"{name}={content}".encode(errors="replace")) >= MAX_VARIABLE:
            raise ValueError(f"a mapping of names to values; that of {name} exceeds Linux's {MAX_VARIABLE:,} bytes")
        if name in CONTRACT:
            raise ValueError(f"a mapping without {name}, which the orchestrator sets in every worker")
    return {str(name): str(content) for name, content in value.items()}


@kind(
    {
        "type": "array",
        "maxItems": MAX_RULES,
        "items": {
            "type": "object",
            "properties": {
                "action": one_of(ACTIONS),
                "exit_codes": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 255}},
                "cause": one_of(CAUSES),
                "log": {"type": "string", "format": "regex", "maxLength": MAX_PATTERN},
            },
            "required": ["action"],
            "anyOf": [{"required": [name]} for name in sorted(CONDITIONS)],
            "additionalProperties": False,
        },
    }
)
def rules(value: Any) -> list[dict[str, Any]]:
    """Rules for failures."""
    form = f"a list of at most {MAX_RULES} mappings"
    meaning = f"{form} with an action ({', '.join(ACTIONS)}) and one or more of {', '.join(CONDITIONS)}"
    if not isinstance(value, list) or len(value) > MAX_RULES:
        raise ValueError(meaning)
    found = []
    for rule in value:
        if not isinstance(rule, Mapping) or rule.get("action") not in ACTIONS or not CONDITIONS & rule.keys():
            raise ValueError(meaning)
        if unknown := rule.keys() - CONDITIONS - {"action"}:
            raise ValueError(f"{meaning}; {unknown.pop()!r} is unknown")
        codes = rule.get("exit_codes", [])
        if not isinstance(codes, list) or not all(type(code) is int and 0 < code < 256 for code in codes):
            raise ValueError(f"{meaning}; exit_codes is a list of numbers from 1 to 255")
        if not all(isinstance(rule.get(name, ""), str) for name in ("log", "cause")):
            raise ValueError(f"{meaning}; log and cause are text")
        if rule.get("cause", "error") not in CAUSES:
            raise ValueError(f"{meaning}; the causes are {', '.join(CAUSES)}")
        if len(rule.get("log", "")) > MAX_PATTERN:
            raise ValueError(f"{meaning}; log is a regular expression of at most {MAX_PATTERN} characters")
        found.append(dict(rule))
    if why := flaw(tuple(rule["log"] for rule in found if "log" in rule)):
        raise ValueError(f"{meaning}; log is a regular expression ({why})")
    return found


@kind({"type": "boolean"})
def boolean(value: Any) -> bool:
    """True or false."""
    if value in (True, False, "true", "false"):
        return value in (True, "true")
    raise ValueError("true or false")


@kind(list_of(matching(MODULE)))
def modules(value: Any) -> list[str]:
    """Names of modules, as a list or in one string."""
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or not all(re.fullmatch(MODULE, str(name)) for name in names):
        raise ValueError("a list of modules")
    return [str(name) for name in names]


# The first operator ends the name: linear time.
CONSTRAINT = r"[^\s\x00-\x1f\x7f-\x9f=!]+ ?[!=]= ?" + f"{VISIBLE}+"


@kind(list_of(matching(CONSTRAINT, maxLength=MAX_CONSTRAINT), maxItems=MAX_CONSTRAINTS))
def constraints(value: Any) -> list[str]:
    """Placement constraints of Swarm."""
    conditions = [str(one) for one in value] if isinstance(value, list) else [value]
    if len(conditions) > MAX_CONSTRAINTS or not all(
        isinstance(one, str) and len(one) <= MAX_CONSTRAINT and re.fullmatch(CONSTRAINT, one) for one in conditions
    ):
        raise ValueError(
            f"a list of at most {MAX_CONSTRAINTS} conditions such as node.labels.gpu==a100 or node.hostname!=box, "
            f"each of at most {MAX_CONSTRAINT} characters"
        )
    return conditions


LONG = duration("10 years", 3650 * _DAY)  # longer than any job, and exact as a float
GRACE = duration("1 day", _DAY)  # must fit 32 bits as seconds for Docker and as milliseconds for poll()


@kind(either(LONG.schema, one_of(["none"]), {"type": "null"}))
def optional_duration(value: Any) -> float | None:
    """A duration, or None for no limit."""
    return None if value in (None, "none") else LONG.parse(value)


def optional(other: Kind) -> Kind:
    """The other kind, or None."""
    return Kind(lambda value: None if value is None else other.parse(value), either(other.schema, {"type": "null"}))


STORAGE_URL = r"(?:s3|gs|az|file)://[!-~]+"
STORAGE = text(rf"|{STORAGE_URL}", "a URL such as s3://bucket/folder, gs://…, az://… or file:///folder")
SOURCE = text(
    r"(?!git\+)[^\x00-\x1f\x7f-\x9f]*|git\+(https|ssh|file)://[!-~]+", "a folder, or git+https://…@REVISION#FOLDER"
)
PATH = text(r"[^\x00-\x1f\x7f-\x9f]*", "a path")
NAME = text(r"[^\x00-\x1f\x7f-\x9f]{0,200}", "text of at most 200 characters, on one line")
USER = text(r"auto|root|[0-9]{1,9}(:[0-9]{1,9})?", "auto, root, UID, or UID:GID")
VOLUME = text(rf"|/{VISIBLE}+|[\w.-]+", "the name of a volume, or a path")


_SIZE = text(r"0{0,9}[1-9][0-9]{0,18}[bkmgBKMG]?", "a size such as 512m or 4g")


@kind({**_SIZE.schema, "minimum": 1})
def size(value: Any) -> str:
    """A number of bytes in Docker's notation."""
    given = str(_SIZE.parse(value))
    if parse_size(given) > MAX_BYTES:
        raise ValueError("a size such as 512m or 4g, below 8 EiB")
    return given


@kind(matching(r"[0-9]{1,6}(\.[0-9]{1,30})?", minimum=0.01, maximum=10_000))
def cpus(value: Any) -> float:
    """A number of cores."""
    meaning = "a number from 0.01 to 10000"
    number = float(text(r"[0-9]{1,6}(\.[0-9]{1,30})?", meaning).parse(value))
    if not 0.01 <= number <= 10_000:
        raise ValueError(meaning)
    return number


@kind(either({**size.schema, "minimum": MIN_MEMORY}, one_of([UNLIMITED])))
def limit(value: Any) -> str:
    """A number of bytes in Docker's notation, or `unlimited`."""
    try:
        if value == UNLIMITED:
            return UNLIMITED
        if parse_size(given := str(size.parse(value))) < MIN_MEMORY:
            raise ValueError("a size such as 512m or 4g, at least 64m")
        return given
    except ValueError as error:
        raise ValueError(f"{error}, or {UNLIMITED}") from None
