"""Run directories that are not ours must be taken for a job by no command, whatever is in them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commanded import create, supervised
from test_commands import end, runs_elsewhere

from orchestrate.cli import JOB_COMMANDS
from orchestrate.errors import UsageError
from orchestrate.job import load
from orchestrate.paths import JobPaths

ROOT = os.geteuid() == 0


def linked(path: Path) -> None:
    """Another job of ours, by a link."""
    path.rename(path.parent / "far")
    path.symlink_to(path.parent / "far")


def writable(path: Path) -> None:
    path.chmod(0o777)


def of_a_group(path: Path) -> None:
    path.chmod(0o770)


def of_another_user(path: Path) -> None:
    if not ROOT:
        pytest.skip("must be root to make a folder of another user")
    os.chown(path, 65534, 65534)


FORGED = {
    linked: "it is a link",
    writable: "other users can write to it",
    of_a_group: "other users can write to it",
    of_another_user: "it belongs to nobody (user 65534)",
}


@pytest.mark.parametrize("found", ["by its folder", "by its nodes"])
@pytest.mark.parametrize("command", JOB_COMMANDS)
@pytest.mark.parametrize("forge", FORGED)
def test_no_command_must_act_on_a_run_directory_that_is_not_ours(
    do, paths, command: str, forge: Callable[[Path], None], found: str
):
    end(paths)
    forge(paths.root)
    before = sorted(os.listdir(paths.root))
    if found == "by its nodes":
        do.engine.states = [runs_elsewhere(paths.root)]
    with supervised(paths.root) as other:
        code, out, err = do(command, "a-1")
        assert (code, out) == (2, [])
        assert err == [
            f"error: {paths.root} is not a run directory of yours: {FORGED[forge]}",
            "hint: python -m orchestrate ps lists your jobs",
        ]
        assert other.poll() is None and do.engine.calls == []
    assert {*before, "supervisor.lock"} == {*os.listdir(paths.root)}
    with pytest.raises(UsageError, match="no job that can go on"):
        load(paths)


@pytest.mark.parametrize("forge", FORGED)
def test_a_run_directory_that_is_not_ours_must_be_listed_and_matched_nowhere(do, paths, forge):
    forge(create(JobPaths(paths.root.parent / "a-12")).root)
    with supervised(paths.root.parent / "a-12"):
        assert do("ps") == (0, ["NAME  ENGINE  NODES  STATE  RUN"], [])
    assert do("rm", "a", "--dry-run") == (0, [f"folder {paths.root}"], [])


def test_a_job_that_lives_must_be_found_though_a_link_has_its_name(do, tmp_path):
    far = create(JobPaths(tmp_path / "far" / "a-1"))
    far.log(0).write_text("hello\n")
    end(far)
    (tmp_path / "a-1").symlink_to(far.root)
    do.engine.states = [runs_elsewhere(far.root)]
    assert do("logs", "a-1") == (0, ["master 0    | hello"], [])
    assert do("wait", "a-1")[0] == 0


def test_a_job_whose_run_directory_is_gone_must_still_be_stopped(do, tmp_path):
    do.engine.states, do.engine.things = [runs_elsewhere(tmp_path / "a-1")], ["container a-1-master"]
    assert do("stop", "a-1")[0] == 0 and do.engine.things == []


@pytest.mark.parametrize("forge", [linked, writable])
def test_no_files_of_a_cluster_must_be_moved_to_a_run_directory_that_is_not_ours(do, tmp_path, forge):
    cluster = create(JobPaths(tmp_path / "c-1"), cluster="c-1")
    job = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    forge(job.root)
    code, _, err = do("down", "c-1")
    why = f"{job.root} is not a run directory of yours: {FORGED[forge]}"
    assert (code, err[0]) == (1, f"error: c-1 is down, but the files of a-1 are lost: {why}")
    assert job.shared.is_symlink() and not cluster.root.exists()
