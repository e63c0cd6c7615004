"""A batch script of Slurm as a job file: its #SBATCH lines, and the script that it starts. Pure."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from orchestrate.errors import UsageError
from orchestrate.node.ranks import CONTRACT
from orchestrate.spec.command import read
from orchestrate.spec.inputs import SET_HERE
from orchestrate.spec.redact import is_secret

SHORT = dict(A="account", C="constraint", G="gpus", J="job-name", L="licenses", N="nodes", c="cpus-per-task")
SHORT |= dict(D="chdir", a="array", e="error", i="input", o="output")
SHORT |= dict(d="dependency", n="ntasks", p="partition", q="qos", t="time", w="nodelist", x="exclude")
ENDS = re.compile(r"[&|;<>]|[0-9]>")  # of a command, to the shell
# What may start the training, the likeliest first.
STARTS = [*map(re.compile, (r"\btorchrun\b|torch\.distributed\.run\b", r"\b(srun|mpirun|accelerate|deepspeed)\b"))]
STARTS += [re.compile(r"\bpython3?\b")]
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
MAPPED = ("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "gpus", "gpus-per-node")
SHOWN = (".", "source", "module", "conda", "cd", "mkdir", "srun", "python", "python3")  # lines that hold no secrets
NUMBER = re.compile("[0-9]{1,9}")
MAX_SHOWN = 100  # characters of a line that is not carried over
MAX_SIZE = 1 << 16  # bytes of a script that are looked at
MAX_LINE = 10_000  # characters of a command, with the values of its variables
MAX_TRIED = 100  # commands that may start the training, of each kind


def job_file(text: str) -> str:
    """Return the job file for a batch script, as far as its lines say; empty if it has no #SBATCH line.

    Its last lines are comments with what is not carried over.
    """
    found = _options(text)
    if not found:
        return ""
    job: dict[str, Any] = {"engine": "slurm"}
    if name := found.get("job-name"):
        job["name"] = name
    tasks, nodes = _number(found.get("ntasks-per-node")) or 1, _number(found.get("nodes")) or 1
    per_node = re.fullmatch(r"(?:gpu:)?(?:[\w.-]+:)?(\d{1,6})", found.get("gpus-per-node") or found.get("gres", ""))
    gpus = int(per_node[1]) * nodes if per_node else _number(found.get("gpus"))
    known = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_GPUS_ON_NODE": gpus // nodes}
    known |= {"SLURM_GPUS_PER_NODE": gpus // nodes, "SLURM_NTASKS_PER_NODE": tasks}
    lines = _lines(text)
    constants, env, _ = _settings(lines)
    start, command, launched = _command(lines, constants | {name: str(number) for name, number in known.items()})
    job |= {"nodes": nodes, "nproc_per_node": tasks} | launched
    if not job["nproc_per_node"]:  # one for each GPU, which is the default
        del job["nproc_per_node"]
    if cores := _number(found.get("cpus-per-task")):
        job["cpus"] = cores * tasks
    if memory := re.fullmatch(r"(\d{1,15})([KMGT]?)B?", found.get("mem", ""), re.I):
        job["memory"] = memory[1] + (memory[2] or "M").lower() if memory[1].strip("0") else "unlimited"
    if gpus:
        job["gpus"] = gpus
    if env:
        job["env"] = env
    if rest := {name: value or True for name, value in found.items() if name not in {*SET_HERE, "gres"}}:
        job["slurm"] = {name: "SECRET" if is_secret(name, str(value)) else value for name, value in rest.items()}
    left = _settings([line for line in lines if line != start])[2]
    left += [f"--{name}" for name in found if name in SET_HERE and name not in MAPPED]
    if per_node and re.search("[a-z].*:", per_node[0].removeprefix("gpu:")):
        left.append(f"the kind of GPUs of {per_node[0]}")
    if not start:
        left.append("the training, which was not found: replace SCRIPT.py")
    left += [f"the value of ${name} in the command" for name in _variables(command) if name not in CONTRACT]
    head = yaml.safe_dump(job | {"command": _masked(command)}, sort_keys=False, width=1000).rstrip()
    return "\n".join([head, *(f"# not carried over: {line}" for line in left)])


def _lines(text: str) -> list[str]:
    """Return the commands of a script, one per line."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line.isprintable() and not line.startswith("#")]
    parts = [part.strip() for line in lines for part in re.findall(r"""(?:[^;"']|"[^"]*"|'[^']*'|["'])+""", line)]
    return [part for part in parts if part not in ("", "set -e")]


def _settings(lines: list[str]) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return the variables that lines set, those that they export, both without secrets, and what else lines do."""
    known, env, left = dict[str, str](), dict[str, str](), list[str]()
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = [line]
        exported = words[:1] == ["export"]
        pairs = words[1:] if exported else words
        if not all(re.match(r"\w+=", pair) for pair in pairs):
            left.append(_named(line))
            continue
        for name, _, value in (pair.partition("=") for pair in pairs):
            if re.search("[$`]", value) or is_secret(name, value) or name in CONTRACT:
                left.append(f"{'export ' * exported}{name}=…")
                continue
            known[name] = value
            if exported:
                env[name] = value
    return known, env, left


def _variables(words: Sequence[str]) -> list[str]:
    """Return the names of the shell's variables in a command."""
    return [*dict.fromkeys(braced or plain for word in words for braced, plain in VARIABLE.findall(word))]


def _named(line: str) -> str:
    """Return how a line begins, up to values, which may be secrets."""
    if match := re.match(r"(export )?\w+=", line):
        return f"{match[0]}…"
    first, *others = line.split()[:4]
    if first not in SHOWN:
        return f"{first} …"[:MAX_SHOWN]
    words = [word.partition("=")[0] for word in _masked([first, *others])]
    ends = next((number for number, word in enumerate(words) if word in ("login", "&&", "|", ";")), len(words))
    return " ".join(words[: ends + 1])[:MAX_SHOWN]


def _masked(words: Sequence[str]) -> list[str]:
    """Return a command without what looks like a secret."""
    found = list[str]()
    for before, word in zip(("", *words), words):
        name, equals, value = word.partition("=")
        named = before if before.startswith("--") and not equals else name if equals else ""
        secret = is_secret(named.lstrip("-").replace("-", "_"), value if equals else word)
        found.append(f"{name}{equals}SECRET" if secret and equals else "SECRET" if secret else word)
    return found


def _options(text: str) -> dict[str, str]:
    """Return the options of #SBATCH lines by their long names."""
    found = {}
    for line in re.findall(r"^#SBATCH\s+(\S.*)$", text, re.M):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()
        for word, after in zip(words, [*words[1:], ""]):
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                name, value = SHORT.get(word[1:2], "") if word.startswith("-") else "", word[2:]
            if name:
                found[name] = value if value or equals or after.startswith("-") else after
    return found


def _command(lines: list[str], known: Mapping[str, str]) -> tuple[str, list[str], dict[str, int]]:
    """Return the line that starts the training, its script with arguments, and the keys that torchrun's flags set.

    `known` are variables whose values are known.
    """
    for line in [line for start in STARTS for line in [*filter(start.search, reversed(lines))][:MAX_TRIED]]:
        if len(line) + sum(len(known.get(braced or plain, "")) for braced, plain in VARIABLE.findall(line)) > MAX_LINE:
            continue
        try:
            words = shlex.split(VARIABLE.sub(lambda match: known.get(match[1] or match[2], match[0]), line))
        except ValueError:
            continue
        words = words[: next((place for place, word in enumerate(words) if ENDS.match(word)), None)]
        tried = False
        for place, word in enumerate(words):
            run = word == "torchrun" or words[place + 1 : place + 3] == ["-m", "torch.distributed.run"]
            if run and not tried:
                tried = True
                with contextlib.suppress(UsageError):
                    command, keys = read(tuple(words[place:]))
                    numbers = {name: str(keys.get(name, "")) for name in ("nproc_per_node", "max_restarts")}
                    if "nproc_per_node" not in keys and any(word.startswith("--nproc") for word in words):  # gpu, auto
                        numbers["nproc_per_node"] = "0"
                    found = {name: int(text) for name, text in numbers.items() if NUMBER.fullmatch(text)}
                    return line, [*command], found
            if word == "-c" and words[place - 1] in ("bash", "sh"):
                inner, words, launched = _command(words[place + 1 : place + 2], known)
                return inner and line, words, launched
            if word.endswith(".py") or word == "-m":
                return line, words[place:], {}
    return "", ["SCRIPT.py"], {}


def _number(text: str | None) -> int:
    return int(text) if text and NUMBER.fullmatch(text) else 0
