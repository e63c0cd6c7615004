"""Kinds of values of keys that bring something into nodes: packages, folders, secrets, ports. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrate.console import quoted
from orchestrate.spec import requirements
from orchestrate.spec.patterns import flaw
from orchestrate.spec.values import MAX_PATTERN, TEXT, VARIABLE, Schema, either, kind, list_of, matching


@kind(list_of(TEXT, maxItems=requirements.MAX_LINES))
def packages(value: Any) -> list[str]:
    """Lines of a requirements file, as a list or in one string."""
    lines = value.splitlines() if isinstance(value, str) else value
    meaning = "a list of packages such as lightning or transformers>=4"
    if not isinstance(lines, list) or not all(isinstance(line, str) and line.isprintable() for line in lines):
        raise ValueError(meaning)
    if len(lines) > requirements.MAX_LINES:
        raise ValueError(f"a list of at most {requirements.MAX_LINES} packages")
    try:
        return [requirements.checked(line.strip()) for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"{meaning} ({error})") from None


MAX_FOLDERS = 100  # of mounts, and of data: each is compared with every other
MOUNT = r"([^\x00-\x1f\x7f-\x9f]+):(/[^\x00-\x1f\x7f-\x9f:]*?)/*(?::(ro|rw))?"


@kind(list_of(matching(MOUNT), maxItems=MAX_FOLDERS))
def mounts(value: Any) -> list[str]:
    """Folders or files of this machine, as `SOURCE:TARGET`, optionally with `:ro` or `:rw`."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) and re.fullmatch(MOUNT, one) for one in found):
        raise ValueError("a list of mounts such as ~/models:/models or ./cache:/cache:rw")
    if len(found) > MAX_FOLDERS:
        raise ValueError(f"a list of at most {MAX_FOLDERS} mounts")
    return list(found)


DATA = r"[A-Za-z][A-Za-z0-9_]{0,60}"


@kind(
    {
        "type": "object",
        "propertyNames": {"pattern": f"^{DATA}$"},
        "additionalProperties": {"type": "string"},
        "maxProperties": MAX_FOLDERS,
    }
)
def data(value: Any) -> dict[str, str]:
    """Folders with data by name; names differ not only by case."""
    if (
        not isinstance(value, Mapping)
        or not all(isinstance(name, str) and re.fullmatch(DATA, name) for name in value)
        or not all(isinstance(path, str) and path.isprintable() and path for path in value.values())
        or len({name.upper() for name in value}) < len(value)
    ):
        raise ValueError("a mapping of names to folders, such as {train: ~/imagenet/train}")
    if len(value) > MAX_FOLDERS:
        raise ValueError(f"a mapping of at most {MAX_FOLDERS} names to folders")
    return dict(value)


VARIABLE_OF_ENV, OF_SHELL = "variable", "env"  # sources of secrets, besides a path
SECRETS: Schema = {"type": "object", "propertyNames": {"pattern": f"^{VARIABLE}$"}, "additionalProperties": TEXT}


@kind(either(list_of(matching(VARIABLE)), SECRETS))
def secrets(value: Any) -> dict[str, str]:
    """Secrets by name, with their sources: `variable` (of `env`), `env` (of this shell), or the path of a file.

    A list of names means `variable` for each.
    """
    meaning = "names in env, or a mapping of names to sources: env, or the path of a file"
    if not isinstance(value, Mapping):
        names = value.split() if isinstance(value, str) else value
        if not isinstance(names, list):
            raise ValueError(meaning)
        value = dict.fromkeys(map(str, names), VARIABLE_OF_ENV)
    for name, source in value.items():
        if not re.fullmatch(VARIABLE, str(name)):
            raise ValueError(f"{meaning}; {quoted(str(name))} is not a valid name")
        if not isinstance(source, str) or not source or not source.isprintable():
            raise ValueError(f"{meaning}; the source of {name} is neither")
    return dict(value)


WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}  # values that are not text
FLAG = r"[A-Za-z][A-Za-z0-9_.-]*"
SCALAR: Schema = {"type": ["string", "number", "boolean"]}


@kind(
    {
        "type": "object",
        "propertyNames": {"pattern": f"^{FLAG}$"},
        "additionalProperties": either(SCALAR, {"type": "array", "items": SCALAR}, {"type": "null"}),
    }
)
def hyperparameters(value: Any) -> dict[str, Any]:
    """Options of the script by name; a value is text, a number, true, false, or a list of these."""
    meaning = "a mapping of the script's options to values, such as {lr: 0.1, epochs: 3}"
    if not isinstance(value, Mapping):
        raise ValueError(meaning)
    for name, content in value.items():
        items = content if isinstance(content, list) else [content]
        if not re.fullmatch(FLAG, str(name)):
            raise ValueError(f"{meaning}; {quoted(str(name))} is not the name of an option")
        if content is not None and not all(isinstance(item, (str, int, float)) for item in items):
            raise ValueError(f"{meaning}; the value of {name} is neither text nor a number")
    return {str(name): _option(content) for name, content in value.items()}


def _option(content: Any) -> Any:
    """True, False and None are for options without a value; all other values are text."""
    if isinstance(content, list):
        return [str(item) for item in content]
    return content if content is None or isinstance(content, bool) else WORDS.get(str(content), str(content))


METRIC = r"[A-Za-z][\w./ -]{0,40}"
MAX_METRICS = 20


@kind(
    {
        "type": "object",
        "propertyNames": {"pattern": f"^{METRIC}$"},
        "additionalProperties": {"type": "string", "maxLength": MAX_PATTERN},
        "maxProperties": MAX_METRICS,
    }
)
def metrics(value: Any) -> dict[str, str]:
    """Regular expressions by the name of their metric, each with a group for its value."""
    meaning = "a mapping of metrics to regular expressions with a group, such as {loss: 'loss=([0-9.]+)'}"
    if (
        not isinstance(value, Mapping)
        or len(value) > MAX_METRICS
        or not all(re.fullmatch(METRIC, str(name), re.ASCII) for name in value)
        or not all(isinstance(one, str) and len(one) <= MAX_PATTERN for one in value.values())
    ):
        raise ValueError(f"{meaning}, at most {MAX_METRICS}")
    if why := flaw(tuple(value.values()), groups=1):
        raise ValueError(f"{meaning} ({why})")
    return {str(name): one for name, one in value.items()}


LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,250}[A-Za-z0-9])?"
RESERVED = ("orchestrate.", "com.docker.", "io.docker.", "org.dockerproject.")


@kind({"type": "object", "propertyNames": {"pattern": f"^{LABEL}$"}, "additionalProperties": SCALAR})
def labels(value: Any) -> dict[str, str]:
    """Labels by name; those of Docker and of this project are reserved."""
    if not isinstance(value, Mapping) or not all(re.fullmatch(LABEL, str(name)) for name in value):
        raise ValueError("a mapping of labels to text, such as {team: vision}")
    for name, content in value.items():
        if str(name).startswith(RESERVED):
            raise ValueError(f"a mapping without {name}: labels that start with {', '.join(RESERVED)} are reserved")
        if not isinstance(content, (str, int, float)) or len(str(content)) > 4096 or not str(content).isprintable():
            raise ValueError(f"a mapping of labels to text; the value of {name} is not text on one line")
    return {str(name): str(content) for name, content in value.items()}


REQUEUES = "requeues"  # how many further allocations a job gets
# Options of sbatch that follow from other keys, or would break what the job relies on.
SET_HERE = {
    **{name: "nodes" for name in ("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "tasks-per-node")},
    "job-name": "name",
    **{name: "cpus" for name in ("cpus-per-task", "cpus-per-gpu", "mincpus")},
    **{name: "memory" for name in ("mem", "mem-per-cpu", "mem-per-gpu")},
    **{name: "gpus" for name in ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")},
    **{name: "" for name in ("array", "batch", "chdir", "comment", "error", "export", "export-file", "get-user-env")},
    **{name: "" for name in ("input", "kill-on-invalid-dep", "no-kill", "no-requeue", "open-mode", "output")},
    **{name: "" for name in ("parsable", "quiet", "requeue", "signal", "test-only", "wait", "wrap")},
}


OPTION = r"[a-z][a-z-]{1,30}"


@kind(
    {
        "type": "object",
        "propertyNames": {"pattern": f"^(?!(?:{'|'.join(SET_HERE)})$){OPTION}$"},
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    }
)
def slurm(value: Any) -> dict[str, str]:
    """Options of sbatch by name: `true` is one without a value, and `false` none; `requeues` is a limit of our own."""
    if not isinstance(value, Mapping):
        raise ValueError("a mapping of options of sbatch, such as {partition: gpu}")
    given = {str(name): content for name, content in value.items() if content is not False}
    found = {name: "" if content is True else str(content) for name, content in given.items()}
    for name, content in found.items():
        if not re.fullmatch(OPTION, name):
            raise ValueError(f"a mapping of options of sbatch by their long names, such as partition, not {name}")
        if name in SET_HERE:
            why = f"the key {SET_HERE[name]} sets it" if SET_HERE[name] else "it is set already, or not supported"
            raise ValueError(f"a mapping without {name}: {why}")
        if name == REQUEUES and not re.fullmatch("[0-9]{1,6}", content):
            raise ValueError("a mapping in which requeues is a whole number")
        if not isinstance(given[name], (str, int, float)) or not content.isprintable() or len(content) > 1000:
            raise ValueError(f"a mapping of options to text on one line; the value of {name} is something else")
    return {name: "" if content == "true" else content for name, content in found.items()}


PORT = r"(?:([1-9][0-9]{0,4}):)?([1-9][0-9]{0,4})"


@kind(list_of(either({"type": "integer", "minimum": 1, "maximum": 65535}, matching(PORT))))
def ports(value: Any) -> list[str]:
    """Ports of the master to open on this machine, as `PORT` or `HERE:THERE`."""
    meaning = "a list of ports from 1 to 65535, such as [6006, 8080:80]"
    found = re.split(r"[\s,]+", value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    pairs = [re.fullmatch(PORT, str(one)) for one in found]
    if not all(pair and all(int(port or 1) <= 65535 for port in pair.groups()) for pair in pairs):
        raise ValueError(meaning)
    opened = [f"{pair[1] or pair[2]}:{pair[2]}" for pair in pairs if pair]
    if len({pair.partition(":")[0] for pair in opened}) < len(opened):
        raise ValueError(f"{meaning}, each port of this machine only once")
    return opened
