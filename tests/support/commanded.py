"""Commands in this process, on a scripted engine: what they decide, without any node."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrate.cli.main import main
from orchestrate.clock import SYSTEM, Clock
from orchestrate.engines import registry
from orchestrate.engines.base import JobState
from orchestrate.host import records
from orchestrate.record import run_dir
from orchestrate.record.events import Event
from orchestrate.record.logs import Follower
from orchestrate.record.outcomes import WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder
from orchestrate.show.feed import Feed
from orchestrate.show.screen import Display
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch
from support.optional import not_none
from support.plans import HERE, Site, plan
from support.recording import RecordingEngine
from support.repo import ROOT

HOLDS = (
    "import pathlib, sys\nfrom orchestrate.record import lock\nfrom orchestrate.record.paths import JobPaths\n"
    "paths, supervises = JobPaths(pathlib.Path(sys.argv[1])), len(sys.argv) < 3\n"
    "with lock.held(paths, supervises):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


@contextlib.contextmanager
def supervised(folder: Path, *other: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock of a job's supervisor; with `other`, as a command that is none."""
    command = [sys.executable, "-c", HOLDS, str(folder), *other]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert not_none(process.stdout).readline() == b"held\n"
        yield process


class Whole(RecordingEngine):
    """A scripted engine that passes as Docker's, with the inventory `HERE`."""

    name = "docker"  # as in the inventory

    def __init__(self, *generations: list[list[WorkerExit]], things: tuple[str, ...] = (), **more) -> None:
        super().__init__(*generations, **more)
        self.things = list(things)

    def inventory(self, spec, run, run_image) -> Site:
        self.calls += [] if run_image else ["look"]
        return HERE.but(code=str(Path.cwd()))


class Commands:
    """Commands in this process, on the jobs in a folder and on a scripted engine."""

    def __init__(self, runs: Path, monkeypatch, capsys) -> None:
        self.runs, self.capsys, self.engine = runs, capsys, Whole()
        self.clock: Clock = SYSTEM
        monkeypatch.setattr(registry, "available_engines", lambda: [self.engine])
        monkeypatch.setattr(registry, "jobs", lambda: iter(self.engine.jobs()))
        monkeypatch.setattr(registry, "memory", lambda job: 3 << 20)
        monkeypatch.setattr(registry, "select_engine", lambda spec: self.engine)

    def __call__(self, *arguments: object) -> tuple[int, list[str], list[str]]:
        """Run a command; return its exit code and the lines of stdout and stderr."""
        split = arguments.index("--") if "--" in arguments else len(arguments)
        code = main([*map(str, (*arguments[:split], "--runs", self.runs, *arguments[split:]))], self.clock)
        out, err = self.capsys.readouterr()
        return code, out.splitlines(), err.splitlines()


def create(paths: JobPaths, spec: JobSpec | None = None, cluster: str = "") -> JobPaths:
    """Create the files of a job that is about to start, on a cluster if one is named."""
    spec = spec or JobSpec(trainers=2, grace=0.01, command=("-m", "app.train"))
    run_dir.create(spec, plan(spec, HERE.but(cluster=cluster), paths.root.name, 29500), paths)
    return paths


def noted(paths: JobPaths, *events: Event) -> None:
    """Append events to a job's events."""
    emit = Recorder(paths.events, key=bytes.fromhex(records.need(paths.root).events))
    for event in events:
        emit(event)
    emit.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder for run directories."""
    return tmp_path


@pytest.fixture
def do(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(runs, monkeypatch, capsys)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[JobPaths]:
    """The files of a job that is about to start."""
    made = create(JobPaths(tmp_path / "a-1"))
    yield made
    records.forget(made.root)  # a later test's folder can have the inode of this one, and would be taken for it


def end(paths: JobPaths, outcome: str = "succeeded", reason: str = "finished", **more: object) -> None:
    facts: dict[str, object] = {"root_cause": None, "failures": [], "pace": [], "left_behind": "", "generations": 1}
    facts |= {"written": [], "copies": [], "isolated": "", "truncated": []}
    facts |= {"job_id": paths.root.name, "world_size": 3, "duration_s": 1.0}
    records.write(paths.report, json.dumps({"outcome": outcome, "reason": reason, **facts, **more}))


def runs_elsewhere(folder: Path, name: str = "a-1", owner: int = -1, sees: str = "job") -> JobState:
    return JobState(name, "docker", 3, folder / sees, owner)


class Meanwhile:
    """A clock whose `sleep` calls a function."""

    def __init__(self, happens) -> None:
        self.happens = happens

    def sleep(self, seconds: float) -> None:
        self.happens()

    def time(self) -> float:
        return 0.0

    monotonic = time


def terminal_text(leader: int) -> str:
    """All that was written to a pseudo-terminal whose other end is closed; closes this one."""
    found = b""
    with contextlib.suppress(OSError), os.fdopen(leader, "rb", buffering=0) as file:
        while chunk := file.read(1 << 16):
            found += chunk
    return found.decode()


SPEC = JobSpec(trainers=2, grace=0.01, command=("-m", "app.train"))


# --- supervision and report


def supervise(paths: JobPaths, engine: Whole, stops=lambda: 0, follower: Follower | None = None) -> tuple[dict, list]:
    shown: list[str] = []
    feed = watched(paths, Display(lambda text: shown.extend(text.split("\n"))), follower)
    return launch.supervise(paths, engine, stops, feed), shown


def watched(paths: JobPaths, display: Display, follower: Follower | None = None) -> Feed:
    return Feed(paths, *run_dir.load(paths), display, follower)


NOT_OURS = f"has no record: {records.FOREIGN}"
NO_DOCKER = {"DOCKER_HOST": "unix:///nowhere.sock"}


# --- as a separate process


def process(*arguments: str, shell: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m orchestrate ARGUMENTS` with redirections of a shell, in the environment of this test."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LC_", "LANG"))}
    command = f'exec "$0" -m orchestrate "$@" {shell}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable, *arguments],
        env=kept | {"PYTHONPATH": str(ROOT)} | NO_DOCKER | env,
        capture_output=True,
        timeout=120,
    )
