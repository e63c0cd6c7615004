"""`resume` and `run --resume`: which jobs continue and how; on a scripted engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commanded import supervised
from support.methods import after
from support.optional import not_none
from support.scripted import ALL_WELL, KILLED

from orchestrate.host import records
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths


@pytest.fixture
def code(tmp_path, monkeypatch):
    """The current folder, which `resume` may change."""
    (folder := tmp_path / "code").mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def failed(do, engine, runs, code) -> JobPaths:
    """A job that has failed."""
    engine.generations = [[KILLED]]
    assert do("run", "--trainers", "2", "--max-restarts", "0", "--", "-m", "app.train")[0] == 1
    engine.calls.clear()
    return JobPaths(next(runs.iterdir()))


def report(paths: JobPaths, **changes: object) -> None:
    records.write(paths.report, json.dumps({**not_none(run_dir.ended(paths)), **changes}))


def test_a_failed_job_must_continue_in_its_code_folder_as_the_next_generation(do, engine, failed, code, monkeypatch):
    seen: dict[str, Any] = {}

    def look() -> None:
        seen.update(ended=failed.report.exists() or failed.page.exists(), key=not_none(records.find(failed.root)).key)
        files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
        seen.update(opened=files.count(failed.events))  # by the supervisor
        failed.log(0).write_text("before\nafter\n")

    failed.log(0).write_text("before\n")
    monkeypatch.chdir(code.parent)
    engine.generations, engine.start = [[ALL_WELL]], after(engine.start, look)
    status, out, err = do("resume")
    assert (status, out) == (0, ["[0] after"]) and err[0].startswith(f"job {failed.root.name}: 3 nodes")
    assert engine.calls == ["prepare", "up", "start", "down"]
    assert seen["ended"] is False and len(seen["key"]) == 64 and seen["opened"] == 1
    plan = run_dir.load(failed)[1]
    assert (plan.generation, plan.placement.code, plan.workers[0].env["MASTER_PORT"]) == (1, str(code), "29501")
    assert not_none(records.find(failed.root)).key == "" and failed.page.exists()


def test_a_job_that_may_still_run_must_not_be_resumed(do, engine, failed):
    name = failed.root.name
    report(failed, left_behind="container x")
    hint = f"hint: python -m orchestrate stop {name}"
    engine.things = ["container x"]
    assert do("resume", name) == (2, [], [f"error: not all nodes of {name} were removed", hint])
    failed.report.unlink()
    hint = f"hint: python -m orchestrate attach {name}"
    assert do("resume", name) == (2, [], [f"error: {name} has not ended: it has no supervisor", hint])
    with supervised(failed.root) as other:
        error = f"error: {name} has not ended: it is supervised by process {other.pid}"
        assert do("resume", name) == (2, [], [error, hint])
    assert engine.calls == []


def test_a_job_of_which_nothing_is_left_must_be_resumed_whatever_its_report_says(do, engine, failed):
    report(failed, left_behind="container x")  # which a user has removed, for example
    engine.generations = [[ALL_WELL]]
    assert do("resume", failed.root.name)[0] == 0


def test_a_job_whose_code_folder_is_gone_must_not_be_resumed(do, engine, failed, code, monkeypatch):
    monkeypatch.chdir(code.parent)
    code.rmdir()
    error = f"error: cannot enter the job's code folder {code}: No such file or directory"
    assert do("resume") == (2, [], [error, "hint: restore the folder (a link is not followed), or start a new job"])
    assert engine.calls == [] and failed.report.exists()


def test_a_link_in_place_of_the_code_folder_must_not_be_followed(do, engine, failed, code, monkeypatch):
    """The job may have made it, if it could write to the folder above."""
    monkeypatch.chdir(code.parent)
    code.rename(code.with_name("other"))
    code.symlink_to("other")
    error = f"error: cannot enter the job's code folder {code}: Not a directory"
    assert do("resume") == (2, [], [error, "hint: restore the folder (a link is not followed), or start a new job"])
    assert engine.calls == []


def test_a_job_that_is_removed_meanwhile_must_be_named(do, engine, failed):
    engine.prepare = lambda *_: run_dir.remove(failed)
    hint = "hint: python -m orchestrate ps --all"
    assert do("resume")[::2] == (2, [f"error: {failed.root.name} was removed meanwhile", hint])


def test_a_job_that_cannot_be_reopened_must_stay_ended(do, failed):
    failed.page.unlink()
    (failed.page / "folder").mkdir(parents=True)
    assert do("resume")[0] == 1 and run_dir.ended(failed)


@pytest.mark.parametrize(
    "arguments", [["--trainers", "3"], ["--set", "grace=1s"], ["-e", "A=b"], ["job.yaml"], ["--", "train.py"]]
)
def test_settings_must_not_be_ignored_when_a_job_is_resumed(do, engine, failed, arguments):
    error = "error: --resume uses the script and the settings of the job"
    assert do("run", "--resume", "latest", *arguments)[::2] == (2, [error, "hint: remove all other options"])
    assert engine.calls == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--set", "lr=1"], "error: resume: 'lr=1' cannot be set: "),
        (["--max-restarts", "5"], "error: resume: unknown option '--max-restarts'"),
    ],
)
def test_a_setting_must_be_refused_by_name_when_a_job_is_resumed(do, engine, failed, arguments, error):
    code, _, lines = do("resume", *arguments)
    assert code == 2 and lines[0].startswith(error) and "start a new" in lines[1] and engine.calls == []


@pytest.mark.parametrize(
    ("facts", "hinted"),
    [
        ({"checkpoints": ["step-1"]}, True),
        ({"checkpoints": []}, False),
        ({"checkpoints": ["step-1"], "outcome": "succeeded"}, False),
        ({"checkpoints": ["step-1"], "left_behind": "container x"}, False),
    ],
)
def test_resume_must_be_suggested_if_a_job_can_continue_from_a_checkpoint(do, failed, facts, hinted):
    report(failed, **facts)
    hint = f"hint: python -m orchestrate resume {failed.root} continues from its last checkpoint"
    assert (hint in do("attach")[2]) is hinted


def test_a_job_that_is_named_twice_must_have_one_page(do, failed, runs):
    failed.page.unlink()
    assert do("report", failed.root.name, "latest") == (0, [str(failed.page)], [])
    assert failed.page.exists() and not (runs / "report.html").exists()
