"""From a job file, `--set` and flags to a JobSpec: later layers take precedence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrate.console import called, quoted
from orchestrate.errors import UsageError, did_you_mean
from orchestrate.spec import command, strict_yaml
from orchestrate.spec.redact import is_secret
from orchestrate.spec.spec import APP, FIELDS, MAPPINGS, NODES, TEXTS, JobSpec, description

# Keys whose values may be secrets, and are not in errors.
QUIET = ("env", "pip", "secrets", "source", "slurm", "labels", "checkpoints", "output", "on_event")


def _trainers(nodes: Any) -> int:
    """Convert a number of nodes to a number of trainers; raises UsageError."""
    try:
        return int(NODES.parse(nodes)) - 1
    except ValueError as error:
        raise UsageError(f"nodes must be {error}, not {quoted(nodes)}", "nodes includes the master") from None


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
    _check(spec)
    return spec


def _check(spec: JobSpec) -> None:
    """Raise UsageError for keys that contradict each other, and for a secret that would be visible."""
    if (spec.min_trainers or 0) > spec.trainers:
        raise UsageError(f"min_trainers is {spec.min_trainers}, but trainers is {spec.trainers}", "lower min_trainers")
    if unknown := [name for name in spec.secrets.keys() - spec.files.keys() if name not in spec.env]:
        raise UsageError(
            f"secrets lists {unknown[0]}, which is not in env", f"set env.{unknown[0]}, or secrets.{unknown[0]}=env"
        )
    host = spec.network == "host"
    contradictions: list[tuple[str, str, object]] = [
        ("isolated: true", "ports", spec.isolated and spec.ports),
        ("isolated: true", "host_access: true", spec.isolated and spec.host_access),
        ("isolated: true", "network: host", spec.isolated and host),
        ("ports", "network: host, where all ports are open", spec.ports and host),
        ("services", "network: host, which they cannot join", spec.services and host),
        *((f"env.{name}_FILE", f"secrets.{name}, which sets it", f"{name}_FILE" in spec.env) for name in spec.files),
    ]
    for one, other, both in contradictions:
        if both:
            raise UsageError(f"{one} contradicts {other}", "remove one of them")
    if secret := [name for name, value in spec.hyperparameters.items() if _may_be_secret(name, value)]:
        raise UsageError(
            f"hyperparameters.{secret[0]} looks like a secret, and would be visible to all users of this machine",
            f"use env or secrets, which scripts read from a variable or a file: --secret {secret[0].upper()}",
        )


def _may_be_secret(name: str, value: Any) -> bool:
    """Whether an option is likely to be a secret; names with `token` are those of a tokenizer, too."""
    if not isinstance(value, str) or re.fullmatch(r"[\d.eE+-]*", value):
        return False
    return is_secret("", value) or ("token" not in name.lower() and is_secret(name, value))


def _parsed(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Parse the keys of layers, each on its own, without checking them against each other; raises UsageError."""
    found: dict[str, Any] = {}
    merged = set[str]()
    for layer in layers:
        if {"nodes", "trainers"} <= layer.keys():
            raise UsageError("nodes and trainers are both set", "set only one of them; nodes includes the master")
        for key, value in layer.items():
            if key == "nodes":
                key, value = "trainers", _trainers(value)
            name, dot, entry = key.partition(".")
            single = bool(dot) and name in MAPPINGS
            key, value = (name, {entry: value}) if single else (key, value)
            if key not in FIELDS:
                known = ["nodes", *FIELDS]
                others = f"hyperparameters.{key} for an option of the script; otherwise one of {', '.join(known)}"
                hint = "did you mean command?" if key in ("script", "entrypoint") else did_you_mean(key, known)
                raise UsageError(f"unknown key {quoted(key)}", hint or others)
            parsed = _value(key, value)
            found[key] = found.get(key, {}) | parsed if single else parsed
            merged |= {key} if single else set()
    for key in merged:  # entries that are valid alone, but not together
        _value(key, found[key])
    return found


def _value(key: str, value: Any) -> Any:
    try:
        return FIELDS[key].metadata["kind"].parse(_decoded(value))
    except ValueError as error:
        but = "" if key in QUIET else f", not {quoted(value)}"
        raise UsageError(f"{key} must be {error}{but}", description(key)) from None


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
                raise ValueError(f"{error}, which {quoted(name)} is not") from None
        return {_decoded(name): _decoded(content) for name, content in value.items()}
    return [_decoded(one) for one in value] if isinstance(value, (list, tuple)) else value


def read_set(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse `--set key=value …` into a layer; values are YAML."""
    layer: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:  # what follows the name may be a secret
            name = re.match(r"[\w.]*", assignment)[0]  # type: ignore[index]
            raise UsageError(f"--set {name}: missing =", "use --set key=value")
        layer[key] = value
        if not key.startswith(("env.", "metrics.")) and key not in ("command", "name", "user"):
            with contextlib.suppress(yaml.YAMLError):
                layer[key] = strict_yaml.parse(value, all_text=key.partition(".")[0] in TEXTS)[0]
    return layer


def read_file(path: Path) -> dict[str, Any]:
    """Read a job file into a layer; raises UsageError with the location of the error."""
    return layer(strict_yaml.read(path), path)


def layer(text: str, path: Path) -> dict[str, Any]:
    """Parse the text of a job file into a layer; raises UsageError with the location of the error."""
    if re.search(r"^services:[ \t]*\n(?:[ \t]*(?:#.*)?\n)*[ \t]+[\w.-]+:[ \t]*$", text, re.M):  # of a job, it is a path
        what = f"{path} is a Compose file, not a job file"
        raise UsageError(what, f"write its job as keys: {called()} help compose.md")
    try:
        value, places = strict_yaml.parse(text, TEXTS)
    except yaml.MarkedYAMLError as error:
        problem = f"{_location(path, error.problem_mark)}: {error.problem}"
        raise UsageError(problem, "a job file is a YAML mapping") from None
    if places is None:
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise UsageError(f"{path} contains {kind}, not a mapping of keys to values", "write lines such as nodes: 4")
    for key, mark in places.items():
        try:
            _parsed([{key: value[key]}])
        except UsageError as error:
            raise UsageError(f"{_location(path, mark)}: {error}", error.hint) from None
    return value


def _location(path: Path, mark: yaml.Mark | None) -> str:
    return f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
