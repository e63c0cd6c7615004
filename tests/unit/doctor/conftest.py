"""A machine and an engine for `doctor`."""

import pytest

from orchestrate.cli.commands.doctor import examine
from orchestrate.doctor import checks, findings
from orchestrate.engines import check_cache
from orchestrate.host.gpus import Gpu
from orchestrate.spec.spec import JobSpec

MINE = JobSpec(image="mine:1")


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """The GPUs of this machine: none, unless a test sets some."""

    def have(*gpus: Gpu, why: str = "this machine has no NVIDIA GPU", useless: str = "") -> None:
        for module in (checks, findings):
            monkeypatch.setattr(module, "look", lambda: gpus)
        monkeypatch.setattr(findings, "why_none", lambda: why)
        monkeypatch.setattr(check_cache, "gpu_problem", lambda ids: useless)

    have()
    return have


class Engine:
    """A Docker Engine with the given facts."""

    host = "unix:///var/run/docker.sock"

    def __init__(self, **info: object) -> None:
        self.info = {"ServerVersion": "28.0.1", **info}


@pytest.fixture
def found(monkeypatch):
    """A function that runs `doctor` on an engine with the given facts; returns its output lines and exit code."""

    def look(capsys, image=True, swarm: object = None, spec=MINE, **info: object) -> tuple[list[str], int]:
        monkeypatch.setattr(checks, "Daemon", lambda: Engine(**info))
        monkeypatch.setattr(checks, "has_image", lambda daemon, name: image)
        monkeypatch.setattr(checks, "SwarmEngine", swarm)
        code = examine(spec)
        return capsys.readouterr().out.splitlines(), code

    return look
