"""The command of `before` in a node: how often it runs, and when its end is reported."""

import os

import pytest
from support.agents import Waiting
from support.waiting import eventually


@pytest.mark.parametrize("program, code", [("sh prepare.sh", 7), ("missing", 127)])
def test_a_command_of_before_that_fails_must_run_once_in_a_generation(waiting, program, code):
    """Also if the node is asked to start a worker only after that: the job would wait for the command again."""
    (waiting.folder / "prepare.sh").write_text("echo >> prepared; exit 7")
    for rank, generation in ((0, 0), (1, 0), (0, 1), (1, 1)):
        env = {"TORCHELASTIC_RESTART_COUNT": str(generation), "RANK": str(rank)}
        waiting.pipe.ask("start", command=["x.py"], env=env, inherit=True, cwd=None, before=program.split())
        assert waiting.code(rank, generation) == code
        assert waiting.log(rank).count(f"was not started: `{program}` failed with exit code {code}\n") == generation + 1
    assert program == "missing" or (waiting.folder / "prepared").read_text() == "\n\n"


def test_a_command_of_before_that_fails_must_be_reported_at_once(tmp_path):
    """Also if nothing else happens in the node: the command's output has ended before, and no timer is due."""
    node = Waiting(tmp_path, before="from orchestrate.node.messages import listener; listener.PROOF_TIMEOUT = 1e6")
    os.mkfifo(tmp_path / "go")
    command = ["sh", "-c", "exec >/dev/null 2>&1; read line < go; exit 7"]
    node.pipe.ask("start", command=["x.py"], env={"RANK": "0"}, inherit=True, cwd=None, before=command)
    with (tmp_path / "go").open("w"):
        node.status()
    assert node.code(0) == 7
    node.end()


def test_a_command_of_before_that_was_stopped_must_run_again_whatever_its_exit_code(waiting):
    begun, script = waiting.folder / "begun", waiting.folder / "prepare.sh"
    until = "[ $TORCHELASTIC_RESTART_COUNT = 1 ]"
    script.write_text(f"trap 'exit 0' TERM; echo >> {begun}; until {until}; do sleep 0.1; done")
    (waiting.folder / "0.py").write_text("print('worked')")
    for generation in range(2):
        env = {"TORCHELASTIC_RESTART_COUNT": str(generation), "RANK": "0"}
        command = [str(waiting.folder / "0.py")]
        waiting.pipe.ask("start", command=command, env=env, inherit=True, cwd=None, before=["sh", str(script)])
        if not generation:
            eventually(begun.exists)
            waiting.pipe.ask("stop", kill=False)
        assert waiting.code(0, generation) == (0 if generation else 143)
    assert begun.read_text() == "\n\n" and waiting.log(0).endswith("worked\n")
