"""JobSpec: what the user asks for, checked; from a job file, `--set` and flags, the later winning."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrate import command, strict_yaml
from orchestrate.errors import UsageError
from orchestrate.limits import UNLIMITED
from orchestrate.node.ranks import CONTRACT
from orchestrate.patterns import flaw
from orchestrate.restarts import ACTIONS, CAUSES, CONDITIONS
from orchestrate.strict_yaml import shown

APP = ("-m", "app.train", "--resume", "auto")
IMAGE = "orchestrate-node:0.1"
TEXTS = ("command", "env", "name", "user")  # keys whose values are text, whatever they look like
MOST_TRAINERS = 1000  # a Linux bridge takes 1023 ports
MOST_WORKERS = 1024  # of a node
MOST_BYTES = (1 << 63) - 1  # of memory; what the engine can count
MOST_RULES, LONGEST_PATTERN = 100, 1000
MOST_CONSTRAINTS, LONGEST_CONSTRAINT = 100, 500

_WHOLE = r"-?(0|[1-9][0-9]{0,17})"  # Python takes minutes for a million digits
_VISIBLE = r"[^\s\x00-\x1f\x7f-\x9f]"  # neither white space nor a control character
_DAY = 86400
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(_WHOLE, str(value)) or not low <= int(value) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(value)

    return parse


def _trainers(nodes: Any) -> int:
    """The trainers of so many nodes; raises UsageError."""
    try:
        return _integer(1, MOST_TRAINERS + 1)(nodes) - 1
    except ValueError as error:
        raise UsageError(f"nodes must be {error}, not {shown(nodes)}", "the master and all trainers") from None


def _choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(value)

    return parse


def _text(pattern: str, meaning: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not re.fullmatch(pattern, str(value)):
            raise ValueError(meaning)
        return str(value)

    return parse


def _command(value: Any) -> tuple[str, ...]:
    meaning = "a script or -m MODULE, with arguments; one string, or a list of strings"
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:  # a quotation without an end
        raise ValueError(f"{meaning} ({error})") from None
    if not isinstance(words, (list, tuple)) or not words or not all(isinstance(w, (str, int, float)) for w in words):
        raise ValueError(meaning)
    return tuple(str(word) for word in words)


def _gpus(value: Any) -> str | int:
    if value in ("auto", "all", "none"):
        return str(value)
    try:
        return _integer(1, 1024)(value)
    except ValueError:
        raise ValueError("auto, all, none or a whole number from 1") from None


def _duration(longest: str, most: float) -> Callable[[Any], float]:
    """A duration of at most `most` seconds; `longest` says the same in words."""

    def parse(value: Any) -> float:
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,30})?)\s*([smhd]?)", str(value).strip())
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": _DAY}[match[2]] if match else 0.0
        if isinstance(value, bool) or not 0.001 <= seconds <= most:
            raise ValueError(f"a duration such as 90s, 30m, 2h or 1d, from 1 ms to {longest}")
        return seconds

    return parse


def _env(value: Any) -> dict[str, str]:
    """The names and values; an error names no value, which may be a secret."""
    if not isinstance(value, Mapping):
        raise ValueError("a mapping of names to values")
    for name, content in value.items():
        if not re.fullmatch(VARIABLE, str(name)):
            raise ValueError(f"a mapping of names to values; {shown(name)} is not a name")
        if not isinstance(content, (str, int, float)):
            raise ValueError(f"a mapping of names to values; {name} has no text or number as its value")
        if name in CONTRACT:
            raise ValueError(f"a mapping without {name}, which the orchestrator sets in every worker")
    return {str(name): str(content) for name, content in value.items()}


def _rules(value: Any) -> list[dict[str, Any]]:
    some = f"a list of at most {MOST_RULES} mappings"
    meaning = f"{some} with an action ({', '.join(ACTIONS)}) and one or more of {', '.join(CONDITIONS)}"
    if not isinstance(value, list) or len(value) > MOST_RULES:
        raise ValueError(meaning)
    rules = []
    for rule in value:
        if not isinstance(rule, Mapping) or rule.get("action") not in ACTIONS or not CONDITIONS & rule.keys():
            raise ValueError(meaning)
        if unknown := rule.keys() - CONDITIONS - {"action"}:
            raise ValueError(f"{meaning}; {unknown.pop()!r} is none of them")
        codes = rule.get("exit_codes", [])
        if not isinstance(codes, list) or not all(type(code) is int and 0 < code < 256 for code in codes):
            raise ValueError(f"{meaning}; exit_codes is a list of numbers from 1 to 255")
        if not all(isinstance(rule.get(name, ""), str) for name in ("log", "cause")):
            raise ValueError(f"{meaning}; log and cause are text")
        if rule.get("cause", "error") not in CAUSES:
            raise ValueError(f"{meaning}; the causes are {', '.join(CAUSES)}")
        if len(rule.get("log", "")) > LONGEST_PATTERN:
            raise ValueError(f"{meaning}; log is a regular expression of at most {LONGEST_PATTERN} characters")
        rules.append(dict(rule))
    if why := flaw(tuple(rule["log"] for rule in rules if "log" in rule)):
        raise ValueError(f"{meaning}; log is a regular expression ({why})")
    return rules


def _truth(value: Any) -> bool:
    if value in (True, False, "true", "false"):
        return value in (True, "true")
    raise ValueError("true or false")


def _modules(value: Any) -> list[str]:
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or not all(re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", str(name)) for name in names):
        raise ValueError("a list of modules")
    return [str(name) for name in names]


def _constraints(value: Any) -> list[str]:
    conditions = [str(one) for one in value] if isinstance(value, list) else [value]
    form = r"[^\s\x00-\x1f\x7f-\x9f=!]+ ?[!=]= ?" + f"{_VISIBLE}+"  # the first operator ends the name: linear time
    if len(conditions) > MOST_CONSTRAINTS or not all(
        isinstance(one, str) and len(one) <= LONGEST_CONSTRAINT and re.fullmatch(form, one) for one in conditions
    ):
        raise ValueError(
            f"a list of at most {MOST_CONSTRAINTS} conditions such as node.labels.gpu==a100 or node.hostname!=box, "
            f"each of at most {LONGEST_CONSTRAINT} characters"
        )
    return conditions


def _optional_keys(value: Any) -> list[str]:
    names = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(name in FIELDS for name in names):
        raise ValueError("a list of keys of the job file")
    return [str(name) for name in names]


def _variables(value: Any) -> list[str]:
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or not all(re.fullmatch(VARIABLE, str(name)) for name in names):
        raise ValueError("a list of names of env")
    return [str(name) for name in names]


_long = _duration("10 years", 3650 * _DAY)  # longer than any job, and exact as a float
_grace = _duration("1 day", _DAY)  # as seconds of Docker and as milliseconds of poll() it has to fit 32 bits


def _patience(value: Any) -> float | None:
    return None if value in (None, "none") else _long(value)


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else parse(value)


def _field(default: Any, parse: Callable[[Any], Any], doc: str) -> Any:
    factory = (lambda: type(default)(default)) if isinstance(default, (dict, list)) else (lambda: default)
    return dataclasses.field(default_factory=factory, metadata={"parse": parse, "doc": doc})


_name = _text(r"[^\x00-\x1f\x7f-\x9f]{0,200}", "text of at most 200 characters, on one line")
_user = _text(r"auto|root|[0-9]{1,9}(:[0-9]{1,9})?", "auto, root, UID, or UID:GID")
_volume = _text(rf"|/{_VISIBLE}+|[\w.-]+", "a volume's name, or a path")


def _size(value: Any) -> str:
    text = _text(r"0{0,9}[1-9][0-9]{0,18}[bkmgBKMG]?", "a size such as 512m or 4g")(value)
    number, unit = re.fullmatch(r"([0-9]+)(.?)", text).groups()  # type: ignore[union-attr]
    if int(number) << {"k": 10, "m": 20, "g": 30}.get(unit.lower(), 0) > MOST_BYTES:
        raise ValueError("a size such as 512m or 4g, below 8 EiB")
    return text


def _cpus(value: Any) -> float:
    meaning = "a number from 0.01 to 10000"
    number = float(_text(r"[0-9]{1,6}(\.[0-9]{1,30})?", meaning)(value))
    if not 0.01 <= number <= 10_000:
        raise ValueError(meaning)
    return number


def _limit(value: Any) -> str:
    try:
        return UNLIMITED if value == UNLIMITED else _size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {UNLIMITED}") from None


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job. The fields are the keys of a job file; durations are in seconds once read."""

    name: str = _field("", _name, "what the job is called; its id adds four characters")
    command: tuple[str, ...] = _field(APP, _command, "SCRIPT ARGS, or -m MODULE ARGS")
    expand: bool = _field(True, _truth, "replace $JOB_DIR, $RANK and the like in command, in each worker")
    trainers: int = _field(3, _integer(0, MOST_TRAINERS), "nodes besides the master")
    nproc_per_node: int | None = _field(None, _optional(_integer(1, MOST_WORKERS)), "workers on each node")
    gpus: str | int = _field("auto", _gpus, "auto (what the engine has), all, none, or how many")
    engine: str = _field("auto", _choice("auto", "docker", "process", "swarm"), "where the nodes live")
    image: str = _field(IMAGE, _text(rf"{_VISIBLE}+", "the name of an image"), "what the nodes are made of")
    user: str = _field("auto", _user, "who nodes run as; auto: you, but not root")
    env: dict[str, str] = _field({}, _env, "more environment for every worker")
    secrets: list[str] = _field([], _variables, "names of env whose values are shown nowhere, whatever they look like")
    memory: str | None = _field(
        None, _optional(_limit), "limit of each node, such as 4g, or unlimited (default its share of the machine's)"
    )
    cpus: float | None = _field(None, _optional(_cpus), "of each node")
    shm_size: str = _field("1g", _size, "/dev/shm of each node")
    pin: bool = _field(False, _truth, "keep each worker to cores of its own")
    network: str = _field("bridge", _choice("bridge", "host"), "bridge: one of the job's own; host: this machine's")
    host_access: bool = _field(
        False,
        _truth,
        "let nodes reach this machine's own ports and the cloud's metadata service, and this machine theirs",
    )
    encrypt: bool = _field(False, _truth, "Swarm: encrypt what goes over the job's network")
    constraints: list[str] = _field([], _constraints, "Swarm: which hosts take nodes, such as node.labels.gpu==a100")
    volume: str = _field("", _volume, "Swarm: one folder for all hosts")
    max_run: float | None = _field(None, _optional(_long), "the job is stopped after this time, such as 2h")
    grace: float = _field(30.0, _grace, "between the request to stop and the kill")
    max_restarts: int = _field(3, _integer(0, 1_000_000), "restarts within restart_window before the job fails")
    restart_window: float = _field(3600.0, _long, "the time in which restarts are counted")
    rules: list[dict[str, Any]] = _field([], _rules, "what a failure means; see docs/restarts.md")
    min_trainers: int | None = _field(
        None, _optional(_integer(0, MOST_TRAINERS)), "go on with so few where a node cannot come back"
    )
    spares: int = _field(0, _integer(0, MOST_TRAINERS), "more nodes that wait for the place of one that is lost")
    hang_after: float | None = _field(600.0, _patience, "of silence and idleness before a job counts as hung; or none")

    optional: list[str] = _field([], _optional_keys, "keys that an engine without them may ignore")
    warm: bool = _field(True, _truth, "fork workers from a process that has imported torch already")
    preload: list[str] = _field([], _modules, "more modules that such a process imports")

    def to_yaml(self) -> str:
        """The job as a job file that resolves to this very spec."""
        values = dataclasses.asdict(self) | {"command": list(self.command)}
        return yaml.safe_dump(values, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(JobSpec)}


def resolve(*layers: Mapping[str, Any]) -> JobSpec:
    """Make the spec out of layers of field values, a later one winning; raises UsageError, naming key and reason."""
    values = _parsed(layers)
    words, asked = command.read(values.get("command", APP))
    spec = JobSpec(**_parsed([asked]) | values | {"command": words})
    if (spec.min_trainers or 0) > spec.trainers:
        raise UsageError(f"min_trainers is {spec.min_trainers}, and trainers {spec.trainers}", "no more than trainers")
    if unknown := [name for name in spec.secrets if name not in spec.env]:
        raise UsageError(f"secrets names {unknown[0]}, and env does not", f"set env.{unknown[0]}, or remove the name")
    return spec


def unencodable(spec: JobSpec) -> str:
    """What keeps processes of this machine from getting the job's command and environment; empty where nothing does."""
    for key, text in [
        *(("command", word) for word in spec.command),
        *((f"env.{name}", value) for name, value in spec.env.items()),
    ]:
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            return f"{key} has characters that this locale's encoding, {error.encoding}, does not have"
    return ""


def _parsed(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The value of each key of the layers, by itself; how keys fit together is not looked at."""
    values: dict[str, Any] = {}
    for layer in layers:
        if {"nodes", "trainers"} <= layer.keys():
            raise UsageError("nodes and trainers are given", "one of them is enough: nodes counts the master, too")
        for key, value in layer.items():
            if key == "nodes":
                key, value = "trainers", _trainers(value)
            variable = key[4:] if key.startswith("env.") else None
            key, value = ("env", {variable: value}) if variable is not None else (key, value)
            if key not in FIELDS:
                near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(FIELDS)}"
                raise UsageError(f"unknown key {shown(key)}", hint)
            try:
                parsed = FIELDS[key].metadata["parse"](_decoded(value))
            except ValueError as error:
                but = "" if key == "env" else f", not {shown(value)}"
                raise UsageError(f"{key} must be {error}{but}", FIELDS[key].metadata["doc"]) from None
            if variable is None:
                values[key] = parsed
            else:
                values.setdefault("env", {}).update(parsed)
    return values


def _decoded(value: Any) -> Any:
    """The same value, its text as UTF-8 also where Python has read the command line in another encoding.

    Raises ValueError for text that no process can be given.
    """
    if isinstance(value, str):
        try:
            text = value.encode("utf-8", "surrogateescape").decode()
        except UnicodeError:
            text = "\0"
        if "\0" in text:
            raise ValueError("text in UTF-8 without NUL characters")
        return text
    if isinstance(value, Mapping):
        for name, content in value.items():
            try:
                _decoded(content)
            except ValueError as error:
                raise ValueError(f"{error}, unlike {shown(name)}") from None
        return {_decoded(name): _decoded(content) for name, content in value.items()}
    return [_decoded(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_set(assignments: list[str]) -> dict[str, Any]:
    """The layer that `--set key=value …` stands for; values are YAML."""
    layer: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:  # what is behind the name may be a secret
            name = re.match(r"[\w.]*", assignment)[0]  # type: ignore[index]
            raise UsageError(f"--set {name}: no =", "write --set key=value")
        layer[key] = value
        if not key.startswith("env.") and key not in ("command", "name", "user"):
            with contextlib.suppress(yaml.YAMLError):
                layer[key] = strict_yaml.parse(value, all_text=key == "env")[0]
    return layer


def read_file(path: Path) -> dict[str, Any]:
    """The layer in a job file; raises UsageError for what is none, with the place of the mistake."""
    return layer(strict_yaml.read(path), path)


def layer(text: str, path: Path) -> dict[str, Any]:
    """The layer in the text of a job file; raises UsageError with the place of the mistake."""
    try:
        value, places = strict_yaml.parse(text, TEXTS)
    except yaml.MarkedYAMLError as error:
        problem = f"{_place(path, error.problem_mark)}: {error.problem}"
        raise UsageError(problem, "a job file is a YAML mapping") from None
    if places is None:
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise UsageError(f"{path} holds {kind}, not a mapping of keys to values", "write lines such as `trainers: 3`")
    for key, mark in places.items():
        try:
            _parsed([{key: value[key]}])
        except UsageError as error:
            raise UsageError(f"{_place(path, mark)}: {error}", error.hint) from None
    return value


def _place(path: Path, mark: yaml.Mark | None) -> str:
    return f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
