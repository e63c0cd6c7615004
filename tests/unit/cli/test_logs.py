"""`logs` of a job that has written lines to make it costly."""

from support.commanded import supervised


def test_a_search_that_takes_long_must_be_given_up_for_that_line(do, paths, monkeypatch):
    monkeypatch.setattr("orchestrate.cli.commands.logs.SEARCH_SECONDS", 0.05)
    paths.log(0).write_text("loss 1 acc 2\n" + "loss" * (1 << 17) + "\nloss 3 acc 4\n")
    with supervised(paths.root):
        code, lines, messages = do("logs", "a-1", "--rank", "0", "--grep", "loss.*acc")
    assert (code, lines) == (0, ["loss 1 acc 2", "loss 3 acc 4"])
    assert messages == ["warning: a search in the output of rank 0 took too long, and was given up"]


def test_a_tail_of_very_long_lines_must_have_fewer_of_them(do, paths, monkeypatch):
    monkeypatch.setattr("orchestrate.cli.commands.logs.MAX_TAIL", 25)
    paths.log(0).write_text("".join(f"{number} 23456789\n" for number in range(5)))
    with supervised(paths.root):
        assert do("logs", "a-1", "--rank", "0", "--tail", "5")[1] == ["3 23456789", "4 23456789"]
