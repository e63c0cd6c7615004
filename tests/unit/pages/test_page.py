"""The page about a job: when it is there, and how much of a long job it shows."""

import dataclasses
import re
from pathlib import Path

import pytest
from jinja2.bccache import bc_magic
from support.commanded import Whole, create, supervise
from support.optional import not_none

from orchestrate.host import records, writable
from orchestrate.pages.job import load
from orchestrate.pages.page import MAX_VALUE, TEMPLATES, page
from orchestrate.pages.spans import Moment, Span
from orchestrate.record.outcomes import WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec


def test_the_page_must_be_there_when_the_job_has_ended_for_others(tmp_path, monkeypatch):
    """`wait` and `attach` return as soon as report.json is there."""
    paths, write = create(JobPaths(tmp_path / "a-1"), JobSpec(trainers=0, command=("-m", "app.train"))), records.write
    pages: dict[str, bool] = {}

    def written(path: Path, text: str) -> None:
        pages[path.name] = paths.page.exists()
        write(path, text)

    monkeypatch.setattr(records, "write", written)
    supervise(paths, Whole([[WorkerExit(0, 0)]]))
    assert pages["report.json"]


@pytest.fixture
def failed(tmp_path):
    """A job whose only worker has failed."""
    paths = create(JobPaths(tmp_path / "a-1"), JobSpec(trainers=0, max_restarts=0, command=("-m", "app.train")))
    supervise(paths, Whole([[WorkerExit(0, 1)]]))
    return load(paths)


def test_the_page_of_a_long_job_must_show_the_first_failures_and_the_last_events(failed):
    count = 150
    failures = [{"summary": f"failure-{number}", "last_lines": [], "hint": ""} for number in range(count)]
    report = failed.report | {"failures": failures, "root_cause": None, "final_metrics": {"loss": [12345] * 20}}
    spans = [Span("working", float(number), number + 1.0, number, f"phase-{number}") for number in range(count)]
    moments = [Moment("other", (float(number),), f"event-{number}") for number in range(count)]
    text = page([dataclasses.replace(failed, report=report, spans=spans, moments=moments)], [""])
    for what, first in (("failure", 0), ("phase", 0), ("event", 50)):
        assert re.findall(rf"\b{what}-([0-9]+)", text) == [str(first + number) for number in range(100)]
    assert "and 50 more<" in text and "50 earlier ones are in events.jsonl" in text
    (value,) = re.findall(">(\\[12345, .*)</td>", text)
    assert len(value) == MAX_VALUE and value.endswith("…")


def test_last_values_must_be_shown_also_if_they_are_not_finite(failed):
    report = failed.report | {"final_metrics": {"loss": "NaN", "best": 0.5, "none": None, "phase": "train"}}
    text = page([dataclasses.replace(failed, report=report)], [""])
    assert ">NaN<" in text and ">0.5<" in text and ">train<" not in text and ">null<" in text


def test_control_characters_must_not_be_on_the_page(failed):
    moments = [Moment("other", (0.0,), "a\x00b\x1b[2Jc\u202ed\u2066e\ud800f\x7fg")]
    assert "a�b�[2Jc�d�e�f�g" in page([dataclasses.replace(failed, moments=moments)], [""])


@pytest.mark.parametrize("damaged", [b"", b"no template", bc_magic + b"no pickle", "cut"])
def test_a_damaged_template_in_the_cache_must_be_compiled_again(failed, tmp_path, monkeypatch, damaged):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    not_none(TEMPLATES.cache).clear()
    whole = page([failed], [""])
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if damaged == "cut" else damaged)
    not_none(TEMPLATES.cache).clear()
    assert page([failed], [""]) == whole


def test_a_template_that_a_job_could_have_put_into_the_cache_must_not_be_executed(failed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "scratch"))
    not_none(TEMPLATES.cache).clear()
    page([failed], [""])
    kept = {path: path.stat() for path in (tmp_path / "scratch").rglob("*") if path.is_file()}
    writable.note([tmp_path / "scratch"])
    for path in kept:
        path.write_bytes(bc_magic)
    not_none(TEMPLATES.cache).clear()
    page([failed], [""])
    assert kept and all(path.read_bytes() == bc_magic for path in kept)  # neither read nor written
