"""Jobs on three hosts, each with its own engine: same results as on one host, and what a user can ask for."""

import json
import re
import shutil
import signal
from collections import Counter

import pytest
from support.commanded import noted
from support.faults import complete
from support.repo import ROOT
from support.swarm_jobs import RANKS, Job, assert_succeeded
from support.waiting import eventually

from orchestrate.host import records
from orchestrate.record.events import GenerationEnded, OutcomeDecided
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths

pytestmark = pytest.mark.docker


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_default_job_must_reach_the_same_accuracy_on_several_hosts(cli, swarm):
    options = ["--set", "env.OMP_NUM_THREADS=1"]  # otherwise each of the three hosts would use all cores
    job = Job(cli, swarm, *options, "--set", "command=-m app.train --epochs 3 --resume auto", trainers=2)
    eventually(lambda: job.has(0, "epoch 1/3"))
    assert all(job.on(host) for host in swarm.hosts)
    assert job.end(300) == 0, job.err
    accuracy = float(re.findall(r"accuracy ([\d.]+)%", cli.log(0))[-1])
    assert accuracy > 98.5
    assert (cli.run_dir() / "checkpoints" / "last" / "state.pt").exists()
    assert {f"rank-{rank}.log" for rank in range(3)} == {path.name for path in (cli.run_dir() / "logs").iterdir()}
    assert not records.need(cli.run_dir()).key


@pytest.mark.exhaustive
def test_a_script_written_for_torchrun_must_run_unchanged(cli, swarm):
    shutil.copy(ROOT / "examples" / "allreduce.py", cli.folder)
    done = cli("run", "--engine", "swarm", "--gpus", "none", "--trainers", "2", "--", "allreduce.py")
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert cli.log(rank) == f"rank {rank} of 3: the ranks add up to 3\n", cli.report()["failures"][0]["summary"]


def test_a_cluster_must_run_one_job_after_another(cli, swarm):
    options = ("--engine", "swarm", "--gpus", "none", "--trainers", "1")
    name = cli("up", *options).stdout.strip()
    for number in range(2):
        done = cli("run", *options, "--name", f"job-{number}", "--", "sums.py", "5", timeout=100)
        assert done.returncode == 0, done.stderr
        (log,) = (cli.folder / "runs").glob(f"job-{number}-*/logs/rank-1.log")
        assert log.read_text().endswith("step 5\n")
    assert len(cli.ps()) == 1
    assert cli("down", name).returncode == 0


def test_a_node_must_have_the_same_limits_and_rights_as_on_one_machine(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "100000")
    job.until_step(1, rank=3)
    limits = json.loads((cli.run_dir() / "plan.json").read_text())["limits"]
    for name in ("master", "trainer-3"):
        host, node = job.where(name)
        (found,) = json.loads(host.docker("inspect", node))
        rights = found["HostConfig"]
        assert (rights["Memory"], rights["PidsLimit"]) == (limits["memory"], limits["processes"])
        assert (
            limits["memory"] < json.loads(host.docker("info", "-f", "{{.MemTotal}}")) / 2
        )  # a host may have two nodes
        assert (rights["CapDrop"], rights["CapAdd"], rights["Privileged"]) == (["ALL"], None, False)
        assert rights["ReadonlyRootfs"] and "no-new-privileges" in str(rights["SecurityOpt"])
        mounts = host.docker("exec", node, "cat", "/proc/self/mountinfo").splitlines()
        flags = {line.split()[4]: line.split()[5].split(",") for line in mounts if " - tmpfs " in line}
        for place in ("/dev/shm", "/run/orchestrate"):
            assert {"nosuid", "nodev", "noexec"} <= set(flags[place])
        room = host.docker(
            "exec", node, "df", "--block-size=1", "--output=size", "/dev/shm", "/run/orchestrate"
        ).split()
        assert [int(size) for size in room[1:]] == [1 << 30, 16 << 20]
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130, job.err


ADDRESSES = {"MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "JOB_DIR", "JOB_ID"}
ADDRESSES |= {"TORCHELASTIC_RUN_ID"}
ON_EACH_ENGINE = ("--trainers", "2", "--gpus", "none", "--set", "env.OMP_NUM_THREADS=1")  # or cores would differ


def test_every_engine_must_give_the_same_plan_except_addresses(cli, swarm):
    plans = []
    for engine in ("process", "docker", "swarm"):
        env = {"DOCKER_HOST": ""} if engine == "docker" else {}
        done = cli("plan", "--json", "--engine", engine, *ON_EACH_ENGINE, "--", "-m", "app.train", **env)
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        for worker in plan["workers"]:
            worker["env"] = {name: value for name, value in worker["env"].items() if name not in ADDRESSES}
        plans.append((plan["nodes"], plan["command"], plan["workers"]))
    assert plans[0] == plans[1] == plans[2] and len(plans[0][2]) == 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_engine_must_compute_the_same_losses(cli, swarm):
    losses = []
    for engine in ("process", "docker", "swarm"):
        env = {"DOCKER_HOST": ""} if engine == "docker" else {}
        runs = ["--engine", engine, *ON_EACH_ENGINE, "--runs", engine]
        done = cli("run", *runs, "--", "-m", "app.train", "--epochs", "1", **env)
        assert done.returncode == 0, done.stderr
        (run,) = (cli.folder / engine).iterdir()
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) > 1 and losses[0] == losses[1] == losses[2]


def test_each_worker_must_have_the_gpu_that_swarm_reserved_for_it(cli, swarm):
    (cli.folder / "gpu.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    done = cli("run", "--engine", "swarm", "--gpus", "all", "--trainers", "5", "--set", "warm=false", "--", "gpu.py")
    assert done.returncode == 0, done.stderr
    assert {cli.log(rank).strip() for rank in range(6)} == {f"GPU-host-{n}-{x}" for n in (1, 2, 3) for x in "ab"}


def test_more_nodes_than_gpus_must_be_an_error(cli, swarm):
    done = cli("run", "--engine", "swarm", "--gpus", "all", "--trainers", "6", "--", "count.py", "5")
    assert done.returncode == 4 and "7 workers need 7 GPUs, but only 6 are available" in done.stderr


def test_training_must_continue_without_its_orchestrator_until_another_takes_over(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "200")
    job.until_step(30, rank=2)
    job.process.kill()
    job.process.communicate()
    done = cli("attach", cli.run_dir().name)
    assert done.returncode == 0, done.stderr
    assert cli.report()["generations"] == 1
    for rank in RANKS:
        assert complete(job.steps(rank), 200)


def test_files_still_on_hosts_when_the_outcome_is_decided_must_be_copied(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "150")
    job.until_step(30, rank=2)
    job.process.kill()
    job.process.communicate()
    for rank in RANKS:
        host, node = job.where(["master", "trainer-1", "trainer-2", "trainer-3"][rank])
        eventually(lambda host=host, node=node: "step 150" in host.docker("logs", node))
    assert not any(complete(job.steps(rank), 150) for rank in RANKS)
    reason = "all workers ended with exit code 0"
    ended = GenerationEnded(generation=0, outcome=Outcome.SUCCEEDED, why=reason)
    # As if the orchestrator had died a moment later:
    noted(JobPaths(cli.run_dir()), ended, OutcomeDecided(Outcome.SUCCEEDED, reason))
    done = cli("attach", cli.run_dir().name)
    assert done.returncode == 0, done.stderr
    for rank in RANKS:
        assert complete(job.steps(rank), 150)
        assert (cli.run_dir() / "checkpoints" / f"rank-{rank}").read_text() == "150"


@pytest.mark.exhaustive
def test_leftovers_of_a_dead_orchestrator_must_be_listed_and_removed(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "100000", trainers=5)
    job.until_step(10, rank=5)
    plan = json.loads((cli.run_dir() / "plan.json").read_text())
    listed = swarm.hosts[0].docker("service", "ps", "--format", "{{.Name}} {{.Error}}", f"{cli.run_dir().name}-trainer")
    lost = [int(slot) for slot in re.findall(r"\.(\d+) .*starting container failed", listed)]  # replaced by others
    numbers = [number for number in range(1, 6 + len(lost)) if number not in lost]
    assert plan["nodes"] == ["master", *(f"trainer-{number}" for number in numbers)]
    assert Counter(job.until("nodes_up")["hosts"].values()) == {host.name: 2 for host in swarm.hosts}
    job.process.kill()
    job.process.communicate()
    name = cli.run_dir().name
    assert cli.ps() == [[name, "swarm", "6", "no supervisor", f"runs/{name}"]]
    shown = cli("stop", name, "--dry-run").stdout.split("\n")[:-1]
    things = ["service {}-master", "service {}-trainer", "container {}-relay", "secret {}-node", "network {}_job"]
    assert sorted(shown) == sorted(thing.format(name) for thing in things)
    assert cli("stop", name).returncode == 0
    assert not cli("stop", name, "--dry-run").stdout


@pytest.mark.parametrize(
    "event",
    [
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("nodes_starting", "nodes_up")),
        "generation_started",
    ],
)
def test_ctrl_c_at_any_moment_must_leave_nothing(cli, swarm, event):
    job = Job(cli, swarm, "--", "count.py", "100000")
    job.until(event)
    job.process.send_signal(signal.SIGINT)
    assert (job.end(60), cli.report()["outcome"]) == (130, "stopped")


@pytest.mark.exhaustive
def test_a_host_without_the_image_must_be_reported_by_name(cli, swarm):
    first = swarm.hosts[0]
    (cli.folder / "Dockerfile").write_text("FROM orchestrate-node:0.1\nLABEL only=here\n")
    first.docker("build", "--quiet", "--tag", "lonely:1", str(cli.folder))
    try:
        options = ["--image", "lonely:1", "--gpus", "none", "--trainers", "5"]
        done = cli("run", "--engine", "swarm", *options, "--", "count.py", "5")
        assert done.returncode == 3
        assert re.search(r"error: host-[23] has no image lonely:1\n", done.stderr), done.stderr
    finally:
        eventually(lambda: not first.docker("ps", "--all", "--quiet"))
        first.docker("image", "rm", "lonely:1")


@pytest.mark.exhaustive
def test_a_constraint_that_no_host_meets_must_be_reported(cli, swarm):
    done = cli("run", "--engine", "swarm", "--set", "constraints=node.labels.gpu == a100", "--gpus", "none")
    assert done.returncode == 3
    assert "no suitable host for a node: scheduling constraints not satisfied on 3 nodes" in done.stderr


def test_a_shared_folder_must_hold_the_files_of_all_hosts(cli, swarm):
    shared = cli.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)  # nodes do not run as root, even if root starts the job
    job = Job(cli, swarm, "--set", f"volume={shared}", "--", "count.py", "until-restarted")
    job.until_step(25, rank=2)
    job.kill_worker(2)
    assert_succeeded(job)
    assert (shared / cli.run_dir().name / "checkpoints" / "rank-3").read_text() == str(job.steps(3)[-1][0])


def test_a_job_must_train_on_the_network_of_the_hosts(cli, swarm):
    shutil.copy(ROOT / "examples" / "allreduce.py", cli.folder)
    options = ["--engine", "swarm", "--gpus", "none", "--trainers", "3", "--set", "network=host"]
    done = cli("run", *options, "--", "allreduce.py")
    assert done.returncode == 0, done.stderr
    assert all(cli.log(rank).endswith(f"rank {rank} of 4: the ranks add up to 6\n") for rank in RANKS)


@pytest.mark.exhaustive
def test_doctor_must_report_three_healthy_hosts(cli, swarm):
    done = cli("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("2 GPUs offered") == 3 and "error" not in done.stdout
    assert done.stdout.count("a test node on it responds over an overlay network") == 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_doctor_must_report_an_unreachable_host(cli, swarm):
    swarm.hosts[2].cut()
    eventually(lambda: "Down" in swarm.states())
    done = cli("doctor")
    assert f"host-3 ({swarm.hosts[2].address}) accepts no nodes: down, active" in done.stdout
