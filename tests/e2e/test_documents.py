"""The README must be true: each command in a `console` block must print what the block shows."""

import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.leftovers import leftovers
from support.mnist import check_trained
from support.processes import MARK
from support.repo import ROOT

from app.checkpoint import read_manifest

README = (ROOT / "README.md").read_text()
# Messages that only a first run or a slow one prints, or one on a busy machine, which slows some workers.
PASSING = (
    "installing|building the image|starting|the nodes are still|waiting for|importing|cleaning up|"
    "looking for GPUs$|testing the GPUs with torch$|[a-z0-9-]+: step|slow: rank"
)
ACTIVATE = ". .venv/bin/activate"


def blocks() -> list[tuple[str, str]]:
    """The README's console blocks: the commands of each, and the output that follows them."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", README, re.S):
        commands = re.findall(r"^\$ (.*)", block, flags=re.M)
        found.append((" && ".join(commands), re.sub(r"^\$ .*\n", "", block, flags=re.M)))
    return found


def grouped(output: str) -> dict[str, list[str]]:
    """The output of each worker and our own (""), as lines in order, without what differs between two runs."""
    found: dict[str, list[str]] = {}
    for line in re.sub(rf"^({PASSING})\b.*\n", "", output, flags=re.M).splitlines():
        match = re.match(r"(.*?) \| (.*)", line) or re.match(r"(\[[\d,-]+\]) (.*)", line)  # Compose's prefix, or ours
        speaker, text = match.groups() if match else ("", line)
        found.setdefault(speaker.rstrip(), []).append(normalized(text).rstrip())
    return found


def normalized(line: str) -> str:
    """A line without times, ids, ports, versions, paths and hardware; results only as good or bad."""
    line = re.sub(r"Docker Engine \S+,", "Docker Engine,", line)
    line = re.sub(r"gloo on CPU \(.*\)", "gloo on CPU", line)
    line = re.sub(r"-[0-9a-f]{6}\b", "-#", line)
    line = re.sub(r"/\S*/(runs/)", r"\1", line)
    line = re.sub(r"(?<= )/\S+", "/", line)
    line = re.sub(r"\d+ threads? per worker", "threads", line)
    line = re.sub(r"[\d.]+ [MG]iB of memory", "memory", line)
    line = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:#", line)
    line = re.sub(r"\b\d+\.\d+ s\b", "# s", line).replace(" after # s of preparation", "")
    line = re.sub(r"accuracy (9\d|100)\.\d+%", "accuracy: good", line)
    return re.sub(r"loss 0\.[0-2]\d*", "loss: good", line)


def matches(shown: str, printed: str) -> bool:
    """Whether a command has printed what the README shows, where `...` means more lines."""
    expected, found = grouped(shown), grouped(printed)
    if "..." not in expected.get("", []):
        return found == expected
    expected[""].remove("...")
    lines = {speaker: iter(found.get(speaker, [])) for speaker in expected}
    return all(line in lines[speaker] for speaker, texts in expected.items() for line in texts)


SHOWN = blocks()[0][1]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("99.30%", "10.25%"),
        ("rank 3 of 4", "rank 7 of 4"),
        ("[1] rank 1", "[1] rank 2"),
        ("succeeded: 4 workers", "succeeded: 3 workers"),
        ("4 nodes", "3 nodes"),
        ("loss 0.0211", "loss 2.3026"),
        ("runs/digits-4f2a", "runs/digits"),
        ("[0] epoch 2/3", "[0] epoch 3/3"),
    ],
)
def test_a_false_line_must_be_detected(was, now):
    assert was in SHOWN and matches(SHOWN, SHOWN)
    assert not matches(SHOWN, SHOWN.replace(was, now, 1))
    assert not matches(SHOWN.replace(was, now, 1), SHOWN)


def test_a_different_order_must_be_detected():
    assert not matches(SHOWN, "\n".join(reversed(SHOWN.splitlines())))


def test_differences_between_runs_must_be_ignored():
    other = SHOWN.replace("18.7 s", "31.0 s").replace("4f2a", "beef").replace("99.30%", "98.90%")
    assert matches(SHOWN, other.replace("26.1.5", "28.2.2").replace("1 thread per", "2 threads per"))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project for the README's own commands to set up; its folder gives Compose a unique project name."""
    copy = tmp_path_factory.mktemp("newcomer") / f"readme-{secrets.token_hex(4)}"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
    for folder in (copy, *copy.parents[:3]):
        folder.chmod(0o755)
    return copy


def own(name: str) -> bool:
    """Whether a variable of this process is one that a newcomer's shell would not have."""
    return name.startswith(("NODE_", "COMPOSE_", "MAKE", "MFLAGS", "PYTEST", "PYTHON", "VIRTUAL_ENV"))


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.xdist_group("readme")
@pytest.mark.parametrize(("place", "block"), [*enumerate(blocks())], ids=[command for command, _ in blocks()])
def test_a_command_must_print_what_the_readme_says(place, block, docker_engine, project):
    """Runs in the README's order, in one folder, with the environment that its first commands create."""
    command, output = block
    assert place == 0 or (project / ".venv").is_dir(), "the README's first command has set nothing up"
    if place > [ACTIVATE in command for command, _ in blocks()].index(True):
        command = f"{ACTIVATE} && {command}"
    runtimes = subprocess.run(["docker", "info", "-f", "{{.Runtimes}}"], capture_output=True, text=True, check=True)
    if "nvidia" in runtimes.stdout:  # the README's output is that of a machine without GPUs
        command = re.sub(r"orchestrate (run|up)", r"orchestrate \1 --gpus none", command)
        command = command.replace("make run", "make run ARGS='--gpus none'")
    env = {key: value for key, value in os.environ.items() if not own(key)}
    found = [folder for folder in env["PATH"].split(os.pathsep) if Path(folder) != Path(sys.executable).parent]
    env |= {"PATH": os.pathsep.join(found), MARK: str(project)}
    done = subprocess.run(
        command, shell=True, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert matches(output, done.stdout) if output else done.returncode == 0, done.stdout
    if "make run" in command:
        check_trained(*project.glob("runs/digits-*"))
    if "docker compose" in command:
        assert read_manifest(project / "checkpoints" / "best")["score"] >= 0.985
    assert leftovers(project) == {}
