"""Faults on GPUs: the report must name the failed rank and the cause, and a restart must resume from a checkpoint."""

import pytest
from support.faults import complete
from support.on_gpus import NEARLY, on_cuda
from support.waiting import eventually

pytestmark = pytest.mark.gpu
DUMP_SOON = ("-e", "TORCH_NCCL_DUMP_ON_TIMEOUT=0", "-e", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=1000")  # after a timeout


def test_a_killed_rank_must_restart_the_job_while_its_peer_waits_on_the_gpu(gpu_nodes):
    before = gpu_nodes.used()
    job = gpu_nodes.start_job(*gpu_nodes.pair, "--", "cuda_steps.py", "until-asked")
    job.until_step(15, rank=1)
    job.kill_worker(1)
    job.until("generation_started", 2)
    gpu_nodes.finish_jobs()
    assert job.end() == 0, job.err
    assert job.causes() == [(1, "killed")]
    for rank in (0, 1):
        steps = job.steps(rank)
        assert complete(steps) and {generation for _, generation in steps} == {0, 1}
    assert eventually(gpu_nodes.only_nodes)
    assert not on_cuda(gpu_nodes.processes())
    eventually(lambda: gpu_nodes.used() < before + NEARLY)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("out_of_memory", "out of GPU memory"),
        ("out_of_range", "GPU error"),
        ("illegal_address", "GPU error"),
        ("ecc_error", "GPU error"),
        ("lost_device", "GPU error"),
    ],
)
def test_a_rank_that_fails_on_its_gpu_must_be_named_with_the_cause(gpu_nodes, fault, cause):
    done = gpu_nodes.run(*gpu_nodes.pair, "--max-restarts", "0", "--", "cuda_steps.py", "1000000", fault)
    assert done.returncode == 1, done.stderr
    root = gpu_nodes.report()["root_cause"]
    assert (root["rank"], root["cause"]) == (1, cause), root
    assert eventually(gpu_nodes.only_nodes)


def test_a_rank_that_never_joins_a_collective_must_be_named_after_the_timeout(gpu_nodes):
    options = ("--max-restarts", "0", *DUMP_SOON, "--", "cuda_steps.py", "1000000", "never_arrives", "5")
    done = gpu_nodes.run(*gpu_nodes.pair, *options)
    assert done.returncode == 1, done.stderr
    root = gpu_nodes.report()["root_cause"]
    assert (root["rank"], root["cause"]) == (1, "timeout"), root


def test_ranks_that_call_different_collectives_must_be_reported_with_their_calls(gpu_nodes):
    done = gpu_nodes.run(*gpu_nodes.pair, "--max-restarts", "0", "--", "cuda_steps.py", "1000000", "mismatch")
    assert done.returncode == 1, done.stderr
    root = gpu_nodes.report()["root_cause"]
    assert root["cause"] == "mismatch", root
    last_lines = "\n".join(root["last_lines"])
    assert "Detected mismatch between collectives on ranks" in last_lines
    assert "OpType=ALLREDUCE" in last_lines and "OpType=BROADCAST" in last_lines
