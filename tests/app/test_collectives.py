"""The app's demonstrations: collectives and their bandwidth, and the comparison of strategies."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.gangs import Gang
from support.training import ok

from app import collectives, compare
from app.job import Job


@pytest.mark.slow
def test_every_collective_must_match_its_definition(tmp_path):
    done = ok(Gang(tmp_path, 3, [], collectives.main).end())
    rows = dict(line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| "))
    reductions = {f"all_reduce {name}" for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
    others = {"send_recv", "broadcast", "broadcast_object_list", "scatter", "gather", "reduce", "reduce_scatter"}
    last = {"all_gather", "all_gather_object", "all_to_all", "barrier"}
    assert set(rows) == {"collective", "---"} | reductions | others | last
    assert rows["collective"] == "gloo" and rows["all_reduce SUM"] == "yes" and "WRONG" not in done.stdout
    assert "all_reduce BXOR: yes\n  rank 0: 1 -> 0\n  rank 1: 2 -> 0\n  rank 2: 3 -> 0\n" in done.stdout


@pytest.mark.slow
def test_the_bandwidth_must_be_defined_as_in_nccl_tests(tmp_path):
    done = ok(Gang(tmp_path, 2, ["--bench", "--bytes", "65536", "--repeat", "2"], collectives.main).end())
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [line[:2] for line in lines[:3]] == [["all_reduce", "1024"], ["all_reduce", "8192"], ["all_reduce", "65536"]]
    for name, size, microseconds, algorithm, bus in lines:
        assert float(algorithm) == pytest.approx(int(size) / float(microseconds) / 1e3, abs=0.01)
        assert float(bus) == pytest.approx(float(algorithm) * (0.5 if name == "all_gather" else 1), abs=0.01)


@pytest.mark.slow
def test_the_time_of_a_collective_must_be_the_time_of_its_slowest_rank(monkeypatch):
    monkeypatch.setattr(collectives.dist, "barrier", lambda: None)
    job = Job()
    monkeypatch.setattr(job, "gather", lambda mine: [mine, mine + 7, mine + 3])
    assert 7 <= collectives._timed(lambda: None, job, 1) < 8


def test_compare_must_count_the_samples_of_all_epochs(monkeypatch):
    def train(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        rows = [{"kind": "epoch", "samples": 100, "seconds": 2.0, "test_accuracy": 0.5 + n / 4} for n in range(2)]
        Path(env["JOB_DIR"], "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(compare.subprocess, "run", train)
    row = compare.run("ddp", 2, [])
    assert (row["samples/s"], row["seconds"], row["accuracy"]) == (50.0, 4.0, 0.75)


def test_compare_must_train_with_the_given_number_of_workers_outside_of_any_other_job(monkeypatch):
    calls: list[tuple[list[str], dict[str, str]]] = []

    def train(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append((command[1:], env))
        rows = [{"kind": "pace"}, {"kind": "step", "loss": 0.5}]
        rows += [{"kind": "epoch", "samples": 100, "seconds": 2.0, "test_accuracy": 0.5, "loss": 7}]
        Path(env["JOB_DIR"], "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(compare.subprocess, "run", train)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "JOB_DIR"):
        monkeypatch.setenv(name, "5")
    found = [compare.run("ddp", workers, ["--epochs", "1"]) for workers in (1, 2)]
    assert [(row["strategy"], row["workers"], row["losses"]) for row in found] == [("ddp", n, [0.5]) for n in (1, 2)]
    head = ["-m", "app.train", "--strategy", "ddp"]
    assert [command for command, _ in calls] == [[*head, *spawn, "--epochs", "1"] for spawn in ([], ["--spawn", "2"])]
    for _, env in calls:
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & env.keys() and "PATH" in env
        assert not Path(env["JOB_DIR"]).exists()  # removed after it was read


def test_compare_must_exit_with_the_error_of_a_failed_training_run(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "error: no luck\n")
    monkeypatch.setattr(compare.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="(?s)error: .*app.train --strategy dp --lr 9\nerror: no luck"):
        compare.run("dp", 1, ["--lr", "9"])


@pytest.mark.parametrize("arguments", [[], ["--", "--epochs", "1"], ["--", "--dataset", "mnist"]])
def test_compare_must_generate_its_data_before_timing_any_run(monkeypatch, tmp_path, arguments):
    done: list[object] = []

    def run(strategy: str, workers: int, given: list[str]) -> dict[str, object]:
        done.append((strategy, workers, given))
        seconds = {"single": 8.0, "dp": 10.0, "manual": 5.0, "ddp": 4.0}[strategy] / workers
        return {
            "strategy": strategy, "workers": workers, "seconds": seconds, "samples/s": 800 / seconds,
            "accuracy": 0.98765, "losses": [],
        }  # fmt: skip

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare.data, "load", lambda name, folder, download: done.append((name, folder, download)))
    monkeypatch.setattr(sys, "argv", ["compare", "--workers", "1", "2", "--out", str(tmp_path / "a" / "b"), *arguments])
    compare.main()
    runs = [("single", 1), ("dp", 1), ("manual", 1), ("manual", 2), ("ddp", 1), ("ddp", 2)]
    expected = [(*one, arguments[1:]) for one in runs]
    assert done == [("digits", compare.data.HOME, False)] * ("--dataset" not in arguments) + expected
    folder = tmp_path / "a" / "b"
    rows = json.loads((folder / "results.json").read_text())
    assert [row["speed-up"] for row in rows] == pytest.approx([1, 0.8, 1.6, 3.2, 2, 4])
    lines = (folder / "table.md").read_text().splitlines()
    assert lines[1] == "| --- | --- | --- | --- | --- | --- |"
    assert lines[2] == "| single | 1 | 8.0 | 100 | 98.77% | 1.00 |"
    assert lines[-1] == "| ddp | 2 | 2.0 | 400 | 98.77% | 4.00 |" and len(lines) == 8
    svg = (folder / "speed.svg").read_text()
    assert [float(width) for width in re.findall(r'<rect .*? width="(.*?)"', svg)] == [90, 72, 144, 288, 180, 360]
    assert [int(y) for y in re.findall(r'<rect x="120" y="(.*?)"', svg)] == [*range(30, 30 + 6 * 26, 26)]
    assert re.findall(r">([^<>]+)</text>", svg)[-2:] == ["ddp × 2", "400"] and 'height="196"' in svg
