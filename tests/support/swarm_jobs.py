"""Jobs on a Swarm of three hosts."""

import json
import re
import signal

from support.faults import Background, complete
from support.hosts import Swarm

RANKS = range(4)


class Job(Background):
    """`orchestrate run --engine swarm` in the background."""

    def __init__(self, cli, swarm: Swarm, *arguments: str, trainers: int = 3) -> None:
        super().__init__(cli, "swarm", *arguments, trainers=trainers)
        self.swarm = swarm

    def where(self, node: str):
        """The host of a node, and the node's container there."""
        task = "master.1" if node == "master" else f"trainer.{node.rpartition('-')[2]}"
        name = f"{self.project()}-{task}."
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


def assert_succeeded(job: Job, last: int = 0) -> None:
    """Check that the job has succeeded after one restart and that the log of each of its 4 ranks is complete."""
    assert job.end(240) == 0, job.err
    report = job.cli.report()
    assert (report["outcome"], report["generations"], report["world_size"]) == ("succeeded", 2, 4)
    for rank in RANKS:
        steps = job.steps(rank)
        assert complete(steps, last), [*zip(steps, steps[1:])][-200:]
        assert last or 40 < [generation for _, generation in steps].count(1) <= 50
