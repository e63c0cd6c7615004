"""Faults in a running job, on the real engines: the cause must be named, and the job must continue without loss.

docs/failures.md lists the faults by number.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from support.engines import Engine
from support.faults import Background, complete
from support.leftovers import docker
from support.printed import printed
from support.repo import ROOT
from support.waiting import eventually

from orchestrate.spec.spec import IMAGE
from orchestrate.supervise.policy import NOT_SAVED


def restarted(job: Background, rank: int, cause: str) -> None:
    """Check that the job restarts after one failure, then succeeds, and that every rank's log is complete."""
    job.until("generation_started", 2)
    job.cli.finish_jobs()
    assert job.end() == 0, job.err
    assert job.causes() == [(rank, cause)]
    for number in range(3):
        steps = job.steps(number)
        assert complete(steps)
        assert {generation for _, generation in steps} == {0, 1}
        assert "\n[node] generation 1\n" in job.cli.log(number)


def test_a_killed_worker_must_restart_the_gang_from_its_checkpoint(ready, engine):
    job = Background(ready, engine, "--", "count.py", "until-asked")
    job.until_step(25, rank=1)
    job.kill_worker(1)
    restarted(job, 1, "killed")
    before, again = ([step for step, generation in job.steps(1) if generation == number] for number in (0, 1))
    assert again[0] % 10 == 1  # it saves every ten steps, and may be killed just before a save
    assert 0 <= max(before) + 1 - again[0] <= 10
    ports = [event["master_port"] for event in job.events("generation_starting")]
    assert len(set(ports)) == 2
    for rank in range(3):  # each line was shown once
        assert printed(job.out, rank) == [
            line for line in ready.log(rank).splitlines() if line != "[node] generation 1"
        ]


@pytest.mark.parametrize("node", [pytest.param("trainer-2", marks=pytest.mark.exhaustive), "master"])
def test_a_node_that_dies_must_be_replaced(cli, engine, node):
    job = Background(cli, engine, "--secret", "HOME", "--", "count.py", "until-asked")  # the new node can write it
    rank = 0 if node == "master" else 2
    job.until_step(25, rank=rank)
    before = job.node_pid(node)
    job.kill_node(node)
    job.until("generation_started", 2)
    assert before != job.node_pid(node)
    restarted(job, rank, "node stopped" if engine == "docker" else "node lost")


@pytest.mark.docker
@pytest.mark.parametrize(
    "command",
    [["rm", "-f"], *(pytest.param(how, marks=pytest.mark.exhaustive) for how in (["stop", "-t1"], ["restart", "-t0"]))],
    ids=" ".join,
)
def test_a_node_that_a_user_removes_must_be_replaced_within_the_restart_budget(
    cli, docker_engine, nothing_left, command
):
    job = Background(cli, "docker", "--", "count.py", "until-asked")
    job.until_step(25, rank=1)
    docker(*command, job.node("trainer-1"))
    restarted(job, 1, "node stopped")


@pytest.mark.docker
def test_a_job_whose_nodes_are_removed_repeatedly_must_end(cli, docker_engine, nothing_left):
    job = Background(cli, "docker", "--max-restarts", "2", "--", "count.py", "10000")
    for generation in range(3):
        eventually(lambda generation=generation: job.has(1, f" in {generation}\n"))
        docker("rm", "-f", job.node(f"trainer-{generation + 1}"))  # Compose numbers each new one higher
    assert job.end() == 1
    assert cli.report()["reason"] == "max_restarts is 2"
    assert job.causes() == [(1, "node stopped")] * 3


@pytest.mark.docker
def test_a_job_taken_down_with_compose_must_come_back(cli, docker_engine, nothing_left):
    job = Background(cli, "docker", "--", "count.py", "until-asked")
    job.until_step(15, rank=2)
    # "down" fails if the job is back before it has removed the network: generation 2 shows that it stopped nodes.
    subprocess.run(
        ["docker", "compose", "--project-name", cli.run_dir().name, "down", "--timeout", "1"],
        cwd=cli.env["PYTHONPATH"],
        check=False,
        capture_output=True,
    )
    job.until("generation_started", 2)
    cli.finish_jobs()
    assert job.end() == 0, job.err
    assert {cause for _, cause in job.causes()} == {"node stopped"}
    assert all(complete(job.steps(rank)) for rank in range(3))


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGBUS])
def test_a_crashed_worker_must_be_reported_with_its_signal_and_stack(ready, engine, number):
    (ready.folder / "crash.py").write_text(
        "import os, sys\ndef innermost():\n    os.kill(os.getpid(), int(sys.argv[1]))\n"
        "if os.environ['RANK'] == '1':\n    innermost()\nimport signal\nsignal.pause()\n"
    )
    job = Background(ready, engine, "--max-restarts", "0", "--", "crash.py", str(int(number)))
    assert job.end() == 1
    cause = ready.report()["root_cause"]
    assert cause["cause"] == ("shared memory" if number == signal.SIGBUS else "crash")
    assert f"was killed by {number.name} (exit code {128 + number})" in cause["summary"]
    assert any("crash.py" in line and "in innermost" in line for line in cause["last_lines"])


def test_a_script_that_cannot_be_loaded_must_not_be_retried(ready, engine):
    (ready.folder / "train.py").write_text("import nonesuch\n")
    job = Background(ready, engine, "--", "train.py")
    assert job.end() == 1
    assert ready.report()["reason"] == "this kind of failure is not retried"
    assert ready.report()["generations"] == 1


@pytest.mark.parametrize(
    ("rule", "generations"),
    [
        ("{exit_codes: [75], action: ignore}", 3),
        ("{log: no luck, action: fail}", 1),
        ("{cause: error, action: count}", 1),
    ],
)
def test_rules_in_the_job_file_must_decide_what_an_exit_means(ready, engine, rule, generations):
    (ready.folder / "train.py").write_text(
        "import os, sys\nprint('no luck')\n"
        "sys.exit(75 if os.environ['TORCHELASTIC_RESTART_COUNT'] in '01' and os.environ['RANK'] == '0' else 0)\n"
    )
    (ready.folder / "job.yaml").write_text(f"max_restarts: 0\nrules: [{rule}]\ncommand: train.py\n")
    job = Background(ready, engine, "job.yaml")
    assert job.end() == (0 if generations == 3 else 1)
    assert ready.report()["generations"] == generations


def test_a_job_that_fails_at_the_same_step_must_end_after_three_generations(ready, engine):
    (ready.folder / "train.py").write_text(
        "import json, os, pathlib, sys\njob_dir = pathlib.Path(os.environ['JOB_DIR'])\n"
        "with (job_dir / 'metrics.jsonl').open('a') as file: file.write(json.dumps({'step': 7}) + '\\n')\n"
        "sys.exit(1 if os.environ['RANK'] == '1' else 0)\n"
    )
    job = Background(ready, engine, "--max-restarts", "50", "--", "train.py")
    assert job.end() == 1
    assert ready.report()["reason"] == NOT_SAVED
    assert ready.report()["generations"] == 4  # the first one did make progress
    delays = [event["delay"] for event in job.events("restart_decided")]
    assert delays == [0.0, 0.0, 1.0, 0.0]


def test_a_slow_worker_must_be_reported_and_left_alone(cli, mnist, nothing_left):
    (cli.folder / "slow.py").write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nfrom app import data, train\n"
        "normalised = data.normalised\n"
        "def slowly(*arguments):\n"
        "    time.sleep(0.1 if os.environ['RANK'] == '2' else 0)\n"
        "    return normalised(*arguments)\n"
        "data.normalised = slowly\ntrain.main()\ntrain.leave()\n"
    )
    few = ("--dataset", "mnist", "--data", str(mnist), "--batch-size", "16", "--epochs", "5")
    job = Background(cli, "process", "--", "slow.py", *few)
    assert job.end() == 0, job.err
    assert cli.report()["generations"] == 1
    assert [line.split(" spent ")[0] for line in job.err.splitlines() if line.startswith("slow: ")] == [
        "slow: rank 2 on trainer-2"
    ]


@pytest.mark.docker
def test_running_out_of_memory_twice_at_the_same_step_must_end_the_job(cli, docker_engine, nothing_left):
    (cli.folder / "hungry.py").write_text(
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "if os.environ['RANK'] == '1':\n    x = [b'x' * 1_000_000 for _ in range(10_000)]\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "for path in ('/sys/fs/cgroup/memory.events', '/sys/fs/cgroup/memory/memory.oom_control'):\n"
        "    lines = open(path) if os.path.exists(path) else ()\n"
        "    print(*(line for line in lines if line.startswith('oom_kill ')), end='')\n"
    )
    job = Background(cli, "docker", "--set", "memory=100m", "--", "hungry.py")
    assert job.end() == 1
    assert cli.report()["reason"] == "out of memory twice at the same step"
    assert job.causes() == [(1, "out of memory")] * 2
    for rank in (0, 2):  # no memory was short on the other nodes
        assert set(re.findall(r"^oom_kill \d+$", cli.log(rank), re.M)) == {"oom_kill 0"}


@pytest.mark.docker
def test_an_out_of_memory_child_must_be_distinguished_from_its_worker(cli, docker_engine, nothing_left):
    (cli.folder / "parent.py").write_text(
        "import os, signal, subprocess, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': sys.exit(4)\n"
        "if os.environ['RANK'] == '1':\n"
        "    eat = 'x = [b\"x\" * 10**6 for _ in range(10**4)]'\n"
        "    subprocess.run([sys.executable, '-c', eat], check=True)\n"
        "signal.pause()\n"
    )
    job = Background(cli, "docker", "--max-restarts", "1", "--set", "memory=100m", "--", "parent.py")
    assert job.end() == 1
    first, second = cli.report()["failures"]
    assert (first["rank"], first["cause"]) == (1, "out of memory in a child")
    assert "(exit code 1)" in first["summary"]
    assert (second["cause"], second["exit_code"]) == ("error", 4)  # though these nodes ran out of memory before


@pytest.mark.docker
def test_a_job_must_wait_for_a_paused_node(cli, docker_engine, nothing_left):
    job = Background(cli, "docker", "--set", "hang_after=10s", "--", "count.py", "until-asked")
    job.until_step(10, rank=1)
    docker("pause", job.node("trainer-1"))
    assert job.until("node_in_trouble")["trouble"] == "paused"
    assert not job.events("worker_ended")
    cli.finish_jobs()
    eventually(lambda: len(job.events("worker_ended")) == 2)  # the other workers do not wait for it
    (ready_to_end := cli.run_dir() / "job" / "finish").unlink()  # the paused worker has not seen it yet
    docker("unpause", job.node("trainer-1"))
    job.until("node_well")
    ready_to_end.touch()
    assert job.end() == 0
    assert cli.report()["generations"] == 1
    assert "trainer-1 is paused; the job waits (to resume: docker unpause)" in job.err


@pytest.mark.docker
def test_a_node_that_is_cut_off_must_stop_before_the_next_generation_trains(cli, docker_engine, nothing_left):
    job = Background(cli, "docker", "--", "count.py", "600")
    job.until_step(10, rank=1)
    network = f"{cli.run_dir().name}_job"
    docker("network", "disconnect", network, job.node("trainer-1"))
    assert job.until("node_in_trouble")["trouble"] == "partition"
    job.until("generation_started", 2)
    found = docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", job.node("trainer-1"))
    assert "trainer" in json.loads(found)[network]["Aliases"]  # the name by which nodes find each other
    ended = {event["rank"] for event in job.events("worker_ended")}
    assert ended == {0, 1, 2}
    assert job.until("generation_ended")["cause"]["cause"] == "partition"
    cli("stop", cli.run_dir().name)
    assert job.end() == 130
    assert all(complete(job.steps(rank), job.steps(rank)[-1][0]) for rank in range(3))


@pytest.mark.docker
def test_a_node_that_is_cut_off_briefly_must_be_left_alone(cli, docker_engine, nothing_left):
    job = Background(cli, "docker", "--", "count.py", "until-asked")
    job.until_step(10, rank=1)
    network = f"{cli.run_dir().name}_job"
    docker("network", "disconnect", network, job.node("trainer-1"))
    job.until("node_in_trouble")
    docker("network", "connect", network, job.node("trainer-1"))
    job.until("node_well")
    cli.finish_jobs()
    assert job.end() == 0
    assert cli.report()["generations"] == 1


def test_a_job_must_continue_with_fewer_nodes_and_readmit_one_at_a_checkpoint(cli, engine):
    job = Background(cli, engine, "--min-trainers", "1", "--", "count.py", "2000")
    job.until_step(15, rank=1)
    name = f"{cli.run_dir().name}-trainer-3"
    if engine == "docker":  # another container has the name of the next new node
        docker("create", "--name", name, "orchestrate-node:0.1")
        docker("rm", "-f", job.node("trainer-1"))
        free = ["docker", "rm", name]
    else:
        socket = f"/tmp/orchestrate-{os.getuid()}/{cli.run_dir().name}/trainer-1.sock"
        pid = job.node_pid("trainer-1")
        os.rename(socket, socket + ".away")
        os.mkdir(socket)
        os.kill(pid, signal.SIGKILL)
        free = ["rmdir", socket]
    assert job.until("nodes_missing")["nodes"] == ["master", "trainer-2"]
    assert job.until("generation_starting", 2)["world_size"] == 2
    job.until_steps_in(1)
    subprocess.run(free, check=True, capture_output=True)
    job.until("node_back")
    assert job.until("generation_starting", 3)["world_size"] == 3
    outcomes = [event["outcome"] for event in job.events("generation_ended")]
    assert outcomes == ["failed", "rescaled"]
    cli("stop", cli.run_dir().name)
    assert job.end() == 130
    assert complete(job.steps(0), job.steps(0)[-1][0])


@pytest.mark.docker
def test_if_one_node_cannot_start_the_others_must_be_removed_and_the_reason_reported(cli, docker_engine, nothing_left):
    docker("create", "--name", "count-abcd-trainer-2", "orchestrate-node:0.1")
    known = "import secrets, sys; secrets.token_hex = lambda n: 'abcd'; from orchestrate.cli.main import main; "
    command = ["run", "--engine", "docker", "--gpus", "none", "--trainers", "2", "--", "count.py", "1"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{known}sys.exit(main({command!r}))"],
            cwd=cli.folder,
            env=cli.env,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        docker("rm", "count-abcd-trainer-2")
    assert done.returncode == 3
    assert 'The container name "/count-abcd-trainer-2" is already in use' in done.stderr
    assert docker("ps", "-aq", "--filter", "label=orchestrate.job=count-abcd") == ""
    assert cli.report()["outcome"] == "failed"


@pytest.fixture
def one_network(docker_engine):
    """An engine with an address pool for a single network."""
    engine = Engine("--default-address-pool", "base=10.214.0.0/24,size=24")
    yield engine
    engine.remove()


@pytest.mark.docker
def test_exhausted_address_pools_must_be_reported_with_a_hint(cli, one_network):
    one_network.docker("import", "-", IMAGE, content=bytes(1024))
    one_network.docker("network", "create", "taken")
    options = ["--engine", "docker", "--gpus", "none", "--trainers", "1"]
    done = cli("run", *options, "--", "count.py", "1", DOCKER_HOST=one_network.host)
    assert done.returncode == 3
    assert "address pool" in done.stderr.partition("hint: ")[0]
    assert "hint: Docker's address pools are used up" in done.stderr
    assert not one_network.docker("ps", "-aq")


def test_a_job_must_not_succeed_if_a_worker_fails_late(ready, engine):
    (ready.folder / "late.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(1)\n    sys.exit(4)\n"
    )
    job = Background(ready, engine, "--max-restarts", "0", "--", "late.py")
    assert job.end() == 1
    assert (ready.report()["root_cause"]["rank"], ready.report()["root_cause"]["exit_code"]) == (1, 4)


def test_workers_that_ignore_sigterm_must_be_killed_in_parallel(cli, engine):
    (cli.folder / "deaf.py").write_text(
        "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    job = Background(cli, engine, "--set", "grace=2s", "--", "deaf.py", trainers=7)
    for rank in range(8):
        eventually(lambda rank=rank: job.has(rank, "ready"))
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 130
    stopping, ended = job.until("workers_stopping"), job.until("generation_ended")
    assert 1 < ended["seconds"] - stopping["seconds"] < 2 * 8  # in parallel, not one after the other
    assert {event["exit_code"] for event in job.events("worker_ended")} == {137}


def test_max_run_must_leave_a_checkpoint_of_the_last_step(ready, engine):
    job = Background(ready, engine, "--max-run", "8s", "--", "count.py", "100000")
    assert job.end() == 124
    for rank in range(3):
        saved = int((ready.run_dir() / "checkpoints" / f"rank-{rank}").read_text())
        assert saved == job.steps(rank)[-1][0]


def test_a_flood_of_output_must_be_logged_completely_without_blocking_workers(ready, engine):
    (ready.folder / "flood.py").write_text("for i in range(30_000): print(i)\n")
    job = Background(ready, engine, "--", "flood.py", trainers=1)
    assert job.end() == 0
    for rank in range(2):
        assert ready.log(rank).split() == [str(i) for i in range(30_000)]


def test_the_last_output_before_a_sudden_death_must_be_kept(ready, engine):
    (ready.folder / "sudden.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    print('x' * 100_000)\n    print('last', end='', flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    job = Background(ready, engine, "--max-restarts", "0", "--", "sudden.py", trainers=1)
    assert job.end() == 1
    assert ready.log(1) == "x" * 100_000 + "\nlast"
    assert "[1] last\n" in job.out
    assert ready.report()["root_cause"]["last_lines"][-1] == "last"


def test_the_report_must_list_every_failure(ready, engine):
    job = Background(ready, engine, "--", "count.py", "until-asked")
    job.until_step(15, rank=1)
    job.kill_worker(1)
    job.until_steps_in(1, rank=2)
    job.kill_worker(2, signal.SIGSEGV)
    job.until("generation_started", 3)
    ready.finish_jobs()
    assert job.end() == 0, job.err
    assert job.causes() == [(1, "killed"), (2, "crash")]
    assert json.loads(json.dumps(ready.report()))["generations"] == 3
    assert "generation 0: rank 1 on trainer-1 was killed by SIGKILL (exit code 137), at step" in job.err
