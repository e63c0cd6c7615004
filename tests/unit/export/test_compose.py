"""A job as a plain Compose file: this project's own file with all variables filled in."""

import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.exports import make_folder

from orchestrate.engines.docker.labels import only
from orchestrate.engines.docker.mounts import bind
from orchestrate.errors import UsageError
from orchestrate.export import compose as export_compose
from orchestrate.export.compose import compose
from orchestrate.files.paths import PACKAGE
from orchestrate.host import owners, users, writable
from orchestrate.spec.layers import resolve
from orchestrate.spec.spec import JobSpec

COMMAND = ["train.py", "--text", "$A ${B:-c}"]
NODES = ("master", "trainer")


def exported(**values) -> dict:
    return yaml.safe_load(compose(resolve({"command": COMMAND}, values), "digits"))


def test_the_file_must_have_no_variables_left():
    text = compose(resolve({"command": "train.py"}), "digits")
    assert "$" not in text and "-cpu" not in text
    file = yaml.safe_load(text)
    assert (file["name"], set(file["services"])) == ("digits", {*NODES, "outcome"})
    assert set(file) == {"name", "services", "networks"}
    for service in file["services"].values():
        assert not {"profiles", "build"} & service.keys() and service["healthcheck"] == {"disable": True}


def test_a_node_must_get_the_jobs_settings():
    asked = {"trainers": 5, "nproc_per_node": 2, "image": "mine:1", "memory": "3g", "cpus": 1.5, "shm_size": "2g"}
    file = exported(gpus="none", grace="90s", **asked)
    for role in NODES:
        node = file["services"][role]
        assert (node["image"], node["mem_limit"], node["cpus"], node["shm_size"]) == ("mine:1", "3g", "1.5", "2g")
        assert (node["memswap_limit"], node["pids_limit"]) == ("3g", "2730")
        assert node["tmpfs"] == [f"/tmp:size={3 << 29},mode=1777,nosuid,nodev,exec"]
        assert node["user"] == "{}:{}".format(*users.nodes_of(JobSpec().user) or (os.getuid(), os.getgid()))
        env = node["environment"]
        assert (env["NODE_ROLE"], env["NODE_MODE"], env["NODE_NPROC"], env["NODE_GRACE"]) == (
            role,
            "rendezvous",
            "2",
            "90",
        )
        assert (env["JOB_ID"], env["JOB_DIR"]) == ("digits", "/job")
        assert node["stop_grace_period"] == "100s"  # otherwise Compose would kill workers that are saving
    assert file["services"]["outcome"]["image"] == "mine:1"
    assert file["services"]["trainer"]["scale"] == "5" and "scale" not in file["services"]["master"]
    free = exported(gpus="none")["services"]["master"]
    assert (free["mem_limit"], free["cpus"], free["shm_size"]) == ("0", "0", "1g")
    assert exported(gpus="none", memory="unlimited")["services"]["master"]["mem_limit"] == "0"


@pytest.mark.parametrize(
    ("asked", "sudo", "user"),
    [
        ("auto", "", "{}:{}".format(*users.without_account())),
        ("auto", "7", "7:7"),
        ("4242:4243", "7", "4242:4243"),
        ("root", "7", "0:0"),
    ],
)
def test_nodes_exported_by_root_must_run_as_the_same_user_as_under_the_orchestrator(monkeypatch, asked, sudo, user):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(owners, "check", Path.resolve)  # root refuses the folder of the user who runs the tests
    for name in ("SUDO_UID", "SUDO_GID"):
        monkeypatch.setenv(name, sudo)
    file = exported(user=asked)
    assert {file["services"][role]["user"] for role in NODES} == {user}


def test_what_nodes_cannot_read_must_be_noted_in_the_file_except_for_what_is_hidden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a b", "runs", ".hidden", "ignored"):
        (tmp_path / folder).mkdir(mode=0o700)
    (tmp_path / ".dockerignore").write_text("ignored")
    (tmp_path / "link").symlink_to("a b")
    (tmp_path / "train.py").touch(0o644)
    tmp_path.chmod(0o755)

    def noted(user: str) -> list[str]:
        return re.findall(
            "who cannot read (.*) in the code folder", compose(resolve({"command": COMMAND, "user": user}), "x")
        )

    assert noted("4321:4321") == ["'a b'"] and not noted(f"{os.getuid()}:{os.getgid()}")
    tmp_path.chmod(0o700)
    (tmp_path / "train.py").chmod(0o600)
    assert noted("4321:4321") == ["., 'a b', train.py"]


def test_other_users_must_not_be_able_to_enter_the_run_directory(tmp_path, monkeypatch):
    (tmp_path / "it's $HOME\n\x1b").mkdir()
    monkeypatch.chdir(tmp_path / "it's $HOME\n\x1b")
    make_folder(compose(resolve({"command": COMMAND}), "digits"))
    run, job = Path("runs/digits").stat(), Path("runs/digits/job").stat()
    assert stat.S_IMODE(run.st_mode) == 0o700 and run.st_uid == os.getuid()
    assert (job.st_uid, job.st_gid) == (users.nodes_of(JobSpec().user) or (os.getuid(), os.getgid()))


def test_folders_of_this_machine_must_be_mounted_and_the_working_directory_kept(tmp_path, monkeypatch):
    code, data = tmp_path / "code", tmp_path / "a$b"
    (code / "src").mkdir(parents=True)
    data.mkdir()
    monkeypatch.chdir(code)
    for folder in (tmp_path, data):
        folder.chmod(0o755)
    file = exported(data={"train": str(data)}, mounts=[f"{data}:/models:rw"], chdir="src", user="root")
    source = str(data).replace("$", "$$")
    for role in NODES:
        node = file["services"][role]
        for target, fixed in (("/data/train", True), ("/models", False)):
            assert {**bind(Path(source), target), "read_only": fixed} in node["volumes"]
        assert (node["working_dir"], node["environment"]["DATA_TRAIN"]) == ("/workspace/src", "/data/train")
    assert exported()["services"]["master"]["working_dir"] == "/workspace"


def replacements(run: Path, elsewhere: Path) -> list[Callable[[], object]]:
    """Ways in which a clone can replace a run directory."""
    return [
        lambda: run.symlink_to(elsewhere),
        lambda: run.symlink_to(elsewhere / "none"),
        lambda: (run.mkdir(), (run / "job").symlink_to(elsewhere)),
        lambda: run.touch(),
    ]


def test_links_that_an_exported_job_can_make_must_not_be_followed_later(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    exported(mounts=f"{tmp_path}/shared:/s:rw")
    (tmp_path / "runs" / "digits" / "job").mkdir(parents=True)
    for name in ("shared", "runs/digits/job"):
        (tmp_path / name / "prepared").symlink_to("/etc")
        with pytest.raises(UsageError, match=f"prepared leads to /etc, out of {tmp_path}/"):
            writable.resolved(f"{tmp_path}/{name}/prepared")


@pytest.mark.parametrize("number", range(4))
def test_a_run_directory_that_came_with_the_code_must_be_refused_and_left_alone(tmp_path, monkeypatch, number):
    code, elsewhere = tmp_path / "code", tmp_path / "elsewhere"
    code.mkdir()
    elsewhere.mkdir(mode=0o755)
    monkeypatch.chdir(code)
    text = compose(resolve({"command": COMMAND}), "digits")
    (code / "runs").mkdir()
    replacements(code / "runs" / "digits", elsewhere)[number]()
    with pytest.raises(UsageError, match=rf"{code}/runs/digits\S* is (a link|not a folder)") as error:
        exported()
    assert "--name" in error.value.hint
    before = elsewhere.stat()
    with pytest.raises(subprocess.CalledProcessError):  # from a file that was exported before
        make_folder(text)
    assert elsewhere.stat() == before and not [*elsewhere.iterdir()]


def test_a_job_that_has_run_must_be_exportable_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = compose(resolve({"command": COMMAND}), "digits")
    make_folder(text)
    assert compose(resolve({"command": COMMAND}), "digits") == text


def test_a_runs_folder_that_is_a_link_must_be_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to("elsewhere")
    for _ in range(2):  # first as a dangling link
        with pytest.raises(UsageError, match=f"{tmp_path}/runs is a link") as error:
            exported()
        assert error.value.hint
        (tmp_path / "elsewhere").mkdir(exist_ok=True)


def test_a_node_must_see_the_code_the_program_and_the_job_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for role in NODES:
        code, program, folder, _ = exported()["services"][role]["volumes"]
        here, options = Path.cwd(), {"create_host_path": False}
        seen = {"type": "bind", "read_only": True, "bind": options}
        assert code == seen | {"source": str(here), "target": "/workspace"}
        assert program == seen | {"source": str(PACKAGE), "target": "/opt/orchestrate"}
        assert folder == {"type": "bind", "source": f"{here}/runs/digits/job", "target": "/job", "bind": options}


def test_a_node_must_not_see_runs_git_or_ignored_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("$secrets", ".git"):
        (tmp_path / name).mkdir()
    (tmp_path / ".env").touch()
    (tmp_path / ".dockerignore").write_text(".env\n$secrets\n")
    folder = {"type": "tmpfs", "read_only": True, "tmpfs": {"size": 4096, "mode": 0o555}}
    hidden = [
        folder | {"target": "/workspace/$$secrets"},
        bind(Path(os.devnull), "/workspace/.env") | {"read_only": True},
        folder | {"target": "/workspace/.git"},
        folder | {"target": "/workspace/runs"},  # which is created before the job starts
    ]
    for role in NODES:
        found = exported()["services"][role]["volumes"][3:]
        assert sorted(found, key=lambda mount: mount["target"]) == hidden
    (tmp_path / ".dockerignore").write_text("train.py\n")
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match="nodes cannot see the script: train.py is hidden"):
        exported()


@pytest.mark.parametrize("name", ["$5", "${A:-b}", "a:b", "a:ro", 'it\'s "so" \\', "new\nline", "-dash", " é\x85\x01"])
def test_a_folder_must_be_mounted_whatever_its_name(monkeypatch, name):
    monkeypatch.setattr(export_compose, "code_folder", lambda _: Path("/home/me", name))
    monkeypatch.setattr(export_compose.Path, "cwd", lambda: Path("/srv", name))
    text = compose(resolve({"command": COMMAND}), "digits")
    for role in NODES:
        code, _, folder = yaml.safe_load(text)["services"][role]["volumes"]
        assert (code["source"], code["target"]) == (f"/home/me/{name}".replace("$", "$$"), "/workspace")
        assert (folder["source"], folder["target"]) == (f"/srv/{name}/runs/digits/job".replace("$", "$$"), "/job")
    lines = text.splitlines()
    assert all(line.startswith("# ") for line in lines[:4]) and lines[4].startswith("name: ")


def test_a_folder_whose_name_is_not_utf_8_must_be_refused(monkeypatch):
    monkeypatch.setattr(export_compose, "code_folder", lambda _: Path("/home/me/\udcff"))
    with pytest.raises(UsageError, match=r"/home/me/.udcff' cannot be mounted") as caught:
        exported()
    assert caught.value.hint


def test_secrets_must_come_from_the_environment_of_compose():
    env = {"HF_TOKEN": "canary-$1", "URL": "https://me:canary@host", "A": "b"}
    text = compose(resolve({"command": COMMAND}, {"env": env}), "digits")
    assert "canary" not in text and "# Set in the environment of docker compose: HF_TOKEN, URL.\n" in text
    for role in NODES:
        found = yaml.safe_load(text)["services"][role]["environment"]
        assert found["HF_TOKEN"] == "${HF_TOKEN:?set HF_TOKEN}" and found["URL"] == "${URL:?set URL}"
        assert found["A"] == "b"


def test_the_command_and_the_environment_must_reach_the_workers_unchanged():
    file = exported(env={"A": "$HOME", "OMP_NUM_THREADS": "2"})
    for role in NODES:
        node = file["services"][role]
        assert node["command"] == ["train.py", "--text", "$$A $${B:-c}"]
        assert (node["environment"]["A"], node["environment"]["OMP_NUM_THREADS"]) == ("$$HOME", "2")
    assert "A" not in file["services"]["outcome"].get("environment", {})


def test_nodes_must_find_each_other_and_start_in_order():
    for gpus in ("none", "all"):
        services = exported(gpus=gpus)["services"]
        assert [services[role]["networks"] for role in NODES] == [{"job": {"aliases": [role]}} for role in NODES]
        assert services["master"]["depends_on"] == ["trainer"]
        assert not services["trainer"]["depends_on"]
        assert services["outcome"]["depends_on"] == {"master": {"condition": "service_completed_successfully"}}
        assert services["outcome"]["command" if "command" in services["outcome"] else "entrypoint"][0] == "python"


@pytest.mark.parametrize(("gpus", "runtime"), [("none", None), ("auto", None), ("all", "nvidia"), (4, "nvidia")])
def test_only_nodes_with_gpus_must_use_the_nvidia_runtime(gpus, runtime):
    for role in NODES:
        node = exported(gpus=gpus)["services"][role]
        assert node.get("runtime") == runtime
        assert node["environment"].get("NVIDIA_VISIBLE_DEVICES") == ("all" if runtime else None)


def test_a_node_must_have_no_extra_rights_and_must_not_look_like_an_orchestrated_job():
    for role in NODES:
        node = exported()["services"][role]
        assert (node["cap_drop"], node["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert (node["read_only"], node["init"], node["restart"]) == (True, False, "no")
        assert node["labels"] == dict.fromkeys(only({}), "")  # by which `ps` and `stop` find jobs
    assert exported()["networks"] == {"job": {"driver_opts": {"com.docker.network.driver.mtu": 65535}}}


def test_an_unsupported_time_limit_must_be_noted_in_the_file():
    assert "# Compose does not support max_run" in compose(resolve({"command": COMMAND, "max_run": "1h"}), "digits")
    assert "max_run" not in compose(resolve({"command": COMMAND}), "digits")


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to be refused")
def test_root_must_not_use_a_folder_that_another_account_can_replace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir(mode=0o700)
    (tmp_path / "runs").chmod(0o777)
    with pytest.raises(UsageError, match="every user can change"):
        exported()
