"""Helpers for fault tests: a job in the background, its events and its logs."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable

from support.cli import Cli
from support.leftovers import docker
from support.processes import environ
from support.waiting import eventually

# Without packet filters, which cost each container another one: test_guard.py tests them.
OPTIONS = ("--gpus", "none", "--set", "grace=5s", "--set", "host_access=true")


class Background:
    """`orchestrate run` in the background."""

    def __init__(self, cli: Cli, engine: str, *arguments: str, trainers: int = 2) -> None:
        self.cli, self.engine = cli, engine
        self.process = cli.start("run", "--engine", engine, "--trainers", str(trainers), *OPTIONS, *arguments)
        self.out, self.err = "", ""

    def events(self, name: str = "") -> list[dict]:
        try:
            lines = (self.cli.run_dir() / "events.jsonl").read_text().splitlines()
        except (ValueError, OSError):
            return []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["event"] == name or not name]

    def until(self, name: str, count: int = 1) -> dict:
        """Wait for an event."""
        return eventually(lambda: self.events(name)[count - 1 :] or self.ended_early())[0]

    def ended_early(self) -> None:
        if self.process.poll() not in (None, -signal.SIGKILL):  # killed by the test itself
            raise AssertionError(self.process.communicate()[1][-2000:])

    def until_step(self, step: int, rank: int = 0) -> None:
        """Wait for a step of the first generation."""
        line = f"step {step} in 0\n"
        eventually(lambda: self.has(rank, line) or self.ended_early())

    def until_steps_in(self, generation: int, rank: int = 0) -> None:
        """Wait until a later generation, which starts from an unknown step, has done some steps."""
        eventually(lambda: self.cli.log(rank).count(f" in {generation}\n") > 3 or self.ended_early())

    def has(self, rank: int, text: str) -> bool:
        try:
            return text in self.cli.log(rank)
        except (ValueError, OSError):
            return False

    def project(self) -> str:
        """The name that the nodes carry: the job's, or its cluster's."""
        run = self.cli.run_dir()
        return json.loads((run / "plan.json").read_text())["placement"]["cluster"] or run.name

    def node(self, name: str) -> str:
        return container(self.project(), name)

    def kill_node(self, name: str) -> None:
        kill_node(self.engine, self.project(), name)

    def node_pid(self, name: str) -> int:
        return node_pid(self.engine, self.project(), name)

    def kill_worker(self, rank: int, number: int = signal.SIGKILL) -> None:
        pid = int(re.findall(r"pid (\d+)", self.cli.log(rank))[-1])
        if self.engine == "docker":
            plan = json.loads((self.cli.run_dir() / "plan.json").read_text())
            node = self.node(plan["workers"][rank]["node"])
            docker("exec", node, "python", "-c", f"import os; os.kill({pid}, {int(number)})")
        else:
            os.kill(pid, number)

    def end(self, timeout: float = 300) -> int:
        """Wait for the end of the orchestrator; return its exit code."""
        self.out, self.err = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def causes(self) -> list[tuple[int, str]]:
        """Rank and cause of each failure in the report."""
        return [(failure["rank"], failure["cause"]) for failure in self.cli.report()["failures"]]

    def steps(self, rank: int) -> list[tuple[int, int]]:
        """Step and generation of each line that the script count.py wrote."""
        found = re.findall(r"^step (\d+) in (\d+)$", self.cli.log(rank), re.M)
        return [(int(step), int(generation)) for step, generation in found]


def compose_hangs(cli: Cli, after: bool = False) -> Callable[[], str]:
    """Make `docker compose up` hang, at once or `after` the nodes are up; returns a function for its process id."""
    path, hung, real = cli.folder / "bin" / "docker", cli.folder / "hung", shutil.which("docker")
    path.parent.mkdir()
    does = f'{real} "$@"; ' * after + f"echo $$ > {hung}; sleep 600"
    path.write_text(f"#!/bin/sh\ncase $* in *' up '*) {does} ;; esac\nexec {real} \"$@\"\n")
    path.chmod(0o755)
    cli.env["PATH"] = f"{path.parent}:{cli.env['PATH']}"
    return lambda: hung.read_text() if hung.exists() else ""


def container(project: str, name: str) -> str:
    """The container of a node."""
    names = (f"{project}-{name}$", f"{project}-{name}-1$")
    return next(filter(None, (docker("ps", "-aq", "--filter", f"name={one}").strip() for one in names)), "")


def node_pid(engine: str, project: str, name: str) -> int:
    """The process id of a node."""
    if engine == "docker":
        return int(docker("inspect", "--format", "{{.State.Pid}}", container(project, name)))
    socket = f"/tmp/orchestrate-{os.getuid()}/{project}/{name}.sock"
    nodes = subprocess.run(["pgrep", "-f", "orchestrate/node$"], capture_output=True, text=True, check=True)
    for pid in map(int, nodes.stdout.split()):
        if environ(pid).get("NODE_SOCKET") == socket:
            return pid
    raise AssertionError(f"no process listens at {socket}")


def kill_node(engine: str, project: str, name: str) -> None:
    if engine == "docker":
        docker("kill", container(project, name))
    else:
        os.kill(node_pid(engine, project, name), signal.SIGKILL)


def complete(steps: list[tuple[int, int]], last: int = 0) -> bool:
    """Whether count.py's log has no gap: each step in a generation follows the one before, and the last is `last`.

    Without `last`, the job must have ended at a multiple of ten, where `until-asked` and `until-restarted` end.
    """
    within = all(one[1] != other[1] or other[0] == one[0] + 1 for one, other in zip(steps, steps[1:]))
    return bool(steps) and within and steps[0] == (1, 0) and steps[-1][0] == (last or steps[-1][0] // 10 * 10)


ALONE = ("run", "--engine", "docker", "--trainers", "0", "--gpus", "none")
