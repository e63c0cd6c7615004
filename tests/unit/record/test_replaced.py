"""A run directory in whose place a project puts a link, as `git pull` can: nothing is written through it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.commanded import create

from orchestrate.clock import SYSTEM
from orchestrate.engines import sockets
from orchestrate.engines.slurm.session import SlurmSession
from orchestrate.errors import EngineError
from orchestrate.host import records
from orchestrate.record import slurm_job, stacks, usage
from orchestrate.record.paths import JobPaths
from orchestrate.record.progress import Progress
from orchestrate.record.times import TimesWriter
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.tensorboard import Board

NAMES = ["report.json", "report.html", "plan.json", "usage.json", "stacks.json", "copied.json", "stop.asked", "slurm"]
NAMES += [".metrics", "times.jsonl"]


@pytest.fixture
def paths(tmp_path: Path) -> JobPaths:
    """A job whose run directory has become a link to a folder of the user."""
    paths = create(JobPaths(tmp_path / "runs" / "job-1"))
    paths.sockets.mkdir()
    victim = tmp_path / "victim"
    (victim / "sockets" / "deep").mkdir(parents=True)
    (victim / "secrets").mkdir()
    for name in (*NAMES, "sockets/deep/mine", "secrets/mine"):
        (victim / name).write_text("mine")
    (victim / "sockets").chmod(0o755)
    paths.root.rename(tmp_path / "moved")
    paths.root.symlink_to(victim)
    return paths


def slurm_down(paths: JobPaths) -> None:
    """End the nodes of a job of Slurm."""
    session = SlurmSession.__new__(SlurmSession)
    session.paths, session.nodes, session.steps, session.clock = paths, {}, [], SYSTEM
    session.clients = type("Clients", (), {"connect": lambda *_: None, "broadcast": lambda *_: None})()
    session.down(0)


def written(board: Board) -> None:
    """Write metrics."""
    board.heard(Progress(1, metrics={"loss": 0.5}))
    board.catch_up()


WAYS: dict[str, Callable[[JobPaths], object]] = {
    "report": lambda paths: records.write(paths.report, "{}"),
    "removed report": lambda paths: records.remove(paths.report),
    "page": lambda paths: records.put(paths.page, "<html>"),
    "usage": lambda paths: usage.write(paths, {}),
    "removed usage": usage.remove,
    "question for usage": usage.ask,
    "question for stacks": stacks.ask,
    "stacks": lambda paths: stacks.answer(paths, {}),
    "removed stacks": stacks.remove,
    "copied files": lambda paths: JobFiles(paths).keep_copied({}),
    "number of Slurm": lambda paths: slurm_job.keep(paths, "1"),
    "TensorBoard": lambda paths: written(Board(paths, str)),
    "times": lambda paths: TimesWriter(paths.times).note({0: 1}),
    "sockets": lambda paths: sockets.share(paths.sockets, "1:1"),
    "sockets of a cluster": lambda paths: sockets.tidy(paths.sockets, set()),
    "removed sockets": lambda paths: sockets.unshare(paths.sockets),
    "nodes of Slurm": slurm_down,
}


def everything(folder: Path) -> dict[Path, tuple[int, int, str]]:
    """The mode, the owner and the text of each file and folder."""
    found = [folder, *folder.rglob("*")]
    states = [(path, path.stat(), path.read_text() if path.is_file() else "") for path in found]
    return {path: (status.st_mode, status.st_uid, text) for path, status, text in states}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_must_be_written_through_a_link_in_place_of_a_run_directory(paths, tmp_path, way):
    before = everything(tmp_path / "victim")
    try:
        WAYS[way](paths)
    except (OSError, EngineError) as error:
        assert str(paths.root) in str(error)
    assert everything(tmp_path / "victim") == before


def test_a_job_whose_cluster_was_replaced_must_count_as_removed(tmp_path):
    JobPaths(tmp_path / "up-1").create_cluster()
    files = JobFiles(create(JobPaths(tmp_path / "job-1"), cluster="up-1"))
    assert not files.gone()
    (tmp_path / "up-1").rename(tmp_path / "away")
    (tmp_path / "up-1").symlink_to("away")
    assert files.gone()
