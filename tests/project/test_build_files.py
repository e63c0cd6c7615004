"""The Makefile, the Dockerfile and docker-compose.yml must do what the README promises, as far as files show."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from support.repo import ROOT

from orchestrate.engines.docker.labels import only
from orchestrate.export.compose import VARIABLE
from orchestrate.plan.limits import limits
from orchestrate.spec.sizes import parse_size
from orchestrate.spec.spec import JobSpec

# --- make


TOOL = '#!/bin/bash\necho "$(basename "$0")${{*:+ $*}}" >> "{calls}"\n[ "$(basename "$0") $1" != "$FAILS" ]\n'
UV = TOOL.replace("\n[", '\ncat > "{calls}.given"\n[')
DOCKER = '#!/bin/bash\n[ "$1" != "$NO_DOCKER" ]\n'


class Make:
    """`make` with fake tools that record their calls, and a fake `docker` that answers."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.calls = folder / "venv", folder / "calls"
        for name in ("bin/docker", *(f"venv/bin/{name}" for name in ("python", "pip", "ruff", "mypy", "uv"))):
            tool = folder / name
            tool.parent.mkdir(parents=True, exist_ok=True)
            text = {"docker": DOCKER, "uv": UV.format(calls=self.calls)}
            tool.write_text(text.get(tool.name, TOOL.format(calls=self.calls)))
            tool.chmod(0o755)
        ours = ("MFLAGS", "ARGS", "JOBS", "VENV", "PYTHON")  # set by the `make test` that may run this test
        clean = {name: os.environ[name] for name in os.environ if name not in ours and not name.startswith("MAKE")}
        self.env = clean | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "FAILS": "", "NO_DOCKER": ""}

    def __call__(self, *arguments: str, **env: str) -> tuple[int, list[str]]:
        """Run make; return its exit code and the commands it ran, sorted where they run at the same time."""
        self.calls.write_text("")
        command = ["make", f"VENV={self.venv}", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.env | env, capture_output=True, text=True)
        calls = self.calls.read_text().splitlines()
        first = next((place for place, call in enumerate(calls, 1) if call.startswith("ruff format")), len(calls))
        calls[first : first + 3] = sorted(calls[first : first + 3])
        return done.returncode, calls

    def given(self) -> str:
        """The input of `uv`."""
        return self.calls.with_name("calls.given").read_text()

    def stamps(self) -> set[str]:
        """The stamps of what has been installed."""
        return {path.name for path in self.venv.iterdir() if path.is_file()}


@pytest.fixture
def make(tmp_path):
    return Make(tmp_path)


INSTALL = "pip install --quiet --quiet --disable-pip-version-check --editable ."
WITH_TORCH = "pip install --disable-pip-version-check --editable ."  # several GB, so progress is shown


def test_make_run_must_set_up_once_and_run_the_job_with_its_arguments(make):
    run = "python -m orchestrate run --trainers 1 -- a.py"
    assert make("run", "ARGS=--trainers 1 -- a.py") == (0, [INSTALL, run])
    assert make("run", "ARGS=--trainers 1 -- a.py") == (0, [run])
    assert make("run") == (0, ["python -m orchestrate run"])


@pytest.mark.parametrize("lacking", ["info", "compose"])
def test_torch_must_be_installed_only_if_local_processes_need_it(make, lacking):
    assert make("run")[1][0] == INSTALL
    assert make.stamps() == {".base"}
    assert make("run", NO_DOCKER=lacking)[1][0] == f"{WITH_TORCH}[torch]"
    assert make.stamps() == {".base", ".torch"}
    assert len(make("run")[1]) == len(make("run", NO_DOCKER=lacking)[1]) == 1


def test_make_test_must_run_every_check_with_its_arguments(make):
    types = ["mypy", "mypy --config-file tests/mypy.ini tests"]
    checks = ["ruff check", "ruff format --check", *types, "python -m pytest --collect-only -qq"]
    pytest = "python -m pytest -n 4 --durations=10"
    assert make("test", "ARGS=-k plan") == (0, [f"{WITH_TORCH}[test]", *checks, f"{pytest} -k plan"])
    assert make.stamps() == {".base", ".torch", ".test"}  # which includes the others
    assert make("test", "JOBS=0", "ARGS=-x")[1][-1] == "python -m pytest -n 0 --durations=10 -x"
    assert make("check")[1] == [*checks, f"{pytest.replace('4', '6')} tests/unit tests/app tests/project"]
    assert make("test-all", "ARGS=-x")[1] == [*checks, f"{pytest} --all -x"]
    assert len(make("run", NO_DOCKER="info")[1]) == 1


@pytest.mark.parametrize(
    ("fails", "last"), [("ruff check", 0), ("mypy ", 4), ("mypy --config-file", 4), ("python -m", 5)]
)
def test_a_failed_check_must_fail_make_test(make, fails, last):
    make("run")
    (make.venv / ".test").touch()
    code, calls = make("test", FAILS=fails)
    assert code != 0 and len(calls) == last + 1


def test_a_failed_set_up_must_be_retried(make):
    code, calls = make("run", FAILS="pip install")
    assert code != 0 and calls == [INSTALL] and not make.stamps()
    assert make("run")[1][0] == INSTALL


def test_a_failed_job_must_fail_make_run(make):
    assert make("run", FAILS="python -m")[0] != 0


def test_a_missing_environment_must_be_created(make, tmp_path):
    (make.venv / "bin" / "python").rename(tmp_path / "bin" / "python9")
    _, calls = make("run", "PYTHON=python9")
    assert calls[:2] == [f"python9 -m venv {make.venv}", INSTALL]


def test_changed_requirements_must_be_installed(make):
    make("run")
    os.utime(make.venv / ".base", (0, 0))
    assert make("run")[1][0] == INSTALL


# --- the image


def image() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile for nodes, the last stage, and before the first stage: name and arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    steps = [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]
    stages = [index for index, (name, _) in enumerate(steps) if name == "FROM"]
    return steps[: stages[0]] + steps[stages[-1] :]


LOCK = (ROOT / "requirements.lock").read_text()
PLACES = [(python, machine) for python in ("3.11", "3.12") for machine in ("x86_64", "aarch64")]


def locked(python: str, machine: str) -> dict[str, str]:
    """The versions that pip would install from the lock on Linux, by package name."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}
    wanted = [Requirement(line) for line in re.findall(r"^([a-z].*?) *\\?$", LOCK, re.M)]
    chosen = [one for one in wanted if one.marker is None or one.marker.evaluate(environment)]
    versions = {one.name: str(one.specifier).removeprefix("==") for one in chosen}
    assert len(versions) == len(chosen)  # one version of each package
    return versions


@pytest.mark.parametrize(("python", "machine"), PLACES)
def test_the_lock_must_satisfy_the_requirements_of_local_processes(python, machine):
    (needed,) = re.findall(r"^torch = (\[.*\])", (ROOT / "pyproject.toml").read_text(), re.M)
    found = locked(python, machine)
    for one in map(Requirement, yaml.safe_load(needed)):
        assert one.specifier.contains(found[one.name]), one.name
    assert {"numpy", "filelock", "typing-extensions", "nvidia-nccl-cu13"} <= found.keys()  # and their dependencies


def test_each_locked_package_must_have_hashes_and_no_index_url():
    name, hashes = r"[a-z][\w.-]*==[\w.]+(?: ; [^\\\n]+)?", r"(?: \\\n    --hash=sha256:[0-9a-f]{64})+"
    packages = re.findall(f"^{name}{hashes}$", LOCK, re.M)
    assert len(packages) == len(re.findall(r"^[^ #\n]", LOCK, re.M)) > 20
    assert not re.search(r"://|--(extra-)?index|--find-links|\w\.(org|com|io|net)\b", LOCK)


@pytest.mark.parametrize("index", ["", "https://index/cpu", "/wheels"])
def test_the_image_must_install_only_locked_packages_and_torch_from_another_index_on_request(index, tmp_path):
    (install,) = [arguments for name, arguments in image() if name == "RUN" and "pip install" in arguments]
    lock = "--mount=type=bind,source=requirements.lock,target=/tmp/requirements.lock "
    assert lock in install and "--mount=type=bind,from=wheels,target=/wheels " in install
    script = re.sub(r"--mount=\S+ ", "", install).replace("/tmp/", f"{tmp_path}/")
    (tmp_path / "requirements.lock").write_text(LOCK)
    for name in ("pip", "python3", "chown"):
        (tmp_path / name).write_text(f'#!/bin/sh\n[ {name} != pip ] || echo "$@"\n')
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TORCH_INDEX": index}
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True)
    commands = done.stdout.splitlines()
    if not index:
        assert commands == [f"install --require-hashes --requirement {tmp_path}/requirements.lock"]
        return
    assert commands[0] == f"install --require-hashes --no-deps --requirement {tmp_path}/others.lock"
    others, packages = (tmp_path / "others.lock").read_text(), locked("3.12", "x86_64")
    left = {name for name in packages if not re.search(f"^{re.escape(name)}==.*\n +--hash", others, re.M)}
    assert {"torch", "torchvision", "triton", "nvidia-nccl-cu13"} <= left
    assert all(name in ("torch", "torchvision", "triton") or name.startswith(("nvidia-", "cuda-")) for name in left)
    source = f"--index-url {index}" if "://" in index else f"--no-index --find-links {index}"
    chosen = f"torch=={packages['torch']} torchvision=={packages['torchvision']}"
    assert commands[1:] == [f"install --no-deps {source} {chosen}"]


def test_the_base_image_must_be_pinned_by_digest_in_one_place():
    base = r"python:3\.\d+\.\d+-slim-[a-z]+@sha256:[0-9a-f]{64}"
    named, index = [arguments for name, arguments in image() if name == "ARG"]
    assert re.fullmatch(f"BASE_IMAGE={base}", named) and index == "TORCH_INDEX="
    assert SERVICES["master"]["build"]["args"] == ["BASE_IMAGE", "TORCH_INDEX"]  # from the environment
    for path in ("docker-compose.yml", "README.md", ".ci/run"):
        assert not re.search(r"python:3|sha256:", (ROOT / path).read_text())


def test_make_lock_must_take_the_newest_versions_that_the_project_allows(make):
    code, (install, tool, command) = make("lock")
    assert (code, install) == (0, INSTALL) and tool.startswith("pip install ") and tool.endswith(" uv")
    argv = command.split()
    assert argv[:3] == ["uv", "pip", "compile"] and {"--universal", "--generate-hashes", "--upgrade"} <= set(argv)
    assert argv[-3:] == ["--output-file", "requirements.lock", "-"]
    assert make.given() == "torch>=2.10\ntorchvision\nsafetensors\n"


def test_the_image_must_start_a_node_without_root_on_the_given_base():
    steps = image()
    assert steps[0][0] == "ARG" and [base for name, base in steps if name == "FROM"][-1] == "${BASE_IMAGE}"
    assert ("COPY", "--chmod=755 orchestrate /opt/orchestrate") in steps and ("COPY", "--chmod=755 app app") in steps
    last = dict(steps)
    assert last["WORKDIR"] == "/workspace" and last["USER"] == "1000:1000"
    assert yaml.safe_load(last["ENTRYPOINT"]) == ["python", "/opt/orchestrate/node"]
    assert last["ENV"].startswith("PATH=/opt/venv/bin:$PATH ")
    assert any(arguments == "install -d -m 1777 /job" for _, arguments in steps)
    users = [index for index, (name, _) in enumerate(steps) if name == "USER"]
    assert users[0] > max(index for index, (name, _) in enumerate(steps) if name in ("RUN", "COPY"))


def test_the_ca_bundle_must_reach_pip_and_no_layer():
    (install,) = [arguments for name, arguments in image() if "pip install" in arguments]
    assert install.startswith("--mount=type=secret,id=ca,required=false ")
    assert "export PIP_CERT=/run/secrets/ca" in install
    assert not any("ca" in arguments.split() for name, arguments in image() if name in ("COPY", "ADD", "ARG"))


# --- docker-compose.yml


FILE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = FILE["services"]
NODES = ("master", "trainer", "master-cpu", "trainer-cpu")


def defaults(value: object) -> dict[str, str]:
    """The variables in a part of the Compose file, with their defaults."""
    return {name: default for name, default in VARIABLE.findall(yaml.safe_dump(value, width=10_000))}


def test_each_profile_must_have_a_complete_gang():
    assert {name for name, service in SERVICES.items() if service["profiles"] == ["gpu"]} == {
        "master",
        "trainer",
        "outcome",
    }
    for suffix, profile in (("", "gpu"), ("-cpu", "cpu")):
        master, trainer, outcome = (SERVICES[f"{name}{suffix}"] for name in ("master", "trainer", "outcome"))
        assert [service["profiles"] for service in (master, trainer, outcome)] == [[profile]] * 3
        assert [service["environment"]["NODE_ROLE"] for service in (master, trainer)] == ["master", "trainer"]
        assert master["depends_on"] == [f"trainer{suffix}"] and "depends_on" not in trainer
        assert outcome["depends_on"] == {f"master{suffix}": {"condition": "service_completed_successfully"}}
        assert trainer["scale"] == "${TRAINERS:-1}" and "scale" not in master


def test_nodes_of_both_profiles_must_have_the_same_network_names():
    assert SERVICES["master"]["networks"] == SERVICES["trainer"]["networks"] == {"job": {}}
    assert SERVICES["master-cpu"]["networks"] == {"job": {"aliases": ["master"]}}
    assert SERVICES["trainer-cpu"]["networks"] == {"job": {"aliases": ["trainer"]}}


def test_only_the_gpu_profile_must_request_gpus():
    for name in NODES:
        gpu = not name.endswith("-cpu")
        assert ("runtime" in SERVICES[name], "NVIDIA_VISIBLE_DEVICES" in SERVICES[name]["environment"]) == (gpu, gpu)
    assert SERVICES["master"]["environment"]["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_nodes_of_both_profiles_must_otherwise_be_identical():
    own = {"profiles", "runtime", "networks", "depends_on", "build", "scale", "environment"}
    first, *others = ({key: value for key, value in SERVICES[name].items() if key not in own} for name in NODES)
    assert all(other == first for other in others)
    roles = {"NODE_ROLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    first, *others = (
        {key: value for key, value in SERVICES[name]["environment"].items() if key not in roles} for name in NODES
    )
    assert all(other == first for other in others)
    assert SERVICES["master"]["build"] == SERVICES["master-cpu"]["build"]


def test_documented_variables_must_reach_nodes_with_the_defaults_of_a_job():
    found = defaults(SERVICES["master-cpu"]) | defaults(SERVICES["trainer-cpu"])
    job = JobSpec()
    assert found["NODE_CODE"] == "." and found["NODE_COMMAND"] == "-m app.train"
    assert (found["NODE_SHM"], found["NODE_GRACE"]) == (job.shm_size, f"{job.grace:g}")
    assert (found["NODE_MODE"], found["NPROC_PER_NODE"], found["TRAINERS"]) == ("rendezvous", "1", "1")
    assert (found["NODE_MEMORY"], found["NODE_CPUS"]) == ("0", "0")
    assert parse_size(found["NODE_TMP"]) == limits(None, 0, 1).tmp
    assert int(found["NODE_PIDS"]) == limits(None, 0, 4).processes
    assert defaults(FILE["secrets"]) == {"CA_BUNDLE": "/dev/null"}
    assert SERVICES["master"]["build"]["secrets"] == [*FILE["secrets"]]
    gpu = defaults(SERVICES["master"])
    assert (gpu["NODE_GPUS"], gpu["NODE_RUNTIME"]) == ("all", "nvidia")


def test_health_checks_of_images_must_be_disabled_in_containers_with_the_jobs_key():
    assert all(service["healthcheck"] == {"disable": True} for service in SERVICES.values())


def test_a_node_must_import_nothing_from_its_job_whatever_the_images_pythonpath():
    assert {tuple(SERVICES[name]["entrypoint"]) for name in NODES} == {
        ("${NODE_PYTHON:-python}", "-I", "/opt/orchestrate/node")
    }


def test_a_node_must_see_the_code_read_only_and_have_restricted_rights():
    for name in NODES:
        node = SERVICES[name]
        code, program, folder = node["volumes"]
        seen = {"type": "bind", "read_only": True, "bind": {"create_host_path": False}}
        assert code == seen | {"source": "${NODE_CODE:-.}", "target": node["working_dir"]}
        assert program == seen | {"source": "./orchestrate", "target": "/opt/orchestrate"} and folder == "job:/job"
        assert node["environment"]["JOB_DIR"] == "/job" and node["environment"]["HOME"] == "/tmp"
        assert (node["read_only"], node["restart"], node["init"]) == (True, "no", False)
        assert (node["cap_drop"], node["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert (node["oom_score_adj"], node["cpu_shares"], node["ulimits"]) == (500, 512, {"core": 0})
        assert node["memswap_limit"] == node["mem_limit"]  # no swap
        assert node["environment"]["USER"] and defaults(node)["NODE_WIPE"] == "/tmp /dev/shm /dev/mqueue"
        assert node["logging"] == {"driver": "json-file", "options": {"max-size": "50m", "max-file": "3"}}
        assert int(node["stop_grace_period"].removesuffix("s")) > JobSpec().grace
        assert node["tmpfs"] == ["/tmp:size=${NODE_TMP:-2g},mode=1777,nosuid,nodev,exec"]
        assert "ports" not in node and "privileged" not in node
    assert FILE["volumes"].keys() == {"job"}
    assert FILE["networks"]["job"]["driver_opts"] == {"com.docker.network.driver.mtu": 65535}


def test_containers_and_network_must_carry_labels_with_the_jobs_name_and_owner():
    wanted = {"orchestrate.job": "${JOB_ID:-}", "orchestrate.run": "${NODE_JOB_DIR:-}"}
    wanted["orchestrate.owner"] = "${JOB_OWNER:-}"
    for labels in (*(service["labels"] for service in SERVICES.values()), FILE["networks"]["job"]["labels"]):
        assert labels == only(wanted)


def test_every_variable_set_by_the_orchestrator_must_be_used():
    used = {"NODE_IMAGE", "NODE_CODE", "NODE_JOB_DIR", "NODE_USER", "NODE_SHM", "NODE_MEMORY", "NODE_CPUS", "JOB_OWNER"}
    for name in NODES:
        assert used <= defaults(SERVICES[name]).keys()
    environment = SERVICES["trainer-cpu"]["environment"]
    for name in ("NODE_MODE", "NODE_GRACE", "NODE_PRELOAD", "NODE_SOCKETS", "JOB_ID"):
        assert f"${{{name}:-" in environment[name]
    assert "${NPROC_PER_NODE:-" in environment["NODE_NPROC"]
    for key, name in (
        ("image", "IMAGE"),
        ("user", "USER"),
        ("shm_size", "SHM"),
        ("mem_limit", "MEMORY"),
        ("cpus", "CPUS"),
        ("pids_limit", "PIDS"),
    ):
        assert SERVICES["trainer-cpu"][key].startswith(f"${{NODE_{name}:-")


def test_the_outcome_service_must_have_no_rights_and_no_network():
    for name in ("outcome", "outcome-cpu"):
        service = SERVICES[name]
        assert service["network_mode"] == "none" and service["read_only"] and service["cap_drop"] == ["ALL"]
        assert (service["mem_limit"], service["pids_limit"]) == ("256m", 64)
        assert "all ranks succeeded" in service["entrypoint"][-1]
