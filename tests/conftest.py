"""Fixtures: the command line as a user has it, the engines, and the check that a test leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
# The SDK leaves its socket open when the engine does not answer; no user sees that.
WARNINGS = "error,ignore:unclosed:ResourceWarning"
DOCKER_REQUIRED = os.environ.get("ORCHESTRATE_REQUIRE_DOCKER") == "1"


def docker_answers() -> bool:
    commands = (["docker", "info"], ["docker", "compose", "version"])
    return shutil.which("docker") is not None and all(
        subprocess.run(command, capture_output=True).returncode == 0 for command in commands
    )


@pytest.fixture(scope="session")
def docker_engine():
    if not docker_answers():
        if DOCKER_REQUIRED:
            pytest.fail("ORCHESTRATE_REQUIRE_DOCKER=1, and no Docker Engine with Compose answers")
        pytest.skip("no Docker Engine with Compose answers")


@pytest.fixture(scope="session")
def nvidia_runtime(docker_engine):
    done = subprocess.run(["docker", "info", "-f", "{{json .Runtimes}}"], capture_output=True, text=True, check=True)
    if "nvidia" not in json.loads(done.stdout):
        if DOCKER_REQUIRED:
            pytest.fail("ORCHESTRATE_REQUIRE_DOCKER=1, and the engine has no NVIDIA runtime, nor the stand-in")
        pytest.skip("the engine has no NVIDIA runtime; .ci/docker-engine starts one with a stand-in")


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


def leftovers() -> dict[str, set[str]]:
    """All that a job could leave: containers, networks, volumes, node processes, their sockets."""
    found = {"processes": set(), "sockets": {str(path) for path in Path(f"/tmp/orchestrate-{os.getuid()}").glob("*")}}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = folder.joinpath("cmdline").read_bytes().split(b"\0")
            if b"NODE_SOCKET=" in folder.joinpath("environ").read_bytes() and b"pytest" not in words:
                found["processes"].add(folder.name)
        except OSError:
            continue
    if docker_answers():
        found["containers"] = set(docker("ps", "-aq").split())
        found["networks"] = set(docker("network", "ls", "-q").split())
        found["volumes"] = set(docker("volume", "ls", "-q").split())
    return found


@pytest.fixture
def nothing_left():
    """Fail where a test leaves a container, network, volume or process that was not there before."""
    before = leftovers()
    yield
    assert leftovers() == before


def eventually(what, timeout: float = 60):
    """The first true value of `what()`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := what():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout} s: {what}")


def gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Cli:
    """`python -m orchestrate` in a folder of its own, which holds the test scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, folder)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith("NODE_")}
        self.env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": WARNINGS}

    def __call__(self, *arguments: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "orchestrate", *arguments],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrate", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def ps(self) -> list[list[str]]:
        """What `ps` says of the jobs in this folder, from which their own counts. Others may be on the machine."""
        rows = [re.split(r"  +", line) for line in self("ps").stdout.splitlines()]
        assert rows[0] == ["NAME", "ENGINE", "NODES", "STATE", "RUN"]
        prefix = f"{self.folder}/"
        return [[*row[:-1], row[-1].removeprefix(prefix)] for row in rows if row[-1].startswith(prefix)]

    def run_dir(self) -> Path:
        """The one job's run directory."""
        (found,) = (path for path in self.folder.glob("runs/*") if not (path / "nodes").exists())
        return found

    def log(self, rank: int) -> str:
        return (self.run_dir() / "logs" / f"rank-{rank}.log").read_text()

    def report(self) -> dict:
        return json.loads((self.run_dir() / "report.json").read_text())

    def wait_for(self, text: str, rank: int) -> None:
        """Wait until a rank's log has `text`."""
        eventually(lambda: any(text in path.read_text() for path in self.folder.glob(f"runs/*/logs/rank-{rank}.log")))

    def kill_worker(self, rank: int, number: int) -> None:
        """Send a signal to a worker of the script steps.py, wherever its process id counts."""
        pid = int(re.search(r"pid (\d+)", self.log(rank))[1])
        plan = json.loads((self.run_dir() / "plan.json").read_text())
        if plan["inventory"]["engine"] == "process":
            os.kill(pid, number)
        else:
            node = self.container(plan["workers"][rank]["node"])
            docker("exec", node, "python", "-c", f"import os; os.kill({pid}, {number})")

    def container(self, node: str) -> str:
        return docker("ps", "-aq", "--filter", f"name={self.run_dir().name}-{node}").strip()


@pytest.fixture
def cli(tmp_path):
    return Cli(tmp_path)


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.docker)])
def engine(request, nothing_left):
    """Each engine in turn; a test of it must leave nothing behind."""
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """A folder with a little of MNIST's own files."""
    from test_app import COUNT, write_mnist

    folder = tmp_path_factory.mktemp("mnist")
    write_mnist(folder, COUNT)
    return folder


@pytest.fixture
def sharded(mnist, tmp_path):
    """The same as five shards."""
    from app import data, shards

    folder = tmp_path / "shards"
    shards.write(folder, data.load("mnist", mnist, download=False), 5)
    return folder


def here(monkeypatch, folder: Path, *arguments: str) -> None:
    """Train in this very process."""
    from app import train

    monkeypatch.setenv("JOB_DIR", str(folder))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    train.main()


@pytest.fixture
def small(mnist, tmp_path, monkeypatch):
    """Train on little, in this process; returns the job's folder."""

    def run_small(*arguments: str) -> Path:
        base = ("--dataset", "mnist", "--data", str(mnist), "--epochs", "1", "--batch-size", "32")
        here(monkeypatch, tmp_path / "job", *base, *arguments)
        return tmp_path / "job"

    return run_small
