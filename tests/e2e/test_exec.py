"""`exec` and `shell`: commands beside the workers of a running job."""

import os
import pty
import select
import subprocess
import sys

import pytest
from support.faults import Background
from support.waiting import eventually

SHOWS = "echo $RANK/$LOCAL_RANK $TOKEN $DOCKER_CONFIG $LINES $SSH_KEY $PWD\n"
SHOWS += "python -c 'import os; print(os.environ.get(\"NODE_KEY\"), os.getcwd())'"


@pytest.fixture
def job(ready):
    """A running job, which ends with the test."""
    options = (
        "--nproc-per-node",
        "2",
        "-e",
        "TOKEN=hidden",
        "-e",
        "DOCKER_CONFIG=theirs",
        "-e",
        "LINES=a\nb",
        "-e",
        "SSH_KEY=c\nd",
    )
    job = Background(ready, ready.engine, *options, "--", "count.py", "until-asked")
    job.until_step(1, rank=1)
    yield job
    ready.finish_jobs()
    assert job.end() == 0


def test_a_command_must_run_with_the_environment_and_in_the_folder_of_a_worker(ready, job):
    run = ready.run_dir().name
    folder = f"/job/{run}/work" if ready.engine == "docker" else str(ready.folder)
    for options, rank in (((), "0/0"), (("--node", "trainer-1"), "2/0"), (("--rank", "3"), "3/1")):
        done = ready("exec", run, *options, "--", "sh", "-c", SHOWS)
        key = "" if ready.engine == "docker" else "None"
        assert done.stdout == f"{rank} hidden theirs a b c d {folder}\n{key} {folder}\n", done.stderr
        assert done.returncode == 0


def test_each_node_must_be_visited_and_the_first_error_be_the_exit_code(ready, job):
    done = ready("exec", ready.run_dir().name, "--all", "--", "sh", "-c", "echo $RANK; exit $RANK")
    assert done.stdout == "master:\n0\ntrainer-1:\n2\ntrainer-2:\n4\n" and done.returncode == 2


def test_a_shell_must_have_a_terminal_if_there_is_one(ready, job):
    command = [sys.executable, "-m", "orchestrate", "shell", ready.run_dir().name, "--rank", "1"]
    leader, follower = pty.openpty()
    with subprocess.Popen(command, cwd=ready.folder, env=ready.env, stdin=follower, stdout=follower) as process:
        os.close(follower)
        os.write(leader, b"test -t 0 && echo rank-$RANK; exit 7\n")
        seen = b""

        def shown() -> bool:
            nonlocal seen
            while select.select([leader], [], [], 0)[0]:
                try:
                    seen += os.read(leader, 1 << 16)
                except OSError:  # the other end is closed
                    break
            return b"rank-1" in seen

        assert eventually(shown)
        assert process.wait(60) == 7
    os.close(leader)


def test_a_wrong_worker_or_no_command_must_be_refused(ready, job):
    done = ready("exec", "ls")
    assert done.returncode == 2 and "no command: it comes after --" in done.stderr
    run = ready.run_dir().name
    for options, text in (
        (["--node", "trainer-9", "--", "ls"], "nodes are master, trainer-1, trainer-2"),
        (["--rank", "9", "--", "ls"], "ranks are 0 to 5"),
        (["--rank", "-1", "--", "ls"], "ranks are 0 to 5"),
        ([], "no command: it comes after --"),
        (["--"], "no command: it comes after --"),
        (["--all", "--rank", "1", "--", "ls"], "not allowed with argument"),
    ):
        done = ready("exec", run, *options)
        assert done.returncode == 2 and text in done.stderr, done.stderr
