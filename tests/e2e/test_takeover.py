"""A job must continue when its orchestrator dies at any moment, and another one must be able to take over.

The cases follow Determined's tests for restarts of its master and agents: with running, stopping, lost and queued
containers, another death after the takeover, and agents that disappear and return.
"""

import fcntl
import json
import os
import signal
import subprocess

import pytest
from support.faults import Background, complete
from support.optional import not_none
from support.printed import printed
from support.processes import processes
from support.waiting import eventually

from orchestrate.record import lock
from orchestrate.record.paths import JobPaths


def attach(cli, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return cli("attach", cli.run_dir().name, timeout=timeout)


def kill_orchestrator(job: Background) -> None:
    """Kill the orchestrator with SIGKILL."""
    job.process.kill()
    job.process.communicate()


def assert_succeeded(job: Background, generations: int) -> None:
    report = job.cli.report()
    assert (report["outcome"], report["generations"]) == ("succeeded", generations)
    assert all(complete(job.steps(rank)) for rank in range(3))


def test_training_must_continue_without_its_orchestrator_until_another_takes_over(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(10, rank=2)
    kill_orchestrator(job)
    step = job.steps(1)[-1][0]
    eventually(lambda: job.steps(1)[-1][0] > step + 10)  # training continues
    cli.finish_jobs()
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"runs/{cli.run_dir().name}"
    assert f"step {job.steps(2)[-1][0]} in 0" in printed(done.stdout, 2)
    assert_succeeded(job, 1)


@pytest.mark.any_engine
def test_a_worker_failure_without_a_supervisor_must_be_detected_later(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(15, rank=1)
    kill_orchestrator(job)
    job.kill_worker(1)
    cli.finish_jobs()
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert job.causes() == [(1, "killed")]
    assert_succeeded(job, 2)


@pytest.mark.any_engine
def test_a_job_that_ends_without_a_supervisor_must_be_reported_later(cli, engine):
    job = Background(cli, engine, "--", "count.py", "40")
    job.until_step(15, rank=1)
    kill_orchestrator(job)
    for rank in range(3):
        job.until_step(40, rank=rank)
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert_succeeded(job, 1)


@pytest.mark.any_engine
def test_a_final_failure_without_a_supervisor_must_be_reported_with_its_cause(cli, engine):
    job = Background(cli, engine, "--max-restarts", "0", "--", "count.py", "4000")
    job.until_step(15, rank=1)
    kill_orchestrator(job)
    job.kill_worker(2, signal.SIGSEGV)
    done = attach(cli)
    assert done.returncode == 1
    assert job.causes() == [(2, "crash")]
    assert "root cause: rank 2 on trainer-2 was killed by SIGSEGV (exit code 139)" in done.stderr


def test_a_node_that_vanishes_without_a_supervisor_must_be_replaced(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(15, rank=2)
    kill_orchestrator(job)
    job.kill_node("trainer-2")
    cli.finish_jobs()
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert [rank for rank, _ in job.causes()] == [2]
    assert_succeeded(job, 2)


@pytest.mark.any_engine
def test_all_nodes_that_vanish_without_a_supervisor_must_be_replaced(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(15, rank=2)
    kill_orchestrator(job)
    for node in ("master", "trainer-1", "trainer-2"):
        job.kill_node(node)
    cli.finish_jobs()
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert_succeeded(job, 2)


@pytest.mark.parametrize(
    "phase",
    [
        "nodes_starting",
        pytest.param("nodes_up", marks=pytest.mark.exhaustive),
        pytest.param("generation_starting", marks=pytest.mark.exhaustive),
        "generation_started",
    ],
)
def test_a_job_whose_orchestrator_dies_during_the_start_must_be_startable(cli, engine, phase):
    job = Background(cli, engine, "--", "count.py", "60")
    eventually(lambda: job.events(phase))
    kill_orchestrator(job)
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert set(cause for _, cause in job.causes()) <= {"interrupted"}
    assert all(job.steps(rank)[-1][0] == 60 for rank in range(3))


def test_nodes_that_do_not_listen_yet_must_be_awaited_after_a_takeover(cli, nothing_left):
    late, go = cli.folder / "late", cli.folder / "go"
    late.mkdir()
    (late / "sitecustomize.py").write_text(
        "import os, time\nwhile 'NODE_SOCKET' in os.environ and 'RANK' not in os.environ "
        f"and not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    )
    cli.env["PYTHONPATH"] = f"{late}:{cli.env['PYTHONPATH']}"
    job = Background(cli, "process", "--", "count.py", "60")
    eventually(lambda: len(processes(cli.folder)) == 4)  # the orchestrator and the nodes
    kill_orchestrator(job)
    successor = cli.start("attach", cli.run_dir().name)
    eventually(lambda: lock.holder(JobPaths(cli.run_dir())))
    go.touch()
    _, err = successor.communicate(timeout=150)
    assert successor.returncode == 0, err


@pytest.mark.any_engine
def test_a_job_whose_orchestrator_dies_during_the_stop_must_be_stoppable(cli, engine):
    (cli.folder / "slow.py").write_text(
        "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(2), sys.exit(143)))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.1)\n"
    )
    job = Background(cli, engine, "--", "slow.py")
    for rank in range(3):
        eventually(lambda rank=rank: job.has(rank, "ready"))
    job.process.send_signal(signal.SIGTERM)
    job.until("workers_stopping")
    kill_orchestrator(job)
    done = attach(cli)
    assert (done.returncode, cli.report()["outcome"]) == (130, "stopped")


@pytest.mark.any_engine
def test_a_job_whose_orchestrator_dies_between_generations_must_continue(cli, engine):
    job = Background(cli, engine, "--", "count.py", "60")
    job.until_step(15, rank=1)
    job.kill_worker(1)
    job.until("generation_ended")
    kill_orchestrator(job)
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert (1, "killed") in job.causes()
    assert all(job.steps(rank)[-1][0] == 60 for rank in range(3))


def test_a_job_whose_orchestrator_dies_during_the_clean_up_must_keep_its_outcome(cli, engine):
    job = Background(cli, engine, "--", "count.py", "5")
    job.until("outcome_decided")
    kill_orchestrator(job)
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert cli.report()["outcome"] == "succeeded"


@pytest.mark.any_engine
def test_a_job_must_survive_repeated_deaths_of_its_supervisor(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(10, rank=1)
    kill_orchestrator(job)
    for count in (2, 3):
        second = cli.start("attach", cli.run_dir().name)
        eventually(lambda count=count: len(job.events("taken_over")) == count - 1)
        second.kill()
        second.communicate()
    job.kill_worker(0)
    cli.finish_jobs()
    done = attach(cli)
    assert done.returncode == 0, done.stderr
    assert job.causes() == [(0, "killed")]
    assert_succeeded(job, 2)


@pytest.mark.any_engine
def test_attach_must_follow_a_supervised_job_and_take_over_if_the_supervisor_dies(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(10, rank=1)
    second = cli.start("attach", cli.run_dir().name)
    message = second.stderr.readline()
    assert message.startswith(f"following {cli.run_dir().name}, supervised by process {job.process.pid} ")
    assert not job.events("taken_over")
    kill_orchestrator(job)
    job.until("taken_over")
    step = job.steps(1)[-1][0]
    eventually(lambda: job.steps(1)[-1][0] > step + 20)
    cli.finish_jobs()
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    shown = printed(out, 1)
    log = cli.log(1).splitlines()
    assert shown == log[len(log) - len(shown) :] and len(shown) > 20  # each line once, beginning with last lines
    assert_succeeded(job, 1)


@pytest.mark.any_engine
def test_closing_the_terminal_must_not_end_the_job(cli, engine):
    job = Background(cli, engine, "--", "count.py", "until-asked")
    job.until_step(10, rank=1)
    not_none(job.process.stderr).close()
    not_none(job.process.stdout).close()
    job.process.send_signal(signal.SIGHUP)
    cli.finish_jobs()
    assert job.process.wait(timeout=300) == 0
    assert_succeeded(job, 1)


@pytest.mark.any_engine
def test_a_detached_job_must_work_with_ps_wait_logs_and_attach(cli, engine):
    detached = ("run", "--engine", engine, "--gpus", "none", "--trainers", "2", "--detach")
    done = cli(*detached, "--", "count.py", "until-asked", "0.03")
    supervisor = not_none(lock.holder(JobPaths(cli.run_dir()))).pid  # it exists as soon as the command has returned
    assert done.returncode == 0, done.stderr
    assert os.getsid(supervisor) == supervisor  # Ctrl-C in the terminal does not reach it
    name = cli.run_dir().name
    assert done.stdout == f"runs/{name}\n"
    assert f"hint: python -m orchestrate attach {name}" in done.stderr
    assert [row[3] for row in cli.ps()] == ["running"]
    follower, waiting = cli.start("logs", name, "-f"), cli.start("wait", name)
    cli.finish_jobs()
    assert waiting.wait(timeout=150) == 0
    waiting.communicate()
    output = follower.communicate(timeout=150)[0]
    assert f"[0] {cli.log(0).splitlines()[-1]}\n" in output and "step 10 in 0" in output
    attached = cli("attach", name)
    assert (attached.returncode, attached.stdout) == (0, "")
    assert "succeeded: 3 workers" in attached.stderr and attached.stderr.endswith(f"\nruns/{name}\n")
    assert "succeeded: 3 workers" in (cli.run_dir() / "supervisor.log").read_text()


def test_ps_must_show_a_job_with_a_supervisor_and_no_nodes(cli, nothing_left):
    done = cli("run", "--engine", "process", "--gpus", "none", "--trainers", "0", "--", "count.py", "1")
    assert done.returncode == 0, done.stderr
    name = cli.run_dir().name
    assert not cli.ps()
    with (cli.run_dir() / "supervisor.lock").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert cli.ps() == [[name, "process", "0", "running", f"runs/{name}"]]


@pytest.mark.any_engine
def test_wait_must_return_the_jobs_exit_code_and_refuse_an_unsupervised_job(cli, engine):
    job = Background(cli, engine, "--max-restarts", "0", "--", "count.py", "2000")
    job.until_step(10, rank=1)
    waiting = cli.start("wait", cli.run_dir().name)
    kill_orchestrator(job)
    _, err = waiting.communicate(timeout=150)
    assert waiting.returncode == 5
    assert "has no supervisor" in err and f"hint: python -m orchestrate attach {cli.run_dir().name}" in err
    job.kill_worker(1)
    assert attach(cli).returncode == 1
    assert cli("wait", cli.run_dir().name).returncode == 1


def test_stop_and_rm_must_remove_only_the_leftovers_of_a_dead_orchestrator(cli, engine):
    other = cli.start(
        "run", "--engine", engine, "--gpus", "none", "--trainers", "0", "--name", "other", "--", "count.py", "10000"
    )
    eventually(lambda: any("step 3 " in path.read_text() for path in cli.folder.glob("runs/other-*/logs/rank-0.log")))
    (other_run,) = cli.folder.glob("runs/other-*")
    cli.run_dir = lambda: next(cli.folder.glob("runs/count-*"), cli.folder / "none")
    job = Background(cli, engine, "--", "count.py", "10000", trainers=1)
    job.until_step(10, rank=1)
    name = cli.run_dir().name
    refused = cli("rm", name)
    assert refused.returncode == 2 and "is running, supervised by process" in refused.stderr
    kill_orchestrator(job)
    shown = cli("stop", name, "--dry-run").stdout.splitlines()
    if engine == "docker":
        assert shown == [f"container {name}-master-1", f"container {name}-trainer-1", f"network {name}_job"]
    else:
        assert [line.split()[0] for line in shown] == ["process", "process", "folder"]
    assert job.steps(0)  # nothing has been changed
    stopped = cli("stop", name)
    assert stopped.returncode == 0, stopped.stderr
    assert cli.report()["outcome"] == "stopped"
    assert cli("stop", name, "--dry-run").stdout == ""
    assert cli("rm", name, "--dry-run").stdout == f"folder {cli.run_dir()}\n"
    folder = cli.run_dir()
    assert cli("rm", name).returncode == 0
    assert not folder.exists()
    assert cli.ps() == [[other_run.name, engine, "1", "running", f"runs/{other_run.name}"]]
    other.send_signal(signal.SIGTERM)
    other.communicate(timeout=150)
    report = json.loads((other_run / "report.json").read_text())
    assert (report["outcome"], report["generations"]) == ("stopped", 1)
