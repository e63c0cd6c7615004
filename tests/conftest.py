"""Fixtures: the command line, the engines, and the check that a test leaves nothing behind."""

import collections
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import Cli
from support.leftovers import DOCKER_REQUIRED, clear, docker_answers, leftovers

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for pytest itself: tests run in parallel
# Hundreds of commands and nodes start from this checkout; without its bytecode, each would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's shell ignores it for what it starts with `&`
for name in ("SUDO_UID", "SUDO_GID"):  # root's nodes then run as a user without an account
    os.environ.pop(name, None)

pytest_plugins = [
    "support.commanded",
    "support.joining",
    "support.on_gpus",
    "support.agents",
    "support.contexts",
    "support.victims",
    "support.object_stores",
    "support.code_tree",
    "support.copies",
    "support.repositories",
    "support.webhooks",
]  # fixtures of engines and nodes
if importlib.util.find_spec("docker"):
    pytest_plugins += ["support.answers", "support.manager_stub"]


TESTS = Path(__file__).parent
BY_FILE = ("unit", "app", "project", "benchmarks")  # tests of a file in one pytest process, which imports torch once
# Expensive fixtures, and in how many pytest processes each is set up and shared by its tests.
SHARED = {"hosts": 1, "single": 1, "kept": 1, "machines": 1, "looked_at": 1}


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run tests marked `exhaustive`, and both engines in turn")


def pytest_configure(config):
    if importlib.util.find_spec("hypothesis"):  # tests on GPUs need neither this nor the SDK
        from support import fuzzing

        fuzzing.load(config.option.all)


@pytest.hookimpl(wrapper=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # slow tests start first
    if not config.option.all and not any("::" in argument for argument in config.args):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("exhaustive")])
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for name, copies in SHARED.items():
        for number, item in enumerate(item for item in items if name in item.fixturenames):
            item.add_marker(pytest.mark.xdist_group(f"{name}-{number % copies}"))
    for item in items:
        if "ready" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(f"ready-{item.callspec.params['engine']}"))
        if item.get_closest_marker("gpu"):  # one after the other: they measure the memory in use
            item.add_marker(pytest.mark.xdist_group("gpu"))
        if item.path.relative_to(TESTS).parts[0] in BY_FILE and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(TESTS))))
    return (yield)


def pytest_make_parametrize_id(val):
    """Shorten texts of up to 100,000 characters, which would fill the list of slow tests."""
    return f"{val[:60]}..." if isinstance(val, str) and len(val) > 100 else None


def sendable(data):
    """Return the data of a report with all surrogates escaped."""
    if isinstance(data, dict):
        return {name: sendable(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(sendable, data))
    return data.encode(errors="backslashreplace").decode() if isinstance(data, str) else data


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Escape surrogates in messages and output: a process of xdist could not send them, and would end the run."""
    return sendable((yield))


def pytest_report_teststatus(report):
    """Count skipped GPU tests separately: the summary has one line per reason, not per test."""
    return ("skipped (GPU)", "s", "SKIPPED") if report.skipped and "gpu" in report.keywords else None


def pytest_terminal_summary(terminalreporter, config):
    """Print why GPU tests were skipped; with `--durations=N`, also the time of the N files that took longest."""
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
    terminalreporter.section("time of the slowest files, of which several run in parallel")
    for name in sorted(seconds, key=lambda name: -seconds[name])[: config.option.durations or None]:
        terminalreporter.write_line(f"{seconds[name]:7.1f} s {len(tests[name]):5} tests  {name}")


@pytest.hookimpl(trylast=True)  # after xdist has ended its processes
def pytest_sessionfinish(session):
    """Remove what an interrupted run has left."""
    if not hasattr(session.config, "workerinput"):
        with contextlib.suppress(FileNotFoundError):  # another run may remove folders of older runs meanwhile
            clear(session.config._tmp_path_factory.getbasetemp())


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
        if os.environ.get("ORCHESTRATE_REQUIRE_NVIDIA") == "1":
            pytest.fail("ORCHESTRATE_REQUIRE_NVIDIA=1, and the engine has no NVIDIA runtime, nor the stand-in")
        pytest.skip("the engine has no NVIDIA runtime; .ci/docker-engine starts one with a stand-in")


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


@pytest.fixture
def cli(tmp_path):
    instance = Cli(tmp_path)
    yield instance
    instance.clean()


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """A folder with a small excerpt of MNIST, in its own file format."""
    from support.mnist import COUNT, write_mnist

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


@pytest.fixture
def small(mnist, tmp_path, monkeypatch):
    """A function that trains on little data in this process and returns the job folder."""

    from support.training import here

    def run_small(*arguments: str) -> Path:
        base = ("--dataset", "mnist", "--data", str(mnist), "--epochs", "1", "--batch-size", "32")
        here(monkeypatch, tmp_path / "job", *base, *arguments)
        return tmp_path / "job"

    return run_small
