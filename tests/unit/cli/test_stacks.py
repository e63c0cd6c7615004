"""`stacks`: what is shown of the workers of a running job, as its supervisor has written it."""

import json
import os

import pytest
from support.commanded import Meanwhile, create, end, supervised
from support.methods import raising

from orchestrate.record import stacks
from orchestrate.record.outcomes import Stack
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

TORCH = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"
WAITS = f'  File "{TORCH}", line 9 in barrier\n  File "/job/work/train.py", line 30 in main\n'
LOADS = '  File "/job/work/data.py", line 41 in load\n  File "/job/work/train.py", line 8 in main\n'
ZYGOTE = "/opt/orchestrate/node/programs/zygote.py"
BELOW = f'  File "<frozen runpy>", line 88 in _run_code\n  File "{ZYGOTE}", line 9 in run\n'


def stack(*frames: str) -> Stack:
    return Stack("Stack (most recent call first):\n" + "".join(frames))


@pytest.fixture
def show(do, runs):
    """Run `stacks` on a job of eight workers, whose supervisor answers with some stacks; return its lines."""
    paths = create(
        JobPaths(runs / "a-1"), JobSpec(trainers=7, secrets={"TOKEN": "TOKEN"}, env={"TOKEN": "s3cr3tvalue"})
    )

    def show(found: dict[int, Stack], *options: str) -> list[str]:
        do.clock = Meanwhile(lambda: stacks.answer(paths, found))
        with supervised(paths.root):
            code, out, _ = do("stacks", "a-1", *options)
        assert code == 0 and not stacks.asked(paths) and stacks.read(paths) is None
        return [line for text in out for line in text.splitlines()]

    return show


def test_equal_stacks_must_be_one_group_and_the_odd_ones_come_first(show):
    found = dict.fromkeys(range(8), stack(WAITS, BELOW)) | {5: stack(LOADS, BELOW)}
    assert show(found) == [
        "rank 5: running at data.py:41 in load",
        '  File "data.py", line 41 in load',
        '  File "train.py", line 8 in main',
        "ranks 0-4, 6-7: waiting at train.py:30 in main",
        f'  File "{TORCH}", line 9 in barrier',
        '  File "train.py", line 30 in main',
    ]


def test_frames_of_libraries_must_be_left_out_between_those_of_the_job_unless_all_are_asked_for(show):
    library = [f'  File "/usr/lib/python3/dist-packages/lightning/loop.py", line {line} in run\n' for line in range(9)]
    found = dict.fromkeys(range(8), stack(*library, LOADS, *library, BELOW))
    shown = show(found)
    assert shown[1:5] == [*map(str.rstrip, library[:3]), "  … 6 frames of libraries"]
    assert shown[5:] == [
        *LOADS.replace("/job/work/", "").splitlines(),
        library[0].rstrip(),
        "  … 8 frames of libraries",
    ]
    assert len(show(found, "--verbose")) == 1 + 2 * len(library) + 2


FORKED = """  File "/usr/lib/python3.12/multiprocessing/process.py", line 314 in _bootstrap
  File "/job/work/train.py", line 8 in main
"""
IDLE = stack('  File "/usr/lib/python3.12/multiprocessing/queues.py", line 113 in get\n', FORKED).text
READS = stack('  File "/job/work/data.py", line 13 in read\n', FORKED).text


def test_child_processes_that_run_code_of_the_user_must_be_shown_below_their_rank(show):
    own = stack(LOADS, BELOW).text
    found = {0: Stack(own + READS + IDLE), 1: Stack(own + IDLE + READS + READS), 2: Stack(own + IDLE)}
    loads = ['  File "data.py", line 41 in load', '  File "train.py", line 8 in main']
    reads = '    File "data.py", line 13 in read'
    assert show(found, "--ranks", "0-2") == [
        *["rank 0: running at data.py:41 in load", *loads, "  a child process: running at data.py:13 in read", reads],
        *["rank 1: running at data.py:41 in load", *loads, "  2 child processes: running at data.py:13 in read", reads],
        *["rank 2: running at data.py:41 in load", *loads],
    ]


def test_of_groups_of_one_size_those_that_wait_must_come_last(show):
    found = {rank: stack(WAITS if rank < 4 else LOADS) for rank in range(8)}
    assert [line for line in show(found) if line.startswith("rank")] == [
        "ranks 4-7: running at data.py:41 in load",
        "ranks 0-3: waiting at train.py:30 in main",
    ]


def test_a_rank_at_a_breakpoint_must_be_shown_there(show):
    waits = '  File "/opt/orchestrate/node/programs/debugger.py", line 140 in awaited\n'
    stops = (
        '  File "/usr/lib/python3.12/cmd.py", line 130 in cmdloop\n  File "/usr/lib/python3.12/pdb.py", line 5 in _\n'
    )
    found = show({0: stack(waits, LOADS, BELOW), 1: stack(stops, LOADS, BELOW)})
    assert [line for line in found if line.startswith("rank")] == [
        "rank 0: in a debugger at data.py:41 in load",
        "rank 1: in a debugger at data.py:41 in load",
        "ranks 2-7: ended",
    ]


def test_ranks_must_be_selected(show):
    assert show({2: stack(LOADS), 3: stack(WAITS)}, "--ranks", "2,6")[::3] == [
        "rank 2: running at data.py:41 in load",
        "rank 6: ended",
    ]


def test_workers_without_a_stack_must_be_named_with_the_reason(show):
    found = {
        0: Stack("", "starting"),
        1: Stack("", "unable", "S"),
        2: Stack("", "silent", "T"),
        3: Stack("", "silent", "S"),
        4: stack("  <no Python frame>\n"),
    }
    assert show(found) == [
        "rank 0: not started yet",
        "rank 1: no stack, since it is not a script that was started warm",
        "rank 2: stopped (SIGSTOP)",
        "rank 3: no answer",
        "rank 4: not in Python code",
        "ranks 5-7: ended",
    ]


def test_neither_secrets_nor_control_characters_of_a_node_must_be_shown(show):
    text = '  File "/job/work/\x1b[31ms3cr3tvalue.py", line 1 in f\n'
    shown = "\n".join(show({0: stack(text)}))
    assert "s3cr3tvalue" not in shown and "\x1b" not in shown and "line 1 in f" in shown


def test_files_below_the_current_folder_must_be_shown_relative_to_it(show):
    assert show({0: stack(f'  File "{os.getcwd()}/a/b.py", line 1 in f\n')})[0] == "rank 0: running at a/b.py:1 in f"


def test_a_question_that_another_command_has_removed_must_be_asked_again(do, runs):
    paths, turns = create(JobPaths(runs / "a-1")), [0]

    def meanwhile() -> None:
        turns[0] += 1
        if turns[0] == 1:
            stacks.answer(paths, {0: stack(LOADS)})
            stacks.remove(paths)  # by the other one, which has read it
        elif stacks.asked(paths) and turns[0] > 2:
            stacks.answer(paths, {0: stack(WAITS)})

    do.clock = Meanwhile(meanwhile)
    with supervised(paths.root):
        code, out, _ = do("stacks", "a-1")
    assert code == 0 and out[0].startswith("rank 0: waiting")


def test_a_job_without_an_answer_must_be_an_error(do, runs):
    paths = create(JobPaths(runs / "a-1"))
    code, _, err = do("stacks", "a-1")
    assert code != 0 and "a-1 has no supervisor" in err[0] and "attach" in err[-1]
    do.clock = Meanwhile(lambda: None)
    do.clock.monotonic = iter(range(0, 1000, 10)).__next__
    with supervised(paths.root):
        code, _, err = do("stacks", "a-1")
    assert code != 0 and err[0] == "error: the supervisor of a-1 does not respond"
    assert not stacks.asked(paths)  # a later generation does not answer
    do.clock = Meanwhile(raising(KeyboardInterrupt))
    with supervised(paths.root):
        do("stacks", "a-1")
    assert not stacks.asked(paths)
    end(paths)
    code, _, err = do("stacks", "a-1")
    assert code == 2 and "a-1 has ended" in err[0] and "logs a-1" in err[-1]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": []}', '{"0": 1}', '{"0": ["", "", "", "", ""]}', "[" * 9999])
def test_a_damaged_answer_must_count_as_none(paths, content):
    paths.stacks.write_text(content)
    assert stacks.read(paths) is None


def test_a_link_must_be_neither_followed_nor_answered(paths, tmp_path):
    for path in (paths.stacks, paths.stacks_asked):
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        stacks.ask(paths)
    stacks.answer(paths, {0: Stack("x")})
    assert not (tmp_path / "elsewhere").exists() and json.loads(paths.stacks.read_text()) == {"0": ["x", "", ""]}
