"""The qsub script on two nodes of this machine, with pbsdsh played by a script: no PBS server can be had here."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.faults import complete
from support.odd_text import odd
from support.repo import ROOT
from support.waiting import eventually
from support.written import Written

from orchestrate.spec.layers import resolve

LINKS = """import os, sys
if os.environ["RANK"] == "1":
    os.rename(os.environ["JOB_DIR"], "elsewhere")
    os.symlink(os.path.realpath("elsewhere"), os.environ["JOB_DIR"])
sys.exit(1)
"""


class Pbs(Written):
    """Submits jobs, and shows what they have written."""

    def __init__(self, cli, folder: Path) -> None:
        super().__init__(cli.folder)
        self.cli, self.folder = cli, folder
        (folder / "bin").mkdir()
        (folder / "bin" / "pbsdsh").write_text(f"#!{sys.executable}\n{(ROOT / 'tests/support/pbsdsh.py').read_text()}")
        (folder / "bin" / "pbsdsh").chmod(0o755)
        (folder / "nodes").write_text("localhost\n" * 2)

    def submit(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        done = self.cli("export", "pbs", "--gpus", "none", "--nodes", "2", *arguments)
        assert done.returncode == 0, done.stderr
        of_qsub = self.cli.env | env | {"HOME": str(self.folder)}
        (self.folder / "qsub.json").write_text(json.dumps(of_qsub))
        pbs = {
            "PBS_O_WORKDIR": str(self.cli.folder),
            "PBS_JOBID": f"{os.getpid()}.here",
            "PBS_NODEFILE": str(self.folder / "nodes"),
        }
        pbs |= {"PBS_PLAYED": str(self.folder / "qsub.json"), "PATH": f"{self.folder / 'bin'}:{of_qsub['PATH']}"}
        (self.folder / "job.pbs").write_text(done.stdout)
        job = subprocess.Popen(
            ["bash", str(self.folder / "job.pbs")],
            env=of_qsub | pbs,
            cwd=self.folder,
            text=True,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.cli.started.append(job)
        return job


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    err = job.communicate(timeout=120)[1]
    return job.returncode, err


@pytest.fixture
def pbs(cli, tmp_path_factory):
    return Pbs(cli, tmp_path_factory.mktemp("pbs"))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_script_must_train_on_two_machines(pbs):
    shutil.copy(ROOT / "examples" / "allreduce.py", pbs.cli.folder)
    job = pbs.submit("--nproc-per-node", "2", "--", "allreduce.py")
    assert finish(job) == (0, "")
    for rank in range(4):
        assert pbs.log("allreduce", rank).endswith(f"rank {rank} of 4: the ranks add up to 6\n")


def test_variables_and_arguments_must_reach_the_workers_and_secrets_only_from_qsub(pbs):
    arguments, secret = odd(50), "it's $HOME"
    env = {f"ODD_{number}": text for number, text in enumerate(arguments)} | {
        "stop": "a",
        "attempt": "b",
        "PATH": "/evil",
    }
    file = pbs.cli.folder / "job.yaml"
    file.write_text(resolve({"command": ["probe.py", *arguments], "env": env | {"HF_TOKEN": "canary"}}).to_yaml())
    assert finish(pbs.submit(str(file), HF_TOKEN=secret)) == (0, "")
    for rank in range(2):
        seen = json.loads(pbs.log("probe", rank))
        assert seen["args"] == arguments and seen["env"].items() >= (env | {"HF_TOKEN": secret}).items()
        assert (seen["cwd"], seen["env"]["OMP_NUM_THREADS"]) == (str(pbs.cli.folder), "1")
        assert (seen["env"]["RANK"], seen["env"]["WORLD_SIZE"]) == (str(rank), "2")
    code, err = finish(pbs.submit(str(file)))
    assert code and "set HF_TOKEN in the environment of qsub" in err and "canary" not in err


def test_a_killed_worker_must_restart_the_gang_from_its_checkpoint(pbs):
    job = pbs.submit("--", "count.py", "until-restarted")
    eventually(lambda: len(pbs.steps(0)) > 25 and len(pbs.steps(1)) > 25)
    subprocess.run(["kill", "-KILL", re.findall(r"pid (\d+)", pbs.log("count", 1))[-1]], check=True)
    assert finish(job) == (0, "generation 0 ended with exit code 137\n")
    assert all(complete(pbs.steps(rank)) for rank in range(2))
    assert {generation for _, generation in pbs.steps(0)} == {0, 1}


def test_the_end_of_a_job_must_wait_until_workers_have_saved(pbs):
    job = pbs.submit("--", "count.py", "100000")
    eventually(lambda: len(pbs.steps(0)) > 15 and len(pbs.steps(1)) > 15)
    (pbs.cli.folder / "runs" / "count" / ".ended-of-a-worker").touch()
    subprocess.run(["pkill", "-TERM", "--session", str(job.pid)], check=True)  # as PBS, for qdel and at the time limit
    assert finish(job) == (143, "")
    for rank in range(2):
        saved = pbs.cli.folder / "runs" / "count" / "checkpoints" / f"rank-{rank}"
        assert saved.read_text() == str(pbs.steps(rank)[-1][0])


def test_a_script_that_cannot_succeed_must_not_be_retried(pbs):
    (pbs.cli.folder / "usage.py").write_text("raise SystemExit(2)\n")
    assert finish(pbs.submit("--", "usage.py")) == (2, "")


def test_a_job_whose_folder_is_gone_must_have_failed(pbs):
    (pbs.cli.folder / "gone.py").write_text(
        "import os, shutil\nshutil.rmtree(os.environ['JOB_DIR'])\nraise SystemExit(1)\n"
    )
    code, err = finish(pbs.submit("--set", "max_restarts=0", "--", "gone.py"))
    assert code == 1 and "generation 0 ended with exit code 1" in err


def test_a_machine_that_starts_nothing_must_fail_the_job_and_end_the_other_node(pbs):
    (pbs.folder / "lost-1").touch()
    code, err = finish(pbs.submit("--set", "max_restarts=1", "--", "count.py", "100000"))
    assert code == 1 and err.count("spawn failed on node 1") == err.count("ended with exit code 1\n") == 2
    assert not list(pbs.steps(1))


def test_other_machines_than_the_script_asks_for_must_be_refused(pbs):
    (pbs.folder / "nodes").write_text("localhost\n" * 3)
    code, err = finish(pbs.submit("--", "count.py", "1"))
    assert code == 2 and err.startswith("error: PBS_NODEFILE does not have 2 lines")


def test_a_link_in_the_place_of_the_job_folder_must_be_refused(pbs):
    (pbs.cli.folder / "runs").mkdir()
    (pbs.cli.folder / "runs" / "count").symlink_to(pbs.cli.folder)
    done = pbs.cli("export", "pbs", "--nodes", "2", "--", "count.py")
    assert done.returncode == 2 and "/runs/count is a link" in done.stderr
    (pbs.cli.folder / "runs" / "count").unlink()
    (pbs.cli.folder / "links.py").write_text(LINKS)
    job = pbs.submit("--set", "max_restarts=3", "--", "links.py")  # its first generation replaces the folder
    code, err = finish(job)
    assert code == 2 and err.endswith("another --name\n")
