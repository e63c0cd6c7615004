"""Settings that a node must find on its own machine: the interface, the GPUs, the generation that may start."""

import os

import pytest

from orchestrate.node.local_env import interface_to, local_env
from orchestrate.node.ranks import assign, fence, gpus
from orchestrate.node.static import envs

LOOPBACK = interface_to("127.0.0.1")
BASE = {"NODE_RANK": "0", "NNODES": "1", "MASTER_ADDR": "127.0.0.1"}


def test_a_worker_must_use_the_interface_of_the_route_to_its_master():
    env = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "", "RANK": "3"}
    found = local_env(env)
    assert found == env | {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    assert env["GLOO_SOCKET_IFNAME"] == ""


def test_a_given_interface_must_be_kept():
    env = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}
    assert local_env(env) == env


@pytest.fixture
def reserved(monkeypatch):
    for name in [name for name in os.environ if name.startswith("DOCKER_RESOURCE_")]:
        monkeypatch.delenv(name)
    return lambda **found: [monkeypatch.setenv(f"DOCKER_RESOURCE_{name}", value) for name, value in found.items()]


def test_a_worker_must_use_the_gpus_that_swarm_has_reserved(reserved):
    env = {"GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": "GPU-planned"}
    assert local_env(env)["CUDA_VISIBLE_DEVICES"] == "GPU-planned"
    reserved(GPU_1="GPU-b", GPU_0="GPU-a")
    assert local_env(env)["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert local_env(env | {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""  # a job on CPU


def test_the_gpus_of_a_machine_must_come_from_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA T4 (UUID: GPU-aa)"\n')
    tool.chmod(0o755)
    assert gpus() == ["GPU-aa"]
    tool.write_text('#!/bin/sh\necho "GPU 0: NVIDIA T4 (UUID: GPU-aa)"; exit 9\n')  # for example, without its driver
    assert gpus() == []
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpus() == []


@pytest.mark.parametrize(
    ("text", "oldest"),
    [("0\n", 0), ("2\n", 2), ("2 over\n", 3), ("0 over\n", 1), ("", 0), ("nonsense\n", 0), (None, 0)],
)
def test_the_fence_must_be_read_from_the_generation_file(tmp_path, text, oldest):
    if text is not None:
        (tmp_path / "generation").write_text(text)
    assert fence(str(tmp_path)) == oldest


def test_without_a_job_folder_every_generation_must_be_free_to_start():
    assert fence(None) == 0


def test_every_worker_must_have_a_thread_even_with_more_workers_than_cores():
    (first, *_) = assign([{"host": "a", "cpus": 2, "gpus": []}], 4, "m", 1, "j", "eth0")
    assert first["OMP_NUM_THREADS"] == "1"


def test_a_node_must_use_as_many_gpus_as_it_has_workers():
    nodes = [{"host": "a", "cpus": 4, "gpus": ["0", "1", "2", "3", "4"]}] * 2
    envs = assign(nodes, 2, "m", 1, "j", "eth0")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs] == ["0,1", "0,1", "2,3", "2,3"]


# --- nodes that another program starts


def test_our_own_variables_must_take_precedence():
    variables = BASE | {"PET_NODE_RANK": "5", "SLURM_NODEID": "6", "SLURM_NNODES": "9", "NODE_NPROC": "1"}
    (env,) = envs(variables | {"PET_MASTER_ADDR": "elsewhere", "PET_NPROC_PER_NODE": "3"}, [], 4)
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def test_an_empty_variable_must_count_as_missing():
    (env,) = envs(BASE | {"NODE_RANK": "", "JOB_COMPLETION_INDEX": "0"}, [], 4)
    assert env["RANK"] == "0"


def test_a_node_without_gpus_must_have_one_worker_by_default():
    (env,) = envs(BASE, [], 4)
    assert (env["WORLD_SIZE"], env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("1", "4", "")


def test_only_a_single_node_must_use_the_loopback_interface():
    (alone,) = envs(BASE, [], 4)
    assert (alone["GLOO_SOCKET_IFNAME"], alone["NCCL_SOCKET_IFNAME"]) == (LOOPBACK, LOOPBACK)
    (first,) = envs(BASE | {"NNODES": "2"}, [], 4)
    assert "GLOO_SOCKET_IFNAME" not in first and "NCCL_SOCKET_IFNAME" not in first


def test_interfaces_and_the_run_id_must_come_from_the_environment():
    variables = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib0"}
    (env,) = envs(BASE | variables | {"JOB_ID": "mine", "TORCHELASTIC_MAX_RESTARTS": "4"}, [], 4)
    assert variables.items() <= env.items()
    assert (env["TORCHELASTIC_RUN_ID"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("mine", "4")
    assert envs(BASE, [], 4)[0]["TORCHELASTIC_RUN_ID"] == "job"
    assert envs(BASE | {"TORCHELASTIC_RUN_ID": "theirs"}, [], 4)[0]["TORCHELASTIC_RUN_ID"] == "theirs"


def test_gpus_must_be_assigned_separately_on_each_machine():
    found = envs(BASE | {"NODE_RANK": "1", "NNODES": "2", "NODE_NPROC": "2"}, ["GPU-a", "GPU-b"], 4)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["GPU-a,GPU-b"] * 2
    with pytest.raises(ValueError, match="3 workers on one machine need as many GPUs; it has 2"):
        envs(BASE | {"NODE_NPROC": "3"}, ["GPU-a", "GPU-b"], 4)
