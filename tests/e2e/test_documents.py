"""The documents must be true: each command in a `console` block must print what the block shows.

A block after `<!-- run by FILE -->` is covered by another test, and one after `<!-- not run: REASON -->` by none.
"""

import functools
import os
import re
import secrets
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.leftovers import leftovers
from support.mnist import check_trained
from support.processes import MARK
from support.repo import ROOT

from app.checkpoint import read_manifest

DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# Messages that only a first run or a slow one prints, or one on a busy machine, which slows some workers.
PASSING = (
    "installing|building the image|starting|the nodes are still|waiting for|importing|cleaning up|"
    "looking for GPUs$|testing the GPUs with torch$|[a-z0-9-]+: step|slow: rank"
)


def blocks(path: Path) -> list[tuple[str, str]]:
    """The console blocks of a document that run here: the commands of each, and the output that follows them."""
    found = []
    for mark, block in re.findall(r"(<!-- [^\n]* -->\n\n)?```console\n(.*?)```", path.read_text(), re.S):
        if not mark:
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
    expected[""] = [line for line in expected[""] if line != "..."]
    lines = {speaker: iter(found.get(speaker, [])) for speaker in expected}
    return all(line in lines[speaker] for speaker, texts in expected.items() for line in texts)


SHOWN = blocks(ROOT / "docs" / "app.md")[0][1]


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
def newcomer(tmp_path_factory):
    """A function that returns a copy of the project for a document; its folder gives Compose a unique project name."""

    @functools.cache
    def copy(name: str) -> Path:
        folder = tmp_path_factory.mktemp("newcomer") / f"{name.lower()}-{secrets.token_hex(4)}"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
        for path in (folder, *folder.parents[:3]):
            path.chmod(0o755)
        return folder

    return copy


def own(name: str) -> bool:
    """Whether a variable of this process is one that a newcomer's shell would not have."""
    return name.startswith(("NODE_", "COMPOSE_", "MAKE", "MFLAGS", "PYTEST", "PYTHON", "VIRTUAL_ENV"))


def environment(document: Path, folder: Path) -> dict[str, str]:
    """A newcomer's variables: with a new virtual environment for a document that installs, otherwise with this one."""
    env = {key: value for key, value in os.environ.items() if not own(key)}
    programs = Path(sys.executable).parent
    if "$ pip install" in document.read_text():
        found = [path for path in env["PATH"].split(os.pathsep) if Path(path) != programs]
        programs = folder.parent / "env" / "bin"
        if not programs.exists():
            venv.create(programs.parent, with_pip=True)
        env["PATH"] = os.pathsep.join(found)
    activated = [f"{folder}/.venv/bin"] * ("activate" in document.read_text())
    return env | {"PATH": os.pathsep.join([*activated, str(programs), env["PATH"]]), MARK: str(folder)}


def runnable(command: str) -> str:
    """A command whose output is that of a machine without GPUs, and without pip's output."""
    command = re.sub(r"pip install", "pip install --quiet --disable-pip-version-check", command)
    runtimes = subprocess.run(["docker", "info", "-f", "{{.Runtimes}}"], capture_output=True, text=True, check=True)
    if "nvidia" not in runtimes.stdout:
        return command
    command = re.sub(r"orchestrate (run|up)", r"orchestrate \1 --gpus none", command)
    return command.replace("make run", "make run ARGS='--gpus none'")


CASES = [
    pytest.param(path, block, id=f"{path.stem}: {block[0]}", marks=pytest.mark.xdist_group(path.stem))
    for path in DOCUMENTS
    for block in blocks(path)
]


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize(("document", "block"), CASES)
def test_a_command_must_print_what_the_document_says(document, block, docker_engine, newcomer):
    """Runs in the order of the document, in one folder."""
    folder, (command, output) = newcomer(document.stem), block
    env = environment(document, folder)
    done = subprocess.run(
        runnable(command), shell=True, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    fails = "--fail-rank" in command
    assert (done.returncode != 0) is fails and (not output or matches(output, done.stdout)), done.stdout
    if "make run" in command:
        check_trained(*folder.glob("runs/digits-*"))
    if "docker compose" in command:
        assert read_manifest(folder / "checkpoints" / "best")["score"] >= 0.985
    detached = any("--detach" in words for words, _ in blocks(document))  # a job that runs on between two blocks
    if not detached or block == blocks(document)[-1]:
        assert leftovers(folder) == {}
