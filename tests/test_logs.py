"""What a person sees of the logs must be complete, in order within a rank, and harmless to the terminal."""

import pytest

from orchestrate.logs import Follower, clean, last_words, prefixes, tail
from orchestrate.paths import JobPaths


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
def test_a_line_must_be_shown_without_what_steers_a_terminal(line, shown):
    assert clean(line) == shown


def test_lines_must_be_handed_out_once_and_whole(tmp_path):
    paths = JobPaths(tmp_path)
    paths.logs.mkdir()
    follower = Follower(paths, prefixes({0: "master", 1: "trainer-1"}))
    assert list(follower.lines()) == []
    paths.log(0).write_bytes(b"a\nb\nhal")
    assert list(follower.lines()) == ["master 0    | a", "master 0    | b"]
    with paths.log(0).open("ab") as file:
        file.write(b"f\nrest")
    paths.log(1).write_bytes(b"other\n")
    assert list(follower.lines()) == ["master 0    | half", "trainer-1 1 | other"]
    assert list(follower.lines(end=True)) == ["master 0    | rest"]
    assert list(follower.lines(end=True)) == []


def test_what_was_handed_out_must_not_be_again_when_other_ranks_are_followed(tmp_path):
    paths = JobPaths(tmp_path)
    paths.logs.mkdir()
    for rank in range(2):
        paths.log(rank).write_text(f"of {rank}\n")
    follower = Follower(paths, {0: "a ", 1: "b "})
    assert list(follower.lines()) == ["a of 0", "b of 1"]
    follower.follow({1: "c "})
    for rank in range(2):
        with paths.log(rank).open("a") as file:
            file.write("more\n")
    assert list(follower.lines()) == ["c more"]
    follower.follow({0: "a ", 1: "b "})
    assert list(follower.lines()) == ["a more"]


def test_what_was_written_before_must_be_left_out_but_for_the_last_lines(tmp_path):
    paths = JobPaths(tmp_path)
    paths.logs.mkdir()
    paths.log(0).write_text("".join(f"line {number}\n" for number in range(1000)))
    paths.log(1).write_text("short\n")
    follower = Follower(paths, {0: "", 1: ""})
    follower.skip(last=20)
    assert list(follower.lines()) == ["line 998", "line 999", "short"]


def test_marks_of_generations_must_be_left_out_where_somebody_else_tells_of_them(tmp_path):
    paths = JobPaths(tmp_path)
    paths.logs.mkdir()
    paths.log(0).write_bytes(b"a\n[node] generation 1\nb\n")
    assert list(Follower(paths, {0: ""}).lines()) == ["a", "[node] generation 1", "b"]
    assert list(Follower(paths, {0: ""}, marks=False).lines()) == ["a", "b"]


def test_the_tail_must_be_the_last_lines_of_a_long_log(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"{i}\n" for i in range(100_000)))
    text = tail(path)
    assert len(text) < 1 << 16
    assert last_words(text, 0, 2) == ["99998", "99999"]
    assert tail(tmp_path / "none") == ""
