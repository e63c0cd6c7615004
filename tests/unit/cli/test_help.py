"""The help, the version and the exit codes that it lists."""

import contextlib
import os
import pty
import re

import pytest
from support.commanded import terminal_text

from orchestrate import __version__, errors
from orchestrate.cli import result
from orchestrate.cli.main import main
from orchestrate.cli.options import EXITS
from orchestrate.cli.table import COMMANDS, USUAL
from orchestrate.errors import EngineError, ResourceError, UsageError
from orchestrate.supervise.context import BY_MAX_RUN, BY_USER

# --- help


RUNS = ["--runs"]
SHOWING = ["--print-path", "--json", "--progress", "--quiet", "--ranks", "--timestamps", "--junit-xml"]
FLAGS = ["--trainers", "--gpus", "--nproc-per-node", "--engine", "--image", "--name", "--max-run", "--max-restarts"]
FLAGS += ["--min-trainers", "--spares", "--set", "--nodes", "--memory", "--cpus", "--env", "--require-communication"]
FLAGS += ["--dockerfile", "--pip", "--requirements", "--data", "--mount", "--checkpoints"]
FLAGS += ["--output", "--keep", "--source", "--chdir", "--secret", "--isolated", "--stdin", "--queue", "--on-event"]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("run", [*FLAGS, *RUNS, "--dry-run", "--detach", *SHOWING, "--resume"]),
        ("plan", [*FLAGS, *RUNS, "--json"]),
        ("up", [*FLAGS, *RUNS]),
        ("doctor", [*FLAGS, "--quick", "--json"]),
        ("help", []),
        ("completion", ["--install"]),
        ("export kubernetes", [*FLAGS, "--form"]),
        ("export slurm", [*FLAGS, "--form"]),
        ("export compose", FLAGS),
        ("down", [*RUNS, "--dry-run"]),
        ("ps", [*RUNS, "--all", "--json"]),
        ("events", [*RUNS, "--follow"]),
        ("prune", [*RUNS, "--older-than", "--caches", "--dry-run"]),
        ("report", RUNS),
        ("resume", [*RUNS, *SHOWING, "--detach", "--queue"]),
        ("schema", []),
        ("top", [*RUNS, "--once"]),
        ("stacks", [*RUNS, "--ranks"]),
        ("debug", [*RUNS, "--rank"]),
        ("exec", [*RUNS, "--node", "--rank", "--all"]),
        ("shell", [*RUNS, "--node", "--rank"]),
        ("serve", [*RUNS, "--port"]),
        ("logs", [*RUNS, "--rank", "--ranks", "--tail", "--grep", "--follow", "--since", "--merge", "--timestamps"]),
        ("attach", [*RUNS, *SHOWING]),
        ("wait", RUNS),
        ("stop", [*RUNS, "--all", "--dry-run"]),
        ("rm", [*RUNS, "--dry-run"]),
    ],
)
def test_the_help_of_a_command_must_list_its_flags(capsys, command, flags):
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m orchestrate {command} ")
    assert set(re.findall(r"^  (?:-\w[^,]*, )?(--[\w-]+)", text, re.M)) == {*flags, "--help", "--verbose"}


def test_the_help_must_fit_on_a_screen_and_begin_with_the_usual_commands(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 23 and all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines[lines.index("most used:") + 1 :][:5]] == [*USUAL]
    named = {name for line in lines if re.match(r"  [a-z ]+: ", line) for name in line.partition(":")[2].split()}
    assert named == {*COMMANDS}


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("logs", "usage: python -m orchestrate logs"),
        ("restarts", "# Failures and restarts\n"),
        ("shm-size", "shm_size: size of /dev/shm in each node"),
        ("shm_size", "shm_size: size of /dev/shm in each node"),
    ],
)
def test_help_must_show_a_command_a_page_or_a_key(capsys, topic, text):
    assert main(["help", topic]) == 0
    assert capsys.readouterr().out.startswith(text)


@pytest.mark.parametrize("topic", ["export.md", "export.md#formats", "restarts.md"])
def test_a_page_must_be_found_by_its_file_also_if_a_command_has_its_name(capsys, topic):
    assert main(["help", topic]) == 0
    assert capsys.readouterr().out.startswith("# ")


def test_the_help_of_a_command_must_name_the_page_with_its_name(capsys):
    assert main(["help", "export"]) == 0
    assert capsys.readouterr().out.endswith("\nmore: python -m orchestrate help export.md\n")


def test_help_on_a_terminal_must_be_formatted():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as tty, contextlib.redirect_stdout(tty):
        assert main(["help", "debugging"]) == 0
    text = terminal_text(leader)
    assert "\x1b[" in text and "A slow run" in text and not re.search("^##|<!--|```", text, re.M)


def test_help_without_a_topic_must_list_commands_and_pages(capsys):
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    assert "most used:" in text and "restarts, " in text


def test_an_unknown_topic_must_be_refused_with_the_nearest_one(capsys):
    assert main(["help", "memry"]) == 2
    assert capsys.readouterr().err == "error: no help on 'memry'\nhint: did you mean memory?\n"


def test_the_version_must_be_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_the_exit_codes_must_match_the_help():
    codes = {errors.SUCCEEDED: "succeeded", errors.FAILED: "a worker failed", errors.LOST: "lost"}
    codes |= {UsageError.exit_code: "usage", EngineError.exit_code: "no engine", ResourceError.exit_code: "something"}
    codes |= {errors.TIMED_OUT: "time limit", errors.INTERRUPTED: "stopped by the user"}
    assert all(f" {code}  " in EXITS.replace("\n", "  ") and meaning in EXITS for code, meaning in codes.items())
    found = {"succeeded": 0, "failed": 1, "lost": 5}
    assert {word: result.exit_code({"outcome": word, "reason": ""}) for word in found} == found
    assert result.exit_code({"outcome": "stopped", "reason": BY_USER}) == 130
    assert result.exit_code({"outcome": "stopped", "reason": BY_MAX_RUN}) == 124
