"""An image that is built for a job."""

import contextlib
import re
from types import SimpleNamespace
from typing import cast

from orchestrate.engines.docker import packages
from orchestrate.engines.docker.client import Daemon
from orchestrate.job.spec import JobSpec


def test_a_build_must_trust_neither_the_user_of_an_image_nor_other_projects(tmp_path, monkeypatch):
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        texts.append(packages._dockerfile("base", "python", "me\nRUN --mount=from=other,target=/x id", []))
    assert [line.split()[0] for line in texts[0].splitlines()] == ["FROM", "USER", "RUN", "USER"]
    caches = {re.findall(r"type=cache,id=([^,]+),", text)[0] for text in texts}
    assert len(caches) == 2


def test_an_image_with_packages_must_be_built_again_when_its_base_has_changed():
    spec = JobSpec(image="mine:1", pip=["a"])
    names = [packages.with_packages(cast(Daemon, Images(number)), spec) for number in ("sha256:1", "sha256:2")]
    assert names[0] != names[1]
    assert packages.with_packages(cast(Daemon, Images("sha256:1")), spec) == names[0]


class Images:
    """An engine whose only image has this id."""

    def __init__(self, number: str) -> None:
        self.client = SimpleNamespace(images=SimpleNamespace(get=lambda name: SimpleNamespace(id=number)))

    def translating_errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
