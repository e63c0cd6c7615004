"""A machine and an engine for `doctor`."""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from orchestrate.cli.commands.doctor import examine
from orchestrate.doctor import checks, machine
from orchestrate.engines import check_cache
from orchestrate.host.gpus import Gpu
from orchestrate.spec.spec import JobSpec

MINE = JobSpec(image="mine:1")


@pytest.fixture(autouse=True)
def own(monkeypatch):
    """The GPUs of this machine: none, unless a test sets some."""

    def have(*gpus: Gpu, why: str = "this machine has no NVIDIA GPU", useless: str = "") -> None:
        for module in (checks, machine):
            monkeypatch.setattr(module, "look", lambda: gpus)
        monkeypatch.setattr(machine, "why_none", lambda: why)
        monkeypatch.setattr(check_cache, "gpu_problem", lambda ids: useless)
        monkeypatch.setattr(machine, "link_mtu", lambda: None)

    have()
    return have


class Engine:
    """A Docker Engine with the given facts."""

    host = "unix:///var/run/docker.sock"

    def __init__(self, networks: Sequence[object], **info: object) -> None:
        self.info = {"ServerVersion": "28.0.1", "CgroupVersion": "2", **info}
        network = {"Options": info.pop("NetworkOptions", {})}
        self.networks = lambda: networks
        self.api = SimpleNamespace(
            get=lambda path: self.info if path == "/info" else network,
            post=lambda path, content: {"Id": "new"},
            delete=lambda path: None,
        )

    def compose(self, *_: str, **__: object) -> str:
        return "2.30.3\n"

    @contextlib.contextmanager
    def translating_errors(self, what: str) -> Iterator[None]:
        yield


@pytest.fixture
def found(monkeypatch):
    """A function that runs `doctor` on an engine with the given facts; returns its output lines and exit code."""

    def look(capsys, image=True, swarm: object = None, spec=MINE, networks=(), **info: object) -> tuple[list[str], int]:
        monkeypatch.setattr(checks, "Daemon", lambda: Engine(networks, **info))
        monkeypatch.setattr(checks, "has_image", lambda daemon, name: image)
        monkeypatch.setattr(checks, "SwarmEngine", swarm)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 30))
        code = examine(spec)
        return capsys.readouterr().out.splitlines(), code

    return look
