"""Plain `docker compose up`, without the orchestrator: trainers must form one gang, in Compose's order."""

import json
import os
import re
import subprocess

import pytest
from support.leftovers import docker
from support.repo import ROOT, SCRIPTS
from support.waiting import eventually

pytestmark = pytest.mark.docker
CPU = ("--profile", "cpu")


class Project:
    """The project's Compose file, as a separate Compose project that runs a test script."""

    def __init__(self, name: str, script: str) -> None:
        self.name = name
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("NODE_", "COMPOSE_"))}
        self.env = clean | {"NODE_CODE": str(SCRIPTS), "NODE_COMMAND": script}

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        command = ["docker", "compose", "--ansi", "never", "--project-name", self.name, *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.env | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **env)
        out, _ = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, out)


@pytest.fixture
def project(docker_engine, nothing_left, request):
    compose = Project(f"test-{os.getpid()}", "probe.py --flag 'a b'")
    yield compose
    for profile in ("cpu", "gpu"):
        compose("--profile", profile, "down", "--volumes", "--timeout", "1")


def workers(output: str) -> dict[str, dict]:
    """The output of probe.py, by the container name that Compose prints."""
    found = re.findall(r"^(\S+) +\| \[rank (\d+)\] ({.*})$", output, re.M)
    assert all(json.loads(text)["env"]["RANK"] == rank for _, rank, text in found)
    return {name: json.loads(text) for name, rank, text in found}


def check_gang(output: str, suffix: str, trainers: int) -> dict[str, dict]:
    seen = workers(output)
    assert set(seen) == {f"master{suffix}-1", *(f"trainer{suffix}-{i}" for i in range(1, trainers + 1))}
    for name, worker in seen.items():
        service, _, number = name.rpartition("-")
        env = worker["env"]
        assert env["RANK"] == ("0" if service.startswith("master") else number)
        assert (env["WORLD_SIZE"], env["MASTER_ADDR"]) == (str(trainers + 1), "master")
        assert worker["args"] == ["--flag", "a b"]
    return seen


@pytest.mark.parametrize("trainers", [0, 11])
def test_the_cpu_profile_must_rank_any_number_of_trainers(project, trainers):
    done = project(*CPU, "up", "--scale", f"trainer-cpu={trainers}")
    assert done.returncode == 0, done.stdout
    check_gang(done.stdout, "-cpu", trainers)


def test_the_number_of_trainers_must_be_read_from_the_environment(project):
    done = project(*CPU, "up", TRAINERS="2")
    assert done.returncode == 0, done.stdout
    check_gang(done.stdout, "-cpu", 2)


def test_a_node_must_be_able_to_run_several_workers(project):
    done = project(*CPU, "up", TRAINERS="2", NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stdout
    found = re.findall(r"^(\S+) +\| \[rank (\d+)\] {", done.stdout, re.M)
    nodes = ["master-cpu-1", "trainer-cpu-1", "trainer-cpu-2"]
    assert sorted(found, key=lambda one: one[1]) == [(nodes[rank // 2], str(rank)) for rank in range(6)]


def test_the_trainers_must_end_when_the_master_dies(project):
    project.env["NODE_COMMAND"] = "steps.py"
    up = project.start(*CPU, "up", "--scale", "trainer-cpu=1")
    eventually(lambda: "[rank 1] stepping" in project(*CPU, "logs", "trainer-cpu").stdout)
    docker("kill", f"{project.name}-master-cpu-1")
    state = ("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", f"{project.name}-trainer-cpu-1")
    eventually(lambda: docker(*state) == "exited 143\n")
    up.communicate(timeout=150)
    assert up.returncode != 0


def test_the_default_must_use_the_nvidia_runtime_and_give_every_node_its_own_gpu(project, nvidia_runtime):
    done = project("up", "--scale", "trainer=3")
    assert done.returncode == 0, done.stdout
    gpus = {worker["env"]["CUDA_VISIBLE_DEVICES"] for worker in check_gang(done.stdout, "", 3).values()}
    assert len(gpus) == 4 and all(re.fullmatch(r"GPU-[-\w]+", gpu) for gpu in gpus)


def test_more_nodes_than_gpus_must_fail_with_a_hint(project, nvidia_runtime):
    done = project("up", "--scale", "trainer=4")
    assert done.returncode != 0
    assert "error: 5 workers on one machine need as many GPUs; it has 4" in done.stdout
    assert "hint: use fewer nodes (--scale trainer=N)" in done.stdout
    assert workers(done.stdout) == {}


def test_ranks_after_a_rescale_must_follow_the_order_of_containers_not_their_numbers(project):
    assert project(*CPU, "up", "--scale", "trainer-cpu=3").returncode == 0
    docker("rm", f"{project.name}-trainer-cpu-1")
    done = project(*CPU, "up", "--no-recreate", "--scale", "trainer-cpu=2")
    assert done.returncode == 0, done.stdout
    ranks = {name: worker["env"]["RANK"] for name, worker in workers(done.stdout).items()}
    assert ranks == {"master-cpu-1": "0", "trainer-cpu-2": "1", "trainer-cpu-3": "2"}


def test_a_trainer_must_have_its_grace_period_when_the_gang_ends(project, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "save.py").write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not os.path.exists('/job/ready'): time.sleep(0.01)\n"
        "    sys.exit(3)\n"
        "def save(*_):\n"
        "    time.sleep(1)\n"
        "    print('saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(15, save)\n"
        "open('/job/ready', 'w')\n"
        "while True: time.sleep(0.01)\n"
    )
    project.env |= {"NODE_CODE": str(tmp_path), "NODE_COMMAND": "save.py"}
    done = project(*CPU, "up", "--scale", "trainer-cpu=1")
    assert done.returncode != 0
    eventually(lambda: "[rank 1] saved" in project(*CPU, "logs", "trainer-cpu").stdout)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failing_rank_must_end_the_gang_and_make_up_fail(project, rank):
    project.env["NODE_COMMAND"] = f"steps.py {rank}=3"
    done = project(*CPU, "up", "--scale", "trainer-cpu=2")
    assert done.returncode != 0
    assert docker("inspect", "--format", "{{.State.ExitCode}}", f"{project.name}-master-cpu-1") == "3\n"
    name = "master" if rank == 0 else "trainer-2"
    assert f"rank {rank} on {name} failed with exit code 3; stopping the others" in done.stdout
    assert "all ranks succeeded" not in done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchs_store_must_outlive_rank_0(project):
    project.env["NODE_COMMAND"] = "leaves_first.py"
    done = project(*CPU, "up", "--scale", "trainer-cpu=1")
    assert done.returncode == 0 and "[rank 1] made a group" in done.stdout, done.stdout


def test_any_user_must_be_able_to_write_to_a_new_volume(docker_engine):
    mount = ("--mount", "type=volume,dst=/job", "--entrypoint", "touch")
    docker("run", "--rm", "--user", "4242:4242", *mount, "orchestrate-node:0.1", "/job/file")


def test_a_second_up_must_train_again(project):
    for _ in range(2):
        done = project(*CPU, "up", "--scale", "trainer-cpu=1")
        assert done.returncode == 0, done.stdout
        check_gang(done.stdout, "-cpu", 1)


def test_nodes_must_have_no_docker_socket_and_no_unneeded_privileges(project):
    config = json.loads(project(*CPU, "--profile", "gpu", "config", "--format", "json").stdout)
    names = {"master", "trainer", "outcome"}
    assert set(config["services"]) == names | {f"{name}-cpu" for name in names}
    for name, service in config["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert "privileged" not in service and "ports" not in service and "cap_add" not in service, name
        assert not any("docker.sock" in str(volume) for volume in service.get("volumes", ())), name
        if "outcome" not in name:
            assert service["user"] == "1000:1000", name
            assert service["init"] is False and service["shm_size"] == str(1 << 30), name
            assert service["logging"]["options"] == {"max-size": "50m", "max-file": "3"}, name
            assert (service["stop_grace_period"], service["stop_signal"]) == ("40s", "SIGTERM"), name
            assert service.get("runtime") == (None if name.endswith("-cpu") else "nvidia"), name


def test_scaling_a_service_of_an_inactive_profile_must_be_refused_by_name(project):
    done = project(*CPU, "up", "--scale", "trainer=3")
    assert done.returncode != 0
    assert "no such service: trainer: disabled" in done.stdout
