"""Commands must touch only what they were asked for: not other jobs, other users' files, or the folder."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from support.engines import Engine
from support.faults import OPTIONS, Background
from support.leftovers import docker
from support.processes import descendants, gone
from support.waiting import eventually

from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.image import _offer
from orchestrate.host import users
from orchestrate.spec.spec import IMAGE, JobSpec

SAME = f"same-{os.getpid():x}"  # unique prefix of names; other test runs may have jobs on this machine
KEYS = ("project", "service", "container-number")  # of Compose's labels
STATE = Path(f"/tmp/orchestrate-{os.getuid()}")


class Other:
    """A job that runs until it is stopped, next to others in the same folder."""

    def __init__(self, cli, engine: str, name: str, trainers: int = 0) -> None:
        self.cli, self.name = cli, name
        options = ("--engine", engine, "--trainers", str(trainers), "--name", name, *OPTIONS)
        self.process = cli.start("run", *options, "--", "count.py", "until-asked")
        eventually(lambda: self.steps() > 2)

    @property
    def run(self) -> Path:
        return next(self.cli.folder.glob(f"runs/{self.name}-??????"), self.cli.folder / "none")

    def steps(self) -> int:
        log = self.run / "logs" / "rank-0.log"
        return log.read_text().count("step") if log.exists() else 0

    def orphan(self) -> str:
        """Kill its orchestrator; return its id."""
        self.process.kill()
        self.process.communicate()
        return self.run.name

    def untouched(self) -> bool:
        """Whether it continues in its first generation."""
        before = self.steps()
        eventually(lambda: self.steps() > before + 2)
        return "generation" not in (self.run / "logs" / "rank-0.log").read_text() and self.process.poll() is None

    def end(self) -> dict:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=150)
        return json.loads((self.run / "report.json").read_text())


@pytest.mark.parametrize("command", ["stop", "rm"])
@pytest.mark.any_engine
def test_stop_and_rm_must_remove_what_is_left_of_a_job_and_touch_no_other(cli, engine, command):
    other, gone = Other(cli, engine, "other"), Other(cli, engine, "gone", trainers=1)
    done = cli(command, gone.orphan())
    assert done.returncode == 0, done.stderr
    assert gone.run.exists() is (command == "stop")
    assert [row[0] for row in cli.ps()] == [other.run.name]
    assert other.untouched()
    assert (other.end()["generations"], other.run.exists()) == (1, True)


def test_a_prefix_of_several_jobs_must_be_refused(cli, nothing_left):
    jobs = [Other(cli, "process", name) for name in (f"{SAME}-1", f"{SAME}-2")]
    names = ", ".join(job.run.name for job in reversed(jobs))  # the newest first
    for command in ("stop", "logs", "attach", "wait"):
        done = cli(command, SAME)
        assert (done.returncode, done.stderr) == (
            2,
            f"error: {SAME} matches 2 jobs\nhint: jobs in runs: {names}\n",
        )
    assert all(job.untouched() for job in jobs)
    assert cli("stop", f"{SAME}-1").returncode == 0
    assert jobs[1].untouched()
    jobs[0].process.communicate(timeout=150)
    jobs[1].end()
    assert cli("rm", SAME).returncode == 2
    assert all(job.run.exists() for job in jobs)
    twin = jobs[0].run.with_name(jobs[0].run.name + "0")  # its name begins with the other's
    shutil.copytree(jobs[0].run, twin)
    assert cli("rm", jobs[0].run.name).returncode == 0
    assert twin.exists() and not jobs[0].run.exists() and jobs[1].run.exists()


def test_a_prefix_must_prefer_the_job_that_is_running(cli, nothing_left):
    ended, runs = Other(cli, "process", f"{SAME}-1"), Other(cli, "process", f"{SAME}-2")
    ended.end()
    assert cli("logs", SAME).returncode == 0
    assert cli("stop", SAME).returncode == 0
    runs.process.communicate(timeout=150)
    assert json.loads((runs.run / "report.json").read_text())["outcome"] == "stopped"


def test_a_prefix_of_several_clusters_must_be_refused(cli, nothing_left):
    up = ("up", "--engine", "process", "--trainers", "0", "--set", "warm=false")
    names = sorted(cli(*up, "--name", name).stdout.strip() for name in ("same-1", "same-2"))
    done = cli("down", "same")
    assert (done.returncode, done.stderr) == (
        2,
        f"error: same matches 2 clusters\nhint: clusters in runs: {', '.join(names)}\n",
    )
    assert sorted(row[0] for row in cli.ps()) == names
    assert [cli("down", name).returncode for name in names] == [0, 0]


def test_a_job_must_use_a_cluster_that_fits(cli, nothing_left):
    up = ("up", "--engine", "process", "--set", "warm=false")
    small, large, third = (
        cli(*up, "--name", name, "--trainers", count).stdout.strip()
        for name, count in (("a", "0"), ("b", "1"), ("c", "1"))
    )
    done = cli("run", "--engine", "process", "--trainers", "1", "--", "count.py", "3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == f"not using {small}: it has 0 trainers, the job needs 1"
    assert f", on {large}\n" in done.stderr and third not in done.stderr
    for name in (small, large, third):
        assert cli("down", name).returncode == 0


def test_logs_of_one_rank_must_show_only_that_rank(cli, nothing_left):
    done = cli("run", "--engine", "process", "--trainers", "2", *OPTIONS, "--", "probe.py")
    assert done.returncode == 0, done.stderr
    name = cli.run_dir().name
    logs = [cli("logs", name, "--rank", str(rank)).stdout for rank in range(3)]
    assert [json.loads(text)["env"]["RANK"] for text in logs] == ["0", "1", "2"]
    assert cli("logs", name, "--rank", "2", "-f").stdout == logs[2]
    (cli.folder / "runs" / name / "logs" / "rank-1.log").write_text("one\ntwo")
    assert cli("logs", name, "--rank", "1").stdout == "one\ntwo\n"  # including an unfinished last line
    done = cli("logs", name, "--rank", "3")
    assert (done.returncode, done.stderr) == (2, "error: there is no rank 3\nhint: ranks are 0 to 2\n")


@pytest.mark.parametrize("arguments", [["plan"], ["run", "--dry-run"]], ids=" ".join)
def test_a_plan_must_create_no_files(cli, engine, arguments):
    before = set(cli.folder.rglob("*"))
    done = cli(*arguments, "--engine", engine, "--trainers", "1", *OPTIONS, "--", "probe.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  rank 1   trainer-1  local rank 0  cpu\n" in done.stdout
    assert set(cli.folder.rglob("*")) == before


@pytest.mark.docker
@pytest.mark.parametrize("arguments", [["plan"], ["run", "--dry-run"]], ids=" ".join)
def test_a_plan_must_not_build_or_pull_an_image(cli, docker_engine, arguments):
    engine = Engine()
    try:
        done = cli(*arguments, "--engine", "docker", "--gpus", "none", "--", "probe.py", DOCKER_HOST=engine.host)
        assert (done.returncode, done.stderr) == (0, "")
        assert (
            not engine.docker("image", "ls", "-aq") + engine.docker("ps", "-aq") + engine.docker("volume", "ls", "-q")
        )
    finally:
        engine.remove()


@pytest.mark.docker
@pytest.mark.parametrize(
    ("command", "error"),
    [
        (
            ["run", "--image", "nonesuch.invalid/x:1", "--", "probe.py"],
            "error: cannot find or pull the image nonesuch.invalid/x:1",
        ),
        (["run", "--", "hidden.py"], "error: nodes cannot see the script: hidden.py is hidden"),
        (["run", "--runs", ".", "--", "probe.py"], "is the code folder"),
        (["up", "--runs", "."], "is the code folder"),
        (["run", "--runs", f"{'/'.join(['x' * 200] * 25)}", "--", "probe.py"], "File name too long"),
        (["run", "--runs", "file/runs", "--", "probe.py"], "Not a directory"),
    ],
)
def test_a_refused_job_must_leave_no_files(cli, docker_engine, nothing_left, command, error):
    (cli.folder / "hidden.py").touch()
    (cli.folder / "file").touch()
    (cli.folder / ".dockerignore").write_text("hidden.py\n")
    before = {*cli.folder.iterdir()}
    done = cli(command[0], "--engine", "docker", "--gpus", "none", "--trainers", "1", *command[1:])
    assert (done.returncode in (2, 4), error in done.stderr, done.stdout) == (True, True, ""), done.stderr
    assert {*cli.folder.iterdir()} == before


@pytest.mark.docker
def test_a_node_that_starts_slowly_must_still_be_reached_by_its_socket(cli, docker_engine, nothing_left):
    (cli.folder / "nothing.py").touch()
    since = docker("info", "--format", "{{.SystemTime}}").strip()
    options = ["--gpus", "none", "--trainers", "0", "--set", "cpus=0.03", "--set", "host_access=true"]
    done = cli("run", "--engine", "docker", *options, "--set", "warm=false", "--", "nothing.py")
    assert done.returncode == 0, done.stderr
    until = docker("info", "--format", "{{.SystemTime}}").strip()
    form = ["--filter", "event=exec_create", "--format", "{{.Actor.Attributes.name}}"]
    assert cli.run_dir().name not in docker("events", "--since", since, "--until", until, *form)


def test_the_gpu_check_must_run_nothing_from_the_jobs_image_and_leave_nothing(cli, nvidia_runtime, nothing_left):
    image = f"empty-{os.getpid()}"
    with tarfile.open(cli.folder / "empty.tar", "w"):
        pass
    docker("import", str(cli.folder / "empty.tar"), image)
    try:
        done = cli("plan", "--engine", "docker", "--gpus", "auto", "--image", image, "--", "probe.py")
        assert done.returncode == 0 and done.stderr in ("", "looking for GPUs\n")  # the latter if it takes long
        assert "NCCL on GPU\n" in done.stdout  # though the image has not even nvidia-smi
    finally:
        docker("image", "rm", image)


def test_the_gpu_check_must_use_little_memory_whatever_the_image_writes(nvidia_runtime, nothing_left, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nhead -c 100000000 /dev/zero | tr '\\000' x\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    image, container = f"flood-{os.getpid()}", docker("create", IMAGE).strip()
    try:
        docker("cp", str(tmp_path / "nvidia-smi"), f"{container}:/usr/local/bin/nvidia-smi")
        docker("commit", container, image)
    finally:
        docker("rm", "--volumes", container)
    daemon = Daemon()
    tracemalloc.start()
    try:
        assert _offer(daemon, image, tmp_path, JobSpec()).gpus == ()
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
        daemon.client.close()
        docker("image", "rm", image)


def test_flags_must_override_set_and_set_must_override_the_job_file(cli):
    (cli.folder / "job.yaml").write_text("trainers: 3\nname: of-the-file\ncommand: steps.py\nengine: process\n")

    def planned(*arguments: str) -> str:
        return cli("plan", "job.yaml", *arguments).stdout.splitlines()[0]

    assert ": 4 nodes × 1 worker" in planned() and "job of-the-file-" in planned()
    assert ": 3 nodes × 1 worker" in planned("--set", "trainers=2")
    assert ": 2 nodes × 1 worker" in planned("--trainers", "1")
    assert ": 2 nodes × 1 worker" in planned("--trainers", "1", "--set", "trainers=2")
    assert "job probe-" in planned("--set", "name=", "--", "probe.py")


# --- other users


def test_sockets_of_a_node_must_be_accessible_to_its_owner_only(cli, engine):
    other = Other(cli, engine, "other")
    mine = STATE / other.run.name if engine == "process" else other.run / "sockets"
    (socket,) = (path for path in mine.iterdir() if path.is_socket())
    node = users.without_account()[0] if engine == "docker" and os.getuid() == 0 else os.getuid()
    owners = {STATE: os.getuid(), mine.parent: os.getuid(), mine: node, socket: node}
    for path, owner in owners.items():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert path.stat().st_uid == owner, path
    for user, name in ((65534, socket.name), (1000, str(socket))) if os.getuid() == 0 else ():  # as other users
        folder, name = os.path.split(name)
        reach = f"import os, socket\nos.setuid({user})\nos.chdir({folder or '.'!r})\n"
        connect = f"{reach}socket.socket(socket.AF_UNIX).connect({name!r})"
        done = subprocess.run([sys.executable, "-c", connect], cwd=mine, capture_output=True, text=True)
        assert "PermissionError" in done.stderr
    assert other.untouched()
    other.end()


@pytest.mark.docker
@pytest.mark.parametrize("command", ["stop", "rm"])
def test_the_job_of_another_user_must_be_left_alone(cli, docker_engine, nothing_left, command):
    name = f"foreign-{os.getpid():x}"
    labels = {"orchestrate.job": name, "orchestrate.owner": "12345"}
    labels["orchestrate.run"] = f"{cli.folder}/runs/{name}/job"
    labels |= {f"com.docker.compose.{key}": value for key, value in zip(KEYS, (name, "master", "1"))}
    options = [word for item in labels.items() for word in ("--label", "=".join(item))]
    container_id = docker("create", "--name", f"{name}-master-1", *options, "orchestrate-node:0.1").strip()
    try:
        done = cli(command, name)
        assert (done.returncode, done.stderr) == (
            2,
            f"error: {name} belongs to user 12345\nhint: ask them to stop it\n",
        )
        assert docker("ps", "-aq", "--no-trunc", "--filter", f"id={container_id}").strip() == container_id
    finally:
        docker("rm", container_id)


# --- children of workers


@pytest.mark.parametrize("warm", ["true", pytest.param("false", marks=pytest.mark.exhaustive)])
def test_children_of_a_worker_must_not_outlive_its_node(cli, engine, warm):
    (cli.folder / "parent.py").write_text(
        "import colorsys, os, signal\nsignal.signal(15, signal.SIG_IGN)\npid = os.fork()\n"
        "while not pid: signal.pause()\nprint('forked', pid, os.getpid(), flush=True)\nsignal.pause()\n"
    )
    options = ("--max-restarts", "0", "--set", "grace=1s", "--set", f"warm={warm}", "--set", "preload=[colorsys]")
    job = Background(cli, engine, *options, "--", "parent.py", trainers=1)
    eventually(lambda: all(job.has(rank, "forked") for rank in range(2)))
    below = descendants(job.node_pid("trainer-1"))
    assert len(below) >= 2
    job.kill_node("trainer-1")
    assert job.end() == 1
    eventually(lambda: all(map(gone, below)))
