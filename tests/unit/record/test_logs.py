"""Log output must be complete, in order within a rank, and harmless to the terminal."""

import re

import pytest

from orchestrate.files.lines import MAX_LINE
from orchestrate.record.logs import MAX_BAR, TAIL, Follower, clean, last_lines, tail
from orchestrate.record.paths import JobPaths


def read(follower: Follower, end: bool = False) -> list[str]:
    """Lines with their ranks."""
    return [f"{line.rank} {line.text}" for line in follower.lines(end=end)]


def test_a_log_must_be_read_in_parts_with_its_last_line_intact(paths):
    paths.log(0).write_text("x" * (3 << 20) + "\nlast")
    follower = Follower(paths, [0])
    reads = [[line.text for line in follower.lines(end=True, most=1 << 20)] for _ in range(5)]
    lines = [line for look in reads for line in look]
    assert "".join(lines) == "x" * (3 << 20) + "last" and lines[-1] == "last"
    assert reads[-1] == [] and all(sum(map(len, look)) <= 2 << 20 for look in reads)
    paths.log(1).write_text("first\nsecond\nlast")
    follower.follow([1])
    assert [line.text for _ in range(4) for line in follower.lines(end=True, most=8)] == ["first", "second", "last"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", "plain"),
        (b"\tindented", "\tindented"),
        (b"grad\xc3\xbcn", "gradün"),
        (b"\xff", "\ufffd"),
        (b" 10%\r 50%\r100%", "100%"),
        (b"windows\r", "windows"),
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]52;c;aGVsbG8=\x07stolen", "stolen"),
        (b"\x1b]0;title\x1b\\text", "text"),
        (b"\x1bcreset\x00\x9b", "creset\ufffd"),
        (b"bell\x07", "bell"),
        ("\x9b2Jeight\x9dbits\x85".encode(), "2Jeightbits"),
    ],
)
def test_a_line_must_be_shown_without_terminal_control_sequences(line, shown):
    assert clean(line) == shown


def test_lines_must_be_returned_once_and_whole(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    follower = Follower(paths, [1, 0])
    assert read(follower) == []
    paths.log(0).write_bytes(b"a\nb\nhal")
    assert read(follower) == ["0 a", "0 b"]
    with paths.log(0).open("ab") as file:
        file.write(b"f\nrest")
    paths.log(1).write_bytes(b"other\n")
    assert read(follower) == ["0 half", "1 other"]
    assert read(follower, end=True) == ["0 rest"]
    assert read(follower, end=True) == []


def test_each_line_must_have_its_offset_in_the_log(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    follower = Follower(paths, [0])
    paths.log(0).write_bytes(b"a\nbc\nhal")
    assert [line.offset for line in follower.lines()] == [0, 2]
    with paths.log(0).open("ab") as file:
        file.write(b"f\nrest")
    assert [line.offset for line in follower.lines(end=True)] == [5, 10]
    late = Follower(paths, [0])
    late.skip(5)
    assert [line.offset for line in late.lines(end=True)] == [10]


def test_lines_must_not_repeat_when_other_ranks_are_followed(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    for rank in range(2):
        paths.log(rank).write_text(f"of {rank}\n")
    follower = Follower(paths, [0, 1])
    assert read(follower) == ["0 of 0", "1 of 1"]
    follower.follow([1])
    for rank in range(2):
        with paths.log(rank).open("a") as file:
            file.write("more\n")
    assert read(follower) == ["1 more"] and follower.offsets() == {0: 5, 1: 10}
    follower.follow([0, 1])
    assert read(follower) == ["0 more"]


def test_earlier_output_must_be_skipped_except_the_last_lines(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    paths.log(0).write_text("".join(f"line {number}\n" for number in range(1000)))
    paths.log(1).write_text("short\n")
    for skip in (Follower.skip, Follower.near_end):
        follower = Follower(paths, [0, 1])
        skip(follower, 20)
        assert read(follower) == ["0 line 998", "0 line 999", "1 short"]


def test_generation_marks_must_be_left_out_on_request(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    paths.log(0).write_bytes(b"a\n[node] generation 1\nb\n")
    assert read(Follower(paths, [0])) == ["0 a", "0 [node] generation 1", "0 b"]
    assert read(Follower(paths, [0], marks=False)) == ["0 a", "0 b"]


def test_a_generation_mark_must_not_count_as_output_of_a_worker(paths):
    follower = Follower(paths, [0])
    for line, silent in (("[node] generation 1\n", True), ("a\n", False), ("[node] generation 2\n", False)):
        with paths.log(0).open("a") as file:
            file.write(line)
        assert len(read(follower)) == 1 and follower.silent is silent


def test_the_tail_must_be_the_last_lines_of_a_long_log(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    paths.log(0).write_text("".join(f"{i}\n" for i in range(100_000)))
    text = tail(paths.folder, 0)
    assert 1 << 15 < len(text) < 1 << 16
    assert last_lines(text, 0, 2) == ["99998", "99999"]
    assert tail(paths.folder, 1) == ""


def test_a_progress_bar_must_be_one_line_of_the_tail(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    paths.log(0).write_bytes(b"it began\n" + b"".join(b"\r%d of 100" % i for i in range(100)) + b"\nan error\n")
    assert last_lines(tail(paths.folder, 0), 0, 12) == ["it began", "99 of 100", "an error"]


def test_a_log_that_is_longer_than_a_chunk_must_be_shown_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrate.files.lines.CHUNK", 7)
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    written = [f"line {number}" for number in range(20)]
    paths.log(0).write_text(text := "\n".join(written))
    expected = [(line, f"{text}\n".index(f"{line}\n")) for line in written]
    assert [(line.text, line.offset) for line in Follower(paths, [0]).lines(end=True)] == expected


def test_each_log_must_be_skipped_to_its_last_lines(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    paths.log(0).write_bytes(b"a" * 5000 + b"\nlast\n")  # longer than the part that is shown
    paths.log(1).write_bytes(b"whole\n")
    follower = Follower(paths, [0, 1, 2])
    follower.skip(4096)
    assert read(follower) == ["0 last", "1 whole"]
    paths.log(2).write_bytes(b"late\n")  # a log that did not exist yet
    assert read(follower) == ["2 late"]


def test_a_rank_that_is_followed_later_must_be_shown_from_its_first_line(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    paths.log(0).write_bytes(b"a\nhal")
    paths.log(1).write_bytes(b"b\n")
    follower = Follower(paths, [0])
    assert read(follower) == ["0 a"]
    follower.follow([0, 1])
    with paths.log(0).open("ab") as file:
        file.write(b"f\n")
    assert read(follower) == ["0 half", "1 b"]


# --- the last lines of a worker


@pytest.mark.parametrize(
    ("text", "generation", "expected"),
    [
        ("a\nb\nc", 0, ["b", "c"]),
        ("a\n[node] generation 1\nb", 1, ["b"]),
        ("a\n[node] generation 1\nb\n[node] generation 2\nc", 2, ["c"]),
        ("a\n[node] generation 1", 1, []),  # nothing was written yet
        ("[node] generation 1\nb\n[node] generation 11", 1, ["b", "[node] generation 11"]),
        ("[node] generation 11\nb\nc\nd", 1, ["c", "d"]),  # a long log, whose tail does not contain the mark
        ("", 0, []),
        ("", 3, []),
    ],
)
def test_the_last_lines_must_be_from_the_generation(text, generation, expected):
    assert last_lines(text, generation, 2) == expected


DUMP = """\
Fatal Python error: Segmentation fault

Thread 0x02 (most recent call first):
  File "/lib/threading.py", line 1 in wait

Current thread 0x01 (most recent call first):
  File "/w/train.py", line 3 in innermost
  File "/w/train.py", line 9 in outer
  File "/opt/orchestrate/node/programs/zygote.py", line 7 in fork

Extension modules: numpy, torch (total: 2)"""


def test_of_a_dump_the_crashed_stack_must_be_shown_after_the_output_before_it():
    output = "".join(f"said {number}\n" for number in range(9))
    assert last_lines(output + DUMP, 0, 12) == [
        *(f"said {number}" for number in range(5, 9)),
        "Fatal Python error: Segmentation fault",
        "Current thread 0x01 (most recent call first):",
        '  File "/w/train.py", line 3 in innermost',
        '  File "/w/train.py", line 9 in outer',
    ]


def test_of_a_dump_that_was_asked_for_the_main_thread_must_be_shown():
    """Which comes last; another one may have got the signal."""
    other = DUMP.replace("Thread 0x02", "Current thread 0x02").replace("Current thread 0x01", "Thread 0x01")
    for dump in (DUMP, other):
        assert '  File "/w/train.py", line 3 in innermost' in last_lines(dump, 0, 12, main=True)
    assert not any("innermost" in line for line in last_lines(other, 0, 6))


ADVICE = """\
Search for `cudaErrorIllegalAddress' in the documentation of CUDA for more information.
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def test_native_stack_frames_must_not_hide_the_output_before_them():
    frames = "".join(f"frame #{number}: c10::Error::Error() + 0x96 (0x7f in libc10.so)\n" for number in range(20))
    raised = "Exception raised from checkTimeout at /pytorch/ProcessGroupNCCL.cpp:685 (most recent call first):\n"
    output = f"  what():  Watchdog caught collective operation timeout\n{ADVICE}\n{raised}{frames}\n"
    assert last_lines(output + DUMP, 0, 12)[:2] == [output.splitlines()[0], "Fatal Python error: Segmentation fault"]
    own = ["frame of mind", "frame #12: cannot decode"]
    assert last_lines("\n".join([*own, output]), 0, 12)[:3] == [*own, output.splitlines()[0]]
    prefixed = "".join(f"[rank1]: {line}\n" for line in output.splitlines())
    assert [line for line in last_lines(prefixed, 0, 12) if line.strip() != "[rank1]:"] == [prefixed.splitlines()[0]]


def test_of_a_deep_stack_the_innermost_lines_must_be_shown():
    deep = "\n".join(f'  File "/w/train.py", line {number} in deep' for number in range(50))
    shown = last_lines(f"Fatal Python error: Aborted\nCurrent thread 0x01:\n{deep}", 0, 12)
    assert (len(shown), shown[2]) == (7, '  File "/w/train.py", line 0 in deep')


def test_the_last_of_several_dumps_must_be_shown_and_also_one_without_a_current_thread():
    first = DUMP.replace("innermost", "earlier")
    shown = last_lines(f"{first}\n{DUMP}", 0, 12)
    assert any("innermost" in line for line in shown)
    stack = ["<no Python frame>"]
    assert last_lines("\n".join(["before", "Fatal Python error: Aborted", "", *stack]), 0, 12) == [
        "before",
        "Fatal Python error: Aborted",
        *stack,
    ]


def test_an_overwritten_line_must_be_shown_as_progress(paths):
    paths.log(0).write_bytes(b"begun\nhalf a line")
    paths.log(1).write_bytes(b"begun\n 10%|#   |\r 20%|##  |\r")
    follower = Follower(paths, [0, 1])
    assert read(follower) == ["0 begun", "1 begun"] and follower.bars() == {1: " 20%|##  |"}
    follower.follow([0])
    assert follower.bars() == {}
    follower.follow([0, 1])
    with paths.log(1).open("ab") as file:
        file.write(b"100%\n")
    assert read(follower) == ["1 100%"] and follower.bars() == {}


def test_a_secret_must_be_hidden_wherever_the_end_of_a_long_line_begins(paths):
    paths.log(0).write_bytes(b"x\r" + b"hunter2".rjust(9000) + b"y" * (MAX_BAR - 4) + b"\r")
    follower = Follower(paths, [0], hide=lambda text: text.replace("hunter2", "***"))
    assert read(follower) == [] and not any("r2" in text for text in follower.bars().values())


def test_secrets_must_be_hidden_in_lines_that_are_not_complete_too(paths):
    paths.log(0).write_bytes(b"10% of hunter2\r")
    follower = Follower(paths, [0], hide=lambda text: text.replace("hunter2", "***"))
    assert read(follower) == [] and follower.bars() == {0: "10% of ***"} and follower.silent
    assert read(follower, end=True) == ["0 10% of ***"] and not follower.silent
    with paths.log(0).open("a") as file:
        file.write("hunter2\n")
    assert read(follower) == ["0 ***"]


def test_a_secret_of_several_lines_must_not_become_one_line(paths):
    paths.log(0).write_bytes(b"a\nhunter2\nhunter3\nb\n")
    follower = Follower(paths, [0], hide=lambda text: re.sub("hunter2\nhunter3|hunter.", "***", text))
    assert [(line.text, line.offset) for line in follower.lines()] == [("a", 0), ("***", 2), ("***", 10), ("b", 18)]


def test_a_link_must_not_be_read_as_a_log(paths, tmp_path):
    (tmp_path / "private").write_text("not of this job\n")
    paths.log(0).symlink_to(tmp_path / "private")
    follower = Follower(paths, [0])
    follower.near_end(4)
    follower.skip(4)
    assert follower.offsets() == {0: 0} and read(follower, end=True) == [] and tail(paths.folder, 0) == ""


SECRET = "hunter2000-and-more"


def hide(text: str) -> str:
    return text.replace(SECRET, "***")


@pytest.mark.parametrize("before", [0, 5, len(SECRET), 2000, (1 << 17) + 7])
def test_a_long_line_must_not_be_split_within_a_secret(paths, before):
    """Lines are split once they have MAX_LINE bytes, which are read in parts of CHUNK."""
    at = MAX_LINE - (1 << 17) - before
    paths.log(0).write_text("x" * at + SECRET + "y" * (2 << 20) + SECRET[:7])
    follower = Follower(paths, [0], hide=hide)
    parts = [line.text for line in follower.lines()]
    with paths.log(0).open("a") as file:
        file.write(SECRET[7:] + "z" * (1 << 20) + "\n")
    parts += [line.text for line in follower.lines(end=True)]
    text = "".join(parts)
    assert len(parts) > 2 and text == "x" * at + "***" + "y" * (2 << 20) + "***" + "z" * (1 << 20)


def test_what_is_left_of_a_line_after_its_beginning_was_skipped_must_not_be_shown(paths):
    paths.log(0).write_text("x" * 100 + SECRET)
    for begin in (Follower.skip, Follower.near_end):
        follower = Follower(paths, [0], hide=hide)
        begin(follower, 10)
        assert read(follower) == []
        with paths.log(0).open("a") as file:
            file.write("tail of it\nnext\n")
        assert read(follower) == ["0 next"]
        paths.log(0).write_text("x" * 100 + SECRET)


def test_a_progress_bar_must_be_shown_from_a_line_whose_beginning_was_skipped(paths):
    paths.log(0).write_text("x" * 100 + SECRET + "\r 10%\r")
    late, later = Follower(paths, [0], hide=hide), Follower(paths, [0], hide=hide)
    late.skip(8)
    assert read(late) == [] and late.bars() == {0: " 10%"}
    paths.log(0).write_text("x" * 100 + SECRET)
    later.skip(8)
    with paths.log(0).open("a") as file:
        file.write("x\r 20%\r")
    assert read(later) == [] and later.bars() == {0: " 20%"}


@pytest.mark.parametrize(("rest", "shown"), [("", ""), ("\nthe end", "the end"), ("\r99%\n", "99%")])
def test_the_tail_must_not_begin_within_a_line_that_may_have_a_secret(paths, rest, shown):
    paths.log(0).write_text("x" * 300 + SECRET + "z" * (TAIL + 2 - len(SECRET) - len(rest)) + rest)
    assert hide(tail(paths.folder, 0)) == shown


@pytest.mark.parametrize("marks", [True, False])
def test_the_states_of_a_bar_below_another_one_must_not_become_lines(paths, marks):
    tqdm = pytest.importorskip("tqdm")
    with paths.log(0).open("w") as file:
        with tqdm.tqdm(total=2, file=file, mininterval=0, desc="train") as outer:
            for _ in range(2):
                for _ in tqdm.tqdm(range(50), file=file, mininterval=0, desc="validate", position=1, leave=False):
                    pass
                outer.update()
        file.write("done\n")
    found = read(Follower(paths, [0], marks=marks), end=True)
    assert not [line for line in found if "validate" in line] and found[-1] == "0 done" and len(found) < 6
    lines = [*Follower(paths, [0], marks=marks).lines(end=True)]
    content = paths.log(0).read_bytes()
    assert content[lines[-1].offset :] == b"done\n"  # which gives the time of the line
