"""The job of Slurm to which a job was submitted."""

import pytest

from orchestrate.host import records
from orchestrate.record import slurm_job
from orchestrate.record.slurm_job import Batch


def test_only_the_number_that_this_account_has_recorded_must_count(paths):
    assert slurm_job.of(paths) is None
    slurm_job.keep(paths, "41")
    assert slurm_job.of(paths) == Batch("41", paths) and str(slurm_job.of(paths)) == "job 41 of Slurm"
    good = paths.batch.read_text()
    for text in (good.replace("41", "42"), "41\n", "41", "41 ü", "", "x y", f"-1 {good[3:]}", "\ud800 x", "9" * 9999):
        paths.batch.write_text(text, errors="surrogatepass")
        assert slurm_job.of(paths) is None
    paths.batch.write_text(good)
    records.forget(paths.root)
    assert slurm_job.of(paths) is None


def test_a_link_must_not_be_followed(paths, tmp_path):
    slurm_job.keep(paths, "41")
    paths.batch.rename(tmp_path / "elsewhere")
    paths.batch.symlink_to(tmp_path / "elsewhere")
    assert slurm_job.of(paths) is None


def test_a_job_that_is_submitted_again_must_not_be_asked_to_stop_still(paths):
    paths.stop_asked.touch()
    slurm_job.keep(paths, "42")
    assert not paths.stop_asked.exists()


@pytest.mark.parametrize(
    ("known", "leaves"), [({}, False), ({"PreemptTime": "None"}, False), ({"Restarts": "x"}, False)]
)
def test_a_job_that_neither_makes_way_nor_was_requeued_must_not_count_as_leaving(known, leaves):
    assert slurm_job.slurm.is_leaving(known) is leaves


def test_a_job_that_slurm_has_put_back_must_count_as_leaving(monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not slurm_job.slurm.is_leaving({"Restarts": "1"}) and slurm_job.slurm.is_leaving({"Restarts": "2"})
    assert slurm_job.slurm.is_leaving({"PreemptTime": "2026-11-28T12:00:00"})
