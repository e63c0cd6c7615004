"""Real workers on gloo that wait for each other: the one that failed must be named, not the peers that complain."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from support.faults import Background
from support.leftovers import DOCKER_REQUIRED
from support.waiting import eventually

FAILURES = [
    ("raises", 1, "error", 1),
    ("exits", 1, "error", 7),
    ("leaves", 1, "left early", 0),
    (str(int(signal.SIGKILL)), 1, "killed", 137),
    (str(int(signal.SIGSEGV)), 1, "crash", 139),
    (str(int(signal.SIGTERM)), 1, "terminated", 143),
]


@pytest.mark.slow
@pytest.mark.parametrize(("does", "rank", "cause", "code"), FAILURES, ids=[failure[0] for failure in FAILURES])
def test_the_worker_that_failed_must_be_named(ready, engine, does, rank, cause, code):
    rules = ("--set", "rules=[{cause: terminated, action: fail}]")
    job = Background(ready, engine, "--max-restarts", "0", *rules, "--", "sums.py", "1000", does)
    assert job.end() == 1
    found = ready.report()["root_cause"]
    assert (found["rank"], found["cause"], found["exit_code"]) == (rank, cause, code), job.err


@pytest.mark.slow
def test_torchs_store_must_outlive_rank_0(ready, engine):
    job = Background(ready, engine, "--max-restarts", "0", "--", "leaves_first.py")
    assert job.end() == 0, job.err
    assert all("made a group\n" in ready.log(rank) for rank in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("does", ["eats", pytest.param("spawns", marks=pytest.mark.exhaustive)])
@pytest.mark.docker
def test_running_out_of_memory_must_be_named_as_the_cause(cli, docker_engine, nothing_left, does):
    job = Background(cli, "docker", "--max-restarts", "0", "--set", "memory=1g", "--", "sums.py", "1000", does)
    assert job.end() == 1
    expected = "out of memory" if does == "eats" else "out of memory in a child"
    assert job.causes() == [(1, expected)], job.err


@pytest.mark.slow
def test_a_timeout_must_be_blamed_on_the_worker_that_kept_the_others_waiting(ready, engine):
    job = Background(ready, engine, "--max-restarts", "0", "--", "sums.py", "1000", "sleeps", "3")
    assert job.end() == 1
    assert job.causes() == [(1, "timeout")], job.err


@pytest.mark.slow
def test_a_hang_must_be_reported_with_the_missing_rank_and_its_stack(ready, engine):
    job = Background(ready, engine, "--set", "hang_after=8s", "--", "sums.py", "30", "sleeps")
    assert job.end() == 0, job.err
    assert job.causes() == [(1, "hang")], job.err
    summary = ready.report()["failures"][0]["summary"]
    assert re.search(r"rank 1 on trainer-1 never arrived: it is at \S*sums.py:\d+ in odd_one_out; ", summary)
    assert re.search(r"2 others wait at \S*sums.py:\d+ in <module>", summary)
    for rank in range(3):
        assert "most recent call first" in ready.log(rank)


@pytest.mark.slow
def test_a_frozen_worker_must_be_named(ready, engine):
    job = Background(ready, engine, "--set", "hang_after=8s", "--", "sums.py", "100")
    eventually(lambda: job.has(1, "step 3\n"))
    job.kill_worker(1, signal.SIGSTOP)
    assert job.end() == 0, job.err
    assert job.causes() == [(1, "hang")], job.err
    assert "rank 1 on trainer-1 is stopped (SIGSTOP); 2 others wait at" in ready.report()["failures"][0]["summary"]


@pytest.mark.slow
def test_a_worker_that_never_joins_must_be_named(ready, engine):
    (ready.folder / "late.py").write_text(
        "import os, time\nif os.environ['RANK'] == '2': time.sleep(1000)\n"
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    )
    job = Background(ready, engine, "--max-restarts", "0", "--set", "hang_after=3s", "--", "late.py")
    assert job.end() == 1
    assert job.causes() == [(2, "hang")], job.err
    assert "rank 2 on trainer-2 never arrived: it is at" in ready.report()["root_cause"]["summary"]


def train(cli, engine, *arguments: str) -> Background:
    data = ["--epochs", "2", "--dtype", "float64", "--optimizer", "sgd", "--ledger", "--resume", "auto"]
    grace = ("--set", "grace=60s")  # for ten more steps on a busy machine
    return Background(cli, engine, *arguments, *grace, "--", "-m", "app.train", *data, trainers=1)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.any_engine
def test_sigterm_must_make_the_app_save_at_one_step_and_lose_none(cli, engine):
    job = train(cli, engine)
    metrics = eventually(lambda: next(cli.folder.glob("runs/*/metrics.jsonl"), None))
    eventually(lambda: '"step": 30' in metrics.read_text())
    cli("stop", cli.run_dir().name)
    assert job.end() == 130
    folder = cli.run_dir() / "checkpoints"
    (step,) = {json.loads(path.read_text())["step"] for path in folder.glob("step-*/manifest.json")}
    for rank in range(2):
        ledger = cli.run_dir() / "job" / f"ledger-{rank}.jsonl"
        entries = [json.loads(line) for line in ledger.read_text().splitlines()]
        assert [entry["step"] for entry in entries] == list(range(1, step + 1))
    assert f"stopped by SIGTERM: saved at step {step}" in cli.log(0)
    assert [event["exit_code"] for event in job.events("worker_ended")] == [143, 143]


@pytest.mark.slow
@pytest.mark.docker
def test_lost_packets_must_cost_time_and_nothing_else(cli, docker_engine, nothing_left):
    if os.geteuid() or not shutil.which("nsenter") or not shutil.which("iptables"):
        if DOCKER_REQUIRED:
            pytest.fail("ORCHESTRATE_REQUIRE_DOCKER=1, and losing packets needs root, nsenter and iptables")
        pytest.skip("losing packets needs root, nsenter and iptables")
    job = Background(cli, "docker", "--", "sums.py", "150")
    eventually(lambda: job.has(1, "step 3\n"))

    def iptables(*arguments: str) -> str:
        net = f"--net=/proc/{job.node_pid('trainer-1')}/ns/net"
        return subprocess.run(
            ["nsenter", net, "iptables", *arguments], check=True, capture_output=True, text=True
        ).stdout

    iptables("-A", "INPUT", "-m", "statistic", "--mode", "random", "--probability", "0.02", "-j", "DROP")
    eventually(lambda: job.has(1, "step 130\n"))
    dropped = int(iptables("-L", "INPUT", "-nvx").splitlines()[2].split()[0])
    assert job.end() == 0, job.err
    assert dropped > 0
    assert cli.report()["generations"] == 1
