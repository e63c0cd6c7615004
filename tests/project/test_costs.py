"""What commands cost, as counts: a change that makes one slower is seen here, and not only in benchmarks."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support import costs
from support.cli import Cli

ROOM = 0.15  # part of a limit that may be left; if more is, lower the limit
LIMITS = {
    "--help": {"calls": 34_000, "modules": 112, "opened files": 27, "programs": 0},
    "events": {"calls": 143_000, "modules": 240, "opened files": 146, "programs": 0},
    "logs": {"calls": 198_000, "modules": 252, "opened files": 170, "programs": 0},
    "run": {"calls": 415_000, "modules": 365, "opened files": 555, "programs": 5},  # local processes
}
IN_CONTAINERS = {"modules": 430, "programs": 4, "requests": 32}  # of root, without helper containers
SCRIPT = "import sys\nfor i in range(int(sys.argv[1])):\n    print('line', i)\n"
RUN = ("run", "--engine", "process", "--trainers", "1", "--quiet")
OF_311 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are those of Python 3.11")
WITHOUT_GPUS = pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="the limits are those of a machine without GPUs"
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, dict[str, int]]:
    """The costs of each command: the lowest of some runs, of which the first fills caches.

    On a busy machine, a job waits longer, and looks for news more often: then there are more runs.
    """
    cli = Cli(tmp_path_factory.mktemp("costs"))
    cli.env["XDG_STATE_HOME"] = str(cli.folder / "state")  # a new job looks at records of others
    (cli.folder / "steps.py").write_text(SCRIPT)
    assert not cli(*RUN, "--name", "long", "--", "steps.py", "20000").returncode
    job = next((cli.folder / "runs").glob("long-*")).name
    for number in range(100):  # others, which a command for one job must not look at
        (other := cli.folder / "runs" / f"other-{number:04}").mkdir()
        for name in ("plan.json", "job.yaml", "report.json"):
            shutil.copy(cli.folder / "runs" / job / name, other)
    commands = {"--help": ["--help"], "events": ["events", job], "logs": ["logs", job]}
    commands["run"] = [*RUN, "--name", "short", "--", "steps.py", "10"]
    return {name: least(cli, command, LIMITS[name]) for name, command in commands.items()}


def cost(cli: Cli, command: list[str]) -> dict[str, int]:
    file = cli.folder / "cost.json"
    subprocess.run(
        [sys.executable, costs.__file__, file, *command], cwd=cli.folder, env=cli.env, check=True, capture_output=True
    )
    return json.loads(file.read_text())


def least(cli: Cli, command: list[str], limits: dict[str, int]) -> dict[str, int]:
    lowest, runs = cost(cli, command), 1
    while runs < 3 or (runs < 15 and any(lowest[name] > limits[name] for name in limits)):
        found, runs = cost(cli, command), runs + 1
        lowest = {name: min(lowest[name], found[name]) for name in lowest}
    return lowest


@OF_311
@WITHOUT_GPUS
@pytest.mark.parametrize(("command", "what"), [(command, what) for command in LIMITS for what in LIMITS[command]])
def test_a_command_must_not_cost_more_than_before(measured, command, what):
    limit = LIMITS[command][what]
    assert (1 - ROOM) * limit <= measured[command][what] <= limit


@OF_311
@WITHOUT_GPUS
@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="the limits are those of root")
def test_a_job_in_containers_must_not_cost_more_than_before(docker_engine, tmp_path):
    """Docker's SDK, for example, takes a tenth of a second to import."""
    cli = Cli(tmp_path)
    (tmp_path / "steps.py").write_text(SCRIPT)
    found = least(cli, ["run", "--engine", "docker", *RUN[3:], "--", "steps.py", "10"], IN_CONTAINERS)
    over = {
        what: found[what] for what, limit in IN_CONTAINERS.items() if not (1 - ROOM) * limit <= found[what] <= limit
    }
    assert not over
