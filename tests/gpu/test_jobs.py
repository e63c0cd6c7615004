"""Jobs on this machine's GPUs: assignment, refusals, start of workers, and clean-up."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.on_gpus import ALONE, NEARLY, SHARED, on_cuda
from support.optional import not_none
from support.repo import ROOT
from support.waiting import eventually

pytestmark = pytest.mark.gpu


def facts(cli) -> list[dict]:
    """The facts that the script cuda_sum.py printed, by rank."""
    logs = [cli.log(rank) for rank in range(cli.report()["world_size"])]
    return [json.loads(line) for log in logs for line in log.splitlines() if line.startswith("{")]


def uuids(gpus) -> list[str]:
    return [gpu.id.partition("-")[2] for gpu in gpus]


def check_sums(cli, workers: int) -> list[dict]:
    """The facts of all workers; check that they have added up their ranks."""
    seen = facts(cli)
    assert [fact["sums"] for fact in seen] == [[workers * (workers - 1) / 2]] * workers
    return seen


def test_each_gpu_must_get_a_forked_worker_that_communicates_over_nccl(gpu_nodes, gpus):
    done = gpu_nodes.run("--trainers", "0", "--gpus", "all", "--", "cuda_sum.py")
    assert done.returncode == 0, done.stderr
    assert ", NCCL on GPU" in done.stderr
    seen = check_sums(gpu_nodes, len(gpus))
    assert [fact["gpu"] for fact in seen] == uuids(gpus)
    for fact in seen:
        assert (fact["forked"], fact["backend"], fact["visible"]) == (True, "nccl", len(gpus))
        assert fact["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.id for gpu in gpus)


def test_a_job_must_see_the_requested_number_of_gpus(gpu_nodes, gpus):
    done = gpu_nodes.run("--trainers", "0", "--gpus", "1", "--", "cuda_sum.py")
    assert done.returncode == 0, done.stderr
    (seen,) = check_sums(gpu_nodes, 1)
    assert (seen["visible"], seen["gpu"]) == (1, seen["env"]["CUDA_VISIBLE_DEVICES"].partition("-")[2])


def test_each_node_must_see_only_its_own_gpu_and_use_nccl_with_the_others(gpu_nodes, gpus):
    if len(gpus) < 2:
        pytest.skip("this machine has one GPU")
    done = gpu_nodes.run("--trainers", "1", "--gpus", "2", "--", "cuda_sum.py")
    assert done.returncode == 0, done.stderr
    seen = check_sums(gpu_nodes, 2)
    assert [(fact["visible"], fact["backend"]) for fact in seen] == [(1, "nccl")] * 2
    assert len({fact["gpu"] for fact in seen}) == 2


def test_nodes_must_share_a_gpu_if_the_job_allows_it(gpu_nodes):
    done = gpu_nodes.run("--trainers", "1", "--gpus", "1", *SHARED, "--", "cuda_sum.py")
    assert done.returncode == 0, done.stderr
    assert "on 1 shared GPU" in done.stderr
    seen = check_sums(gpu_nodes, 2)
    assert len({fact["gpu"] for fact in seen}) == 1
    for fact in seen:
        able = fact["nccl"] >= [2, 30]
        assert (fact["env"]["NCCL_MULTI_RANK_GPU_ENABLE"], fact["backend"]) == ("1", "nccl" if able else "gloo")


def test_workers_must_see_no_gpus_without_gpus(gpu_nodes):
    done = gpu_nodes.run("--trainers", "1", "--gpus", "none", "--", "cuda_sum.py")
    assert done.returncode == 0, done.stderr
    for fact in check_sums(gpu_nodes, 2):
        assert (fact["device"], fact["backend"], fact["usable"], fact["visible"]) == ("cpu", "gloo", False, 0)


def test_too_few_gpus_must_be_refused_before_anything_is_made(gpu_cli, gpu_engine, gpus):
    available = "only 1 is available" if len(gpus) == 1 else f"only {len(gpus)} are available"
    more, one = str(len(gpus) + 1), ("--engine", gpu_engine, "--trainers", "0")
    for options, error in (
        (("--gpus", more), f"--gpus {more}: {available}: {gpus[0].id}"),
        (("--gpus", "all", "--trainers", str(len(gpus))), f"{more} workers need {more} GPUs, but {available}"),
        (("--gpus", "all", *SHARED, "--nproc-per-node", more), f"{more} workers need {more} GPUs, but {available}"),
    ):
        done = gpu_cli("run", *one[: 2 if "--trainers" in options else None], *options, "--", "cuda_sum.py")
        assert (done.returncode, done.stdout) == (4, "")
        assert f"error: {error}" in done.stderr
        assert ("share_gpus=true" in done.stderr) == ("--trainers" in options)
    assert not (gpu_cli.folder / "runs").exists()


@pytest.mark.parametrize("value", ["", "-1"])
def test_gpus_that_the_caller_hides_must_not_be_used(gpu_cli, gpu_engine, value):
    arguments = ("plan", "--engine", gpu_engine, "--trainers", "0", "--gpus")
    hidden = f"CUDA_VISIBLE_DEVICES={value} matches none of"
    done = gpu_cli(*arguments, "all", "--", "cuda_sum.py", CUDA_VISIBLE_DEVICES=value)
    assert done.returncode == 4 and f"error: --gpus all: {hidden}" in done.stderr
    done = gpu_cli(*arguments, "auto", "--", "cuda_sum.py", CUDA_VISIBLE_DEVICES=value)
    assert done.returncode == 0 and f"gloo on CPU ({hidden}" in done.stdout


def test_only_gpus_visible_to_the_caller_must_be_used(gpu_cli, gpu_engine, gpus):
    arguments = ("plan", "--engine", gpu_engine, "--trainers", "0", "--gpus", "all", "--", "cuda_sum.py")
    done = gpu_cli(*arguments, CUDA_VISIBLE_DEVICES=gpus[-1].id)
    assert done.returncode == 0, done.stderr
    assert [gpu.id for gpu in gpus if gpu.id in done.stdout] == [gpus[-1].id]


SQUARES = "import torch\n\ndef squares():\n    return torch.arange(3, device='cuda') ** 2\n"
PROGRAM = """
import functions, orchestrate
result = orchestrate.run(functions.squares, engine=%r, nodes=2, gpus=1, share_gpus=True, quiet=True)
print(*((value.device.type, value.tolist()) for value in result.values))
"""


def test_a_function_must_return_tensors_on_a_gpu_as_tensors_on_the_cpu(gpu_cli, gpu_engine):
    (gpu_cli.folder / "functions.py").write_text(SQUARES)
    (gpu_cli.folder / "program.py").write_text(PROGRAM % gpu_engine)
    env = gpu_cli.env | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=gpu_cli.folder, env=env, text=True, capture_output=True, timeout=150
    )
    assert (done.returncode, done.stdout) == (0, "('cpu', [0, 1, 4]) ('cpu', [0, 1, 4])\n"), done.stderr


HOLD = "import sys, torch\nheld = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device=sys.argv[2])\n"


@contextlib.contextmanager
def busy(gpu, number: int) -> Iterator[None]:
    """Another program that holds a tenth of a GPU's memory."""
    command = [sys.executable, "-c", f"{HOLD}print('holds', flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(
        [*command, str(gpu.total // 10), f"cuda:{number}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert not_none(program.stdout).readline() == b"holds\n"
        yield


def test_auto_must_leave_out_a_gpu_that_another_program_uses(gpu_cli, gpu_engine, gpus, monkeypatch):
    if any(gpu.busy for gpu in gpus):
        pytest.skip("other programs use GPUs of this machine already")
    arguments = ("plan", "--engine", gpu_engine, "--trainers", "0", "--gpus")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi
    free = gpu_cli(*arguments, "auto", "--", "cuda_sum.py")
    assert [gpu.id for gpu in gpus if gpu.id in free.stdout] == [gpu.id for gpu in gpus]
    with busy(gpus[0], 0):
        auto, everything = (gpu_cli(*arguments, which, "--", "cuda_sum.py").stdout for which in ("auto", "all"))
    assert [gpu.id for gpu in gpus if gpu.id in auto] == [gpu.id for gpu in gpus[1:]]
    assert "1 GPU in use by other programs" in auto
    assert f"{gpus[0].id}, 1" in everything and "% of its memory in use" in everything


def test_a_job_must_free_all_gpu_memory_and_its_nodes_must_never_use_a_gpu(gpu_nodes):
    assert eventually(gpu_nodes.only_nodes)
    nodes, before = {*gpu_nodes.processes()}, gpu_nodes.used()
    job = gpu_nodes.start_job(*gpu_nodes.pair, "--", "cuda_steps.py", "until-asked")
    job.until_step(3, rank=1)
    workers = {*gpu_nodes.processes()} - nodes
    assert on_cuda(workers) and gpu_nodes.used() >= before + 2 * (512 << 20)
    assert not on_cuda(nodes)
    gpu_nodes.finish_jobs()
    assert job.end() == 0, job.err
    assert eventually(gpu_nodes.only_nodes)
    assert nodes == {*gpu_nodes.processes()}
    eventually(lambda: gpu_nodes.used() < before + NEARLY)


def test_a_preloaded_module_must_be_allowed_to_check_for_a_gpu(gpu_cli, gpu_engine):
    (gpu_cli.folder / "asks.py").write_text("import torch\nAVAILABLE = torch.cuda.is_available()\n")
    done = gpu_cli("run", "--engine", gpu_engine, *ALONE, "--set", "preload=[asks]", "--", "cuda_sum.py")
    assert done.returncode == 0, done.stderr
    (seen,) = check_sums(gpu_cli, 1)
    assert seen["forked"]


@pytest.mark.parametrize("call", ["torch.cuda.init()", "torch._C._cuda_getDeviceCount()"])
def test_workers_must_not_be_forked_if_a_preloaded_module_has_called_cuda(gpu_cli, gpu_engine, call):
    (gpu_cli.folder / "calls.py").write_text(f"import torch\n{call}\n")
    done = gpu_cli("run", "--engine", gpu_engine, *ALONE, "--set", "preload=[calls]", "--", "cuda_sum.py")
    assert done.returncode == 0, done.stderr
    (seen,) = check_sums(gpu_cli, 1)
    assert seen["forked"] == (gpu_engine == "docker")  # where modules of the code folder are not imported ahead
