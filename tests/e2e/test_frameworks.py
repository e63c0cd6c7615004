"""Scripts of popular frameworks must train one model on all nodes, and resume, without knowing of orchestrate."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest
from support.faults import OPTIONS
from support.repo import ROOT

EXAMPLES = ROOT / "examples" / "frameworks"
TORCHVISION = ("--dummy", "--model=shufflenet_v2_x0_5")
EPOCHS = ("--epochs", "40")
SCRIPTS = {  # example: a file that exists once its first checkpoint is complete, and the example's arguments
    "ddp": ("last.pt", EPOCHS),
    "fsdp2": ("*/.metadata", EPOCHS),
    "compiled": ("last.pt", ("--epochs", "12")),
    "lightning_trainer": ("last.ckpt", EPOCHS),
    "lightning_fabric": ("last.ckpt", EPOCHS),
    "accelerate_loop": ("last", EPOCHS),
    "hf_trainer": ("*/trainer_state.json", EPOCHS),
    "deepspeed_zero": ("latest", ("--epochs", "10")),
    "nanogpt": ("ckpt.pt", ("--max_iters=200", "--eval_interval=10", "--out_dir=$JOB_DIR/checkpoints")),
    "titan_style": ("*/.metadata", ("--job.dump_folder=$JOB_DIR", "--training.steps=200")),
    "torchvision_reference": (
        "../checkpoint.pth",
        (*TORCHVISION, "--epochs=10", "--output-dir=$JOB_DIR", "--resume=$JOB_DIR/checkpoint.pth"),
    ),
}
PACKAGES = {"deepspeed_zero": ["deepspeed"]}  # which the tests do without
COMPILER = {"compiled": ["g++"], "deepspeed_zero": ["g++", "ninja"]}
WARNING = "warning: the {} workers exchanged no data: if they train, each trained its own model"


@pytest.fixture
def scripts(cli):
    shutil.copytree(EXAMPLES, cli.folder, dirs_exist_ok=True)
    cli.env["PYTHONWARNINGS"] = "default"  # those of the frameworks' releases
    return cli


def finished(cli, trainers: int = 1) -> set[str]:
    """The digests of the weights on all ranks, each of which must have reported the world size."""
    digests = set()
    for rank in range(trainers + 1):
        (line,) = re.findall(rf"^rank {rank} of {trainers + 1}: \d+ steps, weights (\w+)$", cli.log(rank), re.M)
        digests.add(line)
    return digests


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_frameworks_script_must_train_one_model_and_resume_after_a_kill(scripts, nothing_left, script):
    packages = [name for name in PACKAGES.get(script, ()) if importlib.util.find_spec(name) is None]
    if missing := packages + [name for name in COMPILER.get(script, ()) if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    checkpoint, arguments = SCRIPTS[script]
    compiler = ("-e", f"TORCHINDUCTOR_CACHE_DIR={scripts.folder}/inductor", "-e", "TORCHINDUCTOR_VEC_ISA_OK=1")
    environment = ("-e", f"CHECKPOINT={checkpoint}", *compiler, "--set", "grace=5s")
    command = ("killed_once.py", f"{script}.py", *arguments)
    done = scripts("run", "--engine", "process", "--trainers", "1", "--require-communication", *environment, *command)
    assert done.returncode == 0, done.stderr
    report = scripts.report()
    assert report["generations"] == 2, done.stderr
    assert [(failure["rank"], failure["cause"]) for failure in report["failures"]] == [(1, "killed")]
    assert re.search(r"resum(ed after|ing from)", scripts.log(0).partition("generation 1")[2])
    assert len(finished(scripts)) == 1
    assert min(report["exchanged_bytes"]) > 10_000 and not report["isolated"]
    assert any(scripts.folder.glob("inductor/**/*.so")) == (script == "compiled")
    if script == "hf_trainer":  # it posts its steps
        final = report["final_metrics"]
        assert final["step"] == final["total_steps"] > 100 and final["train_loss"] > 0
    if script == "titan_style":
        kept = {path.name for path in (scripts.run_dir() / "checkpoints").glob("step-*")}
        assert (kept, report["final_metrics"]["step"]) == ({"step-190", "step-200"}, 200)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "arguments", "checkpoint"),
    [
        ("nanogpt", ("--max_iters=3",), "out/ckpt.pt"),
        ("torchvision_reference", (*TORCHVISION, "--epochs=1"), "checkpoint.pth"),
    ],
)
def test_scripts_that_need_no_launcher_must_train_in_a_single_process(scripts, script, arguments, checkpoint):
    command = [sys.executable, f"{script}.py", *arguments]
    done = subprocess.run(command, cwd=scripts.folder, env=scripts.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^rank 0 of 1: \d+ steps", done.stdout, re.M)
    assert (scripts.folder / checkpoint).exists()


@pytest.mark.slow
def test_a_script_whose_framework_does_not_see_the_job_must_be_warned_about(scripts, nothing_left):
    """As it was for each of them before: two models, and success."""
    (scripts.folder / "train.py").write_text(
        "import time\nimport torch\nfrom accelerate import Accelerator\n"
        "model = Accelerator().prepare(torch.nn.Linear(16, 16))\nend = time.monotonic() + 6\n"
        "while time.monotonic() < end:\n    model(torch.randn(8, 16)).sum().backward()\n"
    )
    run = ("run", "--engine", "process", "--trainers", "1", "-e", "ACCELERATE_USE_CPU=false")
    done = scripts(*run, "train.py")
    assert done.returncode == 0, done.stderr
    assert f"{WARNING.format(2)}\n" in done.stderr
    assert "hint: pass model, optimizer and data loaders to Accelerator.prepare(); on the CPU, leave" in done.stderr
    assert scripts.report()["isolated"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_launcher_in_a_shell_script_must_be_named(scripts, nothing_left):
    """It makes a world of its own on each node, and succeeds; a busy machine sees few of its connections in 3 s."""
    (scripts.folder / "train.py").write_text(
        "import time\nimport torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "end = time.monotonic() + 10\nwhile time.monotonic() < end:\n    dist.all_reduce(torch.ones(1000))\n"
    )
    (scripts.folder / "go.sh").write_text("torchrun --standalone --nproc-per-node 1 train.py\n")
    done = scripts("run", "--engine", "process", "--nodes", "2", "--", "bash", "go.sh")
    assert done.returncode == 0, done.stderr
    assert f"{WARNING.format(2)}\n" in done.stderr
    assert "hint: torchrun starts workers of its own on each node: run its script as the job's, without" in done.stderr


@pytest.mark.parametrize(("how", "isolated"), [("alone", True), ("group", True), ("sums", False)])
def test_workers_that_exchange_no_data_must_be_reported(ready, how, isolated):
    done = ready("run", "--engine", ready.engine, "--trainers", "3", *OPTIONS, "--", "together.py", how)
    assert done.returncode == 0, done.stderr
    assert (WARNING.format(4) in done.stderr.splitlines()) == isolated
    report = ready.report()
    assert bool(report["isolated"]) == isolated
    assert (min(report["exchanged_bytes"]) > 100_000) == (how == "sums"), report["exchanged_bytes"]


def test_required_communication_must_fail_a_job_without_it(ready):
    run = ("run", "--engine", ready.engine, "--trainers", "3", *OPTIONS, "--require-communication")
    done = ready(*run, "--", "together.py", "group")
    assert done.returncode == 1
    assert "(the workers exchanged no data (require_communication))" in done.stderr
    assert "hint: after init_process_group() at together.py:14, train a DistributedDataParallel" in done.stderr


def test_a_job_must_be_able_to_set_them_itself(cli):
    done = cli("plan", "--engine", "process", "--nodes", "2", "-e", "PL_TRAINER_DEVICES=auto", "probe.py")
    assert done.returncode == 0, done.stderr
    done = cli(
        "run", "--engine", "process", "--gpus", "none", "--nodes", "2", "-e", "PL_TRAINER_DEVICES=auto", "probe.py"
    )
    env = json.loads(cli.log(1))["env"]
    assert (env["PL_TRAINER_DEVICES"], env["PL_TRAINER_NUM_NODES"], env["ACCELERATE_USE_CPU"]) == ("auto", "2", "true")
