"""Jobs on three hosts, each with its own engine: same results as on one host, and failures of hosts.

The hosts are network namespaces of this machine; see hosts.py.
"""

import json
import os
import re
import shutil
import signal
from collections import Counter

import pytest
from conftest import DOCKER_REQUIRED, ROOT, eventually
from support.commanded import noted
from support.faults import Background, complete
from support.hosts import Swarm, command

from orchestrate.files import records
from orchestrate.files.paths import JobPaths
from orchestrate.job.events import GenerationEnded, OutcomeDecided
from orchestrate.job.outcomes import Outcome

pytestmark = pytest.mark.docker
RANKS = range(4)
WRITES = """
import os, pathlib, runpy
own = pathlib.Path("out", os.environ["RANK"])
own.parent.mkdir(exist_ok=True)
with own.open("a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n")
runpy.run_path("count.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def hosts(docker_engine, tmp_path_factory):
    """Three hosts; the fixture `swarm` checks that they are healthy and that a test leaves nothing on them."""
    if os.getuid() or not all(map(shutil.which, ("ip", "iptables", "nsenter", "unshare", "dockerd"))):
        reason = "needs root, iproute2, iptables and dockerd: each host is a network namespace with its own dockerd"
        pytest.fail(reason) if DOCKER_REQUIRED else pytest.skip(reason)
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
    try:
        eventually(lambda: not hosts.left())
    except AssertionError:
        cli.clean()
        eventually(hosts.clear)  # for the tests that follow
        raise


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


def assert_host_lost(job: Job, ranks: list[int]) -> None:
    """Check that the only failure was the loss of a host, with one of these ranks."""
    ((rank, cause),) = job.causes()
    assert cause == "host lost" and rank in ranks


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


def test_a_script_written_for_torchrun_must_run_unchanged(cli, swarm):
    shutil.copy(ROOT / "examples" / "allreduce.py", cli.folder)
    done = cli("run", "--engine", "swarm", "--gpus", "none", "--trainers", "2", "--", "allreduce.py")
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert cli.log(rank) == f"rank {rank} of 3: the ranks add up to 3\n", cli.report()["failures"][0]["summary"]


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


@pytest.mark.slow
def test_every_engine_must_give_the_same_plan_except_addresses_and_the_same_losses(cli, swarm):
    plans, losses = [], []
    for engine in ("process", "docker", "swarm"):
        env = {"DOCKER_HOST": ""} if engine == "docker" else {}
        runs = ["--engine", engine, "--trainers", "2", "--gpus", "none", "--runs", engine]
        runs += ["--set", "env.OMP_NUM_THREADS=1"]  # otherwise three hosts would have more cores than one
        done = cli("run", *runs, "--", "-m", "app.train", "--epochs", "1", **env)
        assert done.returncode == 0, done.stderr
        (run,) = (cli.folder / engine).iterdir()
        plan = json.loads((run / "plan.json").read_text())
        for worker in plan["workers"]:
            worker["env"] = {name: value for name, value in worker["env"].items() if name not in ADDRESSES}
        plans.append((plan["nodes"], plan["command"], plan["workers"]))
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert plans[0] == plans[1] == plans[2]
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
    job = Job(cli, swarm, "--", "count.py", "400")
    job.until_step(30, rank=2)
    job.process.kill()
    job.process.communicate()
    done = cli("attach", cli.run_dir().name)
    assert done.returncode == 0, done.stderr
    assert cli.report()["generations"] == 1
    for rank in RANKS:
        assert complete(job.steps(rank), 400)


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


def test_leftovers_of_a_dead_orchestrator_must_be_listed_and_removed(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "100000", trainers=11)
    job.until_step(10, rank=11)
    plan = json.loads((cli.run_dir() / "plan.json").read_text())
    listed = swarm.hosts[0].docker("service", "ps", "--format", "{{.Name}} {{.Error}}", f"{cli.run_dir().name}-trainer")
    lost = [int(slot) for slot in re.findall(r"\.(\d+) .*starting container failed", listed)]  # replaced by others
    numbers = [number for number in range(1, 12 + len(lost)) if number not in lost]
    assert plan["nodes"] == ["master", *(f"trainer-{number}" for number in numbers)]
    assert Counter(job.until("nodes_up")["hosts"].values()) == {host.name: 4 for host in swarm.hosts}
    job.process.kill()
    job.process.communicate()
    name = cli.run_dir().name
    assert cli.ps() == [[name, "swarm", "12", "no supervisor", f"runs/{name}"]]
    shown = cli("stop", name, "--dry-run").stdout.split("\n")[:-1]
    things = ["service {}-master", "service {}-trainer", "container {}-relay", "secret {}-node", "network {}_job"]
    assert sorted(shown) == sorted(thing.format(name) for thing in things)
    assert cli("stop", name).returncode == 0
    assert not cli("stop", name, "--dry-run").stdout


@pytest.mark.parametrize("event", ["nodes_starting", "nodes_up", "generation_started"])
def test_ctrl_c_at_any_moment_must_leave_nothing(cli, swarm, event):
    job = Job(cli, swarm, "--", "count.py", "100000")
    job.until(event)
    job.process.send_signal(signal.SIGINT)
    assert (job.end(60), cli.report()["outcome"]) == (130, "stopped")


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


def test_doctor_must_report_three_healthy_hosts(cli, swarm):
    done = cli("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("2 GPUs offered") == 3 and "error" not in done.stdout
    assert done.stdout.count("a test node on it responds over an overlay network") == 3


@pytest.mark.slow
def test_doctor_must_report_an_unreachable_host(cli, swarm):
    swarm.hosts[2].cut()
    eventually(lambda: "Down" in swarm.states())
    done = cli("doctor")
    assert f"host-3 ({swarm.hosts[2].address}) accepts no nodes: down, active" in done.stdout


def test_a_killed_worker_must_restart_the_gang_from_the_checkpoints_of_all_hosts(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "until-restarted")
    job.until_step(25, rank=2)
    job.kill_worker(2)
    assert_succeeded(job)
    assert job.causes() == [(2, "killed")]


def test_a_killed_task_must_be_replaced_by_one_with_its_files(cli, swarm):
    (cli.folder / "writes.py").write_text(WRITES)
    job = Job(cli, swarm, "--", "writes.py", "until-restarted")
    job.until_step(25, rank=1)
    eventually(lambda: all((cli.run_dir() / "work" / "out" / str(rank)).exists() for rank in RANKS))
    host, node = job.where("trainer-1")
    host.docker("kill", node)
    job.until("generation_started", 2)
    written = [line.removeprefix("[rank 1] ") for line in host.docker("logs", node).splitlines()]
    assert_succeeded(job)
    assert cli.log(1).partition("[node] generation 1")[0].splitlines() == written
    assert job.causes() == [(1, "node lost")]
    again = [step for step, generation in job.steps(1) if generation == 1]
    assert again[0] % 10 == 1 and again[0] > 1  # from its checkpoint, copied here and then to the new node
    out = cli.run_dir() / "work" / "out"
    assert {path.name: path.read_text() for path in out.iterdir()} == {str(rank): "0\n1\n" for rank in RANKS}
    assert cli.report()["written"] == [f"out/{rank}" for rank in RANKS]
    assert f"the workers wrote 4 files: {cli.run_dir()}/work\n" in job.err


def test_a_restart_on_a_busy_machine_must_lose_nothing(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "400")
    job.until_step(25, rank=2)
    swarm.hosts[0].docker("update", "--cpus", "0.03", f"{job.project()}-relay")  # all nodes are reached through it
    job.kill_worker(2)
    assert_succeeded(job, 400)
    assert job.causes() == [(2, "killed")]


@pytest.mark.slow
def test_a_job_must_continue_without_a_host_that_dies(cli, swarm):
    job = Job(cli, swarm, "--set", "grace=2s", "--", "count.py", "until-restarted")
    last = swarm.hosts[2]
    job.until_step(30, rank=0)
    ranks = job.on(last)
    assert ranks
    last.kill()
    assert_succeeded(job)
    assert_host_lost(job, ranks)


@pytest.mark.slow
def test_a_job_must_continue_with_fewer_nodes_if_no_host_accepts_another(cli, swarm):
    options = ["--min-trainers", "1", "--set", "cpus=1", "--set", "grace=2s"]
    job = Job(cli, swarm, *options, "--", "count.py", "until-restarted", trainers=5)
    job.until_step(30, rank=0)
    assert all(len(job.on(host)) == 2 for host in swarm.hosts)
    swarm.hosts[2].kill()
    assert job.until("nodes_missing")["missing"] == 2
    replicas = swarm.hosts[0].docker(
        "service", "inspect", "--format", "{{.Spec.Mode.Replicated.Replicas}}", f"{job.project()}-trainer"
    )
    assert int(replicas) <= 5 + 2  # not more with each attempt
    assert_succeeded(job)


def test_the_nodes_of_a_drained_host_must_be_replaced_on_other_hosts(cli, swarm):
    job = Job(cli, swarm, "--", "count.py", "until-restarted")
    job.until_step(25, rank=0)
    last = swarm.hosts[2]
    ranks = job.on(last)
    assert ranks  # nodes are on all hosts
    try:
        swarm.hosts[0].docker("node", "update", "--availability", "drain", last.name)
        assert_succeeded(job)
    finally:
        swarm.hosts[0].docker("node", "update", "--availability", "active", last.name)
    ((rank, cause),) = job.causes()
    assert rank in ranks and cause == "node stopped"
    assert f"({last.name}) was terminated with its node" in job.err


@pytest.fixture
def grow(cli):
    """Put run directories on a disk of 20 MB; yields a function that enlarges it."""
    runs = cli.folder / "runs"
    runs.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=20m", "small", str(runs))
    yield lambda: command("mount", "-o", "remount,size=200m", str(runs))
    shutil.rmtree(cli.run_dir())
    command("umount", str(runs))


def test_files_that_do_not_fit_on_the_disk_must_stay_on_the_nodes_until_they_do(cli, swarm, grow):
    (cli.folder / "large.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n"
        "    open(os.environ['JOB_DIR'] + '/large', 'wb').write(bytes(range(256)) * 160_000)\n"
    )
    done = cli("run", "--engine", "swarm", "--gpus", "none", "--trainers", "1", "--", "large.py")
    assert done.returncode == 0
    assert "warning: not all nodes were removed: 1 file could not be copied, such as 'large': " in done.stderr
    name = cli.run_dir().name
    done = cli("stop", name)
    assert (done.returncode, "1 file could not be copied" in done.stderr) == (1, True)
    grow()
    done = cli("stop", name)
    assert done.returncode == 0, done.stderr
    assert (cli.run_dir() / "job" / "large").read_bytes() == bytes(range(256)) * 160_000
    assert cli.report()["left_behind"] == ""


def test_a_checkpoint_that_does_not_fit_on_the_disk_must_delay_the_next_generation(cli, swarm, grow):
    (cli.folder / "large.py").write_text(
        "import os, pathlib\npath = pathlib.Path(os.environ['JOB_DIR'], 'checkpoints', 'large')\n"
        "if path.exists():\n    print('found', path.stat().st_size)\n"
        "elif os.environ['RANK'] == '1':\n    path.write_bytes(bytes(40_000_000))\n    raise SystemExit(3)\n"
    )
    job = Job(cli, swarm, "--max-restarts", "1", "--", "large.py", trainers=1)
    assert "checkpoints/large" in job.until("disk_full")["error"]
    grow()
    assert job.end() == 0, job.err
    assert [cli.log(rank).count("found 40000000\n") for rank in (0, 1)] == [1, 1]


@pytest.mark.slow
def test_a_job_must_continue_without_a_host_whose_overlay_network_is_cut(cli, swarm):
    options = ["--min-trainers", "1", "--set", "grace=2s", "--set", "constraints=[node.hostname != host-1]"]
    job = Job(cli, swarm, *options, "--", "count.py", "until-restarted", trainers=2)
    job.until_step(30, rank=0)
    (last,) = [host for host in swarm.hosts[1:] if host is not job.where("master")[0]]
    (rank,) = job.on(last)
    (node,) = last.docker("ps", "-q").split()
    last.cut_nodes()
    job.until("generation_started", 2)
    assert swarm.states() == ["Ready"] * 3
    assert "count.py" not in last.docker("top", node)
    assert job.end(240) == 0, job.err
    assert_host_lost(job, [rank])


@pytest.mark.slow
@pytest.mark.parametrize("masters", [True, False], ids=["of the master", "of trainers"])
def test_a_partitioned_host_must_not_train_while_the_others_do(cli, swarm, masters):
    options = ["--set", "grace=2s", "--set", "constraints=[node.hostname != host-1]"]
    job = Job(cli, swarm, *options, "--", "count.py", "until-restarted")
    job.until_step(30, rank=0)
    (last,) = [host for host in swarm.hosts[1:] if (host is job.where("master")[0]) is masters]
    ranks = job.on(last)
    assert ranks
    nodes = last.docker("ps", "-q").split()
    last.cut()
    job.until("generation_started", 2)
    for node in nodes:  # their lease has expired by now
        assert "count.py" not in last.docker("top", node)
    last.heal()
    assert_succeeded(job)
    assert_host_lost(job, ranks)
