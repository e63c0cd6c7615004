"""The sbatch script on a real Slurm cluster of two machines: Debian's, in a container."""

import json
import re
import shutil
import sys

import pytest
from support.cli import Cli
from support.faults import complete
from support.machines import PYTHON
from support.odd_text import odd
from support.repo import ROOT
from support.waiting import eventually
from support.written import Written

from orchestrate.spec.layers import resolve

pytestmark = [pytest.mark.docker, pytest.mark.slow]


class Slurm(Written):
    """A cluster, and a folder with jobs for it."""

    def __init__(self, cli, cluster) -> None:
        super().__init__(cli.folder)
        self.cli, self.cluster, self.state = cli, cluster, cluster.state

    def __call__(self, *command: str, machine: str = "slurm") -> str:
        return self.cluster(*command, machine=machine, folder=self.cli.folder)

    def submit(self, *arguments: str, env: tuple[str, ...] = ()) -> str:
        """Export a job, with the container's own interpreter, and submit it with the variables `env`; return its id."""
        done = self.cli("export", "slurm", "--gpus", "none", "--trainers", "1", *arguments)
        assert done.returncode == 0, done.stderr
        script = self.cli.folder / "job.sh"
        script.write_text(done.stdout.replace(sys.executable, PYTHON))
        return self("env", *env, "sbatch", "--parsable", str(script)).strip()

    def output(self) -> str:
        return "".join(path.read_text() for path in self.cli.folder.glob("slurm-*.log"))


@pytest.fixture
def slurm(machines, folder, nothing_left):
    yield Slurm(Cli(folder), machines)
    machines.settle()


@pytest.mark.exhaustive
def test_a_script_must_train_on_two_machines(slurm):
    shutil.copy(ROOT / "examples" / "allreduce.py", slurm.cli.folder)
    job = slurm.submit("--nproc-per-node", "2", "--", "allreduce.py")
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    assert slurm.state(job) == "COMPLETED", slurm.output()
    for rank in range(4):
        assert slurm.log("allreduce", rank).endswith(f"rank {rank} of 4: the ranks add up to 6\n")


@pytest.mark.exhaustive
def test_torchs_store_must_outlive_the_machine_of_rank_0(slurm):
    job = slurm.submit("--", "leaves_first.py")
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    assert slurm.state(job) == "COMPLETED", slurm.output()
    assert slurm.log("leaves-first", 1).endswith("made a group\n")


def test_variables_and_arguments_must_reach_the_workers_and_secrets_only_from_sbatch(slurm):
    arguments, secret = odd(50), "it's $HOME\n"
    env = {f"ODD_{number}": text for number, text in enumerate(arguments)} | {"stop": "a", "UID": "b"}
    file = slurm.cli.folder / "job.yaml"
    file.write_text(resolve({"command": ["probe.py", *arguments], "env": env | {"HF_TOKEN": "canary"}}).to_yaml())
    job = slurm.submit(str(file), env=(f"HF_TOKEN={secret}",))
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    assert slurm.state(job) == "COMPLETED", slurm.output()
    for rank in range(2):
        seen = json.loads(slurm.log("probe", rank))
        assert seen["args"] == arguments and seen["env"].items() >= (env | {"HF_TOKEN": secret}).items()
    assert "canary" not in (slurm.cli.folder / "job.sh").read_text()
    job = slurm.submit(str(file))
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    assert slurm.state(job) == "FAILED" and "set HF_TOKEN in the environment of sbatch" in slurm.output()


def test_a_killed_worker_must_restart_the_gang_from_its_checkpoint(slurm):
    job = slurm.submit("--", "count.py", "until-restarted")
    eventually(lambda: len(slurm.steps(1)) > 25 and len(slurm.steps(0)) > 25)
    pid = re.findall(r"pid (\d+)", slurm.log("count", 1))[-1]
    slurm.cluster.kill(int(pid), "n2")
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    assert slurm.state(job) == "COMPLETED", slurm.output()
    for rank in range(2):
        assert complete(slurm.steps(rank))
    assert {generation for _, generation in slurm.steps(1)} == {0, 1}
    assert "generation 0 ended with exit code 137" in slurm.output()


def test_a_job_must_save_before_its_time_limit(slurm):
    job = slurm.submit("--", "count.py", "100000")
    eventually(lambda: len(slurm.steps(1)) > 15)
    slurm("scancel", "--batch", "--signal=TERM", job)  # the signal that Slurm sends before the time limit
    eventually(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
    last = slurm.steps(1)[-1]
    assert last[1] == 0  # still the first generation
    assert (slurm.cli.folder / "runs" / "count" / "checkpoints" / "rank-1").read_text() == str(last[0])


def test_a_script_that_cannot_succeed_must_not_be_retried(slurm):
    (slurm.cli.folder / "usage.py").write_text("raise SystemExit(2)\n")
    job = slurm.submit("--", "usage.py")
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    assert slurm.state(job) == "FAILED"
    assert "generation" not in slurm.output()
