"""The app must reach its target accuracy wherever it runs, and save files that can be read again."""

import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, descendants, eventually, proc
from support.faults import Background
from torch.nn import functional as F

from app import checkpoint, data
from app.model import LeNet


@pytest.fixture(scope="session")
def digits():
    return [*data.digits(4000, seed=1), *data.digits(1000, seed=2)]


def test_the_same_seed_must_draw_the_same_digits():
    first, again, other = (data.digits(300, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (first.shape, first.dtype) == ((300, 28, 28), torch.uint8)


def test_the_digits_must_be_hard_for_a_linear_model(digits):
    images, labels, test_images, test_labels = digits
    torch.manual_seed(0)
    inputs = data.normalised(images.unsqueeze(1)).flatten(1)
    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(20):
        for part in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[part]), labels[part]).backward()
            optimizer.step()
    correct = model(data.normalised(test_images.unsqueeze(1)).flatten(1)).argmax(1) == test_labels
    assert 0.6 < correct.float().mean() < 0.92


def check_trained(folder, accuracy: float = 0.985) -> None:
    """Check a job's files after training; `accuracy` is the minimum."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert epochs[-1]["test_accuracy"] >= accuracy
    steps = {record["step"] for record in records if record["kind"] == "step"}
    assert steps == set(range(1, epochs[-1]["step"] + 1))
    (last, manifest), (best, best_manifest) = (
        checkpoint.load(folder / "checkpoints" / name) for name in ("last", "best")
    )
    assert {"model", "optimizer", "scheduler", "scaler", "epoch", "random"} < last.keys()
    assert manifest["step"] == epochs[-1]["step"]
    assert best_manifest["score"] == max(epoch["test_accuracy"] for epoch in epochs)
    LeNet(1, 28).load_state_dict(best["model"])
    plain = torch.load(folder / "checkpoints" / "last" / "state.pt", weights_only=True)
    assert plain.keys() == last.keys()
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "trainers"),
    [("process", 0), ("process", 3)],
    indirect=["engine"],
)
def test_the_default_job_must_reach_the_target_accuracy_on_any_number_of_nodes(cli, engine, trainers):
    one_thread = ("--set", "env.OMP_NUM_THREADS=1")  # on busy cores, the threads of one worker wait for each other
    done = cli("run", "--engine", engine, "--gpus", "none", "--trainers", str(trainers), *one_thread)
    assert done.returncode == 0, done.stderr
    check_trained(cli.run_dir())
    assert cli.report()["final_metrics"]["test_accuracy"] >= 0.985
    assert len(list(cli.run_dir().glob("logs/rank-*.log"))) == trainers + 1


@pytest.mark.slow
def test_the_default_job_must_resume_from_its_checkpoint_after_a_failure(cli, nothing_left):
    job = Background(cli, "process", trainers=1)
    eventually(lambda: list(cli.folder.glob("runs/*/checkpoints/step-*")) or job.ended_early())
    plan = json.loads((cli.run_dir() / "plan.json").read_text())
    assert plan["command"] == ["-m", "app.train", "--resume", "auto"]
    below = descendants(job.node_pid("trainer-1"))
    (worker,) = [pid for pid in below if "app.train" in proc(pid, "cmdline")]
    os.kill(worker, signal.SIGKILL)
    assert job.end(300) == 0, job.err
    assert job.causes() == [(1, "killed")]
    (step,) = re.findall(r"resumed after step (\d+), in epoch", cli.log(0))
    assert int(step) % 188 == 0  # steps per epoch
    check_trained(cli.run_dir())


@pytest.mark.slow
@pytest.mark.docker
def test_plain_compose_with_the_nvidia_runtime_must_train(nvidia_runtime, nothing_left, tmp_path):
    compose = ["docker", "compose", "--project-name", f"test-{os.getpid()}"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("NODE_")}
    env["NODE_COMMAND"] = "-m app.train --epochs 1"  # test_readme.py trains the default job on the cpu profile
    try:
        up = [*compose, "up", "--scale", "trainer=3"]
        done = subprocess.run(up, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout
        subprocess.run([*compose, "cp", "master:/job", str(tmp_path)], cwd=ROOT, env=env, check=True)
        check_trained(tmp_path / "job", accuracy=0.95)
    finally:
        subprocess.run([*compose, "down", "--volumes"], cwd=ROOT, env=env, check=True, capture_output=True)


def train(tmp_path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train in one process, without orchestrate."""
    return subprocess.run(
        [sys.executable, "-m", "app.train", "--data", str(tmp_path), *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "RANK"} | {"JOB_DIR": str(tmp_path / "job")},
        capture_output=True,
        text=True,
        timeout=300,
    )


COUNT = 203  # training samples: not a multiple of anything


def write_mnist(folder, count: int) -> None:
    """Write generated digits in the file format of MNIST."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, seed in (("train", 1), ("t10k", 2)):
        images, labels = data.digits(count, seed)
        parts = {"images-idx3": (3, images), "labels-idx1": (1, labels.to(torch.uint8))}
        for part, (dimensions, tensor) in parts.items():
            header = struct.pack(f">BBBB{dimensions}I", 0, 0, 8, dimensions, *tensor.shape)
            content = header + tensor.numpy().tobytes()
            (raw / f"{name}-{part}-ubyte").write_bytes(content)
            (raw / f"{name}-{part}-ubyte.gz").write_bytes(gzip.compress(content))


def test_the_original_mnist_files_must_be_read_from_a_folder(tmp_path):
    write_mnist(tmp_path, 500)
    done = train(tmp_path, "--dataset", "mnist", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    (record,) = [line for line in (tmp_path / "job" / "metrics.jsonl").read_text().splitlines() if "epoch" in line][-1:]
    assert json.loads(record)["step"] == 8  # 500 images, 64 at a time


def test_a_folder_without_mnist_must_be_refused_without_a_download(tmp_path):
    done = train(tmp_path, "--dataset", "mnist")
    assert done.returncode == 1
    assert f"error: no mnist in {tmp_path}: Dataset not found" in done.stderr
    assert "hint: set --data to the folder" in done.stderr


def test_every_worker_must_evaluate_its_own_part_of_the_test_set(cli, mnist, nothing_left):
    (cli.folder / "evaluate_share.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"sys.argv[1:] = ['--dataset', 'mnist', '--data', {str(mnist)!r}]\n"
        "import json, torch\n"
        "from app.train import Job, Samples, arguments, evaluate, leave\n"
        "job, seen = Job(), []\n"
        "class Seen(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.zeros(1))\n"
        "    def forward(self, x):\n"
        "        seen.extend(x.flatten(1).sum(1).tolist())\n"
        "        return torch.eye(10)[torch.zeros(len(x), dtype=torch.int64)].log()\n"
        "samples = Samples(job, arguments())\n"
        "_, accuracy = evaluate(job, Seen(), samples.test_images, samples.test_labels)\n"
        "print(json.dumps([seen, accuracy]))\n"
        "job.close()\n"
        "leave()\n"
    )
    done = cli("run", "--engine", "process", "--gpus", "none", "--trainers", "2", "--", "evaluate_share.py")
    assert done.returncode == 0, done.stderr
    _, _, images, labels = data.load("mnist", mnist, download=False)
    results = [json.loads(cli.log(rank)) for rank in range(3)]
    assert [len(seen) for seen, _ in results] == [68, 68, 67]
    expected = data.normalised(images).flatten(1).sum(1).sort().values
    assert torch.tensor(sorted(value for seen, _ in results for value in seen)).allclose(expected)
    assert {accuracy for _, accuracy in results} == {int((labels == 0).sum()) / COUNT}
