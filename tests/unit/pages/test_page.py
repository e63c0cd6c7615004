"""The page about a job must be there when the job has ended for others."""

import pytest

from orchestrate.files.paths import JobPaths
from orchestrate.supervise import launch
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.stores import Stores


def test_the_page_must_be_there_when_the_job_has_ended_for_others(tmp_path, monkeypatch):
    """`wait` and `attach` return as soon as report.json is there."""
    order: list[str] = []
    monkeypatch.setattr(launch, "_write_page", lambda paths, data: order.append("page"))
    monkeypatch.setattr(launch.records, "write", lambda path, text: order.append(path.name))
    paths = JobPaths(tmp_path / "run")
    paths.create()
    launch._finish(JobFiles(paths), {"left_behind": "nodes"}, Stores(), pytest.fail)
    assert order == ["page", "report.json"]
