"""Findings of `doctor` on this machine: its engine, its torch and its GPUs."""

import dataclasses
import sys

import pytest

from orchestrate.cli.commands.doctor import examine
from orchestrate.doctor import checks, findings
from orchestrate.errors import EngineError
from orchestrate.host.gpus import Gpu
from orchestrate.spec.spec import IMAGE, JobSpec

MINE = JobSpec(image="mine:1")
OWN = Gpu(id="GPU-1", index=0, name="NVIDIA H200", total=141 << 30, driver="580.95.05")


def test_a_healthy_engine_must_be_reported_as_ok(found, capsys):
    lines, code = found(capsys, Runtimes={"nvidia": {}, "runc": {}}, Swarm={"LocalNodeState": "inactive"})
    assert code == 0 and all(line.startswith("ok ") for line in lines) and len(lines) == 5
    assert "28.0.1 at unix:///var/run/docker.sock" in lines[0] and "NVIDIA runtime is installed" in lines[1]
    assert lines[2] == "ok       this machine has no NVIDIA GPU"
    assert "image mine:1 exists" in lines[3] and "not part of a Swarm" in lines[4]


def test_missing_features_of_an_engine_must_be_reported_but_not_as_errors(found, capsys):
    lines, code = found(capsys, image=False, Runtimes={"runc": {}})
    assert code == 0
    assert lines[1] == "ok       no NVIDIA runtime: jobs train on the CPU"
    assert lines[3:5] == [
        "warning  image mine:1 is missing",
        "         hint: the first run builds or pulls it",
    ]
    assert lines[5:7] == [
        f"warning  image {IMAGE} is missing: without it, nodes can reach this machine's ports",
        "         hint: docker compose build",
    ]
    for spec in (JobSpec(), dataclasses.replace(MINE, host_access=True)):  # no other image is needed
        lines, _ = found(capsys, image=False, spec=spec, Runtimes={"runc": {}})
        assert [line for line in lines if "missing" in line] == [f"warning  image {spec.image} is missing"]


def test_an_engine_that_does_not_answer_must_be_an_error(monkeypatch, capsys):
    def refuse() -> None:
        raise EngineError("no Docker Engine answers", "start Docker")

    monkeypatch.setattr(checks, "Daemon", refuse)
    assert examine(JobSpec()) == 3
    *engine, torch, gpus = capsys.readouterr().out.splitlines()
    assert engine == ["error    no Docker Engine answers", "         hint: start Docker"]
    assert torch.startswith("ok       local processes: torch ") and gpus == "ok       this machine has no NVIDIA GPU"


@pytest.mark.parametrize("there", [True, False])
def test_requirements_of_local_processes_must_be_checked_with_engine_process(monkeypatch, capsys, there):
    def version(name: str) -> str:
        if not there:
            raise findings.metadata.PackageNotFoundError
        return f"2.0 of {name}"

    monkeypatch.setattr(findings.metadata, "version", version)
    assert examine(JobSpec(engine="process")) == 0
    python = sys.executable
    assert capsys.readouterr().out.splitlines()[:-1] == (
        [f"ok       local processes: torch 2.0 of torch in {python}"]
        if there
        else [
            f"warning  local processes: torch is not installed in {python}",
            f"         hint: {python} -m pip install torch",
        ]
    )


def test_a_swarm_that_cannot_be_queried_must_be_reported(found, capsys):
    def refuse() -> None:
        raise EngineError("this host is no manager", "ask one")

    lines, code = found(capsys, swarm=refuse, Swarm={"LocalNodeState": "active"})
    assert code == 0 and lines[-2:] == ["warning  this host is no manager", "         hint: ask one"]


def test_the_gpus_of_this_machine_must_be_listed_with_their_problems(own, capsys):
    idle = dataclasses.replace(OWN, id="GPU-2", used=100 << 30, persistent=False)
    own(OWN, idle, useless="torch 2.15.0: The NVIDIA driver on your system is too old")
    assert examine(JobSpec(engine="process")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "ok       GPU-1: NVIDIA H200, 141 GiB, driver 580.95.05",
        "ok       GPU-2, 71% of its memory in use: NVIDIA H200, 141 GiB, driver 580.95.05",
    ]
    assert lines[3].startswith("warning  persistence mode is off") and "nvidia-smi -pm 1" in lines[4]
    assert lines[5].startswith("warning  local processes cannot use the GPUs: torch 2.15.0: The NVIDIA driver")
    own(dataclasses.replace(idle, used=0, total=0, driver="", display=True))  # whose driver the display keeps loaded
    examine(JobSpec(engine="process"))
    assert capsys.readouterr().out.splitlines()[1:] == ["ok       GPU-2: NVIDIA H200"]


def test_a_driver_library_mismatch_must_be_a_warning(own, capsys):
    own(why="nvidia-smi: Failed to initialize NVML: Driver/library version mismatch")
    examine(JobSpec(engine="process"))
    expected = "\nwarning  nvidia-smi: Failed to initialize NVML: Driver/library version mismatch\n"
    assert capsys.readouterr().out.endswith(expected)


def test_gpus_that_containers_cannot_use_must_be_a_warning_that_names_the_toolkit(own, found, capsys):
    own(OWN)
    lines, code = found(capsys, Runtimes={"runc": {}})
    assert code == 0 and lines[1] == "warning  no NVIDIA runtime: jobs train on the CPU"
    assert "container toolkit" in lines[2] and lines[3].startswith("ok       GPU-1: ")
    lines, _ = found(capsys, Runtimes={"runc": {}}, CDISpecDirs=["/etc/cdi"], ServerVersion="27.5.1")
    assert lines[1] == "ok       GPUs are available to containers as CDI devices (nvidia.com/gpu)"
