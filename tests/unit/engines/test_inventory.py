"""The resources that an engine offers to a job: this machine, or a fake Docker Engine with images and GPUs."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from support.plans import Site, plan, spec

from orchestrate import console
from orchestrate.engines import check_cache, process, venv
from orchestrate.engines.docker import image, labels, packages, probe
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.process import ProcessEngine
from orchestrate.errors import EngineError, EngineLost, ResourceError, UsageError
from orchestrate.files.paths import PROJECT
from orchestrate.spec.spec import IMAGE, JobSpec

LISTING = b"\xff\nGPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n"
LISTED = "GPU 0: A100 (UUID: GPU-7)\nGPU 1: A100 (UUID: GPU-8)"
IN_USE = (
    '<nvidia_smi_log><gpu id="00000000:07:00.0"><uuid>GPU-7</uuid>'
    "<fb_memory_usage><total>1000 MiB</total><used>51 MiB</used></fb_memory_usage></gpu></nvidia_smi_log>"
)
OF_CONTAINERS = {
    **{"dockerfile": ".", "image": "x", "user": "7", "memory": "1g", "cpus": 1.0, "shm_size": "2g"},
    **{"isolated": True, "ports": ["6006:80"], "services": "x", "encrypt": True, "constraints": ["x"]},
}
NVIDIA = {"runc": {}, "nvidia": {}}
PYTHON, GPU_PROBLEM = probe.python, probe.gpu_problem  # the originals, which tests replace


@pytest.fixture(autouse=True)
def probed(monkeypatch):
    """All images have Python, and a torch that can use all GPUs; `test_probe.py` probes real ones."""
    monkeypatch.setattr(probe, "python", lambda *_: "python")
    monkeypatch.setattr(probe, "gpu_problem", lambda *_: "")
    monkeypatch.setattr(check_cache, "gpu_problem", lambda _: "")


def compose(folder, monkeypatch, script: str) -> None:
    """Replace `docker` with a script."""
    path = folder / "docker"
    path.write_text(f"#!/bin/sh\necho $* >> {folder}/arguments\necho $NODE_IMAGE >> {folder}/arguments\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def inventory(daemon: Daemon, requested: JobSpec, run: Path, runs: bool) -> Site:
    """The resources of the engine for a job that runs, or that is only planned."""
    if runs:
        image.prepare(daemon, requested, Path("run"))
    return Site(*image.inventory(daemon, requested, run, runs))


def test_the_inventory_must_describe_the_engine(answers, daemon, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.setattr(image, "code_folder", lambda command: tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "work.py").write_text("import torch\n")
    answers.images = {"mine:1"}
    found = inventory(daemon, spec(), tmp_path / "run", True)
    assert (found.engine, found.about) == ("docker", "Docker Engine 26.1.5, image mine:1")
    assert (found.cores, found.gpus, found.no_gpus) == ((4, 5, 6, 7), (), "the engine has no NVIDIA runtime")
    assert (found.network, found.master_addr, found.interface) == ("bridge", "", "eth0")
    assert (found.job_dir, found.code, found.original) == ("/job", str(tmp_path), "/workspace")
    assert (found.image, found.python) == ("mine:1", "python")
    assert found.preload == ("torch", "torch.distributed")
    assert (found.memory, found.hosts) == (8 << 30, 1)
    assert answers.requests() == []
    found = inventory(
        daemon, spec(network="host", volume="v", memory="1g", optional=["volume"]), tmp_path / "run", True
    )
    assert (found.network, found.master_addr, found.interface) == ("host", "127.0.0.1", "lo")
    assert found.about == "Docker Engine 26.1.5, image mine:1, ignoring volume"
    daemon.info["NCPU"] = 2  # in a virtual machine, for example
    assert inventory(daemon, spec(), tmp_path / "run", True).cores == (0, 1)
    daemon.info["NCPU"] = 0
    del daemon.info["MemTotal"]
    found = inventory(daemon, spec(), tmp_path / "run", True)
    assert (found.cores, found.memory) == ((0,), 0)
    daemon.info |= {"MemTotal": 8 << 30, "MemoryLimit": False}  # an engine that ignores limits
    assert inventory(daemon, spec(), tmp_path / "run", True).memory == 0


def test_gpus_must_be_listed_in_a_container_of_the_image_which_is_then_removed(answers, daemon, tmp_path):
    answers.images, answers.output, daemon.info["Runtimes"] = {"mine:1"}, LISTING, NVIDIA
    found = inventory(daemon, spec(), tmp_path / "run", True)
    assert found.gpus == ("GPU-1", "GPU-2")
    requests = [what.partition("/containers")[2] for what in answers.requests()]
    assert requests == ["/create", "/made/start", "/made/wait", "/made"]
    _, body = answers.query_of("POST /containers/create")
    assert body["Image"] == "mine:1"
    assert (body["Entrypoint"], body["Cmd"]) == (["sh"], ["-c", "nvidia-smi -L; nvidia-smi -q -x"])
    assert body["Labels"] == labels.only(
        {"orchestrate.run": str(tmp_path / "run"), "orchestrate.look": str(os.geteuid())}
    )
    assert body["Healthcheck"]["Test"] == ["NONE"]
    assert set(body["Env"]) == {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"}
    host = body["HostConfig"]
    assert (host["Runtime"], host["NetworkMode"], host["LogConfig"]["Type"]) == ("nvidia", "none", "json-file")
    assert host["LogConfig"]["Config"] == {"max-size": "4m"}
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges:true"])  # the image is not trusted
    assert (host["ReadonlyRootfs"], host["Memory"], host["PidsLimit"]) == (True, 1 << 30, 512)
    assert answers.query_of("DELETE /containers/made")[0] == {"v": "true", "force": "true"}
    query, _ = answers.query_of("GET /containers/made/logs")
    assert (query["stdout"], query["stderr"]) == ("1", "0")


def test_each_check_must_be_announced_before_it_starts(answers, daemon, tmp_path, monkeypatch):
    shown: list[str] = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "python", PYTHON)
    monkeypatch.setattr(probe, "gpu_problem", GPU_PROBLEM)
    monkeypatch.setattr(probe, "image_id", lambda *_: "an-id")
    monkeypatch.setattr(
        probe, "_run", lambda *arguments, **_: ("works" if check_cache.CUDA in arguments[3] else "3 12", "")
    )
    monkeypatch.setattr(console, "phase", shown.append)
    monkeypatch.setattr(image, "code_folder", lambda command: tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "work.py").write_text("import torch\n")
    answers.images, answers.output, daemon.info["Runtimes"] = {"mine:1"}, LISTING, NVIDIA
    answers.on_request = lambda what: shown.append(what) if what.endswith("/made/start") else None
    inventory(daemon, spec(), tmp_path / "run", True)
    looking = ["looking for GPUs", "POST /containers/made/start", ""]
    assert shown == ["looking for Python in the image", "", *looking, "testing the GPUs with torch", ""]


@pytest.mark.parametrize(
    ("images", "used"), [({"mine:1"}, ""), (set(), ""), ({"mine:1", IMAGE}, IMAGE), ({IMAGE}, IMAGE)]
)
def test_a_plan_must_run_only_the_projects_own_image_and_report_a_skipped_check(
    answers, daemon, tmp_path, monkeypatch, images, used
):
    monkeypatch.setattr(probe, "python", PYTHON)
    monkeypatch.setattr(probe, "gpu_problem", GPU_PROBLEM)
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "work.py").write_text("import torch\n")
    answers.images, answers.output, daemon.info["Runtimes"] = images, LISTING, NVIDIA
    found = inventory(daemon, spec(), tmp_path / "run", False)
    if used:
        assert found.gpus == ("GPU-1", "GPU-2") and answers.query_of("POST /containers/create")[1]["Image"] == used
    else:
        assert found.gpus == () and answers.requests() == []
        why = f"GPUs were not checked: that needs the image {IMAGE}, which is missing"
        assert found.no_gpus == why and f"gloo on CPU ({why})" in str(plan(spec(), found, "j"))
        with pytest.raises(ResourceError, match="GPUs were not checked"):
            plan(spec(gpus=1), found, "j")


def test_gpus_must_be_listed_with_the_projects_own_image_if_the_engine_has_it(answers, daemon, tmp_path):
    answers.images, answers.output, daemon.info["Runtimes"] = {"mine:1", IMAGE}, LISTING, NVIDIA
    assert inventory(daemon, spec(), tmp_path / "run", True).gpus == ("GPU-1", "GPU-2")
    assert answers.query_of("POST /containers/create")[1]["Image"] == IMAGE


@pytest.mark.parametrize("what", ["start", "wait", "create"])
def test_a_container_that_fails_to_list_gpus_must_mean_none_and_be_removed(answers, daemon, tmp_path, what):
    answers.images, answers.output, daemon.info["Runtimes"] = {"mine:1"}, LISTING, NVIDIA
    path = "/containers/create" if what == "create" else f"/containers/made/{what}"
    answers.refusals[f"POST {path}"] = 500, f"{'x' * 250} no\x1b[8m driver"
    found = inventory(daemon, spec(), tmp_path, True)
    assert (found.gpus, found.no_gpus) == ((), f"containers cannot see any GPU: {'x' * 190} no driver")
    assert ("DELETE /containers/made" in answers.requests()) is (what != "create")


def test_what_nvidia_smi_reports_must_be_the_reason_for_missing_gpus(answers, daemon, tmp_path):
    why = "Failed to initialize NVML: Unknown Error"
    answers.images, answers.output, daemon.info["Runtimes"] = {"mine:1"}, why.encode(), NVIDIA
    assert inventory(daemon, spec(), tmp_path, True).no_gpus == f"nvidia-smi: {why}"


def test_gpus_must_not_be_listed_if_the_job_uses_none(answers, daemon, tmp_path):
    answers.images, answers.output, daemon.info["Runtimes"] = {"mine:1"}, LISTING, NVIDIA
    assert inventory(daemon, spec(gpus="none"), tmp_path, True).gpus == ()
    assert answers.requests() == []


@pytest.mark.parametrize("gpus", ["all", 2])
def test_no_image_must_be_pulled_for_gpus_that_the_engine_cannot_provide(answers, daemon, tmp_path, monkeypatch, gpus):
    monkeypatch.setattr(probe, "python", PYTHON)
    found = inventory(daemon, spec(gpus=gpus), tmp_path, True)
    assert found.no_gpus == "the engine has no NVIDIA runtime" and answers.requests() == []
    with pytest.raises(ResourceError):
        plan(spec(gpus=gpus), found, "j")


@pytest.mark.parametrize("gpus", ["auto", "none"])
def test_the_image_of_a_job_that_trains_on_cpu_must_be_pulled_if_it_is_missing(answers, daemon, tmp_path, gpus):
    inventory(daemon, spec(gpus=gpus), tmp_path, True)
    assert answers.requests() == ["POST /images/create"]


def test_a_missing_image_must_be_pulled_once_and_never_for_a_plan(answers, daemon, tmp_path):
    daemon.info["Runtimes"] = NVIDIA
    found = inventory(daemon, spec(), tmp_path, False)
    assert found.gpus == () and answers.requests() == []
    image.ensure_image(daemon, spec())
    assert answers.query_of("POST /images/create")[0] == {"tag": "1", "fromImage": "mine"}
    answers.asked.clear()
    image.ensure_image(daemon, spec())
    assert answers.requests() == []


def test_the_pull_of_an_image_must_be_shown_with_its_progress(answers, daemon, monkeypatch, capsys):
    phases = []
    monkeypatch.setattr(image, "phase", phases.append)
    image.ensure_image(daemon, spec(image="mine"))
    assert capsys.readouterr().err == "pulling the image mine\n"
    assert phases == ["pulling the image mine: 3 of 8 MB", ""]
    assert answers.query_of("POST /images/create")[0] == {"tag": "latest", "fromImage": "mine"}


def test_an_image_that_cannot_be_pulled_must_be_reported_with_a_hint(answers, daemon):
    answers.refusals["POST /images/create"] = 404, "pull access denied for mine"
    with pytest.raises(ResourceError, match="cannot find or pull the image mine:1: pull access denied") as error:
        image.ensure_image(daemon, spec())
    assert "docker login" in error.value.hint
    del answers.refusals["POST /images/create"]
    answers.replies["POST /images/create"] = {"error": "no space left"}  # after the download has begun
    with pytest.raises(ResourceError, match="cannot find or pull the image mine:1: no space left"):
        image.ensure_image(daemon, spec())
    answers.refusals["GET /images/mine:1/json"] = 500, "out of order"
    with pytest.raises(EngineError, match="could not inspect mine:1: out of order"):
        image.ensure_image(daemon, spec())
    with pytest.raises(ResourceError, match="cannot find or pull the image a://b"):
        image.ensure_image(daemon, spec(image="a://b"))


@pytest.mark.parametrize("begun", [True, False])
def test_an_engine_that_is_lost_while_it_pulls_an_image_must_not_be_reported_as_a_missing_image(answers, daemon, begun):
    if begun:
        answers.cut_off.add("POST /images/create")
    else:
        answers.on_request = lambda what: "create" in what and 1 / 0  # closes the connection
    with pytest.raises(EngineLost, match="the engine does not respond"):
        image.ensure_image(daemon, spec())


def test_a_container_that_listed_gpus_and_cannot_be_removed_must_be_reported(answers, daemon, tmp_path):
    daemon.info["Runtimes"] = NVIDIA
    answers.images.add("mine:1")
    answers.refusals["DELETE /containers/made"] = 500, "out of order"
    with pytest.raises(EngineError, match="could not remove the container that inspected the image: out of order"):
        inventory(daemon, spec(), tmp_path, True)


def test_packages_must_be_installed_once_and_be_in_the_image_of_the_nodes(answers, daemon, tmp_path, monkeypatch):
    compose(tmp_path, monkeypatch, "")
    answers.images, requested = {"mine:1"}, spec(pip=["a"])
    name = packages.with_packages(daemon, requested)
    image.prepare(daemon, requested, tmp_path)
    answers.images.add(name)
    found = inventory(daemon, requested, tmp_path / "run", True)
    assert (found.image, found.about) == (name, "Docker Engine 26.1.5, image mine:1 with 1 package")
    assert (tmp_path / "arguments").read_text().count("build") == 1
    answers.images.clear()  # a plan, before the image is pulled
    assert inventory(daemon, requested, tmp_path / "run", False).image == "mine:1"


def test_nodes_must_get_the_image_that_a_dockerfile_builds_now(answers, daemon, tmp_path, monkeypatch):
    compose(tmp_path, monkeypatch, "")
    (tmp_path / "Dockerfile").touch()
    requested = spec(dockerfile=str(tmp_path))
    answers.images.add(packages.base(requested))
    found = inventory(daemon, requested, tmp_path / "run", True)
    assert (found.image, found.about) == ("sha256:1", f"Docker Engine 26.1.5, image built from {tmp_path}")
    assert (tmp_path / "arguments").read_text().count("build") == 1


def test_folders_that_cannot_be_mounted_must_be_refused_before_a_job_starts(answers, daemon, tmp_path):
    answers.images = {"mine:1"}
    with pytest.raises(UsageError, match="it is a system folder"):
        inventory(daemon, spec(mounts=["/dev:/x"]), tmp_path / "run", False)
    data = {"a": "s3://bucket/a"}  # is fetched only for a job that runs
    assert inventory(daemon, spec(data=data), tmp_path / "run", False).data == {"a": "/data/a"}


def test_a_code_folder_that_cannot_be_mounted_must_be_refused_before_anything_starts(
    answers, daemon, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    answers.images = {"mine:1"}
    of_job, of_cluster = (tmp_path / "runs" / name for name in ("j/job", "c/nodes"))
    (tmp_path / "work.py").touch()
    (tmp_path / ".dockerignore").write_text("work.py\n")
    with pytest.raises(UsageError, match=r"nodes cannot see the script: work\.py is hidden"):
        inventory(daemon, spec(), of_job, True)
    assert inventory(daemon, spec(), of_cluster, True).code == str(tmp_path)  # it runs no command
    (tmp_path / ".dockerignore").write_text("[!a]\n")
    with pytest.raises(UsageError, match="has an unsupported pattern"):
        inventory(daemon, spec(), of_cluster, True)


def test_our_own_image_must_be_built_by_compose(answers, daemon, tmp_path, monkeypatch):
    compose(tmp_path, monkeypatch, "")
    assert not image.has_image(daemon, IMAGE) and not (tmp_path / "arguments").exists()
    image.ensure_image(daemon, JobSpec())
    command, name = (tmp_path / "arguments").read_text().splitlines()
    assert command.endswith(f"compose --project-directory {PROJECT} --profile gpu build master")
    assert name == IMAGE and answers.requests() == []
    compose(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(ResourceError, match=f"could not build the image {IMAGE}") as error:
        image.ensure_image(daemon, JobSpec())
    assert "BASE_IMAGE" in error.value.hint
    compose(tmp_path, monkeypatch, "echo error during connect: EOF; exit 1")
    with pytest.raises(EngineLost):
        image.ensure_image(daemon, JobSpec())


def test_the_inventory_must_describe_this_machine(tmp_path, monkeypatch):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n[ $1 = -L ] && echo '{LISTED}' || echo '{IN_USE}'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(process, "code_folder", lambda command: tmp_path)
    (tmp_path / "work.py").write_text("import torch\n")
    engine = ProcessEngine()
    found = Site(*engine.inventory(spec(image=IMAGE), tmp_path / "run", False))
    assert (found.engine, found.about, found.network) == ("process", "local processes without isolation", "")
    assert (found.gpus, found.cores, found.no_gpus) == (("GPU-8",), (3,), "")
    assert (found.master_addr, found.interface) == ("127.0.0.1", "lo")
    assert (found.job_dir, found.code) == (str(tmp_path / "run"), str(tmp_path))
    assert found.preload == ("torch", "torch.distributed")
    assert found.gpu_note == "1 GPU in use by other programs, skipped" and found.gpu_cores == ()
    given = ["image", "memory", "cpus", "shm_size", "volume"]
    requested = spec(gpus="none", memory="1g", cpus=2.0, shm_size="2g", volume="v", optional=given)
    found = Site(*engine.inventory(requested, tmp_path / "run", False))
    assert (found.gpus, found.no_gpus) == ((), "")
    assert found.about == "local processes without isolation, ignoring image, memory, cpus, shm_size, volume"
    of_job = {"data": {"train": str(tmp_path)}, "pip": ["a"], "source": "git+https://host/x"}
    found = Site(*engine.inventory(spec(gpus="none", image=IMAGE, **of_job), tmp_path / "run", False))
    assert (found.data, found.python) == (of_job["data"], str(venv.python(["a"])))
    assert found.original == str(tmp_path)  # the checkout, which later runs use, too
    monkeypatch.setattr(process, "code_folder", lambda command: PROJECT)
    with pytest.raises(ResourceError, match="torch is not installed in .*python") as error:
        engine.inventory(JobSpec(), tmp_path / "run", False)
    assert sys.executable in str(error.value) and "pip install torch" in error.value.hint
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch" or None)
    with pytest.raises(ResourceError, match="safetensors is not installed in .*python"):
        engine.inventory(JobSpec(), tmp_path / "run", False)
    assert engine.inventory(JobSpec(), tmp_path / "nodes", False)  # nodes of a cluster, whose jobs may need neither


@pytest.mark.parametrize("key", OF_CONTAINERS)
def test_a_key_that_local_processes_do_not_support_must_be_refused_unless_optional(tmp_path, key):
    requested = {"gpus": "none", "image": IMAGE, "labels": {"a": "b"}, key: OF_CONTAINERS[key]}
    with pytest.raises(UsageError, match=f"^the process engine does not support {key}(\n|$)") as error:
        ProcessEngine().inventory(spec(**requested, optional=["labels"]), tmp_path, False)
    before, _, listed = error.value.hint.partition("=")
    assert (before, {*listed.split(",")}) == ("remove it, or mark it as optional: --set optional", {key, "labels"})
    found = Site(*ProcessEngine().inventory(spec(**requested, optional=[key, "labels"]), tmp_path, False))
    assert {*found.about.partition("local processes without isolation, ignoring ")[2].split(", ")} == {key, "labels"}
