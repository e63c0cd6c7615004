"""What runs an image on a cluster, and how."""

from pathlib import Path

import pytest

from orchestrate.engines.slurm import image
from orchestrate.errors import ResourceError, UsageError
from orchestrate.record.paths import JobPaths
from orchestrate.spec.layers import resolve

PATHS = JobPaths(Path("/shared/runs/train-1"))


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Put commands that print a text into an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def put(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho '{text}'\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return put


def test_pyxis_must_be_preferred_and_apptainer_be_found_by_either_name(commands):
    with pytest.raises(ResourceError, match="neither Apptainer nor Pyxis"):
        image.form()
    commands(singularity="")
    assert image.form() == "singularity"
    commands(apptainer="", srun="  --chdir=PATH")
    assert image.form() == "apptainer"
    commands(srun="  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    assert image.form() == "pyxis"


def before(name: str, **settings) -> list[str]:
    return image.before(resolve({"image": name, "command": "train.py", **settings}), PATHS, "/shared/work")


def test_a_job_must_see_its_run_directory_and_its_data(commands, tmp_path):
    commands(apptainer="")
    assert before("orchestrate-node:0.1") == []
    (tmp_path / "set").mkdir()
    words = before("pytorch/pytorch", data={"set": str(tmp_path / "set")})
    assert words[:4] == ["apptainer", "exec", "--pwd", "/shared/work"] and words[-1] == "docker://pytorch/pytorch"
    mounts = words[5].split(",")
    assert mounts[0] == "/shared/runs/train-1:/shared/runs/train-1"
    assert f"{tmp_path}/set:{tmp_path}/set:ro" in mounts and all(mount.endswith(":ro") for mount in mounts[1:])
    assert "--nv" in before("pytorch/pytorch", gpus=1)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("pytorch/pytorch:2.9", "pytorch/pytorch:2.9"),
        ("nvcr.io/nvidia/pytorch:26.10-py3", "nvcr.io#nvidia/pytorch:26.10-py3"),
        ("localhost:5000/a/b", "localhost:5000#a/b"),
        ("localhost/a", "localhost#a"),
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("nvcr.io#nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
        ("docker://nvcr.io#nvidia/pytorch", "docker://nvcr.io#nvidia/pytorch"),
        ("/shared/a.b/torch.sqsh", "/shared/a.b/torch.sqsh"),
    ],
)
def test_a_registry_must_be_named_as_enroot_names_it(commands, name, found):
    assert image.words("pyxis", name, "/w", ["/a:/a"])[0] == f"--container-image={found}"


@pytest.mark.parametrize("name", ["torch.sif", "./torch.sif", "/nowhere/torch.sqsh", "../torch"])
def test_an_image_that_other_machines_would_not_find_must_be_refused(commands, name):
    commands(apptainer="")
    with pytest.raises(UsageError, match="there is no image"):
        before(name)


def test_a_path_that_cannot_be_mounted_must_be_refused(commands, tmp_path):
    commands(apptainer="")
    (tmp_path / "a,b").mkdir()
    with pytest.raises(UsageError, match="cannot be mounted by apptainer"):
        before("pytorch/pytorch", data={"set": str(tmp_path / "a,b")})
