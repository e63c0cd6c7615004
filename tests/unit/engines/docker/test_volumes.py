"""Volumes that an image declares: which ones nodes get, and which ones make an image unusable."""

import pytest
from support.plans import spec

from orchestrate.engines.docker import image, volumes
from orchestrate.errors import ResourceError


def test_volumes_of_an_image_that_our_mounts_replace_must_be_left_out(answers, daemon):
    assert volumes.volumes(daemon, "mine:1") == []  # no such image
    answers.images = {"mine:1"}
    assert volumes.volumes(daemon, "mine:1") == []
    answers.volumes = ["/workspace", "/run/orchestrate", "/opt/orchestrate/", "/job", "/tmp", "/var/lib/data", "/data/"]
    answers.volumes.append("/run/secrets")
    assert volumes.volumes(daemon, "mine:1") == ["/data", "/var/lib/data"]


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
    assert ascii(path) in str(error.value) and error.value.hint == "remove that VOLUME from its Dockerfile"


def test_an_image_with_too_many_volumes_must_be_refused():
    names = [f"/{number}" for number in range(volumes.MAX_VOLUMES + 1)]
    assert volumes.checked("mine:1", names[1:]) == sorted(names[1:])
    with pytest.raises(ResourceError, match="declares 33 volumes; the limit is 32"):
        volumes.checked("mine:1", names)
