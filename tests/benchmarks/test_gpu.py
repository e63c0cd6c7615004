"""GPU benchmarks: results and documents, independence of Docker, and a run of each on the CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.repo import ROOT

from benchmarks import __main__ as command
from benchmarks import (
    document,
    gpu,
    gpu_bandwidth,
    gpu_checkpoint,
    gpu_cold_start,
    gpu_steady_state,
    gpu_time_to_accuracy,
)

pytestmark = pytest.mark.exhaustive
VALUES = {"one": [[2.0, 1.0, 3.0], "s"], "two": [[2.5e-5, 1e6], "/s"]}
RESULT = {"about": "What it is.", "values": VALUES, "ratios": {"to the other (≤ 1.5)": 1.25}}
MACHINE = {"cpus": 16, "GPUs": "1 × NVIDIA H200", "commit": "0123456789"}


def benchmarks(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m benchmarks` as a user does."""
    argv = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=os.environ | env)


@pytest.fixture
def without_docker(tmp_path):
    """A PYTHONPATH without docker and torchvision."""
    for name in ("docker", "torchvision"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')\n")
    return f"{tmp_path}:{ROOT}"


# --- the command


def test_a_benchmark_must_run_without_docker_and_record_its_machine(without_docker, tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"cold-start": RESULT}))
    done = benchmarks("commands", "--runs", "1", "--json", str(file), PYTHONPATH=without_docker)
    assert done.returncode == 0, done.stderr
    measured = json.loads(file.read_text())
    assert set(measured) == {"cold-start", "commands"}
    assert measured["cold-start"] == RESULT
    assert re.fullmatch(r"[0-9a-f]{10}( \+ changes)?|unknown", measured["commands"]["machine"]["commit"])


def test_gpu_benchmarks_must_be_importable_without_a_gpu_docker_or_torchvision(without_docker):
    code = "import importlib, benchmarks.__main__ as b\n"
    code += "[importlib.import_module('benchmarks.' + n.replace('-', '_')) for n in b.ON_GPUS]"
    env = os.environ | {"PYTHONPATH": without_docker, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        (
            "gpu",
            "gpu-cold-start, gpu-restart, gpu-steady-state, gpu-time-to-accuracy, gpu-checkpoint, gpu-bandwidth need",
        ),
        ("gpu-steady-state", "gpu-steady-state needs"),
    ],
    ids=["all", "one"],
)
def test_the_command_must_report_a_missing_gpu_in_one_line(name, subject):
    done = benchmarks(name, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (4, "")
    assert re.fullmatch(
        rf"error: {subject} an NVIDIA GPU: torch \S+ (finds no usable GPU|is built without).*\n", done.stderr
    )


def test_an_unknown_name_must_be_refused():
    done = benchmarks("gpu-7")
    assert done.returncode == 2
    assert "unknown benchmark gpu-7; choose from cold-start, warm-start" in done.stderr


def test_all_benchmarks_that_need_no_gpu_must_run_by_default(monkeypatch):
    assert run_here(monkeypatch, []) == (0, [*command.ON_DOCKER])


def test_the_name_gpu_must_run_each_gpu_benchmark_once(monkeypatch):
    monkeypatch.setattr(command, "no_gpu", lambda: "")
    assert run_here(monkeypatch, ["gpu-time-to-accuracy", "gpu"]) == (
        0,
        [
            "gpu-time-to-accuracy",
            "gpu-cold-start",
            "gpu-restart",
            "gpu-steady-state",
            "gpu-checkpoint",
            "gpu-bandwidth",
        ],
    )


def run_here(monkeypatch, arguments: list[str]) -> tuple[int, list[str]]:
    """Return the exit code of the command and the names of the benchmarks it would run."""
    names: list[str] = []
    monkeypatch.setattr(command, "measured", lambda name, runs: names.append(name) or (RESULT, True))
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    return command.main(), names


def test_a_failed_benchmark_must_be_reported_and_the_others_must_run(monkeypatch, tmp_path, capsys):
    def measure(runs: int) -> None:
        raise RuntimeError("the GPU is gone\nand more")

    monkeypatch.setattr(command, "no_gpu", lambda: "")
    monkeypatch.setattr(gpu_checkpoint, "measure", measure)
    monkeypatch.setattr(gpu_bandwidth, "measure", lambda runs: RESULT | {"failed": {"NCCL": "one GPU"}})
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "gpu-checkpoint", "gpu-bandwidth", "--json", str(tmp_path / "measured.json")]
    )
    assert command.main() == 1
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["gpu-checkpoint"]["failed"] == {"gpu-checkpoint": "RuntimeError: the GPU is gone"}
    assert measured["gpu-bandwidth"]["values"] == RESULT["values"]
    assert (measured["gpu-checkpoint"]["machine"], set(measured)) == (
        command.machine(),
        {"gpu-checkpoint", "gpu-bandwidth"},
    )
    text = capsys.readouterr().out
    assert "gpu-checkpoint was not measured: RuntimeError: the GPU is gone" in text
    assert "NCCL was not measured: one GPU" in text
    assert re.search(r"one +2\.000 s +\(1\.000 to 3\.000\)", text)


def test_gpus_must_be_counted_by_name():
    listing = "NVIDIA H200, 570.1\nNVIDIA H200, 570.1\nTesla T4, 570.1\n"
    assert command.gpus(listing) == {"GPUs": "2 × NVIDIA H200 + 1 × Tesla T4", "driver": "570.1"}
    assert command.gpus("") == {}


def test_a_machine_with_gpus_must_be_described_with_its_versions(monkeypatch):
    answers = {"nvidia-smi": "NVIDIA H200, 570.1", "git": None}
    monkeypatch.setattr(command, "printed", lambda *argv: answers[argv[0]])
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    found = list(command.machine().items())[4:]
    assert found == [
        ("GPUs", "1 × NVIDIA H200"),
        ("driver", "570.1"),
        ("CUDA", "13.0"),
        ("NCCL", "2.28.9"),
        ("commit", "unknown"),
    ]


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_must_be_marked_if_changed_and_unknown_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert command.commit() == "unknown"
    me = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    for arguments in (["init", "--quiet"], [*me, "commit", "--quiet", "--allow-empty", "--message", "first"]):
        subprocess.run(["git", *arguments], check=True, cwd=tmp_path)
    clean = command.commit()
    assert re.fullmatch("[0-9a-f]{10}", clean)
    (tmp_path / "new.py").touch()
    assert command.commit() == f"{clean} + changes"


# --- the documents


def written(monkeypatch, folder, measured: dict[str, object]) -> dict[str, str]:
    """Run the document command; return the files it writes, by path."""
    file = folder / "measured.json"
    file.write_text(json.dumps(measured))
    monkeypatch.setattr(sys, "argv", ["document", str(file)])
    (docs := folder / "docs").mkdir()
    document.main(docs)
    return {str(path.relative_to(docs)): path.read_text() for path in docs.glob("**/*.*")}


def test_cpu_and_gpu_results_must_go_to_separate_documents(monkeypatch, tmp_path):
    on_gpu = RESULT | {"machine": MACHINE, "date": "2026-05-04", "failed": {"NCCL": "one GPU"}}
    on_cpu = RESULT | {"machine": {"cpus": 2}, "date": "2026-05-05"}
    missed = on_gpu | {"ratios": {"rate (≥ 2)": 1.5}}
    found = written(
        monkeypatch,
        tmp_path,
        {"checkpoint": on_cpu, "gpu-cold-start": on_gpu, "gpu-restart": missed},
    )
    assert set(found) == {
        "performance.md",
        "performance-gpu.md",
        *(f"performance/{n}.svg" for n in ("checkpoint", "gpu-cold-start", "gpu-restart")),
    }
    assert (
        found["performance.md"]
        == """# Performance

Measured side by side with `python -m benchmarks --json FILE`; generated by `python -m benchmarks.document FILE`.
Machine: cpus 2; 2026-05-05.
Ratios carry over to other machines, times do not.
Benchmarks that miss a target come first.

## Checkpoint

What it is.

| measurement | median | lowest | highest | runs |
| --- | --- | --- | --- | --- |
| one | 2 s | 1 | 3 | 3 |
| two | 500,000 /s | 0 | 1,000,000 | 2 |

| figure (target) | value | met |
| --- | --- | --- |
| to the other (≤ 1.5) | 1.25 | yes |

![Checkpoint](performance/checkpoint.svg)
"""
    )
    text = found["performance-gpu.md"]
    assert "Machine: cpus 16, GPUs 1 × NVIDIA H200, commit 0123456789; 2026-05-04.\n" in text
    assert text.index("## GPU restart") < text.index("## GPU cold start")
    assert "| rate (≥ 2) | 1.5 | no |" in text
    assert "\nNCCL was not measured: one GPU\n" in text


@pytest.mark.parametrize(("path", "outdated"), [("app/checkpoint.py", True), ("README.md", False)])
def test_a_figure_must_be_marked_if_what_it_measures_has_changed_since(monkeypatch, tmp_path, path, outdated):
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "app").mkdir()
    for name in ("app/checkpoint.py", "README.md"):
        (tmp_path / name).touch()
    for arguments in (["init"], ["add", "."], ["commit", "-m", "first"]):
        git(*arguments)
    measured = RESULT | {"machine": {"commit": git("rev-parse", "HEAD")}, "date": "2026-05-05"}
    (tmp_path / path).write_text("changed")
    monkeypatch.setattr(document, "ROOT", tmp_path)
    text = document.documents({"checkpoint": measured})["performance.md"]
    assert ("Out of date: what it measures has changed since." in text) == outdated


def test_values_of_two_files_must_be_compared(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, factor in zip(files, (1, 10)):
        values = {"one": [[2.0 * factor, 1.0 * factor, 3.0 * factor], "s"], f"only {factor}": [[1.0], "s"]}
        file.write_text(json.dumps({"help": RESULT | {"values": values}}))
    done = benchmarks("--compare", *map(str, files))
    assert done.returncode == 0 and done.stdout.split() == ["help:", "one", "2.000", "20.000", "s", "10.00", "*"]


def test_gpu_results_alone_must_not_replace_the_cpu_document(monkeypatch, tmp_path):
    machines = [{"machine": MACHINE | {"cpus": cpus}, "date": "2026-05-04"} for cpus in (16, 32)]
    nothing = {"values": {}, "ratios": {}, "failed": {"gpu-restart": "no disk"}}
    found = written(
        monkeypatch, tmp_path, {"gpu-cold-start": RESULT | machines[0], "gpu-restart": RESULT | nothing | machines[1]}
    )
    assert set(found) == {"performance-gpu.md", "performance/gpu-cold-start.svg"}
    first, second = found["performance-gpu.md"].split("## G")[1:]
    assert "Machine: cpus 16, " in first
    assert "Machine: cpus 32, " in second
    assert "| measurement |" not in second and "svg" not in second
    assert "gpu-restart was not measured: no disk" in second


# --- evaluation


def test_rounds_must_interleave_variants_and_skip_one_that_has_failed():
    calls = []

    def good(number: int) -> gpu.Figures:
        calls.append(("good", number))
        return {"good": 2.0 * number}

    def bad(number: int) -> gpu.Figures:
        calls.append(("bad", number))
        if number == 2:
            raise RuntimeError("error: no GPU\nhint: buy one")
        return {"bad": 1.0}

    values, failed = gpu.rounds({"good": good, "bad": bad}, 3)
    assert calls == [("good", 1), ("bad", 1), ("good", 2), ("bad", 2), ("good", 3)]
    assert (values, failed) == ({"good": [2.0, 4.0, 6.0], "bad": [1.0]}, {"bad": "error: no GPU"})
    assert gpu.ratios(values, {"to bad": ("good", "bad"), "to none": ("good", "none")}) == {"to bad": 4.0}
    assert gpu.medians(values, {"of good": "good", "of none": "none"}) == {"of good": 4.0}


def test_a_failed_command_must_be_reported_with_its_error():
    code = "import sys; print('Traceback'); sys.exit('ValueError: 7 is odd\\nhint: take 8')"
    with pytest.raises(RuntimeError, match="^ValueError: 7 is odd$"):
        gpu.output([sys.executable, "-c", code])
    with pytest.raises(RuntimeError, match="^exit code 3: "):
        gpu.output([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_command_that_takes_too_long_must_be_stopped(monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT", 0.1)
    with pytest.raises(RuntimeError, match=r"^stopped after 0\.1 s: "):
        gpu.output([sys.executable, "-c", "import signal; signal.pause()"])


def test_one_gpu_must_be_shared_with_gloo_and_several_must_use_nccl(monkeypatch):
    monkeypatch.setattr(gpu, "count", lambda: 1)
    one = gpu.group()
    assert one[:3] == (("--gpus", "all", "--trainers", "1", "--set", "share_gpus=true"), "gloo", 2)
    assert gpu.without_nccl(one) == {"NCCL between GPUs": "needs two GPUs, but this machine has one"}
    monkeypatch.setattr(gpu, "count", lambda: 8)
    eight = gpu.group()
    assert eight[:3] == (("--gpus", "all", "--trainers", "7"), "nccl", 8)
    assert gpu.without_nccl(eight) == {}


def test_a_warm_run_that_did_not_use_the_nodes_must_be_refused():
    nodes: Any = SimpleNamespace(name="cluster-77aa")
    text = "job one: 1 node × 1 worker, NCCL on GPU, on cluster-77aa\n"
    assert gpu.Cluster.check(nodes, text) == text
    with pytest.raises(RuntimeError, match="did not use the cluster: not using cluster-77aa"):
        gpu.Cluster.check(nodes, "not using cluster-77aa: 2 GPUs\njob one: 1 node × 1 worker, NCCL on GPU\n")


def test_the_phases_of_a_start_must_be_those_of_the_slowest_worker():
    lines = [{"import torch": 1.0, "NCCL init": 3.0}, {"import torch": 2.0, "NCCL init": 0.5}]
    text = "".join(f"[{rank}] {json.dumps(line)}\n" for rank, line in enumerate(lines))
    assert gpu_cold_start.parts(text) == {"import torch": 2.0, "NCCL init": 3.0}
    with pytest.raises(ValueError, match="printed no times"):
        gpu_cold_start.parts("nothing\n")


def epochs(*records: tuple[float, float]) -> str:
    """The content of metrics.jsonl for a step and for epochs with these seconds and accuracies."""
    lines = [{"kind": "step", "loss": 1.0}]
    lines += [{"kind": "epoch", "seconds": s, "test_accuracy": accuracy, "samples": 1200} for s, accuracy in records]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_the_training_rate_must_be_the_median_of_all_epochs_but_the_first():
    assert gpu_steady_state.rate(epochs((60.0, 0.1), (2.0, 0.1), (3.0, 0.1), (4.0, 0.1))) == 400.0


def test_a_training_run_must_be_timed_up_to_the_epoch_that_reaches_its_goal():
    assert gpu_time_to_accuracy.training(epochs((1.0, 0.5), (2.0, 0.98994), (4.0, 0.98996), (8.0, 0.999))) == 7.0
    with pytest.raises(ValueError, match="no epoch with 99%"):
        gpu_time_to_accuracy.training(epochs((1.0, 0.9)))


def test_a_size_must_be_shown_in_its_largest_unit():
    assert list(map(gpu_bandwidth.shown, (1 << 10, 1 << 18, 1 << 26, 1 << 30))) == ["1 KB", "256 KB", "64 MB", "1 GB"]


def test_checkpoints_must_not_be_measured_on_a_disk_that_is_too_small(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=8 << 30))
    result = gpu_checkpoint.measure(1)
    assert result["values"] == {}
    assert result["failed"]["gpu-checkpoint"].startswith("needs 12 GB of free disk space, but ")
