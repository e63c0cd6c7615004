"""A batch script of Slurm as a job file: its #SBATCH lines, and the script that it starts. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from orchestrate.spec.inputs import SET_HERE

SHORT = dict(A="account", C="constraint", G="gpus", J="job-name", L="licenses", N="nodes", c="cpus-per-task")
SHORT |= dict(d="dependency", n="ntasks", p="partition", q="qos", t="time", w="nodelist", x="exclude")
STARTS = re.compile(r"\b(srun|torchrun|mpirun|python3?|accelerate)\b")
MAX_SIZE = 1 << 16  # bytes of a script that are looked at


def job_file(text: str) -> str:
    """Return the job file for a batch script, as far as its lines say; empty if it has no #SBATCH line."""
    found = _options(text)
    if not found:
        return ""
    job: dict[str, Any] = {"engine": "slurm"}
    if name := found.get("job-name"):
        job["name"] = name
    tasks, nodes = _number(found.get("ntasks-per-node")) or 1, _number(found.get("nodes")) or 1
    job |= {"nodes": nodes, "nproc_per_node": tasks}
    if cores := _number(found.get("cpus-per-task")):
        job["cpus"] = cores * tasks
    if memory := re.fullmatch(r"(\d+)([KMGT]?)B?", found.get("mem", ""), re.I):
        job["memory"] = memory[1] + (memory[2] or "M").lower()
    per_node = re.fullmatch(r"(?:gpu:)?(?:[\w.-]+:)?(\d+)", found.get("gpus-per-node") or found.pop("gres", ""))
    if gpus := int(per_node[1]) * nodes if per_node else _number(found.get("gpus")):
        job["gpus"] = gpus
    if rest := {name: value or True for name, value in found.items() if name not in SET_HERE}:
        job["slurm"] = rest
    return yaml.safe_dump(job | {"command": _command(text)}, sort_keys=False, width=1000).rstrip()


def _options(text: str) -> dict[str, str]:
    """Return the options of #SBATCH lines by their long names."""
    found = {}
    for line in re.findall(r"^#SBATCH\s+(\S.*)$", text, re.M):
        name, _, value = line.strip().partition("=") if line.startswith("--") and "=" in line else _parted(line)
        value = value.partition(" #")[0].strip().strip("\"'")
        name = name.removeprefix("--") if name.startswith("--") else SHORT.get(name[1:2], "")
        if name:
            found[name] = value
    return found


def _parted(line: str) -> tuple[str, str, str]:
    """Split an option and its value, which follows a short one directly, or after a space."""
    if line.startswith("--") or line[2:3].isspace() or len(line) < 3:
        return line.partition(" ")
    return line[:2], "", line[2:]


def _command(text: str) -> list[str]:
    """Return the script that a batch script starts last, with its arguments."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    for line in reversed([line for line in lines if STARTS.search(line)]):
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        for place, word in enumerate(words):
            if word.endswith(".py") or (word == "-m" and words[place + 1 : place + 2] != ["torch.distributed.run"]):
                return words[place:]
    return ["SCRIPT.py"]


def _number(text: str | None) -> int:
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else 0
