"""Which images are probed, and what is cached; with simulated probes."""

import sys
from importlib import metadata
from typing import cast

import pytest
from support.plans import Site

from orchestrate.engines import check_cache, process
from orchestrate.engines.docker import probe
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.process import ProcessEngine
from orchestrate.errors import ResourceError
from orchestrate.host.gpus import Gpu
from orchestrate.spec.spec import IMAGE, JobSpec

TORCH = "import torch\nprint('cuda', torch.cuda.is_available())\n"


@pytest.fixture(autouse=True)
def uncached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tmp_path.chmod(0o700)


def test_the_python_of_an_image_must_be_looked_for_once_and_again_after_a_change(answers, daemon, tmp_path):
    answers.images, answers.output = {"mine:1"}, b"a warning\n3 9"
    for number in (1, 1, 2):
        answers.replies["GET /images/mine:1/json"] = {"Id": f"sha256:{number}", "Config": {}}
        assert probe.python(daemon, "mine:1", tmp_path) == "python"
    assert answers.requests().count("POST /containers/create") == 2
    body = answers.query_of("POST /containers/create")[1]
    assert body["User"] == "65534:65534" and body["HostConfig"]["Tmpfs"] == {"/tmp": "size=1g"}
    answers.images = {"old:1"}
    answers.replies["GET /images/old:1/json"] = {"Id": "sha256:3", "Config": {}}
    answers.output = b"3 8"
    with pytest.raises(ResourceError, match=r"the image old:1 has no Python 3\.9 or later: python is Python 3\.8"):
        probe.python(daemon, "old:1", tmp_path)


def test_an_image_in_which_python_hangs_must_be_tried_once(answers, daemon, tmp_path):
    answers.images, answers.refusals["POST /containers/made/wait"] = {"mine:1"}, (500, "timed out")
    with pytest.raises(ResourceError, match=r"has no Python 3\.9 or later: timed out"):
        probe.python(daemon, "mine:1", tmp_path)
    assert answers.requests("DELETE") == ["DELETE /containers/made"]


def test_the_gpus_of_a_job_must_be_tested_in_its_image_until_they_work(answers, daemon, tmp_path):
    answers.images, daemon.info["Runtimes"] = {"mine:1"}, {"nvidia": {}}

    def problem(driver: str = "1") -> str:
        gpus = [Gpu(id=f"GPU-{number}", index=number, driver=driver) for number in (1, 2)]
        return probe.gpu_problem(daemon, "mine:1", tmp_path, "python3", gpus)

    answers.output = b"torch 2: " + b"x" * 1000
    assert problem() == f"torch 2: {'x' * 291}"
    body = answers.query_of("POST /containers/create")[1]
    assert {"HOME=/tmp", "NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2"} < {*body["Env"]}
    assert (body["HostConfig"]["Runtime"], body["Entrypoint"]) == ("nvidia", ["python3"])
    answers.asked.clear()
    answers.output = b"works"
    for driver, number in (("1", 1), ("1", 1), ("2", 1), ("1", 2)):
        answers.replies["GET /images/mine:1/json"] = {"Id": f"sha256:{number}", "Config": {}}
        assert problem(driver) == ""
    assert answers.requests().count("POST /containers/create") == 3
    answers.refusals["POST /containers/made/start"] = 500, "no driver"
    assert problem("3") == "no driver"


def test_the_projects_own_image_must_not_be_probed(tmp_path):
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


def test_a_torch_that_worked_with_these_gpus_must_not_be_tested_again():
    gpus = [Gpu(id=f"GPU-{number}", index=number, driver="1") for number in (1, 2)]
    check_cache.store(check_cache.cuda_key([sys.executable, metadata.version("torch")], gpus), "works")
    assert check_cache.gpu_problem(gpus[::-1]) == ""  # which a test would find


@pytest.mark.parametrize(
    ("output", "lasts"),
    [
        ("torch 2.15.0: Found no NVIDIA driver on your system", True),
        ("torch 2.15.0: Torch not compiled with CUDA enabled", True),
        ("torch 2.15.0: CUDA error: no kernel image is available for execution on the device", True),
        ("torch 2.15.0: CUDA error: CUDA-capable device(s) is/are busy or unavailable", False),
        ("torch 2.15.0: CUDA error: system not yet initialized", False),
    ],
)
def test_what_keeps_torch_from_gpus_until_image_or_driver_change_must_be_known(output, lasts):
    assert check_cache.known(["a"]) is None
    assert check_cache.cuda(["a"], output) == output
    note = " (a cached result, which python -m orchestrate doctor removes)"
    assert check_cache.known(["a"]) == (f"{output}{note}" if lasts else None)
    check_cache.cuda(["b"], "works")
    assert check_cache.known(["b"]) == ""
    check_cache.forget()
    assert check_cache.known(["a"]) is check_cache.known(["b"]) is None


def test_only_a_torch_that_works_or_is_missing_must_be_cached(tmp_path):
    assert check_cache.cuda(["a"], "torch 2: no") == "torch 2: no" and not check_cache.cached(["a"])
    assert check_cache.cuda(["a"], "") == "torch exited without output"
    assert (
        check_cache.cuda(["a"], "works") == ""
        and check_cache.cached(["a"]) == "works"
        and not check_cache.cached(["b"])
    )
    assert check_cache.cuda(["b"], "no torch", "ignored") == "" and check_cache.cached(["b"]) == "no torch"
    assert check_cache.cuda(["c"], "", "no driver") == "no driver" and not check_cache.cached(["c"])
    for damaged in tmp_path.rglob("*.txt"):
        damaged.write_bytes(b"\xff")
    assert not check_cache.cached(["a"])
