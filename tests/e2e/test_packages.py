"""Packages of a job: installed once for each list on every engine, or in the image of a Dockerfile."""

import contextlib
import fcntl
import re
import subprocess

import pytest
import yaml
from support.leftovers import docker, docker_answers
from support.printed import printed

pytestmark = pytest.mark.xdist_group("packages")  # each test removes the images that exist only since it began
PACKAGE = "cowsay==6.1"  # small, and nothing depends on it
SCRIPT = "import os, sys\nimport cowsay\nprint('has', cowsay.__version__, os.environ.get('FROM_IMAGE'))\n"
NAMES = ("orchestrate-packages", "orchestrate-build")


def images() -> set[str]:
    found = docker("images", "--format", "{{.Repository}}:{{.Tag}}") if docker_answers() else ""
    return {line for line in found.splitlines() if line.startswith(NAMES)}


@pytest.fixture
def installing(cli):
    """The command line in a folder whose script needs the package; images that it builds are removed."""
    (cli.folder / "uses.py").write_text(SCRIPT)
    cli.env["XDG_CACHE_HOME"] = str(cli.folder / "cache")
    with open("/tmp/orchestrate-test-packages.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run would build and remove the same images
        before = images()
        yield cli
        for image in images() - before:
            with contextlib.suppress(subprocess.CalledProcessError):  # another test uses it
                docker("rmi", image)


@pytest.mark.slow
def test_packages_must_be_installed_once_and_seen_by_scripts_and_programs(installing, engine):
    (installing.folder / "requirements.txt").write_text(f"-r more.txt\n{PACKAGE}  # as a file\n")
    (installing.folder / "more.txt").write_text("--prefer-binary\n")
    run = ("run", "--engine", engine, "--trainers", "1", "--gpus", "none", "--requirements", "requirements.txt")
    for command, installs in (["uses.py"], True), (["python", "uses.py"], False):
        done = installing(*run, *command)
        assert done.returncode == 0, done.stderr
        assert bool(re.search(r"^installing 2 packages in ", done.stderr, re.M)) == installs
        assert [printed(done.stdout, rank) for rank in range(2)] == [["has 6.1 None"]] * 2
    resolved = yaml.safe_load(next(installing.folder.glob("runs/*/job.yaml")).read_text())
    assert (resolved["requirements"], resolved["pip"]) == ("", ["--prefer-binary", PACKAGE])


@pytest.mark.slow
def test_a_package_that_does_not_exist_must_end_the_job_before_it_starts(installing, engine):
    done = installing("run", "--engine", engine, "--gpus", "none", "--pip", "no-such-package-at-all", "uses.py")
    assert done.returncode == 4
    assert "No matching distribution found for no-such-package-at-all" in done.stderr
    assert "error: could not install the packages: see the output above\n" in done.stderr
    assert not list(installing.folder.glob("runs/*"))


def test_a_script_without_its_package_must_be_told_the_option(installing, engine):
    done = installing("run", "--engine", engine, "--trainers", "0", "--gpus", "none", "uses.py")
    assert done.returncode == 1
    assert "hint: cowsay is neither in your folder nor in" in done.stderr
    assert "install it with --pip cowsay\n" in done.stderr


@pytest.mark.slow
def test_an_image_must_be_built_from_a_dockerfile_without_root_and_secrets(installing, docker_engine, nothing_left):
    (installing.folder / "image").mkdir()
    (installing.folder / "image" / "Dockerfile").write_text(
        "FROM orchestrate-node:0.1\nRUN touch /opt/venv/lib/own && pip --version\nENV FROM_IMAGE=$MINE\n"
    )
    before = images()
    installing.env["HOST_NAME"] = "a-unique-host-name"
    options = ("--dockerfile", "image", "--pip", PACKAGE, "--pip", "--trusted-host ${HOST_NAME}")
    done = installing("run", "--engine", "docker", "--trainers", "0", "--gpus", "none", *options, "uses.py")
    assert done.returncode == 0, done.stderr
    assert f"image built from {installing.folder}/image with 2 packages" in done.stderr
    assert printed(done.stdout, 0) == ["has 6.1 "]
    made = images() - before
    assert {name.partition(":")[0] for name in made} == {*NAMES}
    for name in made:
        assert "a-unique-host" not in docker("history", "--no-trunc", name) + docker("inspect", name)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nodes_that_are_up_must_not_be_used_once_their_dockerfile_has_changed(installing, docker_engine, nothing_left):
    file = installing.folder / "Dockerfile"
    file.write_text("FROM orchestrate-node:0.1\nENV FROM_IMAGE=first\n")
    (installing.folder / "uses.py").write_text(SCRIPT.replace("cowsay.__version__", "0").replace("import cowsay", ""))
    options = ("--engine", "docker", "--trainers", "0", "--gpus", "none", "--dockerfile", ".")
    assert installing("up", *options, "--set", "warm=false").returncode == 0
    done = installing("run", *options, "uses.py")
    assert ("[0] has 0 first" in done.stdout, ", on cluster-" in done.stderr) == (True, True), done.stderr
    file.write_text(file.read_text().replace("first", "second"))
    done = installing("run", *options, "uses.py")
    assert ("[0] has 0 second" in done.stdout, "its image has been built again" in done.stderr) == (True, True), (
        done.stderr
    )
    assert installing("down", "cluster").returncode == 0


def test_a_folder_without_a_dockerfile_must_be_refused(installing, docker_engine, nothing_left):
    done = installing("run", "--engine", "docker", "--gpus", "none", "--dockerfile", ".", "uses.py")
    assert (done.returncode, f"error: no Dockerfile in {installing.folder}\n" in done.stderr) == (2, True)


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "pbs", "compose"])
def test_packages_must_not_be_exported(cli, target):
    done = cli("export", target, "--gpus", "none", "--pip", "lightning", "probe.py")
    assert (done.returncode, "error: pip, requirements and dockerfile cannot be exported" in done.stderr) == (2, True)
