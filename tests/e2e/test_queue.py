"""Jobs that wait for GPUs, which a stand-in for nvidia-smi lists."""

import json
import os
import re
import subprocess
import sys

import pytest
from support.optional import not_none
from support.waiting import eventually

SMI = """#!/bin/sh
case $1 in -L) printf 'GPU 0: X (UUID: {0})\\nGPU 1: X (UUID: {1})\\n';;
*) echo '<nvidia_smi_log><gpu><uuid>{0}</uuid></gpu><gpu><uuid>{1}</uuid></gpu></nvidia_smi_log>';;
esac
"""
ONE, TWO = ("--gpus", "1", "--trainers", "0"), ("--gpus", "all", "--trainers", "1")


@pytest.fixture
def box(cli, tmp_path):
    """A machine with two GPUs, which no other test has; yields a function that starts a job."""
    gpus = [f"GPU-{os.getpid()}-{number}" for number in range(2)]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI.format(*gpus))
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    cli.env["PATH"] = f"{tmp_path / 'bin'}:{cli.env['PATH']}"

    def start(name: str, *options: str) -> subprocess.Popen:
        command = ["--engine", "process", "--name", name, *options, "--", "count.py", "until-asked"]
        return cli.start("run", *command)

    return start


def running(cli, name: str) -> bool:
    return any(path.read_text().count("step 5 ") for path in cli.folder.glob(f"runs/{name}-*/logs/rank-0.log"))


def finish(cli, name: str, job: subprocess.Popen) -> str:
    """Let a job end, and return its messages."""
    (folder,) = cli.folder.glob(f"runs/{name}-*/job")
    (folder / "finish").touch()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    return err


def waiting(cli) -> list[str]:
    """What `ps` says of the queue."""
    rows = [re.split(r"  +", line.strip()) for line in cli("ps").stdout.splitlines()]
    return [
        f"{row[0][:2]} {row[1].partition(',')[0]}"
        for row in rows
        if row[1].startswith("waits for") and row[0][0] == "q"
    ]


def test_jobs_must_wait_for_gpus_in_order_of_arrival_and_dead_ones_must_make_way(cli, box):
    first = box("q1", *TWO)
    eventually(lambda: running(cli, "q1"))
    jobs = {}
    for number, options in enumerate((TWO, ONE, TWO, ONE), 2):
        jobs[f"q{number}"] = box(f"q{number}", *options, "--queue")
        eventually(lambda: len(waiting(cli)) == len(jobs))
    assert waiting(cli) == [
        "q2 waits for 2 GPUs",
        "q3 waits for one of 2 GPUs",
        "q4 waits for 2 GPUs",
        "q5 waits for one of 2 GPUs",
    ]
    assert re.search(r"^q2-\w+ +waits for 2 GPUs, in use by q1-[0-9a-f]{6}$", cli("ps").stdout, re.M)
    (name,) = re.findall(r"^(q2-\w+) ", cli("ps").stdout, re.M)
    for given in (name, "q2"):
        done = cli("logs", given)
        assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: {name} waits in the queue")
        assert done.stderr.endswith(f"stop {name} ends that\n")
        assert cli("stop", "--dry-run", given).stdout == f"process {jobs['q2'].pid}\n"
    passes = box("q6", "--gpus", "1", "--trainers", "0")
    eventually(lambda: running(cli, "q6"))
    passed = r"^warning: this job passes q2-.*, q5-\w+ in the queue; --queue waits in turn$"
    assert re.search(passed, finish(cli, "q6", passes), re.M)
    jobs["q3"].kill()
    jobs["q3"].communicate()
    eventually(lambda: len(waiting(cli)) == 3)
    done = cli("stop", "q5")
    assert done.returncode == 0 and re.fullmatch(r"q5-\w+ stopped\n", done.stderr)
    jobs["q5"].communicate(timeout=60)
    assert jobs["q5"].returncode == 130
    first.kill()  # its nodes end, too
    first.communicate()
    eventually(lambda: running(cli, "q2"))
    assert waiting(cli) == ["q4 waits for 2 GPUs"] and not running(cli, "q4")
    err = finish(cli, "q2", jobs["q2"])
    name = r"q\d-[0-9a-f]{6}"
    assert re.search(rf"^{name} waits for 2 GPUs, in use by q1-[0-9a-f]{{6}}$", err, re.M)
    eventually(lambda: running(cli, "q4"))
    err = finish(cli, "q4", jobs["q4"])
    assert re.search(rf"^{name} waits for 2 GPUs, behind q2-[0-9a-f]{{6}}, q3-", err, re.M)
    assert not waiting(cli)
    cli("stop", next(cli.folder.glob("runs/q1-*")).name)


def test_a_job_that_could_never_run_must_not_wait(cli, box):
    first = box("n1", *TWO)
    eventually(lambda: running(cli, "n1"))
    assert "in use by n1-" in cli("doctor", "--engine", "process", "--quick").stdout
    for options, why in [
        (("--trainers", "3"), "4 workers need 4 GPUs, but only 2 are available"),
        (("--gpus", "3", "--trainers", "0"), "--gpus 3: only 2 are available"),
    ]:
        done = cli("run", "--engine", "process", "--queue", *options, "--", "count.py", "5")
        assert done.returncode == 4 and why in done.stderr and "waits" not in done.stderr
    finish(cli, "n1", first)


def test_a_job_must_be_able_to_wait_before_it_is_resumed(cli, box):
    first = box("r1", *TWO)
    eventually(lambda: running(cli, "r1"))
    assert cli("stop", "r1").returncode == 0
    first.communicate(timeout=60)
    other = box("r2", *TWO)
    eventually(lambda: running(cli, "r2"))
    resumed = cli.start("resume", "r1", "--queue")
    eventually(lambda: re.search("^r1-.* waits for 2 GPUs, in use by r2-", cli("ps").stdout, re.M))
    finish(cli, "r2", other)
    (folder,) = cli.folder.glob("runs/r1-*/job")
    (folder / "finish").touch()
    assert resumed.communicate(timeout=60)[1] and resumed.returncode == 0


def test_jobs_at_the_same_time_must_get_different_gpus_without_a_queue(cli, box):
    jobs = [box(f"s{number}", *ONE) for number in range(2)]
    eventually(lambda: all(running(cli, f"s{number}") for number in range(2)))
    third = cli("plan", "--engine", "process", "--trainers", "0", "--", "count.py", "5")
    users = r"s\d-[0-9a-f]{6}, s\d-[0-9a-f]{6}"
    why = rf"gloo on CPU \(2 GPUs in use by {users}; use --gpus all to include them, or --queue to wait\)"
    assert re.search(why, third.stdout)
    used = {re.search(r"GPU-\d+-\d", finish(cli, f"s{number}", job)) for number, job in enumerate(jobs)}
    assert len({not_none(match)[0] for match in used}) == 2


def test_a_job_in_the_background_must_keep_its_gpus(cli, box):
    done = cli("run", "--detach", "--engine", "process", *ONE, "--name", "d1", "--", "count.py", "until-asked")
    assert done.returncode == 0, done.stderr
    second = box("d2", *TWO, "--queue")
    eventually(lambda: "waits" in cli("ps").stdout and running(cli, "d1"))
    assert not running(cli, "d2")
    cli.finish_jobs()
    eventually(lambda: running(cli, "d2"))
    finish(cli, "d2", second)


def test_a_job_with_pinned_workers_must_be_able_to_wait_for_the_cores(cli, box, tmp_path):
    (tmp_path / "bin" / "nvidia-smi").unlink()
    pinned = ("--trainers", "0", "--set", "pin=true")
    first = box("p1", *pinned)
    eventually(lambda: running(cli, "p1"))
    second = box("p2", *pinned, "--queue")
    eventually(lambda: "waits for the cores" in cli("ps").stdout)
    third = box("p3", *pinned, "--gpus", "none")
    eventually(lambda: running(cli, "p3"))  # at once, next to the first one
    assert re.search(r"warning: this job passes p2-\w+ in the queue", finish(cli, "p3", third))
    finish(cli, "p1", first)
    eventually(lambda: running(cli, "p2"))
    assert re.search(r"p2-\w+ waits for the cores, in use by p1-\w+\n", finish(cli, "p2", second))


PROGRAM = """
import threading
import orchestrate
from orchestrate.host import claims

def start():
    jobs.append(orchestrate.submit("count.py", "until-asked", engine="process", gpus=1, trainers=0, name="api"))

def gpus():
    names = {job.run_dir.name for job in jobs}
    return sorted(gpu[-1] for claim in claims.found() if claim.job in names for gpu in claim.uses)

jobs = []
threads = [threading.Thread(target=start) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(gpus())
jobs[0].stop()
print(len(gpus()))
jobs[0].resume()
print(gpus())
for job in jobs:
    job.stop()
print(gpus())
"""


def test_jobs_of_a_program_must_get_different_gpus_and_give_them_back(cli, box):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=cli.folder, env=cli.env, capture_output=True, text=True, timeout=200)
    both = "['0', '1']"
    assert done.stdout.splitlines() == [both, "1", both, "[]"], done.stderr


def test_kept_nodes_must_have_the_gpus_of_the_job_that_has_started_them(cli, box):
    job = box("k1", *ONE, "--keep", "1m")
    eventually(lambda: running(cli, "k1"))
    (plan,) = cli.folder.glob("runs/kept-*/plan.json")
    (mine,) = cli.folder.glob("runs/k1-*/plan.json")
    assert json.loads(plan.read_text())["gpus"] == json.loads(mine.read_text())["gpus"] != []
    finish(cli, "k1", job)
    cli("down", plan.parent.name)
