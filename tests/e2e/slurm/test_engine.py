"""The engine `slurm` on a real cluster: submit, follow, stop, restart, requeue."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.faults import complete
from support.machines import PYTHON
from support.optional import not_none
from support.repo import SCRIPTS
from support.slurm_cluster import ACCOUNTING
from support.waiting import eventually
from support.written import Written

pytestmark = [pytest.mark.docker, pytest.mark.slow]
SUMS = """import os
import socket

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
found = torch.ones(1) * dist.get_rank()
dist.all_reduce(found)
print(f"{socket.gethostname()}: {found.item():g}", "SLURM_NTASKS" in os.environ, flush=True)
dist.destroy_process_group()
"""
JOINED = """import runpy

import torch.distributed as dist

dist.init_process_group("gloo")
runpy.run_path("count.py", run_name="__main__")
"""
IGNORES = "import contextlib\nwith contextlib.suppress(SystemExit):\n    runpy.run_path"
TRAINS = """import os
import pathlib
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
saved = pathlib.Path(os.environ["JOB_DIR"], "checkpoints", "step")
step = int(saved.read_text()) if saved.exists() else 0
dist.barrier()
while step < 200:
    dist.all_reduce(torch.ones(1))
    step += 1
    print(f"step {step} in {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    if dist.get_rank() == 0:
        saved.with_name("new").write_text(str(step))
        saved.with_name("new").replace(saved)
    time.sleep(0.05)
dist.destroy_process_group()
"""


FILLS = """import os
import time

kept = []
while True:
    if os.environ["RANK"] == "1":
        kept.append(bytearray(b"x" * (8 << 20)))
    time.sleep(0.02)
"""


class Jobs:
    """Our command on the machine for logging in, in a folder with scripts."""

    def __init__(self, cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        for script in SCRIPTS.glob("count.py"):
            shutil.copy(script, folder)
        (folder / "sums.py").write_text(SUMS)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        process = self.cluster.orchestrate(self.folder, *arguments)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.cluster.orchestrate(self.folder, "run", "--engine", "slurm", *arguments)

    def detach(self, *arguments: str) -> Path:
        code, out, err = self("run", "--engine", "slurm", "--detach", *arguments)
        assert code == 0, err
        return self.folder / out.strip()

    def steps(self, run: Path, rank: int) -> list[tuple[int, int]]:
        return Written(self.folder).steps(rank, run.name)

    def pid(self, run: Path, rank: int) -> int:
        return int(re.findall(r"pid (\d+)", (run / "logs" / f"rank-{rank}.log").read_text())[-1])


def report(run: Path) -> dict:
    eventually((run / "report.json").exists)
    return json.loads((run / "report.json").read_text())


def number(run: Path) -> str:
    return (run / "slurm-job").read_text().split()[0]


def hosts(run: Path) -> list[list[str]]:
    """The machines of the nodes, in each generation."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [[*json.loads(line)["hosts"].values()] for line in lines if '"nodes_up"' in line]


@pytest.fixture
def jobs(machines, folder, nothing_left):
    yield Jobs(machines, folder)
    machines.settle()


@pytest.mark.exhaustive
def test_a_job_must_be_followed_from_its_submission_to_its_end(jobs):
    (jobs.folder / "runs").mkdir(mode=0o700)
    code, out, err = jobs("run", "--engine", "slurm", "--nodes", "3", "--dry-run", "--", "sums.py")
    assert code == 0 and "\n#!/bin/bash\n" in out and " --nodes=3 " in out, err
    code, out, err = jobs("run", "--engine", "slurm", "--nodes", "3", "--", "sums.py")
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if line.startswith("[")) == [
        f"[{rank}] n{rank + 1}: 3 False" for rank in range(3)
    ]
    assert re.search(
        r"^submitted (sums-\w+) as job \d+ of Slurm\nfollowing \1, supervised by job \d+ of Slurm", err, re.M
    )
    assert "succeeded: 3 workers" in err
    (run,) = jobs.folder.glob("runs/*")
    assert not (run / "addresses").exists() and "#!/bin/bash" in (run / "slurm.sh").read_text()
    assert jobs.cluster.state(number(run)) == "COMPLETED"
    assert jobs("rm", run.name)[0] == 0 and not run.exists()


def test_a_killed_worker_must_restart_the_gang_within_the_allocation(jobs):
    run = jobs.detach("--nodes", "2", "--", "count.py", "until-restarted")
    eventually(lambda: len(jobs.steps(run, 0)) > 25 and len(jobs.steps(run, 1)) > 25)
    assert [row.split()[1:4] for row in jobs("ps")[1].splitlines()[1:]] == [["slurm", "2", "running"]]
    assert jobs("exec", run.name, "--rank", "1", "--", "hostname")[1] == "n2\n"
    jobs.cluster.kill(jobs.pid(run, 1), "n2")
    code, _, err = jobs("attach", run.name)  # from another shell
    assert code == 0, err
    found = report(run)
    assert (found["outcome"], found["generations"]) == ("succeeded", 2)
    assert [(failure["rank"], failure["cause"]) for failure in found["failures"]] == [(1, "killed")]
    assert all(complete(jobs.steps(run, rank)) for rank in range(2))


@pytest.mark.exhaustive
def test_a_worker_beyond_the_memory_of_its_machine_must_be_named_as_the_cause(jobs):
    (jobs.folder / "fills.py").write_text(FILLS)
    code, _, err = jobs("run", "--engine", "slurm", "--nodes", "2", "--set", "memory=400m", "--", "fills.py")
    assert code == 1, err
    (run,) = jobs.folder.glob("runs/*")
    assert [(failure["rank"], failure["cause"]) for failure in report(run)["failures"]][:1] == [(1, "out of memory")]


@pytest.mark.exhaustive
def test_a_lost_machine_must_be_replaced_by_a_spare_within_the_allocation(jobs):
    run = jobs.detach("--nodes", "2", "--set", "spares=1", "--", "count.py", "until-restarted")
    eventually(lambda: len(jobs.steps(run, 1)) > 25)
    with jobs.cluster.without("n2"):
        found = report(run)
    assert (found["outcome"], found["generations"], found["failures"][0]["rank"]) == ("succeeded", 2, 1)
    first, second = hosts(run)
    assert first[:2] == ["n1", "n2"] and second == ["n1", "n3"]


@pytest.mark.exhaustive
def test_a_lost_machine_without_a_spare_must_put_the_job_back_into_the_queue(jobs):
    (jobs.folder / "trains.py").write_text(TRAINS)
    run = jobs.detach("--nodes", "2", "--", "trains.py")
    eventually(lambda: len(jobs.steps(run, 1)) > 25)
    with jobs.cluster.without("n2"):
        found = report(run)
    assert found["outcome"] == "succeeded" and jobs.steps(run, 1).count((1, 0)) == 1
    assert hosts(run) == [["n1", "n2"], ["n1", "n3"]]


def test_stop_must_let_workers_save_and_the_job_continue_with_resume(jobs):
    run = jobs.detach("--nodes", "2", "--", "count.py", "100000")
    eventually(lambda: len(jobs.steps(run, 1)) > 15)
    code, _, err = jobs("stop", run.name)
    assert code == 0 and f"{run.name} stopped" in err
    assert report(run)["outcome"] == "stopped"
    last = jobs.steps(run, 1)[-1][0]
    assert (run / "checkpoints" / "rank-1").read_text() == str(last)
    jobs.cluster.settle()
    resumed = jobs.cluster.orchestrate(jobs.folder, "resume", run.name)
    eventually(lambda: jobs.steps(run, 1)[-1] > (last + 5, 1))
    assert (last + 1, 1) in jobs.steps(run, 1)
    jobs.cluster("scancel", number(run))  # by Slurm's own command
    resumed.communicate(timeout=60)
    assert resumed.returncode == 130
    assert report(run)["outcome"] == "stopped"


@pytest.mark.exhaustive
def test_a_job_that_waits_must_say_why_and_end_when_it_is_canceled(jobs):
    process = jobs.start("--set", "slurm.begin=now+1hour", "--nodes", "2", "--", "sums.py")
    lines = []
    for line in not_none(process.stderr):
        lines.append(line)
        if "BeginTime" in line:
            break
    assert re.match(r"job \d+ of Slurm is pending \(BeginTime\)", lines[-1])
    (run,) = jobs.folder.glob("runs/*")
    assert [row.split()[3] for row in jobs("ps")[1].splitlines()[1:]] == ["pending"]
    assert jobs("stop", run.name)[0] == 0
    process.communicate(timeout=60)
    assert process.returncode == 130 and report(run)["outcome"] == "stopped"
    code, _, err = jobs("run", "--engine", "slurm", "--set", "slurm.partition=nope", "--", "sums.py")
    assert code == 3 and "invalid partition specified: nope" in err
    assert [*jobs.folder.glob("runs/*")] == [run]


@pytest.mark.skipif(not ACCOUNTING, reason="needs a cluster with accounting: ORCHESTRATE_SLURM_ACCOUNTING=1")
def test_the_state_of_a_job_that_only_accounting_knows_must_be_found(jobs):
    run = jobs.detach("--set", "slurm.begin=now+1hour", "--nodes", "1", "--", "sums.py")
    assert "PENDING" in jobs.cluster("scontrol", "show", "job", number(run))
    jobs.cluster("scancel", number(run))
    eventually(lambda: not jobs.cluster("scontrol", "show", "job", number(run)), 120)
    code = "import sys; from pathlib import Path; from orchestrate.record import paths, slurm_job; "
    code += "print(slurm_job.last_state(slurm_job.of(paths.JobPaths(Path(sys.argv[1])))))"
    assert jobs.cluster(PYTHON, "-c", code, str(run)) == "CANCELLED\n"


@pytest.mark.exhaustive
def test_links_that_come_while_a_job_waits_and_odd_paths_must_change_nothing(jobs):
    """Such as those of `git pull`; Slurm shows paths among its own fields, and replaces % in that of the output."""
    odd = jobs.folder / "p JobState=PENDING Restarts=9 %u"
    odd.mkdir()
    jobs.folder = odd
    (odd / "prints.py").write_text("print('printed', flush=True)\n")
    run = jobs.detach("--set", "slurm.begin=now+6", "--nodes", "1", "--", "prints.py")
    for name in ("supervisor.log", "stop.asked", "secrets", "addresses"):
        (odd / name).mkdir() if name in ("secrets", "addresses") else (odd / name).write_text("mine")
        (run / name).symlink_to(odd / name)
    found = report(run)
    assert (found["outcome"], (run / "logs" / "rank-0.log").read_text()) == ("succeeded", "printed\n")
    assert [(odd / name).read_text() for name in ("supervisor.log", "stop.asked")] == ["mine", "mine"]
    assert not [*(odd / "secrets").iterdir(), *(odd / "addresses").iterdir()]
    assert not (run / "supervisor.log").is_symlink() and "printed" in (run / "supervisor.log").read_text()
    (odd / "waits.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    run = jobs.detach("--nodes", "1", "--", "waits.py")
    eventually(lambda: (run / "logs" / "rank-0.log").exists() and "waits" in (run / "logs" / "rank-0.log").read_text())
    jobs.cluster("scancel", number(run))
    assert (report(run)["outcome"], report(run)["reason"]) == ("stopped", "stopped by the user")


def test_a_job_that_its_partition_can_never_run_must_be_warned_of(jobs):
    words = ["run", "--set", "slurm.partition=all", "--nodes", "9", "--", "sums.py"]  # the engine by the setting
    process = jobs.cluster.orchestrate(jobs.folder, *words)
    for line in not_none(process.stderr):
        if line.startswith("hint: "):
            break
    if not (found := [*jobs.folder.glob("runs/*")]):  # refused by a newer Slurm
        process.communicate(timeout=60)
        assert process.returncode == 3 and "doctor --engine slurm checks the cluster" in line
        return
    (run,) = found
    assert f" stop {run.name}; doctor --engine slurm shows what it has" in line
    assert jobs("stop", run.name)[0] == 0
    process.communicate(timeout=60)
    assert process.returncode == 130


@pytest.mark.exhaustive
def test_ctrl_c_must_detach_and_a_killed_supervisor_be_submitted_again_once(jobs):
    words = [PYTHON, "-m", "orchestrate", "run", "--engine", "slurm", "--nodes", "2", "--", "count.py", "until-asked"]
    jobs.cluster("timeout", "--signal", "INT", "4", *words, folder=jobs.folder)
    (run,) = jobs.folder.glob("runs/*")
    eventually(lambda: len(jobs.steps(run, 1)) > 5)
    first = number(run)
    jobs.cluster("scancel", "--batch", "--signal=KILL", first)
    eventually(lambda: jobs.cluster("squeue", "-h", "-j", first) == "")
    assert [row.split()[3:5] for row in jobs("ps")[1].splitlines()[1:]] == [["no", "supervisor"]]
    both = [jobs.cluster.orchestrate(jobs.folder, "attach", run.name) for _ in range(2)]
    eventually(lambda: jobs.steps(run, 1)[-1][1] == 1)
    assert len(jobs.cluster("squeue", "-h").splitlines()) == 1
    (run / "job" / "finish").touch()
    for process in both:
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_doctor_must_report_the_cluster_and_what_a_machine_sees(jobs):
    code, out, err = jobs("doctor", "--engine", "slurm")
    assert code == 0 and "Slurm can place a job of 1 node with these options" in out, out + err
    assert re.search(r"^ok +Slurm \d+\.\d+", out, re.M) and f"accounting is {'on' if ACCOUNTING else 'off'}" in out
    assert "partition all: 3 machines, 3 free; " in out and "no GPUs; no time limit" in out
    assert re.search(r"n\d has Python 3\.\d+\.\d+ at /opt/venv/bin/python\n", out) and "sees this folder" in out
    code, out, _ = jobs("doctor", "--engine", "slurm", "--set", "slurm.partition=nope")
    assert code == 4 and "there is no partition nope\n         hint: partitions are all, urgent" in out
    assert "Slurm cannot place a job of 4 nodes with these options: sbatch: " in out
    assert "no machine could be asked" in out and "nope" in out.rpartition("no machine could be asked")[2]
    words = (PYTHON, "-m", "orchestrate", "doctor", "--engine", "slurm", "--nodes", "9")
    out = jobs.cluster("env", "HOME=/root", *words, folder=jobs.folder)
    assert "warning  Slurm cannot place a job of 9 nodes" in out
    assert "does not see /root/.local/state/orchestrate," in out
    process = jobs.cluster.orchestrate(Path("/"), "doctor", "--engine", "slurm")
    assert "does not see this folder" in process.communicate(timeout=60)[0] and process.returncode == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", [143, 0])
def test_a_preempted_job_must_save_and_be_put_back_into_the_queue(jobs, code):
    """Whatever the exit code of its workers, which Slurm tells to end."""
    (jobs.folder / "joined.py").write_text(JOINED if code else JOINED.replace("runpy.run_path", IGNORES))
    run = jobs.detach("--nodes", "3", "--set", "grace=5s", "--", "joined.py", "100000")
    follower = jobs.cluster.orchestrate(jobs.folder, "attach", run.name)
    eventually(lambda: len(jobs.steps(run, 2)) > 15)
    jobs.cluster("sbatch", "--partition", "urgent", "--nodes", "3", "--wrap", "true", folder=jobs.folder)
    eventually(
        lambda: (
            "REQUEUED" in jobs.cluster("squeue", "-h", "-j", number(run), "-o", "REQUEUED %T %r")
            and "PENDING" in jobs.cluster("squeue", "-h", "-j", number(run), "-o", "%T")
        )
    )
    assert not (run / "report.json").exists()
    assert "torch's store" not in (run / "logs" / "rank-0.log").read_text()  # its host got the signal, too
    for rank in range(3):
        assert (run / "checkpoints" / f"rank-{rank}").read_text() == str(jobs.steps(run, rank)[-1][0])
    # Slurm lets a job wait for two minutes: within a second of its end, its machines refuse it.
    jobs.cluster("scontrol", "update", f"JobId={number(run)}", "StartTime=now+3")
    eventually(lambda: jobs.steps(run, 2)[-1][1] == 1)
    steps = jobs.steps(run, 2)
    assert complete(steps, last=steps[-1][0])
    assert jobs("stop", run.name)[0] == 0 and report(run)["outcome"] == "stopped"
    eventually(lambda: jobs.cluster("squeue", "-h") == "")  # and is not put back once more
    seen = follower.communicate(timeout=60)[1].partition("the allocation ends: the workers have stopped\n")[2]
    assert re.search(rf"^job {number(run)} of Slurm is pending \(\w+\)", seen, re.M) and follower.returncode == 130


@pytest.mark.exhaustive
def test_the_end_of_the_allocation_must_let_workers_save_and_requeue_the_job_until_its_limit(jobs):
    run = jobs.detach("--nodes", "2", "--set", "grace=5s", "--set", "slurm.requeues=0", "--", "count.py", "100000")
    eventually(lambda: len(jobs.steps(run, 1)) > 15)
    jobs.cluster(
        "scancel", "--batch", "--signal=TERM", number(run)
    )  # the signal that Slurm sends before the time limit
    found = report(run)
    assert (found["outcome"], found["reason"]) == ("stopped", "slurm.requeues is 0")
    assert jobs("wait", run.name)[0] == 124
    assert (run / "checkpoints" / "rank-1").read_text() == str(jobs.steps(run, 1)[-1][0])


@pytest.mark.exhaustive
def test_a_job_whose_first_machine_has_come_back_without_it_must_go_back_into_the_queue(jobs):
    run = jobs.detach("--nodes", "2", "--", "count.py", "100000")
    eventually(lambda: len(jobs.steps(run, 1)) > 15)
    first = jobs.cluster("squeue", "-h", "-j", number(run), "-o", "%B").strip()

    def machines() -> list[str]:
        nodes = jobs.cluster("squeue", "-h", "-j", number(run), "-o", "%N").strip()
        return jobs.cluster("scontrol", "show", "hostnames", nodes).split()

    with jobs.cluster.without(first):
        eventually(lambda: first not in machines(), timeout=100)
    eventually(lambda: "PENDING" in jobs.cluster("squeue", "-h", "-j", number(run), "-o", "%T"), timeout=200)
    assert jobs("stop", run.name)[0] == 0
    assert report(run)["outcome"] == "stopped"


@pytest.mark.exhaustive
def test_a_job_whose_first_machine_is_lost_must_go_back_into_the_queue_and_be_stoppable(jobs):
    """With that, its supervisor is lost, too."""
    run = jobs.detach("--nodes", "2", "--", "count.py", "100000")

    def first(steps: int, generation: int) -> str:
        eventually(lambda: (found := jobs.steps(run, 1)) and found[-1][1] == generation and len(found) > steps)
        return jobs.cluster("squeue", "-h", "-j", number(run), "-o", "%B").strip()

    def down(machine: str) -> bool:
        return "down" in jobs.cluster("sinfo", "-h", "-n", machine, "-o", "%T")

    with jobs.cluster.without(machine := first(15, 0)):
        eventually(lambda: "PENDING" in jobs.cluster("squeue", "-h", "-j", number(run), "-o", "%T"), timeout=200)
        jobs.cluster("scontrol", "update", f"JobId={number(run)}", "StartTime=now+3")
        other = first(len(jobs.steps(run, 1)), 1)
        written = jobs.steps(run, 1)  # once: the job goes on
        assert other != machine and complete(written, last=written[-1][0])
        with jobs.cluster.without(other):
            eventually(lambda: down(other), timeout=100)
            assert jobs("stop", run.name)[0] == 0
    assert report(run)["outcome"] == "stopped"
