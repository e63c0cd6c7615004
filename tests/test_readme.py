"""The README must be true: each command in a `console` block is run, and prints what stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()


def blocks() -> list[tuple[str, str]]:
    """The README's console blocks: the commands of each, and the output that follows them."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", README, re.S):
        commands = re.findall(r"^\$ (.*)", block, flags=re.M)
        found.append((" && ".join(commands), re.sub(r"^\$ .*\n", "", block, flags=re.M)))
    return found


def pattern(output: str) -> list[str]:
    """What must be alike in two runs: the lines, in any order, but for numbers and the ends of job ids."""
    output = re.sub(r"^setting up .*\n", "", output, flags=re.M)  # which the first run prints
    output = re.sub(r"Docker Engine \S+,", "Docker Engine,", output)
    output = re.sub(r"gloo on CPU \(.*\)", "gloo on CPU", output)
    output = re.sub(r"-[0-9a-f]{4}\b", "-#", output)
    output = re.sub(r"/\S*/(runs/)", r"\1", output)
    output = re.sub(r"(?<= )/\S+", "/", output)
    return sorted(re.sub(r"\d+(\.\d+)?", "#", line).rstrip() for line in output.splitlines() if line.strip())


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize(("command", "output"), blocks(), ids=[command for command, _ in blocks()])
def test_a_command_must_print_what_the_readme_says(command, output, docker_engine, nothing_left, tmp_path):
    runtimes = subprocess.run(["docker", "info", "-f", "{{.Runtimes}}"], capture_output=True, text=True, check=True)
    if "nvidia" in runtimes.stdout:  # the README's output is that of a machine without GPUs
        command = re.sub(r"orchestrate (run|up)", r"orchestrate \1 --gpus none", command)
        command = command.replace("make run", "make run ARGS='--gpus none'")
    before = set(ROOT.glob("runs/*"))
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("NODE_", "COMPOSE_", "MAKE", "MFLAGS"))
    }
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    try:
        if "...\n" in output:  # and more lines
            assert set(pattern(output)) - {"..."} <= set(pattern(done.stdout)), done.stdout
        elif output:
            assert pattern(done.stdout) == pattern(output)
        else:
            assert done.returncode == 0, done.stdout
    finally:
        for folder in set(ROOT.glob("runs/*")) - before:
            subprocess.run(["rm", "-r", str(folder)], check=True)


def test_the_two_commands_must_be_targets():
    for target in ("run", "test"):
        assert f"make {target}" in README
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_file_tree_must_be_the_projects():
    tree = README[README.index("## What is where") :]
    named = set(re.findall(r"^([\w./-]+?)/? {2,}\S", tree, re.M))
    assert named and all((ROOT / name).exists() for name in named)
    top = {path.name for path in ROOT.iterdir() if path.name in {"app", "orchestrate", "tests", "examples", ".ci"}}
    assert top <= {name.split("/")[0] for name in named}


def test_markdown_must_have_one_sentence_a_line():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for line in text.splitlines():
            if not line.startswith(("|", "#")):
                assert not re.search(r"[a-z)`][.!?] [A-Z]", line), f"{path.name}: {line}"
