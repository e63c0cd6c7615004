"""JobSpec: what the user asks for, checked; from a job file, `--set` and flags, the later winning."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrate.errors import UsageError
from orchestrate.limits import UNLIMITED
from orchestrate.node.ranks import CONTRACT
from orchestrate.restarts import ACTIONS, CAUSES, CONDITIONS

APP = ("-m", "app.train", "--resume", "auto")
IMAGE = "orchestrate-node:0.1"
TEXT = ("command", "name", "user")  # keys whose value is text, whatever it looks like
MOST_TRAINERS = 1000  # a Linux bridge takes 1023 ports


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)) or not low <= int(value) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(value)

    return parse


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


def _duration(value: Any) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", str(value).strip())
    if isinstance(value, bool) or not match or not float(match[1]):
        raise ValueError("a duration such as 90s, 30m, 2h or 1d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _env(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("a mapping of names to values")
    for name, content in value.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name)) or not isinstance(content, (str, int, float)):
            raise ValueError(f"a mapping of names to values; {name!r} is not")
        if name in CONTRACT:
            raise ValueError(f"a mapping without {name}, which the orchestrator sets in every worker")
    return {str(name): str(content) for name, content in value.items()}


def _rules(value: Any) -> list[dict[str, Any]]:
    meaning = f"a list of mappings with an action ({', '.join(ACTIONS)}) and one or more of {', '.join(CONDITIONS)}"
    if not isinstance(value, list):
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
        try:
            re.compile(rule.get("log", ""))
        except re.error as error:
            raise ValueError(f"{meaning}; log is a regular expression ({error})") from None
        rules.append(dict(rule))
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
    conditions = [value] if isinstance(value, str) else value
    if not isinstance(conditions, list) or not all(re.fullmatch(r"\S+ ?[!=]= ?\S+", str(one)) for one in conditions):
        raise ValueError("a list of conditions such as node.labels.gpu==a100 or node.hostname!=box")
    return [str(condition) for condition in conditions]


def _patience(value: Any) -> float | None:
    return None if value in (None, "none") else _duration(value)


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else parse(value)


def _field(default: Any, parse: Callable[[Any], Any], doc: str) -> Any:
    factory = (lambda: type(default)(default)) if isinstance(default, (dict, list)) else (lambda: default)
    return dataclasses.field(default_factory=factory, metadata={"parse": parse, "doc": doc})


SIZE = r"0{0,3}[1-9]\d{0,15}[bkmgBKMG]?"
_size = _text(SIZE, "a size such as 512m or 4g")
_limit = _text(f"{SIZE}|{UNLIMITED}", f"a size such as 512m or 4g, or {UNLIMITED}")
_number = _text(r"(?=.*[1-9])\d+(\.\d+)?", "a number above 0")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job. The fields are the keys of a job file; durations are in seconds once read."""

    name: str = _field("", _text(r".*", "text"), "what the job is called; its id adds four characters")
    command: tuple[str, ...] = _field(APP, _command, "SCRIPT ARGS, or -m MODULE ARGS")
    trainers: int = _field(3, _integer(0, MOST_TRAINERS), "nodes besides the master")
    nproc_per_node: int | None = _field(None, _optional(_integer(1, 1024)), "workers on each node")
    gpus: str | int = _field("auto", _gpus, "auto (what the engine has), all, none, or how many")
    engine: str = _field("auto", _choice("auto", "docker", "process", "swarm"), "where the nodes live")
    image: str = _field(IMAGE, _text(r"\S+", "the name of an image"), "what the nodes are made of")
    user: str = _field(
        "auto", _text(r"auto|root|\d+(:\d+)?", "auto, root, or UID:GID"), "who nodes run as; auto: you, but not root"
    )
    env: dict[str, str] = _field({}, _env, "more environment for every worker")
    memory: str | None = _field(
        None, _optional(_limit), "limit of each node, such as 4g, or unlimited (default its share of the machine's)"
    )
    cpus: float | None = _field(None, _optional(lambda value: float(_number(value))), "of each node")
    shm_size: str = _field("1g", _size, "/dev/shm of each node")
    pin: bool = _field(False, _truth, "keep each worker to cores of its own")
    network: str = _field("bridge", _choice("bridge", "host"), "bridge: one of the job's own; host: this machine's")
    encrypt: bool = _field(False, _truth, "Swarm: encrypt what goes over the job's network")
    constraints: list[str] = _field([], _constraints, "Swarm: which hosts take nodes, such as node.labels.gpu==a100")
    volume: str = _field("", _text(r"|/\S+|[\w.-]+", "a volume's name, or a path"), "Swarm: one folder for all hosts")
    max_run: float | None = _field(None, _optional(_duration), "the job is stopped after this time, such as 2h")
    grace: float = _field(30.0, _duration, "between the request to stop and the kill")
    max_restarts: int = _field(3, _integer(0, 1_000_000), "restarts within restart_window before the job fails")
    restart_window: float = _field(3600.0, _duration, "the time in which restarts are counted")
    rules: list[dict[str, Any]] = _field([], _rules, "what a failure means; see docs/restarts.md")
    min_trainers: int | None = _field(
        None, _optional(_integer(0, MOST_TRAINERS)), "go on with so few where a node cannot come back"
    )
    spares: int = _field(0, _integer(0, MOST_TRAINERS), "more nodes that wait for the place of one that is lost")
    hang_after: float | None = _field(600.0, _patience, "of silence and idleness before a job counts as hung; or none")

    warm: bool = _field(True, _truth, "fork workers from a process that has imported torch already")
    preload: list[str] = _field([], _modules, "more modules that such a process imports")

    def to_yaml(self) -> str:
        """The job as a job file that resolves to this very spec."""
        values = dataclasses.asdict(self) | {"command": list(self.command)}
        return yaml.safe_dump(values, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(JobSpec)}


def resolve(*layers: Mapping[str, Any]) -> JobSpec:
    """Make the spec out of layers of field values, a later one winning; raises UsageError, naming key and reason."""
    spec = JobSpec(**_parsed(layers))
    if (spec.min_trainers or 0) > spec.trainers:
        raise UsageError(f"min_trainers is {spec.min_trainers}, and trainers {spec.trainers}", "no more than trainers")
    return spec


def _parsed(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The value of each key of the layers, by itself; how keys fit together is not looked at."""
    values: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key.startswith("env."):
                key, value = "env", {**values.get("env", {}), key[4:]: value}
            if key not in FIELDS:
                near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(FIELDS)}"
                raise UsageError(f"unknown key {key!r}", hint)
            try:
                values[key] = FIELDS[key].metadata["parse"](value)
            except ValueError as error:
                raise UsageError(f"{key} must be {error}, not {value!r}", FIELDS[key].metadata["doc"]) from None
    return values


def read_set(assignments: list[str]) -> dict[str, Any]:
    """The layer that `--set key=value …` stands for; values are YAML."""
    layer = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: no =", "write --set key=value")
        layer[key] = value
        if not key.startswith("env.") and key not in TEXT:
            with contextlib.suppress(yaml.YAMLError):
                layer[key] = yaml.safe_load(value)
    return layer


def _as_text(node: Any) -> None:
    """Read the words below a YAML node as they stand: `1.10` is no number there, and `yes` no truth."""
    if isinstance(node, yaml.ScalarNode):
        node.tag = "tag:yaml.org,2002:str"
    for child in node.value if isinstance(node, (yaml.SequenceNode, yaml.MappingNode)) else ():
        _as_text(child[1] if isinstance(child, tuple) else child)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key is a word that stands once, and nothing an alias (so that a small file stays small)."""

    def compose_node(self, parent: Any, index: int) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(None, None, "aliases are not read", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(None, None, "a key is a word", key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
            if key.value in ("env", *TEXT) or key.value.startswith("env."):
                _as_text(value)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> dict[str, Any]:
    """The layer in a job file; raises UsageError with the place of the mistake."""
    try:
        loader = _StrictLoader(path.read_text())
        node = loader.get_single_node()
        value = loader.construct_document(node) if node else {}
    except OSError as error:
        raise UsageError(f"cannot read job file {path}: {error.strerror}", "check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text", "a job file is YAML in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{place}: {getattr(error, 'problem', error)}", "a job file is a YAML mapping") from None
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise UsageError(f"{path} holds {kind}, not a mapping of keys to values", "write lines such as `trainers: 3`")
    for key, _ in node.value if node else []:
        try:
            _parsed([{key.value: value.get(key.value)}])
        except UsageError as error:
            place = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
            raise UsageError(f"{place}: {error}", error.hint) from None
    return value
