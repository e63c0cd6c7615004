"""The qsub script on a real OpenPBS of two machines, each a container: see .ci/pbs."""

import json
import os
import re
import shutil
import sys

import pytest
from support.cli import Cli
from support.faults import complete
from support.machines import PYTHON, Machines
from support.odd_text import odd
from support.repo import ROOT
from support.waiting import eventually
from support.written import Written

from orchestrate.spec.layers import resolve

IMAGE = os.environ.get("ORCHESTRATE_PBS_IMAGE", "")
pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.skipif(not IMAGE, reason="needs an image with OpenPBS, which .ci/pbs builds in ten minutes"),
]


class Pbs(Written):
    """A cluster, and a folder with jobs for it."""

    def __init__(self, cli: Cli, machines: Machines) -> None:
        super().__init__(cli.folder)
        self.cli, self.machines = cli, machines

    def __call__(self, *command: str) -> str:
        words = ("runuser", "-u", "user", "--", "env", "PATH=/opt/pbs/bin:/usr/bin:/bin", *command)
        return self.machines.run("pbs1", self.cli.folder, *words)

    def submit(self, *arguments: str, env: tuple[str, ...] = ()) -> str:
        """Export a job, with the container's own interpreter, and submit it with the variables `env`; return its id."""
        done = self.cli("export", "pbs", "--gpus", "none", "--nodes", "2", *arguments)
        assert done.returncode == 0, done.stderr
        (self.cli.folder / "job.pbs").write_text(done.stdout.replace(sys.executable, PYTHON))
        return self("env", *env, "qsub", "job.pbs").strip()

    def field(self, job: str, name: str) -> str:
        """A field of a job."""
        found = re.search(rf"^ *{name} = (.*)$", self("qstat", "-xf", job), re.M)
        return found[1] if found else ""

    def code(self, job: str) -> int:
        """Wait for the end of a job, and return its exit code."""
        eventually(lambda: self.field(job, "job_state") == "F", 120)
        return int(self.field(job, "Exit_status"))

    def saved(self, rank: int) -> int:
        return int((self.cli.folder / "runs" / "count" / "checkpoints" / f"rank-{rank}").read_text())

    def output(self) -> str:
        return "".join(path.read_text() for path in self.cli.folder.glob("*.o*"))


@pytest.fixture(scope="module")
def machines(docker_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pbs")
    folder.chmod(0o755)
    machines = Machines(folder, IMAGE, ROOT / "tests" / "pbs")
    try:
        machines.start("pbs2", "node")
        machines.start("pbs1", "server")
        list_nodes = ("/opt/pbs/bin/pbsnodes", "-a", "-S")
        eventually(lambda: machines.run("pbs1", machines.folder, *list_nodes).count(" free ") == 2, 120)
        yield machines
    finally:
        machines.down()


@pytest.fixture
def pbs(machines, nothing_left, request):
    folder = machines.folder / request.node.name
    folder.mkdir()
    cli = Cli(folder)
    folder.chmod(0o777)  # jobs run as another user, since PBS does not see processes of root
    return Pbs(cli, machines)


def test_a_script_must_train_on_two_machines(pbs):
    shutil.copy(ROOT / "examples" / "allreduce.py", pbs.cli.folder)
    assert pbs.code(pbs.submit("--nproc-per-node", "2", "--", "allreduce.py")) == 0, pbs.output()
    for rank in range(4):
        assert pbs.log("allreduce", rank).endswith(f"rank {rank} of 4: the ranks add up to 6\n")


def test_variables_and_arguments_must_reach_the_workers_and_secrets_only_from_qsub(pbs):
    arguments, secret = odd(50), "it's $HOME"
    env = {f"ODD_{number}": text for number, text in enumerate(arguments)} | {"stop": "a", "attempt": "b"}
    file = pbs.cli.folder / "job.yaml"
    file.write_text(resolve({"command": ["probe.py", *arguments], "env": env | {"HF_TOKEN": "canary"}}).to_yaml())
    assert pbs.code(pbs.submit(str(file), env=(f"HF_TOKEN={secret}",))) == 0, pbs.output()
    for rank in range(2):
        seen = json.loads(pbs.log("probe", rank))
        assert seen["args"] == arguments and seen["env"].items() >= (env | {"HF_TOKEN": secret}).items()
        assert (seen["env"]["RANK"], seen["env"]["WORLD_SIZE"]) == (str(rank), "2")
    assert pbs.code(pbs.submit(str(file))) and "set HF_TOKEN in the environment of qsub" in pbs.output()


def test_a_killed_worker_must_restart_the_gang_from_its_checkpoint(pbs):
    job = pbs.submit("--", "count.py", "until-restarted")
    eventually(lambda: len(pbs.steps(0)) > 25 and len(pbs.steps(1)) > 25)
    pbs.machines.kill(int(re.findall(r"pid (\d+)", pbs.log("count", 1))[-1]), "pbs2")
    assert pbs.code(job) == 0, pbs.output()
    assert "generation 0 ended with exit code 137" in pbs.output()
    assert all(complete(pbs.steps(rank)) for rank in range(2))
    assert {generation for _, generation in pbs.steps(0)} == {0, 1}


@pytest.mark.parametrize("options", [(), ("--max-run", "5s")])
def test_the_end_of_a_job_must_wait_until_workers_have_saved(pbs, options):
    job = pbs.submit(*options, "--", "count.py", "100000")
    eventually(lambda: len(pbs.steps(0)) > 15 and len(pbs.steps(1)) > 15)
    if not options:
        pbs("qdel", job)
    assert pbs.code(job)
    assert [pbs.saved(rank) for rank in range(2)] == [pbs.steps(rank)[-1][0] for rank in range(2)]


def test_a_script_that_cannot_succeed_must_not_be_retried(pbs):
    (pbs.cli.folder / "usage.py").write_text("raise SystemExit(2)\n")
    assert pbs.code(pbs.submit("--", "usage.py")) == 2
    assert "generation" not in pbs.output()


def test_a_lost_machine_must_requeue_the_job_which_resumes(pbs):
    job = pbs.submit("--", "count.py", "until-asked")
    eventually(lambda: len(pbs.steps(0)) > 15 and len(pbs.steps(1)) > 15)
    with pbs.machines.without("pbs2"):
        eventually(lambda: pbs.field(job, "job_state") == "Q", 120)
        saved = pbs.saved(1)
    eventually(lambda: pbs.steps(1)[-1][0] > saved + 15, 120)
    (pbs.cli.folder / "runs" / "count" / "finish").touch()
    assert pbs.code(job) == 0 and pbs.field(job, "run_count") == "2"
    assert all(pbs.steps(rank).count((1, 0)) == 1 for rank in range(2))
