"""Findings of `doctor` on this machine: its engine, its torch and its GPUs."""

import dataclasses
import sys

import pytest

from orchestrate.cli.commands.doctor import examine
from orchestrate.doctor import checks, machine
from orchestrate.errors import EngineError
from orchestrate.host.gpus import Gpu
from orchestrate.spec.spec import IMAGE, JobSpec

MINE = JobSpec(image="mine:1")
OWN = Gpu(id="GPU-1", index=0, name="NVIDIA H200", total=141 << 30, driver="580.95.05")


def follows(lines: list[str], line: str) -> str:
    """The line after another one."""
    return lines[lines.index(line) + 1]


def test_a_healthy_engine_must_be_reported_as_ok(found, capsys):
    lines, code = found(capsys, Runtimes={"nvidia": {}, "runc": {}}, Swarm={"LocalNodeState": "inactive"})
    assert code == 0 and not [line for line in lines if not line.startswith(("ok ", " "))]
    assert lines[0] == "ok       Docker Engine 28.0.1 at unix:///var/run/docker.sock, Compose 2.30.3"
    for what in ("NVIDIA runtime is installed", "this machine has no NVIDIA GPU", "image mine:1 exists"):
        assert f"ok       {what}" in lines
    assert lines[-1] == "ok       not part of a Swarm"


def test_missing_features_of_an_engine_must_be_reported_but_not_as_errors(found, capsys):
    lines, code = found(capsys, image=False, Runtimes={"runc": {}})
    assert code == 0 and "ok       no NVIDIA runtime: jobs train on the CPU" in lines
    for what, hint in [
        ("image mine:1 is missing", "the first run builds or pulls it"),
        (f"image {IMAGE} is missing: without it, nodes can reach this machine's ports", "docker compose build"),
    ]:
        assert follows(lines, f"warning  {what}") == f"         hint: {hint}"
    for spec in (JobSpec(), dataclasses.replace(MINE, host_access=True)):  # no other image is needed
        lines, _ = found(capsys, image=False, spec=spec, Runtimes={"runc": {}})
        assert [line for line in lines if "missing" in line] == [f"warning  image {spec.image} is missing"]


def test_an_engine_that_does_not_answer_must_be_an_error(monkeypatch, capsys):
    def refuse() -> None:
        raise EngineError("no Docker Engine answers", "start Docker")

    monkeypatch.setattr(checks, "Daemon", refuse)
    assert examine(JobSpec(engine="docker")) == 3
    engine, hint, torch, *_, gpus = capsys.readouterr().out.splitlines()
    assert (engine, hint) == ("error    no Docker Engine answers", "         hint: start Docker")
    assert torch.startswith("ok       local processes: torch ") and gpus == "ok       this machine has no NVIDIA GPU"
    assert examine(JobSpec()) == 0  # local processes are used instead
    assert capsys.readouterr().out.startswith("warning  no Docker Engine answers")


@pytest.mark.parametrize("there", [True, False])
def test_requirements_of_local_processes_must_be_checked_with_engine_process(monkeypatch, capsys, there):
    def version(name: str) -> str:
        if not there:
            raise machine.metadata.PackageNotFoundError
        return f"2.0 of {name}"

    monkeypatch.setattr(machine.metadata, "version", version)
    assert examine(JobSpec(engine="process")) == 0
    python, lines = sys.executable, capsys.readouterr().out.splitlines()
    if there:
        assert lines[0] == f"ok       local processes: torch 2.0 of torch in {python}"
    else:
        assert lines[0] == f"warning  local processes: torch is not installed in {python}"
        assert lines[1] == f"         hint: {python} -m pip install torch"


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
    assert follows(lines, "ok       GPU-1: NVIDIA H200, 141 GiB, driver 580.95.05") == (
        "ok       GPU-2, 71% of its memory in use: NVIDIA H200, 141 GiB, driver 580.95.05"
    )
    off = "warning  persistence mode is off: each job waits several seconds for the driver to load"
    assert "nvidia-smi -pm 1" in follows(lines, off)
    assert lines[-2].startswith("warning  local processes cannot use the GPUs: torch 2.15.0: The NVIDIA driver")
    own(dataclasses.replace(idle, used=0, total=0, driver="", display=True))  # whose driver the display keeps loaded
    examine(JobSpec(engine="process"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ok       GPU-2: NVIDIA H200" and "GPU" not in "".join(lines[:-1])


def test_a_driver_library_mismatch_must_be_a_warning(own, capsys):
    own(why="nvidia-smi: Failed to initialize NVML: Driver/library version mismatch")
    examine(JobSpec(engine="process"))
    expected = "\nwarning  nvidia-smi: Failed to initialize NVML: Driver/library version mismatch\n"
    assert capsys.readouterr().out.endswith(expected)


def test_gpus_that_containers_cannot_use_must_be_a_warning_that_names_the_toolkit(own, found, capsys):
    own(OWN)
    lines, code = found(capsys, Runtimes={"runc": {}})
    assert code == 0 and "container toolkit" in follows(lines, "warning  no NVIDIA runtime: jobs train on the CPU")
    assert any(line.startswith("ok       GPU-1: ") for line in lines)
    lines, _ = found(capsys, Runtimes={"runc": {}}, CDISpecDirs=["/etc/cdi"], ServerVersion="27.5.1")
    assert "ok       GPUs are available to containers as CDI devices (nvidia.com/gpu)" in lines
