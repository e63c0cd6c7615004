"""The same job on three hosts, each with an engine of its own: what must be as on one, and what only hosts can do.

The hosts are network namespaces of this machine; see hosts.py.
"""

import json
import os
import re
import shutil
import signal

import pytest
from conftest import ROOT, eventually
from faults import Background, complete
from hosts import Swarm

pytestmark = pytest.mark.docker
RANKS = range(4)


@pytest.fixture(scope="module")
def hosts(docker_engine, tmp_path_factory):
    """Three hosts; a test that asks for `swarm` has them well, and must leave nothing on them."""
    if os.getuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare", "dockerd"))):
        pytest.skip("hosts are network namespaces with a dockerd each, which root alone can make, with iproute2")
    swarm = Swarm(tmp_path_factory.mktemp("hosts"))
    yield swarm
    swarm.remove()


@pytest.fixture
def swarm(hosts, cli):
    hosts.well()
    eventually(lambda: not hosts.left())
    cli.env["DOCKER_HOST"] = hosts.hosts[0].socket
    yield hosts
    for host in hosts.hosts:
        host.restore()
    hosts.well()
    eventually(lambda: not hosts.left(), timeout=90)


class Job(Background):
    """`orchestrate run --engine swarm` in the background."""

    def __init__(self, cli, swarm: Swarm, *arguments: str, trainers: int = 3) -> None:
        super().__init__(cli, "swarm", *arguments, trainers=trainers)
        self.swarm = swarm

    def where(self, node: str):
        """The host of a node, and its container there."""
        name = f"{self.home()}-master.1." if node == "master" else f"{self.home()}-trainer.{node.rpartition('-')[2]}."
        for host in self.swarm.hosts:
            if found := host.docker("ps", "-q", "--no-trunc", "--filter", f"name={name}").strip():
                return host, found
        raise AssertionError(f"no host has {name}")

    def kill_worker(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = int(re.findall(r"pid (\d+)", self.cli.log(rank))[-1])
        plan = json.loads((self.cli.run_dir() / "plan.json").read_text())
        host, node = self.where(plan["workers"][rank]["node"])
        host.docker("exec", node, "python", "-c", f"import os; os.kill({pid}, {int(number)})")

    def on(self, host) -> list[int]:
        """The ranks on a host."""
        plan = json.loads((self.cli.run_dir() / "plan.json").read_text())
        return [worker["rank"] for worker in plan["workers"] if self.where(worker["node"])[0] is host]


def finished(job: Job, last: int, generations: int = 2, world_size: int = 4) -> None:
    """The job has ended well, and every rank's log is complete."""
    assert job.end(240) == 0, job.err
    report = job.cli.report()
    assert (report["outcome"], report["generations"], report["world_size"]) == ("succeeded", generations, world_size)
    for rank in range(world_size):
        assert complete(job.steps(rank), last), job.steps(rank)


@pytest.mark.slow
def test_the_default_job_must_train_on_all_hosts_to_the_same_accuracy(cli, swarm):
    job = Job(cli, swarm, "--set", "command=-m app.train --epochs 3 --resume auto", trainers=5)
    eventually(lambda: job.has(0, "epoch 1/3"))
    assert all(job.on(host) for host in swarm.hosts)
    assert job.end(300) == 0, job.err
    accuracy = float(re.findall(r"accuracy ([\d.]+)%", cli.log(0))[-1])
    assert accuracy > 98.5
    assert (cli.run_dir() / "checkpoints" / "last" / "state.pt").exists()
    assert {f"rank-{rank}.log" for rank in range(6)} == {path.name for path in (cli.run_dir() / "logs").iterdir()}
    assert not (cli.run_dir() / ".key").exists()


def test_a_script_that_knows_nothing_of_us_must_run_unchanged(cli, swarm):
    shutil.copy(ROOT / "examples" / "allreduce.py", cli.folder)
    done = cli("run", "--engine", "swarm", "--gpus", "none", "--trainers", "5", "--", "allreduce.py")
    assert done.returncode == 0, done.stderr
    for rank in range(6):
        assert cli.log(rank) == f"rank {rank} of 6: the ranks add up to 15\n"


def test_a_worker_that_is_killed_must_restart_the_gang_from_what_all_hosts_have_saved(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "60")
    job.until_step(25, rank=2)
    job.kill_worker(2)
    finished(job, 60)
    assert job.causes() == [(2, "killed")]


def test_a_task_that_is_killed_must_be_replaced_and_find_its_files(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "60")
    job.until_step(25, rank=1)
    host, node = job.where("trainer-1")
    host.docker("kill", node)
    finished(job, 60)
    assert job.causes() == [(1, "node lost")]
    again = [step for step, generation in job.steps(1) if generation == 1]
    assert again[0] % 10 == 1 and again[0] > 1  # from its checkpoint, which came home, and from there to the new node


@pytest.mark.slow
def test_a_host_that_dies_must_be_done_without(cli, swarm):
    job = Job(cli, swarm, "--set", "grace=2s", "--", "count.py", "300")
    last = swarm.hosts[2]
    job.until_step(30, rank=0)
    ranks = job.on(last)
    assert ranks
    last.kill()
    finished(job, 300)
    ((rank, cause),) = job.causes()
    assert cause == "host lost" and rank in ranks


@pytest.mark.slow
def test_a_host_that_is_cut_off_must_not_train_while_the_others_do(cli, swarm):
    job = Job(cli, swarm, "--set", "grace=2s", "--", "count.py", "600")
    last = swarm.hosts[2]
    job.until_step(30, rank=0)
    ranks = job.on(last)
    assert ranks
    nodes = last.docker("ps", "-q").split()
    last.cut()
    job.until("generation_started", 2)
    for node in nodes:  # by now their lease is over
        assert "count.py" not in last.docker("top", node)
    last.heal()
    finished(job, 600)
    ((rank, cause),) = job.causes()
    assert cause == "host lost" and rank in ranks
