"""A node that a scheduler starts must give its workers torchrun's environment as well."""

import re

import pytest

from orchestrate.node import static as given
from orchestrate.node.local_env import interface_to
from orchestrate.node.ranks import CONTRACT
from orchestrate.node.static import envs, own_gpus

OURS = {"NODE_RANK": "1", "NNODES": "3", "NODE_NPROC": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
SLURM = {"SLURM_NODEID": "1", "SLURM_NNODES": "3", "NODE_NPROC": "2", "MASTER_ADDR": "127.0.0.1"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "NNODES": "3", "NODE_NPROC": "2", "MASTER_ADDR": "127.0.0.1"}
KUBEFLOW = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    "variables", [OURS, SLURM, KUBERNETES, KUBEFLOW], ids=["ours", "slurm", "kubernetes", "kubeflow"]
)
def test_a_node_must_derive_the_environment_of_its_workers(variables):
    first, second = envs(variables, [], 4)
    assert [(env["RANK"], env["LOCAL_RANK"]) for env in (first, second)] == [("2", "0"), ("3", "1")]
    assert first["WORLD_SIZE"] == "6" and first["NODE_RANK"] == "1" and first["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == variables.get("MASTER_PORT", variables.get("PET_MASTER_PORT", "29500"))
    assert first["OMP_NUM_THREADS"] == "2"
    elsewhere = {"JOB_ID", "JOB_DIR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    elsewhere |= {"WORKER_CORES", "WORKER_EXPAND", "WORKER_STDIN"}
    assert CONTRACT - first.keys() <= elsewhere


def test_a_complete_environment_must_be_left_unchanged():
    assert envs({"RANK": "3"}, ["GPU-a"], 4) == [{}]


def test_explicit_variables_must_be_kept():
    (env,) = envs(SLURM | {"NODE_NPROC": "1", "OMP_NUM_THREADS": "7", "TORCHELASTIC_RESTART_COUNT": "5"}, [], 4)
    assert (env["OMP_NUM_THREADS"], env["TORCHELASTIC_RESTART_COUNT"]) == ("7", "5")


def test_without_a_worker_count_there_must_be_one_worker_per_gpu():
    found = envs(KUBEFLOW | {"PET_NPROC_PER_NODE": "auto"}, ["GPU-a", "GPU-b", "GPU-c"], 6)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["GPU-a,GPU-b,GPU-c"] * 3


@pytest.mark.parametrize(("named", "found"), [("GPU-a,GPU-b", ["GPU-a", "GPU-b"]), ("", [])])
def test_a_node_must_use_the_gpus_that_a_scheduler_assigns(monkeypatch, named, found):
    monkeypatch.setattr(given, "gpus", lambda: ["GPU-a", "GPU-b", "GPU-c"])  # all GPUs of the machine
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert own_gpus() == found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert own_gpus() == ["GPU-a", "GPU-b", "GPU-c"]


def test_only_the_first_failure_of_a_job_must_be_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("NODE_FAILED", str(tmp_path / "failed"))
    for code in (3, 143):  # of two nodes
        given._record_failure(code)
    assert (tmp_path / "failed").read_text() == "3"


@pytest.mark.parametrize("missing", ["NODE_RANK", "NNODES", "MASTER_ADDR"])
def test_a_missing_variable_must_be_named(missing):
    with pytest.raises(KeyError, match=missing):
        envs({name: value for name, value in OURS.items() if name != missing}, [], 4)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"RANK": "../../x"}, r"RANK must be a whole number of at least 0, not '../../x'"),
        ({"RANK": "0\udcff\x1b"}, r"RANK must be a whole number of at least 0, not '0\udcff\x1b'"),
        ({**OURS, "NODE_RANK": "one"}, "NODE_RANK must be a whole number of at least 0, not 'one'"),
        ({**OURS, "NODE_RANK": "3"}, "NODE_RANK is 3, but there are only 3 nodes"),
        ({**OURS, "NNODES": "0"}, "NNODES must be a whole number from 1 to 10000, not '0'"),
        ({**OURS, "NNODES": "1:3"}, "NNODES must be a whole number from 1 to 10000, not '1:3'"),
        ({**OURS, "NODE_NPROC": "0"}, "NODE_NPROC must be a whole number from 1 to 1024, not '0'"),
        ({**OURS, "NODE_NPROC": "²"}, r"NODE_NPROC must be a whole number from 1 to 1024, not '\xb2'"),
        ({**OURS, "NNODES": "10001"}, "NNODES must be a whole number from 1 to 10000, not '10001'"),
        ({**OURS, "NODE_NPROC": "1025"}, "NODE_NPROC must be a whole number from 1 to 1024, not '1025'"),
        ({**OURS, "MASTER_PORT": "65536"}, "MASTER_PORT must be a whole number from 1 to 65535, not '65536'"),
        ({**OURS, "MASTER_PORT": "29500/tcp"}, "MASTER_PORT must be a whole number from 1 to 65535, not '29500/tcp'"),
    ],
)
def test_an_invalid_number_must_be_named(variables, why):
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        envs(variables, [], 4)


def test_the_interface_must_come_from_the_route():
    assert interface_to("127.0.0.1") in ("lo", "lo0")
    assert interface_to("no.such.host.invalid") == ""
    assert interface_to("a" * 70) == interface_to("a..b") == ""  # not valid host names
