"""Which images are probed, and what is cached; with simulated probes."""

import sys
from typing import cast

from support.plans import Site

from orchestrate.engines import check_cache, process
from orchestrate.engines.docker import probe
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.process import ProcessEngine
from orchestrate.job.gpus import Gpu
from orchestrate.job.spec import IMAGE, JobSpec

TORCH = "import torch\nprint('cuda', torch.cuda.is_available())\n"


def run(cli, *arguments: str):
    return cli("run", "--engine", "docker", "--trainers", "1", *arguments)


def test_the_projects_own_image_must_not_be_probed(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "_run", None)
    assert probe.python(cast(Daemon, None), IMAGE, tmp_path) == "python"


def test_local_processes_must_not_get_gpus_that_their_torch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "look", lambda: (Gpu(id="GPU-1", index=0),))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "uses.py").write_text(TORCH)
    found = Site(*ProcessEngine().inventory(JobSpec(command=("uses.py",)), tmp_path / "run", True))
    assert found.gpus == () and found.no_gpus.startswith(f"{sys.executable} cannot use the GPUs: torch ")
    (tmp_path / "uses.py").write_text("print('no torch')\n")
    found = Site(*ProcessEngine().inventory(JobSpec(command=("uses.py",)), tmp_path / "run", True))
    assert found.gpus == ("GPU-1",)


def test_only_a_torch_that_works_must_be_cached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)
    assert check_cache.cuda(["a"], "torch 2: no") == "torch 2: no" and not check_cache.cached(["a"])
    assert check_cache.cuda(["a"], "") == "torch exited without output"
    assert (
        check_cache.cuda(["a"], "works") == ""
        and check_cache.cached(["a"]) == "works"
        and not check_cache.cached(["b"])
    )
