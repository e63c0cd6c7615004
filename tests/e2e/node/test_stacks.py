"""A node must report where its workers are, whatever they have done to themselves, and they must go on."""

import os
import signal
from pathlib import Path

import pytest
from support.agents import PRELOAD, Waiting
from support.waiting import eventually

STANDS = """
import os, time
def deep(left):
    if left:
        return deep(left - 1)
    open(f"at-{os.getpid()}", "w").close()
    while not os.path.exists("on"):
        time.sleep(0.01)
"""
CLOSES = "import os\nos.closerange(3, 900)\nos.open('theirs', os.O_CREAT | os.O_RDWR)\n" + STANDS + "deep(1)\n"
NAMED = "signal.signal(signalnum=signal.SIGUSR1, handler=print)\nassert signal.getsignal(signal.SIGUSR1) is print\n"
REPLACED = "import os\nopen(f'at-{os.getpid()}', 'w').close()\nos.execvp('sleep', ['sleep', '1000'])\n"


@pytest.fixture
def warm(tmp_path):
    node = Waiting(tmp_path, PRELOAD)
    yield node
    node.end()


def stack(node: Waiting, rank: int) -> tuple[str, str]:
    node.pipe.heard = [message for message in node.pipe.heard if message["say"] != "stack"]
    node.pipe.ask("stacks")
    found = node.pipe.until("stack", rank=rank)
    return found["text"], found["why"]


def pid(node: Waiting, rank: int = 0) -> int:
    found = node.pipe.until("started", rank=rank)["pid"]
    assert eventually((node.folder / f"at-{found}").exists)
    return found


def test_workers_must_show_their_stacks_and_go_on(warm):
    for rank in range(2):
        warm.start(rank, f"{STANDS}\nprint('before')\ndeep({rank})\nprint('after')\n")
    for rank in (0, 1, 0, 1):
        pid(warm, rank)
        text, why = stack(warm, rank)
        names = [line.split()[-1] for line in text.splitlines()[1:]]
        assert text.startswith("Stack (most recent call first):\n") and not why
        assert names[: rank + 2] == ["deep"] * (rank + 1) + ["<module>"] and text.count("Stack") == 1
    (warm.folder / "on").touch()
    assert [warm.code(rank) for rank in range(2)] == [0, 0] and warm.log(1) == "before\nafter\n"
    assert stack_reports(warm) == 0


def stack_reports(node: Waiting) -> int:
    """How many stacks a node reports when it is asked, all before its status."""
    node.pipe.heard = []
    node.pipe.ask("stacks")
    node.status()
    return sum(message["say"] == "stack" for message in node.pipe.heard)


def test_a_stack_must_not_get_into_files_of_a_script_that_has_closed_all_descriptors(warm):
    warm.start(0, CLOSES)
    pid(warm)
    assert "in deep" in stack(warm, 0)[0]
    (warm.folder / "on").touch()
    assert warm.code(0) == 0 and (warm.folder / "theirs").read_bytes() == b""


def test_a_script_that_restores_all_signal_handlers_must_still_show_its_stack(warm):
    known = (
        "{n: to for n in signal.valid_signals() - {9, 19} if (to := signal.getsignal(n)) is not None}"  # as Lightning
    )
    warm.start(0, f"import signal\nfor n, to in {known}.items(): signal.signal(n, to)\n{NAMED}{STANDS}deep(1)\n")
    pid(warm)
    assert "in deep" in stack(warm, 0)[0]
    (warm.folder / "on").touch()
    assert warm.code(0) == 0


def test_a_worker_that_cannot_show_its_stack_must_not_be_signaled(warm):
    warm.start(0, REPLACED)
    process = pid(warm)
    command = Path(f"/proc/{process}/comm")
    assert eventually(lambda: command.read_text() == "sleep\n")
    assert stack(warm, 0) == ("", "unable") == stack(warm, 0)
    assert command.read_text() == "sleep\n"
    os.kill(process, signal.SIGKILL)
    assert warm.code(0) == 137


def test_a_worker_of_a_fresh_interpreter_must_have_no_stack(tmp_path):
    node = Waiting(tmp_path)
    node.start(0, STANDS + "deep(1)\n")
    pid(node)
    assert stack(node, 0) == ("", "unable")
    (tmp_path / "on").touch()
    assert node.code(0) == 0
    node.end()


def test_a_stopped_worker_must_be_reported_as_silent_and_others_not_wait_for_it(warm):
    for rank in range(2):
        warm.start(rank, STANDS + "deep(0)\n")
    os.kill(pid(warm, 0), signal.SIGSTOP)
    pid(warm, 1)
    assert "in deep" in stack(warm, 1)[0]
    assert not [each for each in warm.pipe.heard if each["say"] == "stack" and each["rank"] == 0]
    assert warm.pipe.until("stack", rank=0)["why"] == "silent"
    os.kill(warm.pipe.until("started", rank=0)["pid"], signal.SIGCONT)
    (warm.folder / "on").touch()
    assert [warm.code(rank) for rank in range(2)] == [0, 0]


def test_what_a_worker_writes_besides_its_stack_must_be_limited(warm):
    fills = "import os\nos.truncate(1000, 1 << 40)\n"
    warm.start(0, STANDS + fills + "deep(0)\n")
    pid(warm)
    for _ in range(2):
        text, why = stack(warm, 0)
        assert len(text) <= 1 << 15 and "in deep" in text and not why
    (warm.folder / "on").touch()
    assert warm.code(0) == 0
