"""Fixtures: the command line, the engines, and the check that a test leaves nothing behind."""

import collections
import contextlib
import ctypes
import functools
import importlib.util
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
from support.optional import not_none

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for pytest itself: tests run in parallel
for name in ("SUDO_UID", "SUDO_GID"):  # root's nodes then run as a user without an account
    os.environ.pop(name, None)

pytest_plugins = [
    "support.commanded",
    "support.joining",
    "support.on_gpus",
    "support.agents",
    "support.object_stores",
]  # fixtures of engines and nodes
if importlib.util.find_spec("docker"):  # tests on GPUs need no SDK
    pytest_plugins += ["support.answers", "support.manager_stub"]
ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
# The SDK leaves its socket open when the engine does not answer; no user sees that.
WARNINGS = "error,ignore:unclosed:ResourceWarning"
MARK = "ORCHESTRATE_TEST"  # variable that marks every process of a test with its folder
SOCKETS = Path(f"/tmp/orchestrate-{os.getuid()}")  # of nodes of the process engine
DOCKER_REQUIRED = os.environ.get("ORCHESTRATE_REQUIRE_DOCKER") == "1"


# Expensive fixtures, and in how many pytest processes each is set up and shared by its tests.
SHARED = {"hosts": 2, "single": 1, "kept": 1, "slurm_image": 1, "looked_at": 1}


@pytest.hookimpl(wrapper=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # slow tests start first
    for name, copies in SHARED.items():
        for number, item in enumerate(item for item in items if name in item.fixturenames):
            item.add_marker(pytest.mark.xdist_group(f"{name}-{number % copies}"))
    for item in items:
        if "ready" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(f"ready-{item.callspec.params['engine']}"))
        if item.get_closest_marker("gpu"):  # one after the other: they measure the memory in use
            item.add_marker(pytest.mark.xdist_group("gpu"))
    return (yield)


def pytest_report_teststatus(report):
    """Count skipped GPU tests separately: the summary has one line per reason, not per test."""
    return ("skipped (GPU)", "s", "SKIPPED") if report.skipped and "gpu" in report.keywords else None


def pytest_terminal_summary(terminalreporter, config):
    """Print why GPU tests were skipped; with `--durations`, also how long each file's tests took."""
    skipped = collections.Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped (GPU)", ()))
    for reason, count in skipped.items():
        counted = "1 GPU test was" if count == 1 else f"{count} GPU tests were"
        terminalreporter.write_line(f"{counted} skipped: {reason.removeprefix('Skipped: ')}")
    if config.option.durations is None:
        return
    seconds: dict[str, float] = {}
    tests: dict[str, set[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                name = report.nodeid.partition("::")[0]
                seconds[name] = seconds.get(name, 0) + report.duration
                tests.setdefault(name, set()).add(report.nodeid)
    terminalreporter.section("time per file, of which several run in parallel")
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        terminalreporter.write_line(f"{seconds[name]:7.1f} s {len(tests[name]):5} tests  {name}")


@pytest.hookimpl(trylast=True)  # after xdist has ended its processes
def pytest_sessionfinish(session):
    """Remove what an interrupted run has left."""
    if not hasattr(session.config, "workerinput"):
        with contextlib.suppress(FileNotFoundError):  # another run may remove folders of older runs meanwhile
            clear(session.config._tmp_path_factory.getbasetemp())


@functools.cache
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


def proc(pid: int | str, name: str) -> list[str]:
    """The entries of `cmdline` or `environ` of a process; none if it is gone or access is denied."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    return []


def environ(pid: int | str) -> dict[str, str]:
    """The environment that a process was started with; empty if it cannot be read."""
    return dict(entry.split("=", 1) for entry in proc(pid, "environ") if "=" in entry)


def processes(folder: Path) -> set[int]:
    """The processes that command lines below a folder have started, and their descendants."""
    numbers = [path.name for path in Path("/proc").glob("[0-9]*")]
    return {int(pid) for pid in numbers if f"{environ(pid).get(MARK)}/".startswith(f"{folder}/")}


def leftovers(folder: Path) -> dict[str, list[str]]:
    """Everything that jobs from a folder have left: processes, sockets of nodes, containers, networks, volumes.

    Tests in other folders run at the same time, so only what carries the name of this folder or of one of its jobs
    is returned.
    """
    jobs = {path.parent.name for depth in ("", "*/") for path in folder.glob(f"{depth}*/*/job.yaml")}
    sockets = [*SOCKETS.glob("*"), *folder.glob("**/runs/*/sockets")]
    found = {
        "processes": [line for pid in processes(folder) if (line := " ".join(proc(pid, "cmdline")).strip())],
        "sockets": [
            str(path)
            for path in sockets
            if path.name in jobs or path.name == "sockets" or f"{folder}/" in os.path.realpath(path / "run")
        ],
    }
    for kind in ("container", "network", "volume") if docker_answers() else ():
        lines = docker(kind, "ls", *(["--all", "--no-trunc"] if kind == "container" else []), "--format", "{{json .}}")
        objects = [json.loads(line) for line in lines.splitlines()]
        text = {thing.get("Name") or thing["Names"]: f"{thing['Labels']} {thing.get('Mounts')}" for thing in objects}
        found[kind] = [
            name
            for name in text
            if f"{folder}/" in text[name] or any(name.startswith((f"{job}-", f"{job}_")) for job in jobs)
        ]
    return {kind: names for kind, names in found.items() if names}


def clear(folder: Path) -> None:
    """Kill and remove what jobs from a folder have left."""
    for pid in processes(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for kind, names in leftovers(folder).items():
        if kind in ("container", "network", "volume"):
            docker(kind, "rm", "--force", *names)
    for path in leftovers(folder).get("sockets", ()):
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def nothing_left(tmp_path):
    """Fail if a test leaves anything of its jobs behind."""
    yield
    assert leftovers(tmp_path) == {}


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory):
    """The folder for job records of tests, instead of the user's own."""
    os.environ["XDG_STATE_HOME"] = str(folder := tmp_path_factory.mktemp("state"))
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")  # without defaults of the user
    yield folder
    del os.environ["XDG_STATE_HOME"], os.environ["XDG_CONFIG_HOME"]


@pytest.fixture(autouse=True)
def signals():
    """Restore pytest's signal handlers: the app in this process handles SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def eventually(condition, timeout: float = 300):
    """Wait for the first true value of `condition()`; the timeout allows for a busy machine."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout} s: {condition}")


def die_with_parent() -> None:
    """Make the kernel end this process when the tests end, however they end; runs between fork and exec."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def descendants(*ancestors: int) -> list[int]:
    """The descendants of processes, from a single scan of /proc, since process ids are soon reused."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [*ancestors]
    for pid in found:
        found += children.pop(pid, [])
    return found[len(ancestors) :]


class Cli:
    """`python -m orchestrate` in its own folder, which holds the test scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)  # nodes of root run as another user, who must be able to read it
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, folder)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("NODE_", "OMP_"))}
        self.env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": WARNINGS, MARK: str(folder)}
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, *arguments: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "orchestrate", *arguments],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrate", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.started.append(process)
        return process

    def ps(self) -> list[list[str]]:
        """The rows of `ps` for jobs in this folder, with relative paths; other jobs may be on the machine."""
        rows = [re.split(r"  +", line) for line in self("ps").stdout.splitlines()]
        assert rows[0] == ["NAME", "ENGINE", "NODES", "STATE", "RUN"]
        prefix = f"{self.folder}/"
        return [[*row[:-1], row[-1].removeprefix(prefix)] for row in rows if row[-1].startswith(prefix)]

    def finish_jobs(self) -> None:
        """Make all jobs from this folder that run `count.py until-asked` finish."""
        for folder in self.folder.glob("runs/*/job"):
            (folder / "finish").touch()

    def run_dir(self) -> Path:
        """The run directory of the only job."""
        (found,) = (path for path in self.folder.glob("runs/*") if not (path / "nodes").exists())
        return found

    def log(self, rank: int) -> str:
        return (self.run_dir() / "logs" / f"rank-{rank}.log").read_text()

    def report(self) -> dict:
        return json.loads((self.run_dir() / "report.json").read_text())

    def wait_for(self, text: str, rank: int) -> None:
        """Wait until a rank's log contains `text`."""
        eventually(lambda: any(text in path.read_text() for path in self.folder.glob(f"runs/*/logs/rank-{rank}.log")))

    def kill_worker(self, rank: int, number: int) -> None:
        """Send a signal to a worker of the script steps.py, in its node's PID namespace."""
        pid = int(not_none(re.search(r"pid (\d+)", self.log(rank)))[1])
        plan = json.loads((self.run_dir() / "plan.json").read_text())
        if plan["inventory"]["engine"] == "process":
            os.kill(pid, number)
        else:
            node = self.container(plan["workers"][rank]["node"])
            docker("exec", node, "python", "-c", f"import os; os.kill({pid}, {number})")

    def container(self, node: str) -> str:
        return docker("ps", "-aq", "--filter", f"name={self.run_dir().name}-{node}").strip()

    def clean(self) -> None:
        """Remove what a failed test has left."""
        clear(self.folder)
        for process in self.started:
            if process.returncode is None:
                process.communicate()


@pytest.fixture
def cli(tmp_path):
    instance = Cli(tmp_path)
    yield instance
    instance.clean()


@pytest.fixture(params=["process", pytest.param("docker", marks=pytest.mark.docker)])
def engine(request, nothing_left):
    """Each engine in turn; the test must leave nothing behind."""
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


@pytest.fixture(scope="session")
def ready_nodes(tmp_path_factory):
    """Nodes of each engine that stay up, created on first use."""
    from support.warm_cluster import Ready, of_each_engine

    yield from of_each_engine(lambda engine: Ready(tmp_path_factory.mktemp(f"ready-{engine}"), engine))


@pytest.fixture
def ready(engine, ready_nodes):
    """The command line in a folder whose nodes are already up, for tests of what workers do."""
    nodes = ready_nodes(engine)
    nodes.up()
    yield nodes
    nodes.settle()


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """A folder with a small excerpt of MNIST, in its own file format."""
    from test_app import COUNT, write_mnist

    folder = tmp_path_factory.mktemp("mnist")
    write_mnist(folder, COUNT)
    return folder


@pytest.fixture
def sharded(mnist, tmp_path):
    """The same data as five shards."""
    from app import data, shards

    folder = tmp_path / "shards"
    shards.write(folder, data.load("mnist", mnist, download=False), 5)
    return folder


def here(monkeypatch, folder: Path, *arguments: str) -> None:
    """Train in this process."""
    from app import train

    monkeypatch.setenv("JOB_DIR", str(folder))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    train.main()


@pytest.fixture
def small(mnist, tmp_path, monkeypatch):
    """A function that trains on little data in this process and returns the job folder."""

    def run_small(*arguments: str) -> Path:
        base = ("--dataset", "mnist", "--data", str(mnist), "--epochs", "1", "--batch-size", "32")
        here(monkeypatch, tmp_path / "job", *base, *arguments)
        return tmp_path / "job"

    return run_small
