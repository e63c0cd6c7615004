"""Metrics as TensorBoard events."""

import json
import shutil
import threading

import pytest
from support.tensorboard import curves
from support.waiting import eventually

from orchestrate.record.progress import Progress
from orchestrate.spec.redact import Mask
from orchestrate.supervise.tensorboard import PATTERN, Board


def finished(board: Board) -> None:
    """Write all that is left, as at the end of a job."""
    with board:
        pass


def write(paths, *rows) -> None:
    with (paths.shared / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_rows_must_become_curves_and_repeated_steps_must_replace_earlier_ones(paths):
    board = Board(paths, str)
    row = {"name": "x", "flag": True, "total_steps": 90}
    write(paths, *({"step": step, "loss": 10.0 - step, **row} for step in range(1, 6)))
    board.catch_up()
    write(paths, *({"step": step, "loss": 20.0 - step} for step in range(3, 5)), {"loss": 1.5})
    finished(board)
    assert curves(paths.root) == {"loss": [(1, 9.0), (2, 8.0), (3, 17.0), (4, 16.0), (5, 1.5)]}


def test_metrics_that_a_script_overwrites_must_be_read_from_the_start(paths):
    board = Board(paths, str)
    write(paths, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25})
    board.catch_up()
    paths.metrics.write_text('{"step": 3, "loss": 0.125}\n')
    finished(board)
    assert curves(paths.root) == {"loss": [(1, 0.5), (2, 0.25), (3, 0.125)]}


def test_output_that_comes_faster_than_it_is_written_must_not_fill_the_memory(paths):
    board = Board(paths, str)
    many = {f"a{number}": 0.5 for number in range(350)}  # as a line of 2000 characters can have
    for step in range(10_000):
        board.heard(Progress(step, metrics=many))
    sizes = [len(board.queue.get().metrics) for _ in range(board.queue.qsize())]
    assert len(sizes) > 1000 and sum(sizes) < 500_000


def test_the_last_metrics_of_a_job_must_be_written_at_its_end(paths):
    write(paths, {"step": 1, "loss": 0.5})
    with Board(paths, str) as board:
        eventually(lambda: board.file)  # it waits for more
        write(paths, {"step": 2, "loss": 0.25})
    assert curves(paths.root) == {"loss": [(1, 0.5), (2, 0.25)]}


@pytest.mark.parametrize("lost", [False, True])
def test_another_supervisor_must_continue(paths, lost):
    """With what was written meanwhile; if nothing says where that begins, with what comes then."""
    write(paths, {"step": 1, "loss": 0.5})
    finished(Board(paths, str))
    write(paths, {"step": 2, "loss": 0.25})
    if lost:
        paths.written_metrics.write_text("-x")
    board = Board(paths, str)
    write(paths, {"step": 3, "loss": 0.125})
    finished(board)
    found = [(1, 0.5), *([] if lost else [(2, 0.25)]), (3, 0.125)]
    assert sorted(curves(paths.root)["loss"]) == found  # files of one second come in any order


def test_the_output_must_count_only_without_metrics_of_the_script(paths):
    board = Board(paths, str)
    for loss in (0.5, 0.25):
        board.heard(Progress(7, 90, metrics={"loss": loss}, bar=True))
    board.catch_up()
    write(paths, {"step": 1, "acc": 0.75})
    board.heard(Progress(metrics={"loss": 0.125}))
    finished(board)
    assert curves(paths.root) == {"loss": [(7, 0.5), (8, 0.25)], "acc": [(1, 0.75)]}


def test_steps_of_bars_must_be_those_of_the_job_if_they_name_the_epoch(paths):
    def heard(*epochs: int) -> None:
        board = Board(paths, str)
        for epoch in epochs:
            board.heard(Progress(10, 10, metrics={"loss": 1 / (1 + epoch)}, bar=True, epoch=epoch))
            board.heard(Progress(metrics={"acc": 0.5}))
        finished(board)

    heard(0, 1, 2, 1)  # the gang was restarted
    assert curves(paths.root)["loss"] == [(10, 1.0), (20, 0.5)]
    heard(1)  # the job was resumed
    assert sorted(curves(paths.root)["loss"]) == [(10, 1.0), (20, 0.5)]


def test_full_bars_that_name_no_epoch_must_be_those_of_one_each(paths):
    board = Board(paths, str)
    for loss in (0.5, 0.25):
        board.heard(Progress(9, 9, metrics={"loss": loss}, bar=True))
    finished(board)
    assert curves(paths.root) == {"loss": [(9, 0.5), (18, 0.25)]}


def test_nothing_that_a_job_writes_must_do_harm(paths):
    board = Board(paths, Mask({"API_TOKEN": "hunter2000"}, ()))
    board.heard(Progress(1 << 70, metrics={"huge": 0.5}))
    board.catch_up()
    rows = [{"step": 1, f"metric {number}": number} for number in range(400)]
    (paths.shared / "metrics.jsonl").write_text('{"step": 1, "hunter2000": NaN, "x hunter2000": 1, "\\ud800": 2}\n')
    write(paths, {"y" * 300: 1}, {"step": -1, "big": 1e300}, {"step": 1e9, "text": "a"}, {"step": 1 << 70}, *rows)
    finished(board)
    found = curves(paths.root)
    assert (
        len(found) == 200
        and {"huge", "x ***", "?", "y" * 100} <= found.keys()
        and not any("hunter" in name for name in found)
    )


def test_a_job_without_metrics_must_have_no_events(paths):
    finished(Board(paths, str))
    assert not [*paths.root.glob(PATTERN)]


def test_events_that_cannot_be_written_must_be_given_up_without_harm(paths):
    shutil.rmtree(paths.root)
    paths.root.touch()  # in the way of the folder
    board = Board(paths, str)
    board.heard(Progress(1, metrics={"loss": 0.5}))
    finished(board)
    assert not board.works


def test_the_end_of_a_job_must_close_its_events(paths):
    before, board = threading.active_count(), Board(paths, str)
    write(paths, {"step": 1, "loss": 0.5})
    finished(board)
    assert threading.active_count() == before


def test_metrics_that_come_faster_than_they_are_written_must_be_left_out_and_not_keep_the_job_waiting(paths):
    rows = b'{"a":1}\n' * (1 << 17)
    paths.metrics.write_bytes(rows)
    board = Board(paths, str)
    board.catch_up(0.0)
    assert board.lines.offset == 0
    board.catch_up(0.001)
    assert 0 < board.lines.offset < len(rows) // 4
    paths.metrics.write_bytes(rows * 9)  # 9 MiB
    board.catch_up(0.001)
    assert board.lines.offset >= 1 << 20
    paths.metrics.unlink()
    finished(board)


def test_events_without_end_must_be_given_up(paths, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.tensorboard.MAX_FILE", 1000)
    write(paths, *({"step": step, "loss": 0.5} for step in range(100)))
    board = Board(paths, str)
    finished(board)
    assert not board.works
    (path,) = paths.root.glob(PATTERN)
    assert path.stat().st_mode & 0o777 == 0o600


def test_rows_after_a_line_that_is_longer_than_a_read_must_be_written(paths):
    write(paths, {"step": 1, "text": "x" * 300_000}, {"step": 2, "loss": 0.5})
    finished(Board(paths, str))
    assert curves(paths.root) == {"loss": [(2, 0.5)]}
