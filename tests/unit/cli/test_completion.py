"""Completion of the command line: what the last word can become, and the scripts in real shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrate.cli.commands.completion import candidates
from orchestrate.cli.main import main
from orchestrate.cli.table import COMMANDS


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in ("runs/train-4f2a91", "runs/bert-0c3e7b", "others/gpt-51d04c"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("st", ["stacks", "stop"]),
        ("run --eng", ["--engine"]),
        ("run --engine s", ["slurm", "swarm"]),
        ("run --gpus ", ["all", "auto", "none"]),
        ("run --set shm", ["shm_size="]),
        ("run --memory ", []),
        ("run tr", []),
        ("run -- ", []),
        ("logs ", ["bert-0c3e7b", "latest", "train-4f2a91"]),
        ("logs tr", ["train-4f2a91"]),
        ("logs train-4f2a91 ", []),
        ("logs train-4f2a91 --fo", ["--follow"]),
        ("run train.py --e", []),
        ("run --engine=sl", ["--engine=slurm"]),
        ("run --nodes 2 --eng", ["--engine"]),
        ("logs --runs others g", ["gpt-51d04c"]),
        ("logs --runs=others g", ["gpt-51d04c"]),
        ("run --resume b", ["bert-0c3e7b"]),
        ("export ", ["compose", "kubernetes", "pbs", "slurm"]),
        ("export slurm --form", ["--form"]),
        ("export slurm --form a", ["apptainer"]),
        ("completion z", ["zsh"]),
        ("help job", ["job-file"]),
        ("nonesuch ", []),
        ("doctor --virtual", []),
    ],
)
def test_a_word_must_be_completed_from_what_can_follow(here, line, expected):
    assert candidates(line.split(" ")) == expected


def test_the_first_word_must_be_a_command():
    assert candidates([]) == candidates([""]) == sorted([*COMMANDS, "--help", "--version"])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_must_be_installed_where_the_shell_finds_it(tmp_path, monkeypatch, capsys, shell):
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    assert main(["completion", "--install"]) == 0
    paths, messages = [path for path in tmp_path.rglob("*") if path.is_file()], capsys.readouterr().err
    assert all(path.read_text() == script and str(path) in messages for path in paths)
    assert len(paths) == (1 if shell == "zsh" else 2)  # zsh reads the names of the commands in the file
    monkeypatch.setenv("HOME", "")
    assert main(["completion", "--install"]) == 2


def test_an_unknown_shell_must_be_refused(monkeypatch, capsys):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert main(["completion"]) == 2
    assert capsys.readouterr().err == "error: no completion for 'tcsh'\nhint: use bash, zsh, fish\n"


ASK = {
    "bash": """source <(orchestrate completion bash)
        COMP_WORDS=(./orchestrate logs --runs = runs t); COMP_CWORD=5
        _orchestrate ./orchestrate; echo "${COMPREPLY[@]}" """,
    "zsh": """autoload -Uz compinit; compinit -u -d "$HOME/.zcompdump"; source <(orchestrate completion zsh)
        compadd() { print -- "$@[2]" }; words=(orchestrate logs t); CURRENT=3; _orchestrate""",
    "fish": "orchestrate completion fish | source; complete --do-complete 'orchestrate logs t'",
}


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_must_complete_the_name_of_a_job(here, shell):
    if not (program := shutil.which(shell)):
        pytest.skip(f"{shell} is not installed")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "HOME": str(here)}
    done = subprocess.run([program, "-c", ASK[shell]], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["train-4f2a91"], done.stderr
