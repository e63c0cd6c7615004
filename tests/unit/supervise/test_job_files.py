"""Which files that a job writes count as progress, and which as a sign of life."""

import os

import pytest
from support.plans import HERE

from orchestrate.record import metrics
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress
from orchestrate.supervise.job_files import JobFiles


@pytest.fixture
def files(tmp_path):
    paths = JobPaths(tmp_path / "a-1")
    paths.create()
    return JobFiles(paths)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("checkpoints/step-1", True), ("checkpoints/.step-1.half", False), ("logs/rank-0.log", False), ("other", False)],
)
def test_only_a_complete_checkpoint_must_count_as_saved(files, name, counts):
    before = files.saved()
    (files.paths.root / name).write_text("x")
    assert (files.saved() != before) is counts


def test_a_checkpoint_that_is_saved_again_must_count_as_saved(files):
    path = files.paths.checkpoints / "last"
    path.write_text("one")
    before = files.saved()
    os.utime(path, ns=(0, 0))
    assert files.saved() != before


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("logs/rank-0.log", True),
        ("metrics.jsonl", True),
        ("checkpoints/step-1", True),
        ("events.jsonl", False),
        ("supervisor.log", False),
        ("orchestrate.log", False),
    ],
)
def test_only_files_that_workers_write_must_count_as_a_sign_of_life(files, name, counts):
    before = files.activity()
    (files.paths.root / name).write_text("x")
    assert (files.activity() != before) is counts


def test_metrics_that_a_script_overwrites_must_be_read_from_the_start(files):
    files.paths.metrics.write_text('{"step": 7, "loss": 0.5}\n')
    assert files.step() == 7
    files.paths.metrics.write_text('{"step": 8}\n')
    assert files.step() == 8


@pytest.mark.parametrize("name", ["logs/rank-0.log", "metrics.jsonl"])
def test_only_a_file_that_grows_must_count_as_a_sign_of_life(files, name):
    path = files.paths.root / name
    path.write_text("one")
    before = files.activity()
    assert files.activity() == before
    path.write_text("more")
    assert files.activity() != before


def test_the_highest_step_must_be_read_as_the_metrics_file_grows(files):
    assert files.step() == 0
    with files.paths.metrics.open("ab", buffering=0) as file:
        for text, step in [
            (b'{"step": 5}\n', 5),
            (b'{"step": 3}\n', 5),  # the script has restarted
            (b'{"loss": 0.5}\n{"step": "9"}\n[8]\nnonsense\n', 5),
            (b'{"step": 1', 5),
            (b'2, "loss": 1', 5),
            (b'.0}\n{"step": 4}\n{"step": 9223372036854775808}\n{"step": true}\n', 12),
        ]:
            file.write(text)
            assert files.step() == step
    assert files.step() == 12


def test_metrics_that_take_long_to_read_must_be_read_in_several_calls(files, monkeypatch):
    """Meanwhile, no one handles a request to stop."""
    files.paths.metrics.write_bytes(b"{}\n" * 100_000 + b'{"step": 7}\n' + b"\n" * 100_000 + b'{"step": 8}\n')
    monkeypatch.setattr("orchestrate.supervise.job_files.MAX_SECONDS", 0.0)
    assert files.step() == 0
    monkeypatch.undo()
    assert files.step() == 8


def test_a_line_of_metrics_that_is_too_long_must_be_ignored(files):
    files.paths.metrics.write_text('{"step": 1}\n' + '{"step": 2}'.ljust(metrics.MAX_LINE + 1) + '\n{"step": 0}\n')
    assert files.step() == 1 and files.metrics() == [{"step": 0}]


def test_the_last_part_of_long_metrics_must_be_read_from_its_first_complete_line(files, monkeypatch):
    monkeypatch.setattr("orchestrate.supervise.job_files.MAX_METRICS", 3 << 20)
    files.paths.metrics.write_text('{"old": 1}\n' + '{"cut": 1}'.ljust(4 << 20) + '\n{"step": 2}\n{"step": 3')
    assert files.metrics() == [{"step": 2}]
    files.paths.metrics.write_text("x" * (4 << 20))
    assert files.metrics() == []


def test_the_last_lines_of_a_worker_must_be_from_the_current_generation(files):
    files.paths.log(1).write_text("".join(f"old {i}\n" for i in range(20)) + "[node] generation 2\nnew\n")
    files.paths.log(0).write_text("".join(f"line {i}\n" for i in range(20)))
    assert files.last_lines(0) == [f"line {i}" for i in range(8, 20)]
    files.generation = 2
    assert files.last_lines(1) == ["new"]
    assert files.log(1) == files.paths.root / "logs" / "rank-1.log"
    assert files.text(1).endswith("\nnew")


def test_last_lines_must_contain_no_secrets(files):
    files.paths.log(0).write_text("the token is hunter2000\n")
    assert JobFiles(files.paths, lambda text: text.replace("hunter2000", "***")).last_lines(0) == ["the token is ***"]


def test_steps_in_the_output_of_rank_0_must_count_as_progress_but_not_those_of_bars(files):
    for step, bar in [(7, False), (3, False), (50, True)]:
        files.heard(Progress(step, metrics={"loss": 1 / step, "norm": float("inf")}, bar=bar))
    assert files.step() == 7 and files.metrics() == [{"step": 3, "loss": 0.02}]
    for _ in range(2):
        for number in range(200):
            files.heard(Progress(metrics={f"metric {number}": files.step() + number}))
    assert len(files.metrics()[0]) <= 100


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ([{"step": 1}, {"step": 25}, None, {"step": 11}, {"step": 20}], 25),  # continued from a checkpoint
        ([{"step": 98}, {"step": 99}, {"step": 1}], 0),  # of the second epoch
        ([{"step": 1, "epoch": 1}, {"step": 2, "epoch": 1}], 0),
        ([{"step": 1, "metrics": {"epoch": 1.0}}], 0),
    ],
)
def test_steps_must_count_as_those_of_the_job_until_they_start_again(files, lines, step):
    for line in lines:
        if line is None:
            files.begin(1)
        else:
            files.heard(Progress(**line, bar=True))
    assert files.step() == step


def test_settings_must_not_become_metrics_but_the_last_lines_may_be_printed_once(files):
    files.heard(Progress(metrics={"min_lr": 1e-4, "dropout_loss": 0.1, "loss": 3.0}))
    for loss in (2.0, 2.0, 1.0, 1.0, 1.0):
        files.heard(Progress(metrics={"loss": loss}))
    files.heard(Progress(metrics={"test_acc": 0.9}))
    assert files.has_progress() and files.metrics() == [{"loss": 1.0, "test_acc": 0.9}]
    files.begin(1)
    assert not files.has_progress()  # its workers may still import modules
    files.heard(Progress(step=1))
    assert files.has_progress()


def test_workers_that_ran_in_the_code_folder_itself_must_have_no_list_of_written_files(files):
    assert files.remove_unchanged_copies(HERE.placement) is None


def test_long_last_lines_must_be_truncated(files):
    files.paths.log(0).write_text("short\n" + "x" * 2000 + "\n" + "y" * 2001 + "\n")
    assert files.last_lines(0) == ["short", "x" * 2000, "y" * 1999 + "…"]


def test_the_fence_must_name_the_generation_and_whether_its_workers_may_start(files):
    files.fence(3)
    assert files.paths.fence.read_text() == "3\n"
    files.fence(3, over=True)
    assert files.paths.fence.read_text() == "3 over\n"


def test_the_fence_must_be_written_in_a_folder_that_a_worker_has_made_read_only(files):
    files.paths.shared.chmod(0o500)
    files.fence(3)
    assert files.paths.fence.read_text() == "3\n"
    assert files.paths.shared.stat().st_mode & 0o700 == 0o700  # root could write there anyway
