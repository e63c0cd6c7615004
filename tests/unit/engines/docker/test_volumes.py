"""Volumes that an image declares: which ones nodes get, and which ones make an image unusable."""

import re

import pytest
from support.plans import spec

from orchestrate.engines.docker import image, volumes
from orchestrate.errors import ResourceError
from orchestrate.spec.spec import JobSpec


def test_volumes_of_an_image_that_our_mounts_replace_must_be_left_out(answers, daemon):
    assert volumes.volumes(daemon, "mine:1", JobSpec()) == []  # no such image
    answers.images = {"mine:1"}
    assert volumes.volumes(daemon, "mine:1", JobSpec()) == []
    answers.volumes = ["/workspace", "/run/orchestrate", "/opt/orchestrate/", "/job", "/tmp", "/var/lib/data", "/data/"]
    answers.volumes.append("/run/secrets")
    assert volumes.volumes(daemon, "mine:1", JobSpec()) == ["/data", "/var/lib/data"]


@pytest.mark.parametrize(
    ("volume", "mount"), [("/models", "/models/x"), ("/models/x", "/models"), ("//models", "/models/x")]
)
def test_a_volume_around_or_in_a_mount_of_the_job_must_be_refused_since_volumes_are_emptied(
    answers, daemon, tmp_path, volume, mount
):
    answers.images, answers.volumes = {"mine:1"}, [volume]
    for job in (JobSpec(mounts=[f"{tmp_path}:{mount}:rw"]), JobSpec(mounts=[f"{tmp_path}:{mount}"])):
        with pytest.raises(ResourceError, match=f"which conflicts with {mount} of the node") as error:
            volumes.volumes(daemon, "mine:1", job)
        assert error.value.hint == "mount the folder elsewhere, with `mounts`"
    assert volumes.volumes(daemon, "mine:1", JobSpec(mounts=[f"{tmp_path}:{volume.replace('//', '/')}:rw"])) == []


def test_a_volume_that_a_mount_of_data_replaces_must_be_left_out(answers, daemon, tmp_path):
    answers.images, answers.volumes = {"mine:1"}, ["/data/train"]
    assert volumes.volumes(daemon, "mine:1", JobSpec(data={"train": str(tmp_path)})) == []


@pytest.mark.parametrize(
    "path",
    [
        "data",
        "/a b",
        "/a\tb",
        "/a\0b",
        "/\ud800",
        "/../job",
        "/",
        "/run",
        "//job/x",
        "///opt/orchestrate/node",
        "/opt",
        "/job/a",
        "/tmp/a",
        "/dev/shm",
        "/proc",
        "/sys/x",
    ],
)
def test_an_image_with_an_unusable_volume_must_be_refused_before_a_job_starts(answers, daemon, tmp_path, path):
    answers.images, answers.volumes = {"mine:1"}, ["/data", path]
    with pytest.raises(ResourceError, match="the image mine:1 declares the volume") as error:
        image.inventory(daemon, spec(), tmp_path / "run", False)
    assert ascii(re.sub("^/+", "/", path)) in str(error.value)
    assert error.value.hint == "remove that VOLUME from its Dockerfile"


def test_an_image_with_too_many_volumes_must_be_refused():
    names = [f"/{number}" for number in range(volumes.MAX_VOLUMES + 1)]
    assert volumes.checked("mine:1", names[1:]) == sorted(names[1:])
    with pytest.raises(ResourceError, match="declares 33 volumes; the limit is 32"):
        volumes.checked("mine:1", names)
