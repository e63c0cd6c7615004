"""`logs` of a job that has written lines to make it costly."""

import pytest
from support.commanded import end, supervised
from support.memory import peak

from orchestrate.files.lines import BLOCK
from orchestrate.record import logs


def test_a_search_that_takes_long_must_be_given_up_for_that_line(do, paths, monkeypatch):
    monkeypatch.setattr("orchestrate.cli.commands.logs.SEARCH_SECONDS", 0.05)
    paths.log(0).write_text("loss 1 acc 2\n" + "loss" * (1 << 17) + "\nloss 3 acc 4\n")
    with supervised(paths.root):
        code, lines, messages = do("logs", "a-1", "--rank", "0", "--grep", "loss.*acc")
    assert (code, lines) == (0, ["loss 1 acc 2", "loss 3 acc 4"])
    assert messages == ["warning: a search in the output of rank 0 took too long, and was given up"]


def test_a_tail_of_very_long_lines_must_have_fewer_of_them(do, paths, monkeypatch):
    monkeypatch.setattr("orchestrate.cli.commands.logs.MAX_TAIL", 425)
    paths.log(0).write_text("".join(f"{number} 23456789\n" for number in range(5)))
    with supervised(paths.root):
        assert do("logs", "a-1", "--rank", "0", "--tail", "5")[1] == ["3 23456789", "4 23456789"]


def test_a_tail_of_many_empty_lines_must_have_fewer_of_them(do, paths, monkeypatch):
    monkeypatch.setattr("orchestrate.cli.commands.logs.MAX_TAIL", 1 << 20)
    paths.log(0).write_text("\n" * (1 << 17))
    end(paths)
    (code, lines, _), most = peak(lambda: do("logs", "a-1", "--rank", "0", "--tail", "999999"))
    assert code == 0 and 0 < len(lines) < 1 << 13 and most < 8 << 20


@pytest.mark.parametrize("last", ["", "the last"])
@pytest.mark.parametrize("before", [0, 1, BLOCK // 8 - 1, BLOCK // 8, 40_000])
@pytest.mark.parametrize("count", [0, 1, 2, BLOCK // 8, 50_000])
def test_a_tail_must_be_read_from_the_end_of_the_log(do, paths, monkeypatch, last, before, count):
    read, clean = [], logs.clean
    monkeypatch.setattr(logs, "clean", lambda line, *_: (read.append(line), clean(line))[1])
    lines = [f"{number:7}" for number in range(before)] + ["a", "b"] + [last] * bool(last)
    paths.log(0).write_text("\n".join(lines) + "\n" * (not last))
    end(paths)
    shown = do("logs", "a-1", "--rank", "0", "--tail", str(count))
    assert shown == (0, lines[max(0, len(lines) - count) :], [])
    assert len(read) <= count + 1


def test_a_tail_of_a_log_with_a_hole_must_not_read_all_of_it(do, paths):
    with paths.log(0).open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"\nlast\n")
    end(paths)
    code, lines, _ = do("logs", "a-1", "--rank", "0", "--tail", "5")
    assert code == 0 and lines[-1] == "last"
