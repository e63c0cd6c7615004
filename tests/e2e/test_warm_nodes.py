"""Nodes that stay up must run one job after the other, each as if it were the first."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.cli import Cli
from support.faults import OPTIONS, Background, compose_hangs, container, kill_node
from support.leftovers import docker
from support.processes import gone
from support.waiting import eventually

from orchestrate.host import private


class Cluster:
    """Three nodes that `up` has created, in a folder with the test scripts."""

    def __init__(self, cli: Cli, engine: str, *options: str) -> None:
        self.cli, self.engine = cli, engine
        quick = ("--set", "warm=false")  # most of the scripts do not import torch
        done = cli("up", "--engine", engine, "--trainers", "2", *OPTIONS, *quick, *options)
        assert done.returncode == 0, done.stderr
        self.name = done.stdout.strip()

    def run(self, *arguments: str, trainers: int = 2) -> subprocess.CompletedProcess[str]:
        """Run a job, whose run directory becomes the only one."""
        for old in self.cli.folder.glob("runs/*"):
            if old.name != self.name:
                shutil.rmtree(old)
        return self.cli("run", "--engine", self.engine, "--trainers", str(trainers), *OPTIONS, *arguments)

    def nodes(self) -> list[str]:
        """The objects of the cluster: containers or processes."""
        return self.cli("down", "--dry-run", self.name).stdout.splitlines()

    def state(self) -> str:
        (state,) = [row[3] for row in self.cli.ps() if row[0] == self.name]
        return state.partition(",")[0]

    def fits(self, done: subprocess.CompletedProcess[str]) -> bool:
        assert done.returncode == 0, done.stderr
        return f", on {self.name}\n" in done.stderr


def on_cluster(run: Path) -> str:
    """Where the files of a job on a cluster are; empty once they have been moved to its run directory."""
    assert (run / "job" / "logs").is_dir()
    return os.readlink(run / "job") if (run / "job").is_symlink() else ""


@pytest.fixture
def up(cli, engine):
    clusters = []

    def bring_up(*options: str) -> Cluster:
        clusters.append(Cluster(cli, engine, *options))
        return clusters[0]

    yield bring_up
    for one in clusters:
        done = cli("down", one.name)
        assert (done.returncode, done.stderr) == (0, f"{one.name} removed\n")
        assert not (cli.folder / "runs" / one.name).exists()
        assert not (private.temporary() / one.name).exists()


def test_jobs_must_use_the_nodes_of_a_cluster_and_leave_them_up(up, cli):
    cluster = up()
    before = cluster.nodes()
    assert len(before) >= 4 and cluster.state() == "idle"
    for _ in range(2):
        assert cluster.fits(cluster.run("--", "count.py", "3"))
        assert "step 3 in 0" in cli.log(2)
        assert (cluster.nodes(), cluster.state()) == (before, "idle")
        assert not on_cluster(cli.run_dir()) and cli.report()["outcome"] == "succeeded"
    assert cluster.fits(cluster.run("--", "count.py", "3", trainers=1))  # on two of the three
    assert cli.report()["world_size"] == 2


LEAVES = """
import os, subprocess, sys
print(sorted(os.listdir(os.environ["JOB_DIR"] + "/..")) if os.environ["JOB_DIR"].startswith("/job") else "", flush=True)
places = ("/tmp/left", "/dev/shm/left") if os.environ["JOB_DIR"].startswith("/job") else ()
print([place for place in places if os.path.exists(place)], os.environ.get("LEFT"), sys.modules.get("left"), flush=True)
for place in places:
    os.makedirs(place)
sys.modules["left"], os.environ["LEFT"] = sys, "1"
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("child", child.pid, flush=True)
child.returncode = 0  # no warning that it still runs
"""


def test_a_job_must_find_nothing_from_the_previous_job(up, cli, engine):
    cluster = up("--set", "warm=true", "--set", "preload=[colorsys]")
    (cli.folder / "leaves.py").write_text(LEAVES)
    seen = []
    for _ in range(2):
        assert cluster.fits(cluster.run("--set", "preload=[colorsys]", "--", "leaves.py"))
        assert cli.report()["generations"] == 1, (cli.run_dir() / "events.jsonl").read_text()
        for rank in range(3):
            *lines, child = cli.log(rank).splitlines()
            seen.append([line.replace(cli.run_dir().name, "JOB") for line in lines])
            if engine == "process":
                assert gone(int(child.split()[1]))
    assert seen[:3] == seen[3:]
    for name in ("master", "trainer-1", "trainer-2") if engine == "docker" else ():
        running = docker("exec", container(cluster.name, name), "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "time.sleep" not in running and "zygote.py" in running


@pytest.mark.any_engine
def test_a_job_that_does_not_fit_must_say_why_and_start_its_own_nodes(up):
    cluster = up()
    before = cluster.nodes()
    for options, why in (
        (("--trainers", "3"), "it has 2 trainers, the job needs 3"),
        (("--set", "grace=7s"), "grace is 5.0 on the cluster, 7.0 in the job"),
        (("--set", "shm_size=128m", "--set", "optional=shm_size"), "shm_size is 1g on the cluster, 128m in the job"),
    ):
        done = cluster.run(*options, "--", "count.py", "3")
        assert not cluster.fits(done)
        assert f"not using {cluster.name}: {why}\n" in done.stderr
        assert cluster.nodes() == before


@pytest.mark.any_engine
def test_a_cluster_in_use_must_not_take_a_second_job_or_go_down(up, cli, engine):
    cluster = up()
    job = Background(cli, engine, "--", "count.py", "100000")
    job.until_step(5)
    first = cli.run_dir()
    assert on_cluster(first) == f"../{cluster.name}/nodes/{first.name}" and cluster.state() == "in use"
    second = cli("run", "--engine", engine, "--trainers", "0", *OPTIONS, "--runs", "runs", "--", "count.py", "3")
    assert second.returncode == 0, second.stderr
    assert f"not using {cluster.name}: it is in use by {first.name} (process {job.process.pid})" in second.stderr
    refused = cli("down", cluster.name)
    assert (refused.returncode, f"error: {cluster.name} is in use by {first.name} " in refused.stderr) == (2, True)
    assert refused.stderr.endswith(f" stop {first.name}\n")
    wrong = cli("stop", cluster.name)
    assert (wrong.returncode, f"error: {cluster.name} is a cluster, not a job" in wrong.stderr) == (2, True)
    assert cli("stop", first.name).returncode == 0
    assert job.end() == 130
    assert cluster.state() == "idle" and not on_cluster(first)
    assert json.loads((first / "report.json").read_text())["outcome"] == "stopped"


@pytest.mark.exhaustive
def test_a_job_on_a_cluster_must_survive_failures(up, cli, engine):
    cluster = up()
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(10, rank=1)
    job.kill_worker(1)
    job.until("generation_starting", 2)
    job.until_steps_in(1, rank=2)
    job.kill_node("trainer-1")
    job.until("generation_started", 3)
    cli.finish_jobs()
    assert job.end() == 0, job.err
    assert job.causes() == [(1, "killed"), (1, "node stopped" if engine == "docker" else "node lost")]
    assert len(cluster.nodes()) >= 4 and cluster.state() == "idle"


def test_a_node_lost_between_two_jobs_must_be_brought_back(up, cli, engine):
    cluster = up()
    kill_node(engine, cluster.name, "trainer-2")
    assert cluster.fits(cluster.run("--", "count.py", "3"))
    assert "step 3 in 0" in cli.log(2)


def test_a_node_must_be_recreated_even_if_a_file_it_hid_is_gone(cli, docker_engine, nothing_left):
    (cli.folder / ".dockerignore").write_text("key.pem\n")
    (cli.folder / "key.pem").touch()
    cluster = Cluster(cli, "docker")
    (cli.folder / "key.pem").unlink()
    kill_node("docker", cluster.name, "trainer-2")
    done = cluster.run("--", "count.py", "3")
    assert cli("down", cluster.name).returncode == 0
    assert cluster.fits(done)


@pytest.mark.any_engine
def test_a_job_taken_over_by_attach_must_leave_the_cluster_clean(up, cli, engine):
    cluster = up()
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(10, rank=2)
    job.process.kill()
    job.process.communicate()
    cli.finish_jobs()
    done = cli("attach", cli.run_dir().name)
    assert done.returncode == 0, done.stderr
    assert not on_cluster(cli.run_dir()) and cli.report()["generations"] == 1
    assert cluster.fits(cluster.run("--", "count.py", "3"))
    assert "[node] generation" not in cli.log(0)


@pytest.mark.any_engine
def test_a_detached_job_must_use_the_cluster_and_end_with_its_files_in_its_run_directory(up, cli, engine):
    cluster = up()
    done = cluster.run("--detach", "--", "count.py", "until-asked")
    assert cluster.fits(done)
    name = cli.run_dir().name
    assert on_cluster(cli.run_dir()) and done.stdout == f"runs/{name}\n"
    waiting = cli.start("wait", name)
    cli.finish_jobs()
    assert (waiting.communicate(timeout=150), waiting.returncode) == (("", ""), 0)
    eventually(lambda: cluster.state() == "idle")
    assert not on_cluster(cli.run_dir()) and cli.report()["outcome"] == "succeeded"
    assert "step 10 in 0" in cli.log(2)


@pytest.mark.any_engine
def test_stop_must_end_the_job_of_a_dead_supervisor_and_keep_the_cluster(up, cli, engine):
    cluster = up()
    job = Background(cli, engine, "--", "count.py", "100000")
    job.until_step(10, rank=2)
    job.process.kill()
    job.process.communicate()
    assert cli("stop", cli.run_dir().name).returncode == 0
    assert cluster.state() == "idle" and not on_cluster(cli.run_dir())
    assert cli.report()["outcome"] == "stopped"


@pytest.mark.any_engine
def test_ctrl_c_must_stop_the_job_and_keep_the_cluster(up, cli, engine):
    cluster = up()
    job = Background(cli, engine, "--", "count.py", "100000")
    job.until_step(5)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert cluster.state() == "idle"
    assert cluster.fits(cluster.run("--", "count.py", "3"))


def test_a_cluster_that_cannot_start_must_leave_nothing_behind(cli, engine, nothing_left):
    done = cli("up", "--engine", engine, "--gpus", "64", "--trainers", "2")
    assert done.returncode == 4
    assert not list(cli.folder.glob("runs/*"))


@pytest.mark.docker
def test_ctrl_c_while_a_cluster_starts_must_leave_nothing_behind(cli, docker_engine, nothing_left):
    hung = compose_hangs(cli, after=True)
    up = cli.start("up", "--engine", "docker", "--trainers", "1", *OPTIONS, "--set", "warm=false")
    eventually(hung)
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=150)
    assert up.returncode == 130
    assert not list(cli.folder.glob("runs/*"))


def test_down_must_refuse_an_unknown_cluster(cli):
    done = cli("down", "nonesuch")
    assert (done.returncode, done.stderr) == (
        2,
        "error: no such cluster: nonesuch\nhint: no clusters in runs\n",
    )


@pytest.mark.any_engine
def test_a_standby_node_must_replace_a_lost_one_while_that_is_recreated(cli, engine):
    job = Background(cli, engine, "--spares", "1", "--", "count.py", "until-asked")
    job.until_step(10, rank=2)
    job.kill_node("trainer-1")
    job.until("generation_starting", 2)
    assert job.events("generation_starting")[1]["nodes"] == ["master", "trainer-2", "trainer-3"]
    job.until_steps_in(1, rank=2)
    job.kill_node("trainer-2")
    job.until("generation_starting", 3)
    assert len(job.events("generation_starting")[2]["nodes"]) == 3  # whichever nodes are back by then
    cli.finish_jobs()
    assert job.end() == 0, job.err
    assert job.cli.report()["generations"] == 3
