"""What pages read of a job: its settings, its machine, and the metrics that its script has only printed."""

import dataclasses
import os
import re
import shutil

import pytest
from support.commanded import Whole, create, end, supervise
from support.optional import not_none
from support.page import Page
from support.scripted import ALL_WELL, KILLED

from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.folder import MAX_FILE
from orchestrate.pages.job import curves_of, load
from orchestrate.pages.page import write
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(trainers=2, grace=0.01, command=("-m", "app", "--name", "it's"), env={"API_TOKEN": "hunter2000"})


def finished(paths: JobPaths, spec: JobSpec = SPEC) -> JobPaths:
    supervise(create(paths, spec), Whole([ALL_WELL]))
    return paths


def test_settings_command_and_machine_must_be_those_of_the_job_without_secrets(tmp_path):
    spec = dataclasses.replace(SPEC, command=(*SPEC.command, "hunter2000"), before=("echo", "hunter2000" + " x" * 60))
    paths = finished(JobPaths(tmp_path / "a-1"), spec)
    found = load(paths)
    assert found.command == "-m app --name 'it'\"'\"'s' '***'" and found.machine == "Docker Engine 26.1.5, 8 cores"
    assert (found.name, found.axis) == ("a-1", "order in metrics.jsonl")
    assert found.settings == {
        **{"trainers": "2", "grace": "0.01", "env": "{API_TOKEN: '***'}"},
        "before": f"[echo, '***{' x' * 60}']",
    }
    plan = run_dir.load_for_display(paths)[1]
    inventory = dataclasses.replace(plan.inventory, memory=8 << 30)
    run_dir.keep(paths, dataclasses.replace(plan, gpus=("GPU-a", "GPU-b"), inventory=inventory), spec)
    paths.patch.write_text("+x\n")
    assert load(paths).machine == "Docker Engine 26.1.5, 8 cores, 2 GPUs, 8 GiB of memory"
    assert (found.patched, load(paths).patched) == (False, True)


def test_steps_that_were_repeated_after_a_restart_must_be_counted_and_the_failure_be_listed(tmp_path):
    paths = create(JobPaths(tmp_path / "a-1"), SPEC)
    (paths.shared / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4, 3, 4, 5)))
    supervise(paths, Whole([KILLED], [ALL_WELL]))
    found = load(paths)
    assert found.progress.repeated == 2 and [moment.kind for moment in found.moments] == ["trouble", "other"]


def test_damaged_events_must_be_an_error_unless_the_job_is_a_copy(tmp_path):
    paths = finished(JobPaths(tmp_path / "a-1"))
    assert load(paths).spans
    paths.events.write_text('{"event": "workers_started", "seconds": NaN}\n')
    copy = JobPaths(shutil.copytree(paths.root, tmp_path / "copied" / "a-1", symlinks=True))
    with pytest.raises(UsageError, match=r"events\.jsonl"):
        load(paths)
    assert load(copy).spans == []
    os.truncate(copy.events, MAX_FILE + 1)
    with pytest.raises(UsageError, match="larger than 64 MiB"):  # not read as a whole, as it may be of any size
        run_dir.history(copy)


def test_links_of_a_comparison_must_lead_to_the_pages_that_are_there(tmp_path):
    jobs = [finished(JobPaths(tmp_path / "my runs#1" / name)) for name in ("a-1", "b-2")]
    write(jobs[1:], jobs[1].page)
    jobs[0].page.unlink(missing_ok=True)
    write(jobs, tmp_path / "report.html")
    assert Page((tmp_path / "report.html").read_text()).references() == {"my%20runs%231/b-2/report.html"}


def test_the_page_of_a_job_that_is_about_to_end_must_be_made_from_its_report(tmp_path):
    paths = finished(JobPaths(tmp_path / "a-1"))
    write([paths], paths.page, not_none(run_dir.ended(paths)) | {"world_size": 77})  # not from an earlier one
    assert "77 workers" in paths.page.read_text()


def test_a_page_that_cannot_be_made_must_be_an_error_that_says_why(paths):
    with pytest.raises(UsageError, match="a-1 has not ended") as error:
        write([paths], paths.page)
    assert error.value.hint == "python -m orchestrate attach a-1"
    end(paths)  # with a report in which much is missing
    with pytest.raises(OrchestrateError, match=re.escape(f"cannot write {paths.page}: ")):
        write([paths], paths.page)
    assert not paths.page.exists()


FLAT = [(30, 2), (9, 2), (30, 1), (9, 1), (30, 1)]  # a value that each epoch has at its end
BAR = " 10%|# | {}/30 [00:01<00:09, 3.00it/s, loss={}]"


MINE = {"L": "L: ([0-9.]+)", "step": r"it (\d+)"}


@pytest.mark.parametrize(
    ("patterns", "log", "curves", "axis"),
    [
        (MINE, "it 3 L: 2.5\nit 5 L: 1.5", {"L": [(3, 2.5), (5, 1.5)]}, "step"),
        ({}, "step 3 loss 2.5\n", {}, "order in metrics.jsonl"),
        ({}, "\r".join([BAR.format(3, 2), BAR.format(4, 2), BAR.format(1, 1)]), {"loss": [(3, 2), (31, 1)]}, "step"),
        ({}, "\r".join(BAR.format(*state) for state in FLAT), {"loss": [(30, 2), (60, 1), (90, 1)]}, "step"),
        ({}, "step 1/3 loss 2\nstep 2/3 loss 1\nstep 3/3 loss 1\n", {"loss": [(1, 2), (2, 1), (3, 1)]}, "step"),
        ({}, "{'hunter2000': 2}\n{'hunter2000': 1}\n\xff", {"***": [(1, 2), (2, 1)]}, "order in the log"),
    ],
    ids=[
        "patterns of the job",
        "a single point",
        "the states of a bar",
        "a bar with a flat end",
        "a flat end",
        "a secret",
    ],
)
def test_curves_of_a_script_that_only_prints_must_be_those_of_its_output(paths, patterns, log, curves, axis):
    spec = dataclasses.replace(SPEC, metrics=patterns)
    assert curves_of(paths, spec, 1)[1:] == ({}, "order in metrics.jsonl")
    paths.log(0).write_text(log, "latin-1")
    found, *drawn = curves_of(paths, spec, 1)
    assert drawn == [curves, axis] and found.done == 0  # goodput counts only what is in metrics.jsonl


def test_steps_that_were_printed_before_a_restart_and_not_yet_again_must_not_be_drawn(paths):
    paths.log(0).write_text("it 3 L: 2.5\nit 4 L: 1.5\nit 5 L: 1.5\nit 4 L: 0.5\n")
    curve = [(3, 2.5), (4, 0.5)]
    assert curves_of(paths, dataclasses.replace(SPEC, metrics=MINE), 2)[1:] == ({"L": curve}, "step")


def test_a_bar_that_goes_back_in_a_restart_must_not_count_as_another_epoch(paths):
    bars = [
        "\r".join(BAR.format(step, loss) for step, loss in part) for part in ([(9, 3), (20, 2)], [(19, 5), (30, 1)])
    ]
    paths.log(0).write_text("\n[node] generation 1\n".join(bars))
    assert curves_of(paths, SPEC, 2)[1:] == ({"loss": [(9, 3), (19, 5), (30, 1)]}, "step")


def test_curves_of_metrics_jsonl_must_be_preferred_to_as_many_points_in_the_output(paths):
    (paths.shared / "metrics.jsonl").write_text('{"hunter2000": 2}\n{"hunter2000": 1}\n')
    paths.log(0).write_text("step 3 loss 2.5\nstep 4 loss 2.5\n")
    assert curves_of(paths, SPEC, 1)[1:] == ({"***": [(1, 2), (2, 1)]}, "order in metrics.jsonl")
    (paths.shared / "metrics.jsonl").write_text('{"step": 4, "acc": 2}\n{"step": 9, "acc": 1}\n')
    assert curves_of(paths, SPEC, 1)[1:] == ({"acc": [(4, 2), (9, 1)]}, "step")


def test_logs_that_take_long_to_search_must_be_searched_only_in_part(paths, monkeypatch):
    paths.log(0).write_text("{'loss': 2}\n{'loss': 1}\n" + "{1}\r" * 100)
    assert curves_of(paths, JobSpec(), 1)[1:] == ({"loss": [(1, 2), (2, 1)]}, "order in the log")
    monkeypatch.setattr("orchestrate.pages.job.MAX_SECONDS", 0.0)
    assert curves_of(paths, JobSpec(), 1)[1] == {}


def test_rows_that_take_a_byte_or_two_must_not_all_be_parsed(paths, monkeypatch):
    monkeypatch.setattr("orchestrate.pages.job.MAX_ROWS", 100)
    rows = [f'{{"step": {step}, "loss": {step}}}' for step in range(50_000)]
    paths.metrics.write_text("{}\n" * 1_000_000 + "\n".join(rows) + "\n")
    _, curves, axis = curves_of(paths, SPEC, 1)
    assert axis == "step" and min(step for step, _ in curves["loss"]) > 40_000
