"""JobSpec: the validated specification of a job, from a job file, `--set` and flags; later ones take precedence."""

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
TEXTS = ("command", "env", "name", "user")  # keys whose values are always text

NODES = values.integer(1, values.MAX_TRAINERS + 1)


def _trainers(nodes: Any) -> int:
    """Convert a number of nodes to a number of trainers; raises UsageError."""
    try:
        return int(NODES.parse(nodes)) - 1
    except ValueError as error:
        raise UsageError(f"nodes must be {error}, not {shown(nodes)}", "nodes includes the master") from None


@values.kind(values.list_of({"type": "string"}))
def _optional_keys(value: Any) -> list[str]:
    names = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name in FIELDS for name in names):
        raise ValueError("a list of job-file keys")
    return names


def _field(default: Any, kind: values.Kind, doc: str, absent: str = "") -> Any:
    """Define a key of the job file.

    `doc` is its description in Markdown, for the README, `--help`, errors and editors; `absent` describes the default
    if that is not a value of the key.
    """
    factory = (lambda: type(default)(default)) if isinstance(default, (dict, list)) else (lambda: default)
    return dataclasses.field(default_factory=factory, metadata={"kind": kind, "doc": doc, "absent": absent})


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Specification of a job. Its fields are the keys of a job file; durations are in seconds."""

    name: str = _field(
        "", values.NAME, "name of the job; its id is the name plus four random characters", "the script's name"
    )
    command: tuple[str, ...] = _field(
        APP,
        values.command,
        "command of each worker: `SCRIPT.py ARGS`, `-m MODULE ARGS`, or any program with arguments",
        "the app",
    )
    expand: bool = _field(
        True,
        values.boolean,
        "whether to expand `$JOB_DIR`, `$RANK`, `$WORLD_SIZE` and [the other "
        "variables](ARCHITECTURE.md#the-contract) (`$NAME` or `${NAME}`) in `command`, separately for each worker",
    )
    trainers: int = _field(
        3,
        values.integer(0, values.MAX_TRAINERS),
        "number of nodes besides the master; `nodes` includes it",
    )
    nproc_per_node: int | None = _field(
        None,
        values.optional(values.integer(1, values.MAX_WORKERS)),
        "number of workers per node",
        "one per GPU, or 1 without GPUs",
    )
    gpus: str | int = _field("auto", values.gpus, "GPUs to use: `auto` (all that are free), `all`, `none`, or a number")
    share_gpus: bool = _field(
        False,
        values.boolean,
        "whether nodes may [share GPUs](docs/gpu.md#several-workers-on-one-gpu) if there are fewer GPUs than workers",
    )
    engine: str = _field(
        "auto",
        values.choice("auto", "docker", "process", "swarm"),
        "where nodes run: `docker`, `process`, `swarm`, or `auto` (Docker if it is running, otherwise local processes)",
    )
    image: str = _field(
        IMAGE,
        values.text(rf"{values.VISIBLE}+", "the name of an image"),
        "container image of the nodes, with Python 3.9 or later",
        "the project's image",
    )
    user: str = _field(
        "auto",
        values.USER,
        "user of nodes in containers: `auto` (you, or [an unprivileged user](#file-ownership) if you are root), "
        "`root`, or `UID:GID`",
    )
    env: dict[str, str] = _field({}, values.env, "environment variables of every worker; see [Secrets](#secrets)")
    secrets: list[str] = _field(
        [], values.variables, "variables of `env` to treat as [secrets](#secrets) regardless of their names"
    )
    memory: str | None = _field(
        None,
        values.optional(values.limit),
        "memory limit of each node, such as `4g`, or `unlimited`; see [docs/tuning.md](docs/tuning.md#memory)",
        "an equal share of the machine's memory",
    )
    cpus: float | None = _field(
        None, values.optional(values.cpus), "CPU limit of each node, in cores, such as `1.5`", "no limit"
    )
    shm_size: str = _field("1g", values.size, "size of `/dev/shm` in each node, such as `512m`")
    pin: bool = _field(
        False, values.boolean, "whether to pin each worker to its own cores, for machines that run nothing else"
    )
    network: str = _field(
        "bridge",
        values.choice("bridge", "host"),
        "network of the nodes: `bridge` (private to the job) or `host` ([less isolated](docs/tuning.md#network))",
    )
    host_access: bool = _field(
        False,
        values.boolean,
        "whether nodes can reach this machine's ports and the cloud's metadata service, and this machine can reach "
        "theirs; see [what nodes can reach](docs/tuning.md#what-nodes-can-reach)",
    )
    encrypt: bool = _field(False, values.boolean, "Swarm: whether to encrypt traffic on the job's network")
    constraints: list[str] = _field(
        [],
        values.constraints,
        "Swarm: [placement constraints](docs/swarm.md#where-nodes-go) of nodes, such as `node.labels.gpu==a100`",
    )
    volume: str = _field(
        "",
        values.VOLUME,
        "Swarm: folder or Docker volume shared by all hosts; Kubernetes: PersistentVolumeClaim for `$JOB_DIR`",
    )
    max_run: float | None = _field(
        None, values.optional(values.LONG), "time limit of the job, such as `2h`", "no limit"
    )
    grace: float = _field(30.0, values.GRACE, "grace period between SIGTERM and SIGKILL, at most `1d`")
    max_restarts: int = _field(
        3, values.integer(0, 1_000_000), "maximum number of restarts within `restart_window` before the job fails"
    )
    restart_window: float = _field(3600.0, values.LONG, "time window in which restarts are counted")
    rules: list[dict[str, Any]] = _field(
        [], values.rules, "actions on failures, by exit code, cause or log; see [docs/restarts.md](docs/restarts.md)"
    )
    min_trainers: int | None = _field(
        None,
        values.optional(values.integer(0, values.MAX_TRAINERS)),
        "minimum number of trainers to continue with after a node is lost",
        "all",
    )
    spares: int = _field(0, values.integer(0, values.MAX_TRAINERS), "number of standby nodes that replace lost ones")
    hang_after: float | None = _field(
        600.0, values.optional_duration, "time without output or CPU use after which a job counts as hung, or `none`"
    )
    optional: list[str] = _field(
        [],
        _optional_keys,
        "keys to ignore if the engine does not support them, such as `[memory]`; other unsupported keys are an error",
    )
    require_communication: bool = _field(
        False,
        values.boolean,
        "whether a job fails if its [workers exchange no data](docs/frameworks.md#the-world-check)",
    )
    warm: bool = _field(True, values.boolean, "whether to fork workers from a process that has already imported torch")
    preload: list[str] = _field([], values.modules, "additional modules to import before forking workers")

    def to_yaml(self) -> str:
        """The job as a job file that resolves to this spec."""
        fields = dataclasses.asdict(self) | {"command": list(self.command)}
        return yaml.safe_dump(fields, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(JobSpec)}


def description(key: str) -> str:
    """Description of a key, as plain text with its default."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", FIELDS[key].metadata["doc"])
    return f"{text} (default: {default})" if (default := default_of(key)) else text


def default_of(key: str) -> str:
    """Default of a key, as written in a job file or as a description; empty if there is none."""
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
    """Merge layers of field values into a spec, later ones taking precedence; raises UsageError with key and reason.

    `torchrun` flags in a command belong to its layer, whose own values must not contradict them.
    """
    given = _parsed(layers)
    command_line, flags = command.read(given.get("command", APP))
    index = max((index for index, layer in enumerate(layers) if "command" in layer), default=-1)
    own, later, implied = _parsed(layers[max(0, index) : index + 1]), _parsed(layers[index + 1 :]), _parsed([flags])
    if differ := [key for key in implied if own.get(key, implied[key]) != implied[key]]:
        raise UsageError(
            f"{differ[0]} is {own[differ[0]]}, but torchrun's flags set {implied[differ[0]]}", "set only one of them"
        )
    found = given | {key: value for key, value in implied.items() if key not in later}
    spec = JobSpec(**found | {"command": command_line})
    if (spec.min_trainers or 0) > spec.trainers:
        raise UsageError(f"min_trainers is {spec.min_trainers}, but trainers is {spec.trainers}", "lower min_trainers")
    if unknown := [name for name in spec.secrets if name not in spec.env]:
        raise UsageError(
            f"secrets lists {unknown[0]}, which is not in env", f"set env.{unknown[0]}, or remove it from secrets"
        )
    return spec


def unencodable(spec: JobSpec) -> str:
    """Why the command and environment cannot be passed to processes of this machine; empty if they can be."""
    for key, text in [
        *(("command", word) for word in spec.command),
        *((f"env.{name}", value) for name, value in spec.env.items()),
    ]:
        try:
            os.fsencode(text)
        except UnicodeEncodeError as error:
            return f"{key} has characters that this locale's encoding, {error.encoding}, cannot represent"
    return ""


def _parsed(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Parse the keys of layers, each on its own, without checking them against each other; raises UsageError."""
    found: dict[str, Any] = {}
    for layer in layers:
        if {"nodes", "trainers"} <= layer.keys():
            raise UsageError("nodes and trainers are both set", "set only one of them; nodes includes the master")
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
    """Decode text as UTF-8, even if Python has read the command line in another encoding.

    Raises ValueError for text that cannot be passed to a process.
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
                raise ValueError(f"{error}, which {shown(name)} is not") from None
        return {_decoded(name): _decoded(content) for name, content in value.items()}
    return [_decoded(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_set(assignments: list[str]) -> dict[str, Any]:
    """Parse `--set key=value …` into a layer; values are YAML."""
    layer: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:  # what follows the name may be a secret
            name = re.match(r"[\w.]*", assignment)[0]  # type: ignore[index]
            raise UsageError(f"--set {name}: missing =", "use --set key=value")
        layer[key] = value
        if not key.startswith("env.") and key not in ("command", "name", "user"):
            with contextlib.suppress(yaml.YAMLError):
                layer[key] = strict_yaml.parse(value, all_text=key == "env")[0]
    return layer


def read_file(path: Path) -> dict[str, Any]:
    """Read a job file into a layer; raises UsageError with the location of the error."""
    return layer(strict_yaml.read(path), path)


def layer(text: str, path: Path) -> dict[str, Any]:
    """Parse the text of a job file into a layer; raises UsageError with the location of the error."""
    try:
        value, places = strict_yaml.parse(text, TEXTS)
    except yaml.MarkedYAMLError as error:
        problem = f"{_location(path, error.problem_mark)}: {error.problem}"
        raise UsageError(problem, "a job file is a YAML mapping") from None
    if places is None:
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise UsageError(f"{path} contains {kind}, not a mapping of keys to values", "write lines such as trainers: 3")
    for key, mark in places.items():
        try:
            _parsed([{key: value[key]}])
        except UsageError as error:
            raise UsageError(f"{_location(path, mark)}: {error}", error.hint) from None
    return value


def _location(path: Path, mark: yaml.Mark | None) -> str:
    return f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
