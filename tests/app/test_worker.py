"""A worker of the app: its rank and device, its output and metrics, and its exit."""

import argparse
import datetime
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from app import job, strategy
from app.job import Job
from app.model import build


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path) -> None:
    """A job of one worker on the CPU, in a folder that does not exist yet."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JOB_DIR", str(tmp_path / "runs" / "job"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def noted(monkeypatch) -> list[Any]:
    """The recorded calls to torch.distributed and to torch.cuda, which need no GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(
        job.dist,
        "init_process_group",
        lambda backend, timeout, device_id: calls.append((backend, timeout, device_id)),
    )
    monkeypatch.setattr(job.dist, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(job.dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    return calls


def test_a_worker_without_an_environment_must_be_a_job_of_one(noted, tmp_path):
    alone = Job()
    assert (alone.rank, alone.world_size, alone.generation, alone.asked) == (0, 1, 0, False)
    assert alone.folder == tmp_path / "runs" / "job" and alone.folder.is_dir()
    assert alone.device == torch.device("cpu")
    alone.close()
    assert noted == []


def test_files_must_go_to_the_apps_own_folder_without_job_dir(monkeypatch):
    monkeypatch.delenv("JOB_DIR")
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    assert Job().folder == Path("runs/app")


@pytest.mark.parametrize(
    ("gpus", "device", "backend"), [(False, "cpu", "gloo"), (True, "cuda:2", "nccl")], ids=["cpu", "gpu"]
)
def test_a_worker_must_use_the_gpu_of_its_local_rank(monkeypatch, noted, gpus, device, backend):
    for name, value in (("RANK", "6"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "2"), ("TORCHELASTIC_RESTART_COUNT", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    worker = Job(timeout=7)
    assert (worker.rank, worker.world_size, worker.generation, str(worker.device)) == (6, 8, 4, device)
    own = torch.device(device) if gpus else None
    assert noted == [own] * gpus + [(backend, datetime.timedelta(seconds=7), own)]


def test_the_default_timeout_must_be_half_an_hour(monkeypatch, noted):
    monkeypatch.setenv("WORLD_SIZE", "2")
    Job()
    assert noted == [("gloo", datetime.timedelta(minutes=30), None)]


def test_no_worker_must_leave_the_group_before_all_have_finished(monkeypatch, noted):
    monkeypatch.setenv("WORLD_SIZE", "2")
    Job().close()
    assert noted[1:] == ["barrier", "destroy"]


@pytest.mark.parametrize(("given", "warned"), [("GPU-1", True), ("", False)])
def test_an_assigned_gpu_that_cannot_be_used_must_be_reported(monkeypatch, capsys, given, warned):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    Job()
    assert ("warning: torch cannot use the GPU" in capsys.readouterr().out) is warned


def test_sigterm_must_only_be_recorded_and_a_thread_must_be_able_to_create_a_job():
    workers = [Job()]
    signal.raise_signal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: workers.append(Job()))  # a thread cannot install signal handlers
    thread.start()
    thread.join()
    assert [one.asked for one in workers] == [True, False]


def test_only_rank_0_must_print_without_delay_and_record_metrics(monkeypatch, tmp_path):
    worker = Job()
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        worker.say("hello")
        assert (tmp_path / "out").read_text() == "hello\n"
        worker.record(step=1)
        worker.rank = 1
        worker.say("nothing")
        worker.record(step=2)
    assert (tmp_path / "out").read_text() == "hello\n"
    assert (worker.folder / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_metrics_that_cannot_be_written_must_be_reported_and_written_later(capsys):
    worker = Job()
    (worker.folder / "metrics.jsonl").mkdir()
    worker.record(step=1)
    assert "could not write metrics: " in capsys.readouterr().out
    (worker.folder / "metrics.jsonl").rmdir()
    worker.record(step=2)
    worker.record(step=3)
    lines = (worker.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_values_must_be_summed_as_float64():
    total = Job().sum(torch.tensor([0.1], dtype=torch.float32, requires_grad=True))
    assert (total.dtype, total.requires_grad) == (torch.float64, False)


def test_output_must_be_flushed_before_a_worker_exits(monkeypatch, tmp_path):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        out.write("out")
        err.write("err")
        job.leave(7)
        job.leave()
        assert (tmp_path / "out").read_text() + (tmp_path / "err").read_text() == "outerr"
    assert codes == [7, 0]


@pytest.mark.parametrize(("cores", "threads"), [(8, 2), (2, 1), (None, 1)])
def test_a_spawned_worker_must_have_torchruns_variables_and_its_share_of_the_cores(monkeypatch, cores, threads):
    env: dict[str, str] = {}
    seen: list[Any] = []
    monkeypatch.setattr(os, "environ", env)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(job, "leave", lambda: seen.append("left"))
    args = argparse.Namespace()
    job._spawned(2, 3, 4567, lambda given: seen.append(given is args and dict(env)), args)
    place = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4567", "OMP_NUM_THREADS": str(threads)}
    assert seen == [threads, place | address, "left"]


@pytest.mark.parametrize("name", ["single", "dp"])
def test_a_single_process_strategy_must_refuse_more(name):
    worker = Job()
    worker.world_size = 2
    with pytest.raises(SystemExit, match=f"error: --strategy {name} runs in one process, not 2\nhint: "):
        strategy.Strategy(name, worker, build("lenet", 1, 28))


@pytest.mark.parametrize(("name", "split"), [("dp", True), ("ddp", False), ("single", False)])
def test_only_dp_must_split_batches_over_gpus(name, split):
    worker = Job()
    worker.device = torch.device("cuda", 0)
    way = strategy.Strategy(name, worker, build("lenet", 1, 28))
    assert isinstance(way.model, torch.nn.DataParallel) is split
