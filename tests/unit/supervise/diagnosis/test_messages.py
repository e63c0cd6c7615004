"""Messages of torch, CUDA, NCCL and Python in the last lines of a worker must lead to their cause and their hint."""

import pytest
from support.plans import HERE, plan

from orchestrate.record.outcomes import Cause, WorkerExit
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.diagnosis.root_cause import diagnose

PLAN = plan(JobSpec(trainers=2), HERE, "j", 29500)


def cause(*lines: str, code: int = 1) -> Cause:
    return diagnose(PLAN, WorkerExit(1, code), None, [*lines], "log")


@pytest.mark.parametrize(
    "message",
    [
        *("CUDA error: an illegal instruction was encountered", "CUDA error: misaligned address"),
        *("CUDA error: unknown error", "CUDA error: unspecified launch failure"),
        *("CUDA error: the launch timed out and was terminated", "CUDA error: hardware stack error"),
        *("CUDA error: invalid program counter", "Cuda failure 700 'an illegal memory access was encountered'"),
        *("CUBLAS_STATUS_EXECUTION_FAILED", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "GPU is lost"),
        *("GPU has fallen off the bus", "Unable to determine the device handle for GPU0", "NVRM: Xid", "Xid (PCI:0"),
    ],
)
def test_a_failed_gpu_or_kernel_must_be_recognized(message):
    assert cause(f"RuntimeError: {message}").cause == "GPU error" and "Xid" in cause(message).hint


@pytest.mark.parametrize(
    ("message", "kind", "hint"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "GPU error", "nvidia-smi -c 0"),
        ("CUDA error: system not yet initialized", "GPU error", "systemctl start nvidia-fabricmanager"),
        ("CUDA error: device-side assert triggered", "GPU error", "index or label out of range"),
        ("CUDA error: out of memory", "out of GPU memory", "smaller batch"),
        ("Cuda failure 2 'out of memory'", "out of GPU memory", "smaller batch"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "out of GPU memory", "smaller batch"),
        ("CUDA error: no CUDA-capable device is detected", "no GPUs", "--gpus all"),
        ("Duplicate GPU detected : rank 0 and rank 1", "GPU shared", "its own GPU"),
        ("Detected mismatch between collectives on ranks", "mismatch", "same order"),
        ("No space left on device", "disk full", "free disk space"),
    ],
)
def test_other_messages_must_lead_to_their_cause_and_hint(message, kind, hint):
    found = cause(f"RuntimeError: {message}")
    assert found.cause == kind and hint in found.hint


@pytest.mark.parametrize(
    ("error", "package"),
    [
        *(("No module named 'PIL'", "pillow"), ("No module named 'skimage'", "scikit-image")),
        *(("No module named 'sklearn'", "scikit-learn"), ("No module named 'bs4'", "beautifulsoup4")),
        *(("No module named 'dateutil'", "python-dateutil"), ("No module named 'dotenv'", "python-dotenv")),
        *(("No module named 'yaml'", "pyyaml"), ("Requirement 'scikit-learn>=1' not met", "'scikit-learn>=1'")),
    ],
)
def test_the_package_of_a_missing_module_must_be_named(error, package):
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "    import it"]
    assert cause(*trace, f"ModuleNotFoundError: {error}").hint.endswith(f"install it with --pip {package}")


@pytest.mark.parametrize(
    "option",
    [
        *("nodes", "nnodes", "trainers", "engine", "image", "dry-run"),
        *("detach", "set", "runs", "json", "print-path", "nproc-per-node"),
    ],
)
def test_an_option_of_run_after_the_script_must_be_recognized(option):
    assert "options of run come before" in cause(f"a.py: error: unrecognized arguments: --{option} 2", code=2).hint


def test_a_command_that_runs_before_the_worker_must_be_named_as_what_failed():
    assert cause("x", "[node] rank 1 was not started: see above").summary.startswith("`before` on trainer-1 exited")
    assert cause("[node] rank 1 was not started: see above", "x").summary.startswith("rank 1 on trainer-1 exited")


def test_a_path_through_a_file_must_count_as_a_missing_file():
    assert cause("NotADirectoryError: [Errno 20] Not a directory: 'a/b'").cause == "no such file"
