"""A job can write to its folder: the host must follow no link and open no pipe there."""

import os
import stat
import subprocess
import sys

import pytest
from support.plans import HERE, plan
from support.repo import ROOT

from orchestrate.errors import UsageError
from orchestrate.files import log_file
from orchestrate.files.folder import regular, write_whole
from orchestrate.host import records
from orchestrate.record import lock, run_dir, usage
from orchestrate.record.logs import Follower, tail
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder
from orchestrate.record.times import TimesWriter
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.job_files import JobFiles

SECRET = (
    '{"event": "outcome_decided", "step": 7, "outcome": "succeeded", "world_size": 1, "duration_s": 1.0,'
    ' "generations": 1, "root_cause": null, "failures": [], "pace": [], "left_behind": "",'
    ' "written": [], "copies": [], "isolated": "", "truncated": []}\n'
)
OURS = ("plan.json", "report.json", "events.jsonl")
READERS = {  # file: a function that reads it, and returns whether it is empty
    "logs/rank-0.log": (
        lambda paths: (
            [*Follower(paths, [0]).lines(end=True), tail(paths.folder, 0), *JobFiles(paths).last_lines(0)] == [""]
        )
    ),
    "metrics.jsonl": lambda paths: (JobFiles(paths).metrics(), JobFiles(paths).step()) == ([], 0),
    "report.json": lambda paths: run_dir.ended(paths) is None,
}


@pytest.fixture
def paths(tmp_path):
    job = JobPaths(tmp_path / "run")
    run_dir.create(JobSpec(trainers=0), plan(JobSpec(trainers=0), HERE, "run", 29500), job)
    (tmp_path / "secret").write_text(SECRET)
    return job


def plant(paths: JobPaths, name: str, kind: str) -> int:
    """Replace a file by something of this kind, and return the descriptor of a pipe's writer, otherwise -1."""
    path = (paths.root if name in OURS else paths.shared) / name
    path.unlink(missing_ok=True)
    if kind == "file":
        records.write(path, SECRET)
    elif kind == "link":
        path.symlink_to(paths.root.parent / "secret")
    elif kind == "pipe without a writer":
        os.mkfifo(path)
    else:
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR)
        os.write(writer, SECRET.encode())
        return writer
    return -1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["file", "link", "pipe", "pipe without a writer"])
@pytest.mark.parametrize("name", READERS)
def test_only_a_regular_file_must_be_read(paths, name, kind):
    writer = plant(paths, name, kind)
    assert READERS[name](paths) is (kind != "file")
    if kind == "pipe":
        os.close(writer)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_a_regular_file_must_be_accepted_as_a_plan(paths, kind):
    assert run_dir.load(paths)[1].job_id == "run"
    text = paths.plan.read_text()
    writer = plant(paths, "plan.json", kind)
    (paths.root.parent / "secret").write_text(text)
    with pytest.raises(UsageError, match="does not contain a job that can continue"):
        run_dir.load(paths)
    if kind == "pipe":
        os.close(writer)


def test_events_must_neither_be_read_nor_written_through_a_link(paths):
    plant(paths, "events.jsonl", "link")
    with pytest.raises(OSError):
        Recorder(paths.events)
    assert (paths.root.parent / "secret").read_text() == SECRET


def test_writing_a_file_must_replace_a_link_and_not_its_target(paths):
    plant(paths, "report.json", "link")
    write_whole(paths.report, "ours")
    assert not paths.report.is_symlink() and paths.report.read_text() == "ours"
    assert (paths.root.parent / "secret").read_text() == SECRET
    with pytest.raises(UnicodeEncodeError):
        write_whole(paths.report, "\ud800")
    assert paths.report.read_text() == "ours"
    assert not list(paths.root.glob(".*"))
    (paths.page / "folder").mkdir(parents=True)
    write_whole(paths.page, "ours")
    assert paths.page.read_text() == "ours" and [*paths.root.glob(".report.html.*/folder")]  # moved aside


def test_a_folder_in_place_of_a_file_must_be_moved_away_and_the_file_be_readable_by_nodes(paths):
    paths.fence.mkdir()
    mask = os.umask(0o022)
    try:
        paths.folder.write(paths.fence.name, "1")
    finally:
        os.umask(mask)
    assert paths.fence.read_text() == "1" and stat.S_IMODE(paths.fence.stat().st_mode) == 0o644


def test_a_folder_must_not_be_opened_as_a_file(paths):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError):
            regular(paths.shared)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_files_of_a_job_must_be_readable_by_their_owner_alone(paths):
    mask = os.umask(0)
    try:
        write_whole(paths.report, "ours")
        Recorder(paths.events).close()
        TimesWriter(paths.times).note({0: 1})
        usage.ask(paths)
        with lock.held(paths), log_file.kept(paths.orchestrate_log, str):
            pass
    finally:
        os.umask(mask)
    files = [path for path in paths.root.iterdir() if not path.is_symlink() and path.is_file()]
    made = {paths.report, paths.events, paths.times, paths.usage_asked, paths.lock, paths.orchestrate_log}
    assert {*files} == made | {paths.spec, paths.plan}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700


def test_the_folders_of_a_job_must_be_created_only_once(tmp_path):
    job = JobPaths(tmp_path / "not" / "yet" / "there")
    job.create(work=True)
    assert {path.name for path in job.root.iterdir() if path.is_dir()} == {"job", "logs", "checkpoints", "work"}
    with pytest.raises(FileExistsError):
        job.create()


@pytest.mark.parametrize(
    ("command", "existing", "ours"),
    [
        ("-m app.train", "", True),
        ("-m app", "", True),
        ("-m app.train", "app", False),
        ("-m app.train", "app.py", False),
        ("-m apple.train", "", False),
        ("app.py", "", False),
        ("train.py", "", False),
    ],
)
def test_only_the_projects_own_app_must_run_in_the_projects_own_folder(tmp_path, command, existing, ours):
    if existing:
        (tmp_path / existing).mkdir()
    script = f"from orchestrate.files.paths import code_folder; print(code_folder({tuple(command.split())}))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT if ours else tmp_path), done.stderr
