"""Nodes as containers, on a real engine: their GPUs, limits, rights and networks."""

import json
import os
import signal
import time

import pytest
from support.faults import Background, compose_hangs
from support.leftovers import docker
from support.processes import gone
from support.waiting import eventually

RUN = ("run", "--gpus", "none", "--max-restarts", "0")


def run(cli, engine, *arguments, **env):
    options = [] if "--trainers" in arguments else ["--trainers", "2"]
    return cli("run", "--engine", engine, "--gpus", "none", "--max-restarts", "0", *options, *arguments, **env)


@pytest.mark.exhaustive
@pytest.mark.docker
def test_ctrl_c_must_end_a_compose_that_hangs(cli, docker_engine, nothing_left):
    hung = compose_hangs(cli)
    job = cli.start(*RUN, "--engine", "docker", "--trainers", "1", "--", "steps.py")
    pid = eventually(hung)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=150)
    assert (job.returncode, cli.report()["outcome"]) == (130, "stopped")
    assert gone(int(pid))


@pytest.mark.docker
def test_workers_must_be_forked_even_if_preload_names_a_module_of_the_code_folder(cli, docker_engine, nothing_left):
    (cli.folder / "own.py").write_text("")
    (cli.folder / "train.py").write_text(
        "import sys\nprint('colorsys' in sys.modules)\nimport own\nprint(own.__file__)\n"
    )
    done = run(cli, "docker", "--trainers", "0", "--set", "preload=[own,colorsys]", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert cli.log(0).splitlines() == ["True", "/job/work/own.py"]


@pytest.mark.docker
def test_running_out_of_memory_must_be_recognized(cli, docker_engine, nothing_left):
    (cli.folder / "hungry.py").write_text(
        "import os, signal\nif os.environ['RANK'] == '1':\n    x = [b'x' * 1_000_000 for _ in range(10_000)]\n"
        "signal.pause()\n"
    )
    done = run(cli, "docker", "--set", "memory=100m", "--", "hungry.py")
    assert done.returncode == 1
    assert "root cause: rank 1 on trainer-1 was killed by the kernel's OOM killer" in done.stderr
    assert cli.report()["root_cause"]["cause"] == "out of memory"


@pytest.mark.docker
def test_every_worker_must_get_its_own_gpu_by_uuid(cli, nvidia_runtime, nothing_left):
    done = cli("run", "--gpus", "all", "--trainers", "1", "--", "probe.py")
    assert done.returncode == 0, done.stderr
    assert "2 nodes × 2 workers, NCCL on GPU" in done.stderr
    plan = json.loads((cli.run_dir() / "plan.json").read_text())
    own = []
    for rank in range(4):
        env = json.loads(cli.log(rank))["env"]
        visible = env["CUDA_VISIBLE_DEVICES"].split(",")
        own.append(visible[int(env["LOCAL_RANK"])])
        assert len(visible) == 2
        assert env["NVIDIA_VISIBLE_DEVICES"].split(",") == plan["gpus"]  # for the container's runtime
        assert f"  rank {rank}   {plan['workers'][rank]['node']:<9}  local rank {rank % 2}  {own[-1]}" in done.stderr
    assert own == plan["gpus"] and len(set(own)) == 4


@pytest.mark.docker
def test_fewer_gpus_than_workers_must_be_refused_with_a_hint(cli, nvidia_runtime, nothing_left):
    done = cli("run", "--gpus", "2", "--trainers", "3", "--", "probe.py")
    assert done.returncode == 4
    assert "error: 4 workers need 4 GPUs, but --gpus is 2" in done.stderr
    assert "--nodes 2" in done.stderr and "--gpus none" in done.stderr
    assert not (cli.folder / "runs").exists()


@pytest.mark.docker
def test_a_node_must_be_a_container_with_minimal_privileges(cli, docker_engine, nothing_left):
    job = cli.start("run", "--engine", "docker", "--gpus", "none", "--trainers", "1", "--", "steps.py")
    cli.wait_for("stepping", rank=1)
    try:
        for node in ("master", "trainer-1"):
            state = json.loads(docker("inspect", cli.container(node)))[0]
            host = state["HostConfig"]
            owner = (cli.run_dir() / "job").stat()
            assert state["Config"]["User"] == f"{owner.st_uid}:{owner.st_gid}" != "0:0"
            assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False)
            assert (host["ReadonlyRootfs"], host["Init"], host["RestartPolicy"]["Name"]) == (True, False, "no")
            assert state["Config"]["Tty"] is False
            assert host["SecurityOpt"] == ["no-new-privileges:true"]
            assert (host["ShmSize"], host["PidsLimit"], host["PortBindings"]) == (1 << 30, 8192, {})
            assert {mount["Destination"]: mount["RW"] for mount in state["Mounts"]} == {
                "/workspace": False,
                "/opt/orchestrate": False,
                "/workspace/runs": False,
                "/job": True,
                "/run/orchestrate": True,
            }
            assert not any("docker.sock" in mount["Source"] for mount in state["Mounts"])
    finally:
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=150)


@pytest.mark.docker
def test_a_job_on_the_host_network_must_run_there_and_leave_nothing(cli, docker_engine, nothing_left):
    (cli.folder / "train.py").write_text(
        "import os, socket\nimport torch.distributed as dist\n"
        "print(os.environ['MASTER_ADDR'], os.readlink('/proc/self/ns/net'))\n"
        "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
    )
    done = run(cli, "docker", "--set", "network=host", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert ", on the host network\n" in done.stderr
    host = os.readlink("/proc/self/ns/net")
    assert [cli.log(rank) for rank in range(3)] == [f"127.0.0.1 {host}\n"] * 3


@pytest.mark.docker
@pytest.mark.parametrize(("network", "through"), [("bridge", set()), ("host", {"exec_create", "exec_start"})])
def test_a_node_must_be_reached_through_the_engine_only_if_necessary(
    cli, docker_engine, nothing_left, network, through
):
    since = str(time.time())
    done = run(cli, "docker", "--set", f"network={network}", "--", "probe.py")
    assert done.returncode == 0, done.stderr
    of_the_job = ["--filter", f"label=orchestrate.job={cli.run_dir().name}", "--format", "{{.Action}}"]
    actions = docker("events", "--since", since, "--until", str(time.time()), *of_the_job)
    seen = {line.partition(":")[0] for line in actions.splitlines()}
    assert "start" in seen
    assert {action for action in seen if action.startswith("exec")} - {"exec_die"} == through
    assert not (cli.run_dir() / "sockets").exists()


@pytest.mark.docker
def test_a_node_on_the_host_network_must_be_replaced(cli, docker_engine, nothing_left):
    job = Background(cli, "docker", "--set", "network=host", "--", "count.py", "until-asked")
    job.until_step(15, rank=1)
    job.kill_node("trainer-1")
    job.until("generation_started", 2)
    cli.finish_jobs()
    assert job.end() == 0, job.err
    assert job.causes() == [(1, "node stopped")]
