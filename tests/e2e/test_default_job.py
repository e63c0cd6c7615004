"""The default job must reach its target accuracy wherever it runs."""

import json
import os
import re
import signal
import subprocess

import pytest
import torch
from support.faults import Background
from support.mnist import COUNT, check_trained
from support.processes import descendants, proc
from support.repo import ROOT
from support.waiting import eventually

from app import data


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("trainers", [0, 3])
def test_the_default_job_must_reach_the_target_accuracy_on_any_number_of_nodes(cli, nothing_left, trainers):
    one_thread = ("--set", "env.OMP_NUM_THREADS=1")  # on busy cores, the threads of one worker wait for each other
    done = cli("run", "--engine", "process", "--gpus", "none", "--trainers", str(trainers), *one_thread)
    assert done.returncode == 0, done.stderr
    check_trained(cli.run_dir())
    assert cli.report()["final_metrics"]["test_accuracy"] >= 0.985
    assert len(list(cli.run_dir().glob("logs/rank-*.log"))) == trainers + 1


@pytest.mark.exhaustive
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
    assert int(step) % 94 == 0  # steps per epoch
    check_trained(cli.run_dir())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.docker
def test_plain_compose_with_the_nvidia_runtime_must_train(nvidia_runtime, nothing_left, tmp_path):
    compose = ["docker", "compose", "--project-name", f"test-{os.getpid()}"]
    env = {key: value for key, value in os.environ.items() if not key.startswith("NODE_")}
    env["NODE_COMMAND"] = "-m app.train --epochs 2"  # test_documents.py trains the default job on the cpu profile
    try:
        up = [*compose, "up", "--scale", "trainer=3"]
        done = subprocess.run(up, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout
        subprocess.run([*compose, "cp", "master:/job", str(tmp_path)], cwd=ROOT, env=env, check=True)
        check_trained(tmp_path / "job", accuracy=0.95)
    finally:
        subprocess.run([*compose, "down", "--volumes"], cwd=ROOT, env=env, check=True, capture_output=True)


@pytest.mark.exhaustive
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
