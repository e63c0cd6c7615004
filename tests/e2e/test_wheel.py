"""An installation from a wheel must work in any folder, without this repository."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from support.processes import MARK
from support.repo import ROOT

BUILD = "import hatchling.build as backend, sys\nprint(getattr(backend, sys.argv[1])(sys.argv[2]))"
HELLO = "import os, sys\nprint('hello of', os.environ['RANK'], sys.argv[1:])\n"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


def run(*command: object, cwd: Path, **env: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | env
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, *needs: object) -> Path:
    """Create a virtual environment with these packages, and return its folder of programs."""
    programs = folder / "bin"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", *needs, cwd=folder.parent)
    return programs


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    python = environment(folder / "builds", "hatchling") / "python"
    left_out = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder / "copy", ignore=left_out)
    source = run(python, "-c", BUILD, "build_sdist", folder, cwd=folder / "copy").split()[-1]
    run("tar", "-xf", source, cwd=folder)
    (unpacked,) = folder.glob("torch_orchestrate-*/")
    return folder / run(python, "-c", BUILD, "build_wheel", folder, cwd=unpacked).split()[-1]


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    return environment(tmp_path_factory.mktemp("installed") / "venv", wheel)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's folder with modules that are named like ours, which other users can read."""
    monkeypatch.setenv(MARK, str(tmp_path))
    for name in ("app", "tests", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the user')")
    for name in ("app.py", "orchestrate.py", "docker.py", "yaml.py"):
        (tmp_path / name).write_text("raise SystemExit('of the user')")
    (tmp_path / "hello.py").write_text(HELLO)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    return tmp_path


def test_a_wheel_must_contain_the_files_of_compose_and_docker_and_only_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        shipped = {name: archive.read(name) for name in names if name.startswith("orchestrate/project/")}
    manual = "torch_orchestrate-0.1.0.data/data/share/man/man1/orchestrate.1"
    assert {name.split("/")[0] for name in names if ".dist-info" not in name and name != manual} == {"orchestrate"}
    assert manual in names and "orchestrate/project/docs/tutorial.md" in names
    for name, content in shipped.items():
        assert (ROOT / name.removeprefix("orchestrate/project/")).read_bytes() == content
    compose = yaml.safe_load(shipped["orchestrate/project/docker-compose.yml"])
    assert compose["x-build"]["context"] == "."
    for path in (*ROOT.glob("orchestrate/node/**/*.py"), *ROOT.glob("app/*.py"), ROOT / "requirements.lock"):
        assert f"orchestrate/project/{path.relative_to(ROOT)}" in shipped


@pytest.mark.each_engine
def test_an_installation_must_run_a_script_from_any_folder(programs, here, engine):
    arguments = ("--engine", engine, "--gpus", "none", "--trainers", "1", "--json", "hello.py", "a")
    report = json.loads(run(programs / "orchestrate", "run", *arguments, cwd=here))
    assert report["outcome"] == "succeeded"
    folder = here / "runs" / report["job_id"]
    assert (folder / "logs" / "rank-1.log").read_text() == "hello of 1 ['a']\n"
    assert report["job_id"] in (folder / "report.html").read_text()


@pytest.mark.docker
def test_an_installation_must_run_the_default_job(programs, here, docker_engine):
    for path in here.iterdir():
        path.rename(here.parent / f"{here.name}-{path.name}")
    arguments = ("--gpus", "none", "--trainers", "0", "--json", "--", "-m", "app.train", "--epochs", "1")
    report = json.loads(run(programs / "torch-orchestrate", "run", "--engine", "docker", *arguments, cwd=here))
    assert report["final_metrics"]["test_accuracy"] > 0.9


@pytest.mark.parametrize("target", ["compose", "slurm", "pbs", "kubernetes"])
def test_an_installation_must_export_a_job(programs, here, target):
    text = run(programs / "orchestrate", "export", target, "--image", "a.example/b:1", "hello.py", cwd=here)
    assert "hello.py" in text


def test_an_installation_must_print_its_version(programs, here):
    assert run(programs / "orchestrate", "--version", cwd=here) == run(
        programs / "python", "-P", "-m", "orchestrate", "--version", cwd=here
    )
