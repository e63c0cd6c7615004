"""Swarm services must follow the job: its limits, GPUs, files and network, with minimal privileges."""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from typing import Any

import pytest
from support.ends import KEY
from support.plans import HERE, Site, plan, with_gpus

from orchestrate.engines.docker import labels
from orchestrate.engines.swarm import service_spec
from orchestrate.errors import ResourceError
from orchestrate.files.paths import NODE
from orchestrate.spec.spec import JobSpec


def task_of(
    spec: JobSpec, role: str = "trainer", gpus: int = 0, site: Site = HERE, volumes: Sequence[str] = ()
) -> dict:
    site = (with_gpus(gpus) if gpus else site).but(preload=("torch", "numpy"))
    planned = plan(spec, site, "digits-1")
    return service_spec.task(
        spec,
        planned,
        role,
        image="image:1",
        user="7:8",
        network="net",
        secret=("id", "digits-1-node"),
        key=KEY,
        volumes=volumes,
    )


def env(task: dict) -> dict[str, str]:
    return dict(item.split("=", 1) for item in task["ContainerSpec"]["Env"])


def mounts(task: dict) -> dict[str, dict]:
    return {mount["Target"]: mount for mount in task["ContainerSpec"]["Mounts"]}


def test_limits_of_the_job_file_must_be_reserved_and_enforced():
    task = task_of(JobSpec(trainers=1, cpus=1.5, memory="3g", shm_size="512m"))
    wanted = {"NanoCPUs": 1_500_000_000, "MemoryBytes": 3 << 30}
    assert task["Resources"] == {"Limits": {**wanted, "Pids": 8192}, "Reservations": wanted}
    assert mounts(task)["/dev/shm"]["TmpfsOptions"] == {"Mode": 0o1777, "SizeBytes": 512 << 20}


def test_a_nodes_share_of_the_memory_must_be_enforced_but_not_reserved():
    site = HERE.but(memory=8 << 30, hosts=2)
    task = task_of(JobSpec(trainers=3), site=site)
    assert task["Resources"] == {"Limits": {"MemoryBytes": 7 << 29, "Pids": 8192}, "Reservations": {}}
    assert task["ContainerSpec"]["OomScoreAdj"] == 500
    unlimited = task_of(JobSpec(trainers=3, memory="unlimited"), site=site)
    assert unlimited["Resources"] == {"Limits": {"Pids": 8192}, "Reservations": {}}


def test_a_node_must_have_as_many_gpus_as_workers():
    resources = task_of(JobSpec(trainers=1, nproc_per_node=2), gpus=4)["Resources"]
    (reserved,) = resources["Reservations"]["GenericResources"]
    assert reserved == {"DiscreteResourceSpec": {"Kind": "NVIDIA-GPU", "Value": 2}}
    assert "GenericResources" not in resources["Limits"]


def test_the_environment_of_workers_must_not_be_part_of_a_service():
    assert "canary" not in str(task_of(JobSpec(env={"HF_TOKEN": "canary"})))


@pytest.mark.parametrize(("volume", "kind"), [("/mnt/shared", "bind"), ("shared", "volume")])
def test_a_shared_volume_must_be_mounted_where_nodes_expect_it(volume, kind):
    assert mounts(task_of(JobSpec(volume=volume)))["/shared"] == {"Type": kind, "Source": volume, "Target": "/shared"}
    assert "/shared" not in mounts(task_of(JobSpec()))


def test_nodes_must_find_each_other_by_name_or_on_the_host_network_by_different_ports():
    for role, name, alias in (
        ("master", "master", "master"),
        ("trainer", "digits-1-trainer-{{.Task.Slot}}", "trainer"),
    ):
        task = task_of(JobSpec(), role)
        assert task["ContainerSpec"]["Hostname"] == name
        assert task["Networks"] == [{"Target": "net", "Aliases": [alias]}]
        assert env(task)["NODE_PORT"] == "20001"
    master, trainer = (task_of(JobSpec(network="host"), role) for role in ("master", "trainer"))
    assert "Hostname" not in master["ContainerSpec"] and master["Networks"] == [{"Target": "net"}]
    base = service_spec.port(JobSpec(network="host"), "digits-1")
    assert base == 23864 != service_spec.port(JobSpec(network="host"), "digits-2")  # the same in every process
    assert (env(master)["NODE_PORT"], env(trainer)["NODE_PORT"]) == (f"{base + 1}", f"{base + 1}+{{{{.Task.Slot}}}}")


def test_a_node_must_have_minimal_privileges_and_start_only_once():
    task = task_of(JobSpec(grace=60.0, constraints=["node.labels.gpu == a100"], labels={"team": "vision"}))
    container = task["ContainerSpec"]
    assert (container["User"], container["ReadOnly"], container["Init"]) == ("7:8", True, False)
    assert (container["CapabilityDrop"], container["Privileges"]) == (["ALL"], {"NoNewPrivileges": True})
    assert container["Ulimits"] == [{"Name": "core", "Soft": 0, "Hard": 0}]
    (secret,) = container["Secrets"]
    assert (secret["SecretID"], secret["SecretName"]) == ("id", "digits-1-node")
    assert secret["File"] == {"Name": "node", "UID": "7", "GID": "8", "Mode": 0o400}
    assert container["StopGracePeriod"] == 70_000_000_000 and container["StopSignal"] == "SIGTERM"
    assert container["Labels"] == labels.only({"orchestrate.role": "trainer"}) | {"team": "vision"}
    assert container["Image"] == "image:1"
    assert task["LogDriver"] == {"Name": "json-file", "Options": {"max-size": "50m", "max-file": "3"}}
    assert set(mounts(task)) == {"/tmp", "/var/tmp", "/dev/shm", "/run/orchestrate"}  # all folders that are writable
    for folder in ("/tmp", "/var/tmp"):
        assert mounts(task)[folder] == {"Type": "volume", "Target": folder}
    assert mounts(task)["/run/orchestrate"]["TmpfsOptions"] == {"Mode": 0o1777, "SizeBytes": 16 << 20}
    assert task["RestartPolicy"] == {"Condition": "none"}
    assert task["Placement"] == {"Constraints": ["node.labels.gpu == a100"]}


def test_the_nodes_of_a_cluster_must_have_its_name_whatever_job_they_run():
    spec = JobSpec(network="host")
    planned = plan(spec, HERE.but(cluster="c-1"), "digits-1")
    ids: dict[str, Any] = {"image": "i", "user": "7:8", "network": "net", "secret": ("id", "c-1-node"), "key": KEY}
    task = service_spec.task(spec, planned, "master", **ids)
    assert (env(task)["JOB_ID"], env(task)["NODE_PORT"]) == ("c-1", str(service_spec.port(spec, "c-1") + 1))
    planned = plan(JobSpec(), HERE.but(cluster="c-1"), "digits-1")
    task = service_spec.task(
        JobSpec(), planned, "trainer", image="i", user="7:8", network="net", secret=("id", "c-1-node"), key=KEY
    )
    assert task["ContainerSpec"]["Hostname"] == "c-1-trainer-{{.Task.Slot}}"


def test_a_node_must_get_the_settings_of_the_job():
    values = env(task_of(JobSpec(grace=90.0)))
    assert (values["NODE_GRACE"], values["NODE_PRELOAD"], values["JOB_ID"]) == ("90", "torch numpy", "digits-1")
    assert set(values["NODE_WIPE"].split()) == {"/tmp", "/dev/shm", "/dev/mqueue", "/var/tmp", "/run/orchestrate"}
    assert (values["NODE_MODE"], values["NODE_KEY"], values["HOME"]) == ("agent", KEY.hex(), "/tmp")
    assert values["PYTHONUNBUFFERED"] == values["PYTHONDONTWRITEBYTECODE"] == "1"


def test_the_health_check_of_an_image_must_not_run_in_a_node():
    assert task_of(JobSpec())["ContainerSpec"]["Healthcheck"] == {"Test": ["NONE"]}


def test_the_volumes_of_an_image_must_be_emptied_between_jobs():
    task = task_of(JobSpec(), volumes=["/data", "/tmp", "/shared"])
    assert set(env(task)["NODE_WIPE"].split()) == {
        "/tmp",
        "/dev/shm",
        "/dev/mqueue",
        "/var/tmp",
        "/run/orchestrate",
        "/data",
        "/shared",
    }
    task = task_of(JobSpec(volume="v"), volumes=["/shared"])
    assert "/shared" not in env(task)["NODE_WIPE"].split()  # the user's own volume
    with pytest.raises(ResourceError, match="declares the volume '/var/tmp/job'"):
        task_of(JobSpec(), volumes=["/var/tmp/job"])


def test_the_program_of_a_node_must_be_complete():
    with tarfile.open(fileobj=io.BytesIO(service_spec.program())) as archive:
        names = {f"orchestrate/node/{path.relative_to(NODE)}" for path in NODE.rglob("*.py")}
        assert {*archive.getnames()} == {"orchestrate/__init__.py", *names}


def test_a_node_must_unpack_its_program_and_run_it(tmp_path, monkeypatch):
    (tmp_path / "secret").write_bytes(service_spec.program())
    (tmp_path / "x.py").write_text("import sys; print(*sys.argv[1:])")
    monkeypatch.setattr(service_spec, "PROGRAM", str(tmp_path / "program"))
    command = [sys.executable, "-c", service_spec.boot(str(tmp_path / "secret")), "x.py", "a b"]
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "JOB_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    other = tmp_path / "packages" / "orchestrate"  # of another version, installed in the image
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the wrong package')")
    env["PYTHONPATH"] = str(other.parent)
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "[rank 0] a b\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        ("No such image: mine:1", "host-2 has no image mine:1", "docker load"),
        ("manifest unknown", "host-2 has no image mine:1", "docker load"),
        ("not found: manifest", "host-2 has no image mine:1", "docker load"),
        ("no suitable node", "no suitable host for a node: no suitable node", "docs/swarm.md"),
        ("pull access denied for mine", "host-2 has no image mine:1", "docker load"),
        ("no suitable node (insufficient resources on 3 nodes)", "insufficient resources on 3 nodes", "docs/swarm.md"),
        ("invalid mount config: bind source path does not exist: /x", "host-2: invalid mount", "on every host"),
        ("something else", "host-2: something else", ""),
    ],
)
def test_a_task_that_does_not_start_must_be_reported_with_a_message_and_a_hint(error, message, hint):
    text, advice = service_spec.explain_error(error, "host-2", "mine:1")
    assert message in text and hint in advice and bool(hint) == bool(advice)
