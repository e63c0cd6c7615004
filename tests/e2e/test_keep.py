"""Nodes that are kept after a job: the next job uses them."""

import re
import signal

import pytest
from support.faults import Background
from support.leftovers import docker
from support.optional import not_none
from support.waiting import eventually


def kept(cli) -> list[str]:
    return [path.name for path in cli.folder.glob("runs/kept-*")]


def states(cli) -> dict[str, str]:
    return {row[0]: row[3] for row in cli.ps()}


def test_the_next_job_must_use_the_nodes_of_the_last_one_until_another_needs_its_own(cli, engine):
    run = ("run", "--engine", engine, "--gpus", "none")
    (cli.folder / "who.py").write_text("import os, socket\nprint('node', os.getppid(), socket.gethostname())\n")
    assert cli(*run, "--trainers", "1", "--keep", "1h", "who.py").returncode == 0
    (name,) = kept(cli)
    assert not_none(re.fullmatch(r"idle, holds ([\d.]+) [MG]iB, 60 min left", states(cli)[name]))[1] != "0"
    for options in (["--keep", "10m"], []):
        done = cli(*run, "--trainers", "1", *options, "who.py")
        assert (done.returncode, f", on {name}" in done.stderr) == (0, True), done.stderr
    jobs = [*cli.folder.glob("runs/who-*")]
    nodes = {path.read_text().splitlines()[-1] for job in jobs for path in job.glob("logs/rank-*.log")}
    assert (len(jobs), len(nodes)) == (3, 2)
    done = cli(*run, "--trainers", "2", "who.py")
    assert (done.returncode, " on kept-" in done.stderr, "not using" in done.stderr) == (0, False, False), done.stderr
    assert kept(cli) == [] and states(cli) == {}


def test_kept_nodes_must_end_by_themselves_and_start_again_for_the_next_job(cli, engine):
    run = ("run", "--engine", engine, "--gpus", "none", "--trainers", "1", "--keep", "1s", "probe.py")
    assert cli(*run).returncode == 0
    (name,) = kept(cli)
    if engine == "docker":
        listing = ("ps", "-a", "--filter", f"name={name}", "--format", "{{.State}}")
        eventually(lambda: set(docker(*listing).split()) == {"exited"})
        assert states(cli) == {name: "expired"}
    else:
        eventually(lambda: states(cli) == {})
    done = cli(*run)
    assert (done.returncode, f", on {name}" in done.stderr) == (0, True), done.stderr
    assert cli("down", name).returncode == 0
    assert kept(cli) == []


@pytest.mark.any_engine
def test_kept_nodes_must_wait_for_the_end_of_a_job_without_an_orchestrator(cli, engine):
    job = Background(cli, engine, "--keep", "1s", "--", "count.py", "60", trainers=1)
    job.until_step(5)
    job.process.send_signal(signal.SIGKILL)
    job.end()
    eventually(lambda: all(job.has(rank, "step 60 in 0\n") for rank in range(2)))
    (name,) = kept(cli)
    done = cli("attach")
    assert done.returncode == 0, done.stderr
    assert cli.report()["generations"] == 1
    assert cli("down", name).returncode == 0


def test_swarm_jobs_must_not_be_kept(cli):
    done = cli("plan", "--engine", "swarm", "--keep", "1h", "probe.py")
    assert done.returncode == 2 and not kept(cli)
