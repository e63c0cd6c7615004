"""JobSpec: what the user asks for, checked; from a job file, `--set` and flags, the later winning."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrate.errors import UsageError
from orchestrate.job import command, strict_yaml, values
from orchestrate.job.strict_yaml import shown

APP = ("-m", "app.train", "--resume", "auto")
IMAGE = "orchestrate-node:0.1"
TEXTS = ("command", "env", "name", "user")  # keys whose values are text, whatever they look like


NODES = values.integer(1, values.MAX_TRAINERS + 1)


def _trainers(nodes: Any) -> int:
    """The trainers of so many nodes; raises UsageError."""
    try:
        return int(NODES.parse(nodes)) - 1
    except ValueError as error:
        raise UsageError(f"nodes must be {error}, not {shown(nodes)}", "it includes the master") from None


@values.kind(values.list_of({"type": "string"}))
def _optional_keys(value: Any) -> list[str]:
    names = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name in FIELDS for name in names):
        raise ValueError("a list of keys of the job file")
    return names


def _field(default: Any, kind: values.Kind, doc: str, absent: str = "") -> Any:
    """A key of the job file.

    `doc` is its description in Markdown, for the README, `--help`, errors and editors; `absent` is the default in
    words, where that is not a value of the key.
    """
    factory = (lambda: type(default)(default)) if isinstance(default, (dict, list)) else (lambda: default)
    return dataclasses.field(default_factory=factory, metadata={"kind": kind, "doc": doc, "absent": absent})


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job. The fields are the keys of a job file; durations are in seconds once read."""

    name: str = _field("", values.NAME, "name of the job; its id adds four characters", "the script's")
    command: tuple[str, ...] = _field(
        APP, values.command, "`SCRIPT.py ARGS`, `-m MODULE ARGS`, or any program with its arguments", "the app"
    )
    expand: bool = _field(
        True,
        values.truth,
        "replace `$JOB_DIR`, `$RANK`, `$WORLD_SIZE` and [the other variables](ARCHITECTURE.md#the-contract) in "
        "`command` (`$NAME` or `${NAME}`) with each worker's values",
    )
    trainers: int = _field(
        3,
        values.integer(0, values.MAX_TRAINERS),
        "nodes besides the master; `nodes: 4` says the same as `trainers: 3`",
    )
    nproc_per_node: int | None = _field(
        None,
        values.optional(values.integer(1, values.MAX_WORKERS)),
        "workers on each node",
        "GPUs per node, or 1",
    )
    gpus: str | int = _field("auto", values.gpus, "`auto` (what the engine has), `all`, `none`, or a number")
    share_gpus: bool = _field(
        False,
        values.truth,
        "let nodes [share GPUs](docs/gpu.md#several-workers-on-one-gpu) where there are fewer than workers",
    )
    engine: str = _field(
        "auto",
        values.choice("auto", "docker", "process", "swarm"),
        "`docker`, `process`, `swarm`; `auto` takes Docker where it answers, else processes",
    )
    image: str = _field(
        IMAGE,
        values.text(rf"{values.VISIBLE}+", "the name of an image"),
        "image of the nodes; it needs Python 3.9 or later",
        "the project's",
    )
    user: str = _field(
        "auto",
        values.USER,
        "user that nodes in containers run as: `auto` (you, or [an unprivileged user](#file-ownership) if you are "
        "root), `root` or `UID:GID`",
    )
    env: dict[str, str] = _field({}, values.env, "environment variables for every worker; see [Secrets](#secrets)")
    secrets: list[str] = _field(
        [], values.variables, "variables of `env` whose values are [secrets](#secrets), whatever their names"
    )
    memory: str | None = _field(
        None,
        values.optional(values.limit),
        "limit of each node, such as `4g`, or `unlimited`; see [docs/tuning.md](docs/tuning.md#memory)",
        "an equal share",
    )
    cpus: float | None = _field(None, values.optional(values.cpus), "number of cores that each node may use")
    shm_size: str = _field("1g", values.size, "size of `/dev/shm` of each node")
    pin: bool = _field(False, values.truth, "bind each worker to its own cores; for a machine that runs nothing else")
    network: str = _field(
        "bridge",
        values.choice("bridge", "host"),
        "`bridge`: a network of the job; `host`: that of this machine, which is [less private](docs/tuning.md#network)",
    )
    host_access: bool = _field(
        False,
        values.truth,
        "let nodes reach this machine's own ports and the cloud's metadata service, and this machine theirs; see "
        "[what nodes can reach](docs/tuning.md#what-nodes-can-reach)",
    )
    encrypt: bool = _field(False, values.truth, "Swarm: encrypt traffic on the job's network")
    constraints: list[str] = _field(
        [],
        values.constraints,
        "Swarm: [which hosts](docs/swarm.md#where-nodes-go) take nodes, such as `node.labels.gpu==a100`",
    )
    volume: str = _field(
        "",
        values.VOLUME,
        "Swarm: a folder or Docker volume that all hosts share; on Kubernetes the claim for `$JOB_DIR`",
    )
    max_run: float | None = _field(None, values.optional(values.LONG), "time limit of the job, such as `2h`")
    grace: float = _field(30.0, values.GRACE, "time between SIGTERM and SIGKILL, at most `1d`")
    max_restarts: int = _field(
        3, values.integer(0, 1_000_000), "number of restarts in `restart_window` before the job fails"
    )
    restart_window: float = _field(3600.0, values.LONG, "time in which restarts count")
    rules: list[dict[str, Any]] = _field(
        [], values.rules, "what a failure means, by exit code, cause or log; see [docs/restarts.md](docs/restarts.md)"
    )
    min_trainers: int | None = _field(
        None,
        values.optional(values.integer(0, values.MAX_TRAINERS)),
        "minimum number of trainers to continue with after a node is lost",
    )
    spares: int = _field(0, values.integer(0, values.MAX_TRAINERS), "standby nodes that replace lost ones")
    hang_after: float | None = _field(
        600.0, values.patience, "treat the job as hung after this time without output or CPU use, or `none`"
    )
    optional: list[str] = _field(
        [],
        _optional_keys,
        "keys to ignore if the engine does not support them, such as `[memory]`; without it, such a job is refused",
    )
    warm: bool = _field(True, values.truth, "fork workers from a process that has imported torch")
    preload: list[str] = _field([], values.modules, "more modules for that process to import")

    def to_yaml(self) -> str:
        """The job as a job file that resolves to this very spec."""
        fields = dataclasses.asdict(self) | {"command": list(self.command)}
        return yaml.safe_dump(fields, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(JobSpec)}


def description(key: str) -> str:
    """What a key is, as plain text with its default."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", FIELDS[key].metadata["doc"])
    return f"{text} (default: {words})" if (words := default_of(key)) else text


def default_of(key: str) -> str:
    """The default of a key as one would write it, or in words; empty where there is none."""
    field, value = FIELDS[key], getattr(JobSpec(), key)
    if words := field.metadata["absent"]:
        return str(words)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):  # all are durations
        unit, seconds = next((unit, size) for unit, size in (("h", 3600), ("m", 60), ("s", 1)) if value % size == 0)
        return f"{value / seconds:g}{unit}"
    return str(value) if value not in (None, "", [], {}) else ""


def resolve(*layers: Mapping[str, Any]) -> JobSpec:
    """Make the spec out of layers of field values, a later one winning; raises UsageError, naming key and reason.

    The flags of `torchrun` in a command belong to its layer, whose own values must not differ from them.
    """
    given = _parsed(layers)
    words, flags = command.read(given.get("command", APP))
    place = max((place for place, layer in enumerate(layers) if "command" in layer), default=-1)
    own, later, asked = _parsed(layers[max(0, place) : place + 1]), _parsed(layers[place + 1 :]), _parsed([flags])
    if differ := [key for key in asked if own.get(key, asked[key]) != asked[key]]:
        raise UsageError(
            f"{differ[0]} is {own[differ[0]]}, and {asked[differ[0]]} by torchrun's flags", "set one of them"
        )
    found = given | {key: value for key, value in asked.items() if key not in later}
    spec = JobSpec(**found | {"command": words})
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
    found: dict[str, Any] = {}
    for layer in layers:
        if {"nodes", "trainers"} <= layer.keys():
            raise UsageError("nodes and trainers are both set", "set one of them; nodes includes the master")
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
                parsed = FIELDS[key].metadata["kind"].parse(_decoded(value))
            except ValueError as error:
                but = "" if key == "env" else f", not {shown(value)}"
                raise UsageError(f"{key} must be {error}{but}", description(key)) from None
            if variable is None:
                found[key] = parsed
            else:
                found.setdefault("env", {}).update(parsed)
    return found


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
