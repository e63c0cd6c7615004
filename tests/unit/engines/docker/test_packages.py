"""An image that is built for a job."""

import os
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import yaml
from support.answers import Job

from orchestrate.engines.docker import packages
from orchestrate.engines.docker.client import Daemon
from orchestrate.errors import EngineLost, OrchestrateError, ResourceError
from orchestrate.spec.spec import JobSpec

SETTINGS = ("CA_BUNDLE", "BUILD_NETWORK", *packages.SOURCES)


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[Job]:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    job = Job(tmp_path, monkeypatch)
    job.answers.replies["GET /images/mine:1/json"] = {"Id": "sha256:1", "Config": {"User": "7:8"}}
    yield job
    job.close()


def given(job: Job) -> dict[str, Any]:
    """The Compose file of the build, whose variables Compose must not expand."""
    assert job.words()[-3:] == ["--file", "-", "build"]
    return yaml.safe_load((job.folder / "given").read_text().replace("$$", ""))


def test_packages_must_be_installed_by_root_in_an_image_that_keeps_its_user(job, monkeypatch, capsys):
    job.compose(f"cp $(sed -n 's/^ *context: //p' given)/* {job.folder}")
    spec, daemon = JobSpec(image="mine:1", pip=["b", "--trusted-host ${HOST}", "a"]), job.engine().daemon
    for name, value in zip((*SETTINGS, "HOST"), ("/$x/ca.pem", "host", *"abcd")):
        monkeypatch.setenv(name, value)
    packages.install(daemon, spec, "/venv/bin/python")
    secrets = {name: {"environment": name} for name in ("HOST", *packages.SOURCES)}
    assert given(job)["secrets"] == {"ca": {"file": "/x/ca.pem"}, **secrets}
    node = given(job)["services"]["node"]
    build = node["build"]
    assert (node["image"], build["network"]) == (packages.with_packages(daemon, spec), "host")
    assert (build["secrets"], build["labels"]) == (["ca", *secrets], {"orchestrate.packages": str(os.geteuid())})
    image, root, run, user = build["dockerfile_inline"].splitlines()
    assert (image, root, user) == ("FROM mine:1", "USER 0:0", "USER 7:8")
    assert all(f"--mount=type=secret,id={name},required=false " in run for name in build["secrets"])
    place = "/tmp/orchestrate-packages"
    assert run.endswith(f" PYTHON=/venv/bin/python sh {place}/install.sh {place}/requirements.txt")
    assert (job.folder / "requirements.txt").read_text() == "b\n--trusted-host ${HOST}\na\n"
    assert (job.folder / "install.sh").exists()
    assert "installing 3 packages in mine:1 (once)\n" in capsys.readouterr().err


@pytest.mark.parametrize(("path", "file"), [("image", "Dockerfile"), ("image/My.Dockerfile", "My.Dockerfile")])
def test_a_dockerfile_must_be_built_in_its_folder_however_its_path_is_written(job, monkeypatch, path, file):
    (job.folder / "image").mkdir()
    for name in ("CA_BUNDLE", "BUILD_NETWORK"):
        monkeypatch.setenv(name, "")
    for name in ("Dockerfile", "My.Dockerfile"):
        (job.folder / "image" / name).touch()
    spec = JobSpec(dockerfile=path)
    packages.build(job.engine().daemon, spec)
    build = {"context": str(job.folder / "image"), "dockerfile": file, "network": "default", "secrets": ["ca"]}
    build["labels"] = {"orchestrate.packages": str(os.geteuid())}
    assert given(job)["services"] == {"node": {"image": packages.base(spec), "build": build}}
    assert given(job)["secrets"] == {"ca": {"file": "/dev/null"}}
    assert packages.base(JobSpec(dockerfile=str(job.folder / path))) == packages.base(spec)


def test_a_failed_build_must_be_distinguished_from_a_lost_engine(job):
    (job.folder / "Dockerfile").touch()
    daemon = job.engine().daemon
    for line, kind in (("no such package", ResourceError), ("error during connect: EOF", EngineLost)):
        job.compose(f"echo {line}; exit 1")
        messages = []
        for build in (
            lambda: packages.build(daemon, JobSpec(dockerfile=".")),
            lambda: packages.install(daemon, JobSpec(image="mine:1", pip=["a"]), "python"),
        ):
            with pytest.raises(OrchestrateError) as error:
                build()
            messages.append(str(error.value))
            assert type(error.value) is kind
        what = ["build the image of the Dockerfile", "install the packages"]
        assert kind is EngineLost or messages == [f"could not {one}: see the output above" for one in what]


def test_a_variable_of_a_url_must_not_be_shown_when_it_cannot_be_installed(job, monkeypatch, capsys):
    monkeypatch.setenv("PIP_TOKEN", "canary-7c1")
    job.compose("echo ERROR: cannot install https://canary-7c1@example.org; exit 1")
    with pytest.raises(ResourceError, match="could not install the packages"):
        packages.install(
            job.engine().daemon, JobSpec(image="mine:1", pip=["a @ https://${PIP_TOKEN}@example.org/a.whl"]), "python"
        )
    assert "https://***@example.org" in (shown := capsys.readouterr().err) and "canary" not in shown


def test_a_build_must_trust_neither_the_user_of_an_image_nor_other_projects(tmp_path, monkeypatch):
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        texts.append(packages._dockerfile("base", "python", "me\nRUN --mount=from=other,target=/x id", []))
    assert [line.split()[0] for line in texts[0].splitlines()] == ["FROM", "USER", "RUN", "USER"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another account"))
    texts.append(packages._dockerfile("base", "python", "me", []))
    caches = {re.findall(r"type=cache,id=([^,]+),", text)[0] for text in texts}
    assert len(caches) == 3  # so another project's Dockerfile cannot guess it
    # and in the step itself: the builder would take it for equal to that of a project whose cache has other content
    assert all(re.search(r"type=cache,id=([^,]+),.* CACHE=\1 ", text) for text in texts)


def test_an_image_with_packages_must_belong_to_one_project(tmp_path, monkeypatch, answers, daemon):
    answers.replies["GET /images/mine:1/json"] = {"Id": "sha256:1", "Config": {}}
    names = []
    for name in ("one", "two", "one"):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        names.append(packages.with_packages(daemon, JobSpec(image="mine:1", pip=["a"])))
    assert names[0] == names[2] != names[1]


def test_packages_must_not_be_installed_on_an_image_that_adds_instructions(answers, daemon):
    answers.replies["GET /images/mine:1/json"] = {"Id": "sha256:1", "Config": {"OnBuild": ["RUN id"]}}
    with pytest.raises(ResourceError, match="mine:1 has ONBUILD instructions"):
        packages.install(daemon, JobSpec(image="mine:1", pip=["a"]), "python")


def test_an_image_with_packages_must_be_built_again_when_its_base_has_changed():
    spec = JobSpec(image="mine:1", pip=["a"])
    names = [packages.with_packages(cast(Daemon, Images(number)), spec) for number in ("sha256:1", "sha256:2")]
    assert names[0] != names[1]
    assert packages.with_packages(cast(Daemon, Images("sha256:1")), spec) == names[0]
    others = (["b"], ["a", "b"], ["b", "a"])  # in another order, other versions may be installed
    more = {packages.with_packages(cast(Daemon, Images("sha256:1")), JobSpec(image="mine:1", pip=o)) for o in others}
    assert len({names[0], *more}) == 4


class Images:
    """An engine whose only image has this id."""

    def __init__(self, number: str) -> None:
        self.image = lambda name: {"Id": number}
