"""Communication with the Docker Engine and Compose, with a fake engine and a script in place of `docker`."""

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests
from support.answers import Framed, framed
from support.contexts import context
from support.ends import KEY
from support.messages import encoded, message
from support.processes import gone
from support.scripted import Clock
from support.waiting import eventually

from orchestrate.engines.docker import client as daemon_module
from orchestrate.engines.docker.api import Container
from orchestrate.engines.docker.client import Daemon, name_of, reason
from orchestrate.errors import EngineError, EngineLost, ResourceError
from orchestrate.files.paths import PROJECT
from orchestrate.node.messages import protocol
from orchestrate.node.messages.auth import Signer
from orchestrate.spec.spec import JobSpec


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Replace `docker` with a script."""

    def make(script: str) -> Path:
        path = tmp_path / "bin" / "docker"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        return path

    return make


# --- selection of the engine


@pytest.mark.parametrize("host", ["tcp://10.1.2.3:2375", "ssh://me@box"])
def test_an_engine_on_another_machine_must_be_refused(monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineError, match="another machine") as error:
        Daemon()
    assert host in str(error.value) and "DOCKER_HOST" in error.value.hint


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:1", "tcp://localhost:1", "unix:///none/docker.sock"])
def test_a_local_engine_that_does_not_answer_must_be_reported_with_a_hint(monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineError, match=f"cannot connect to Docker at {host}: (connection|no such)") as error:
        Daemon()
    assert "--engine process" in error.value.hint


def test_the_engine_must_come_from_the_users_docker_context(tmp_path, monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    context(tmp_path, "mine", "tcp://10.9.9.9:1")
    with pytest.raises(EngineError, match="10.9.9.9"):
        Daemon()


def test_compose_must_be_used_if_installed_and_reported_if_missing(answers, command, monkeypatch, tmp_path):
    monkeypatch.setattr(daemon_module, "PLUGINS", [str(tmp_path / "none")])
    command(f"echo $* > {tmp_path}/arguments; echo unknown command: compose >&2; exit 1")
    with pytest.raises(ResourceError, match="Compose v2 is missing.*unknown command: compose"):
        Daemon()
    assert (tmp_path / "arguments").read_text().split()[-1] == "version"
    command("echo docker: unknown command: compose; echo; echo \"Run 'docker --help' for more information\"; exit 1")
    with pytest.raises(ResourceError, match="Compose v2 is missing: docker compose: docker: unknown command: compose"):
        Daemon()
    command("exit 0")
    Daemon()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError):
        Daemon()


def test_output_of_compose_that_is_not_utf_8_must_be_read(answers, command):
    daemon = Daemon()
    command("printf 'not \\377 text \\303\\251\\n' >&2; exit 1")
    with pytest.raises(EngineError, match="not \ufffd text é"):
        daemon.compose("up", capture=True)


def test_nodes_must_run_as_the_owner_of_the_run_directory_or_as_root_on_a_rootless_engine(daemon, tmp_path):
    os.chown(tmp_path, 1234, 5678) if os.getuid() == 0 else None
    owner = tmp_path.stat()
    assert daemon.user(tmp_path, JobSpec()) == f"{owner.st_uid}:{owner.st_gid}"
    daemon.info["SecurityOptions"] = ["name=seccomp", "name=rootless"]
    assert daemon.user(tmp_path, JobSpec()) == "0:0"
    daemon.info["SecurityOptions"] = None
    assert daemon.user(tmp_path, JobSpec()) != "0:0"


def test_nodes_must_have_the_primary_group_of_the_user_not_the_group_of_the_folder(daemon, tmp_path, monkeypatch):
    user = tmp_path.stat().st_uid or 1234
    os.chown(tmp_path, user, 5678) if os.getuid() == 0 else None
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: 4321)
    assert daemon.user(tmp_path, JobSpec()) == f"{user}:4321"


@pytest.mark.parametrize("user", ["auto", "7:8", "7"])
def test_nodes_must_not_run_as_root_unless_requested(daemon, user):
    """On a file system without owners, or with fixed ones, the folder for root's nodes belongs to root."""
    with pytest.raises(EngineError, match="nodes would run as root: / is owned by root") as error:
        daemon.user(Path("/"), JobSpec(user=user))
    assert "--runs DIR" in error.value.hint and "--set user=root" in error.value.hint


def test_a_link_in_place_of_the_folder_of_nodes_must_be_refused(daemon, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(EngineError, match="link is not a folder"):
        daemon.user(tmp_path / "link", JobSpec())


@pytest.mark.parametrize("user", ["root", "0", "0:0", "0:5"])
def test_nodes_must_run_as_root_if_requested(daemon, user):
    assert daemon.user(Path("/"), JobSpec(user=user)) == "0:0"


# --- requests


def test_containers_must_be_found_by_label_whether_running_or_not(answers, daemon):
    answers.container("master", "a", state="exited")
    answers.container("trainer-2", "b")
    assert [name_of(found) for found in daemon.containers("orchestrate.job=a")] == ["a-master-1"]
    assert answers.query_of("GET /containers/json")[0]["all"] == "1"
    assert [name_of(found) for found in daemon.containers("orchestrate.job")] == ["a-master-1", "b-trainer-2"]
    assert daemon.containers("orchestrate.job=c") == []


def test_a_refusal_must_be_distinguished_from_an_unreachable_engine(answers, daemon):
    answers.refusals["GET /containers/json"] = 500, "the store\nis broken"
    with pytest.raises(EngineError, match="could not list its containers: the store is broken") as refused:
        daemon.containers("x")
    assert not isinstance(refused.value, EngineLost)
    answers.on_request = lambda what: 1 / 0  # closes the connection
    with pytest.raises(EngineLost, match="does not respond") as lost:
        daemon.containers("x")
    assert lost.value.hint == daemon_module.GET_DOCKER


def test_an_answer_that_leads_elsewhere_must_count_as_a_refusal(answers, daemon):
    """As for an image name with `//`, which the engine cleans."""
    answers.refusals["GET /images/a//b/json"] = 301, ""
    with pytest.raises(EngineError, match="could not inspect a//b: Moved Permanently"):
        daemon.image("a//b")
    answers.refusals["POST /containers/x/start"] = 304, ""  # it runs already
    daemon.api.post("/containers/x/start")


def test_each_container_must_be_handled_even_if_some_have_already_ended(answers, daemon):
    nodes = [answers.container(f"trainer-{number}") for number in range(1, 5)]
    answers.refusals[f"POST /containers/{nodes[0]['Id']}/kill"] = 404, "No such container"
    answers.refusals[f"POST /containers/{nodes[1]['Id']}/kill"] = 409, "is not running"
    found = daemon.containers("orchestrate.job")
    daemon.each(found, Container.kill)
    assert sorted(answers.requests()) == [f"POST /containers/{node['Id']}/kill" for node in nodes]
    answers.refusals[f"POST /containers/{nodes[2]['Id']}/kill"] = 500, "no permission"
    with pytest.raises(EngineError, match="could not change the state of j-trainer-3: no permission"):
        daemon.each(found, Container.kill)


@pytest.mark.parametrize(
    ("state", "ago", "started_recently"), [("running", 0, True), ("running", 7200, False), ("exited", 0, False)]
)
def test_a_container_must_have_started_recently_only_while_it_runs(answers, daemon, state, ago, started_recently):
    answers.container("master", state=state)
    answers.started = time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime(time.time() - ago))
    for zone in ("UTC-9", "UTC+9", "UTC"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            assert daemon.started_recently(daemon.containers("orchestrate.job")[0], 3600) is started_recently
    time.tzset()


def test_a_command_in_a_container_must_be_reachable_over_its_stdin_and_stdout(answers, daemon):
    def echo(connection) -> None:
        node = Framed(connection)
        connection.sendall(framed(2, b"a warning"))
        node.send(encoded("uploaded", tags={"heard": str(node.hear())}))
        connection.recv(1)

    answers.speaks = echo
    link = daemon.connect_by_exec("box", ["pipe", "-x"], KEY)
    assert link and link.send(protocol.Dump())
    assert eventually(link.receive) == [message("uploaded", tags={"heard": "{'ask': 'dump'}"})]
    body = answers.query_of("POST /containers/box/exec")[1]
    assert (body["Env"], body["User"]) == (["NODE_KEY="], "65534:65534")  # workers must neither read nor trace it
    assert body["Cmd"] == ["pipe", "-x"] and body["AttachStdin"] and body["AttachStdout"] and not body["Tty"]
    link.close()
    answers.speaks = lambda connection: connection.sendall(framed(1, b"no greeting\n"))
    assert daemon.connect_by_exec("box", ["pipe"], KEY) is None
    left = threading.Event()
    answers.speaks = lambda connection: left.wait(0.5) or Framed(connection).hear()
    assert daemon.connect_by_exec("box", ["pipe"], KEY, 0.01) is None  # its greeting comes too late
    left.set()


@pytest.mark.parametrize("cut", [0, 5, -1])
def test_a_greeting_that_arrives_with_the_response_must_not_be_lost(answers, daemon, cut):
    signer = Signer(KEY, listens=True)
    text = framed(2, b"a warning") + framed(1, signer.nonce)
    answers.at_once = text[:cut] if cut else text

    def speak(connection) -> None:
        connection.sendall(text[cut or len(text) :] + framed(1, b"\n"))
        node = Framed(connection, greets=False)
        node.signer = signer
        assert node.hear() == {"ask": "clean"}
        node.send(encoded("cleaned"))
        while connection.recv(100):
            pass

    answers.speaks = speak
    link = daemon.connect_by_exec("box", ["pipe"], KEY)
    assert link and link.sock.gettimeout()
    assert link.converse(protocol.Clean(), protocol.Cleaned) == message("cleaned")
    link.close()


@pytest.mark.parametrize("status", [404, 409])
def test_a_container_that_is_not_running_must_give_no_connection(answers, daemon, status):
    answers.refusals["POST /containers/box/exec"] = status, "is not running"
    assert daemon.connect_by_exec("box", ["pipe"], KEY) is None
    answers.refusals["POST /containers/box/exec"] = 500, "out of room"
    with pytest.raises(EngineError, match="could not run a command in box: out of room"):
        daemon.connect_by_exec("box", ["pipe"], KEY)


# --- Compose


def test_compose_must_be_run_for_this_project_with_only_the_jobs_own_settings(daemon, command, tmp_path, monkeypatch):
    command(f"echo $* > {tmp_path}/arguments; env > {tmp_path}/env")
    for name in ("COMPOSE_FILE", "COMPOSE_PROFILES", "NODE_CODE", "MINE", "JOB_ID"):
        monkeypatch.setenv(name, "caller")
    daemon.compose("up", "--detach", env={"NODE_IMAGE": "mine", "JOB_ID": "j"}, capture=True)
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments == ["--host", daemon.host, "compose", "--project-directory", str(PROJECT), "up", "--detach"]
    env = (tmp_path / "env").read_text().splitlines()
    assert {"NODE_IMAGE=mine", "MINE=caller", "JOB_ID=j"} <= set(env)
    assert not [line for line in env if line.startswith(("COMPOSE_", "NODE_CODE"))]
    daemon.compose("up", folder=tmp_path, capture=True)  # a file of the user, which may use any variable
    assert "NODE_CODE=caller" in (tmp_path / "env").read_text().splitlines()


@pytest.mark.parametrize("capture", [True, False])
def test_a_failure_of_compose_must_be_reported_with_its_last_line(daemon, command, capture, capfd):
    command("echo first; echo the last line >&2; echo; exit 17")
    with pytest.raises(EngineError) as error:
        daemon.compose("build", "master", capture=capture)
    assert (str(error.value), type(error.value), error.value.hint) == ("docker compose: the last line", EngineError, "")
    command("echo; exit 17")
    with pytest.raises(EngineError, match="docker compose: it failed"):  # the last line may be empty
        daemon.compose("build", "master", capture=capture)
    shown = capfd.readouterr()
    assert shown.out == ""  # reserved for the run directory
    assert ("the last line" in shown.err, "first" in shown.err) == (not capture, not capture)


@pytest.mark.parametrize(
    ("line", "kind", "hint"),
    [
        ("Cannot connect to the Docker daemon at unix:///x. Is it running?", EngineLost, "start Docker"),
        ("error during connect: EOF", EngineLost, "start Docker"),
        ("all predefined address pools have been fully subnetted", EngineError, "docker network prune"),
        ("could not find an available, non-overlapping IPv4 address pool", EngineError, "docker network prune"),
    ],
)
def test_engine_errors_in_the_output_of_compose_must_be_recognized(daemon, command, line, kind, hint):
    command(f"echo '{line}'; exit 1")
    with pytest.raises(EngineError, match=line[:20]) as error:
        daemon.compose("up", capture=True)
    assert type(error.value) is kind and hint in error.value.hint


@pytest.mark.parametrize(
    "why",
    [
        "Bind for 127.0.0.1:6006 failed: port is already allocated",
        "listen tcp4 0.0.0.0:6006: bind: address already in use",
    ],
)
def test_a_port_that_is_in_use_must_be_named_in_the_error_with_another_one_to_try(daemon, command, why):
    command(f"echo 'Error response from daemon: {why}'; exit 1")
    with pytest.raises(EngineError, match="^port 6006 of this machine is in use(\n|$)") as error:
        daemon.compose("up", capture=True)
    assert error.value.hint.endswith("--set ports=6007:THERE")


def test_compose_must_get_time_to_finish_when_the_job_is_stopped(daemon, command, tmp_path, monkeypatch):
    command(f"sleep 0.5; touch {tmp_path}/made")
    daemon.compose("up", capture=True, stopped=lambda: True)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("listens", [True, False])
def test_a_compose_that_does_not_end_must_be_ended_with_its_child_processes(
    daemon, command, tmp_path, monkeypatch, listens
):
    monkeypatch.setattr(daemon_module, "COMPOSE_STOP_TIMEOUT", 0.1)
    traps = f"touch {tmp_path}/asked; exit 3" if listens else ""
    started = "sleep" if listens else "sh -c \"trap '' TERM; while :; do sleep 0.1; done\" sleep"
    command(
        f"trap '{traps}' TERM\n{started} 600 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid\n"
        "while :; do wait; done"
    )
    with pytest.raises(EngineError, match="did not exit in time"):
        daemon.compose("up", capture=True, stopped=(tmp_path / "pid").exists)
    assert eventually(lambda: gone(int((tmp_path / "pid").read_text())))
    assert (tmp_path / "asked").exists() is listens


def test_a_compose_that_gets_sigterm_must_get_time_to_clean_up(daemon, command, tmp_path, monkeypatch):
    clock, calls = Clock(), []
    monkeypatch.setattr(daemon_module, "time", clock)
    command(f"trap 'kill $!; sleep 0.5; touch {tmp_path}/clean; exit' TERM\nsleep 600 & touch {tmp_path}/listens; wait")

    def stopped() -> bool:
        if (tmp_path / "listens").exists():
            calls.append(clock.now)
            clock.now += 100 if len(calls) == 2 else 0  # longer than it gets to end by itself
        return True

    with pytest.raises(EngineError, match="did not exit in time"):
        daemon.compose("up", capture=True, stopped=stopped)
    assert (tmp_path / "clean").exists()


def test_a_compose_that_takes_too_long_must_be_ended_without_a_stop_request(daemon, command, monkeypatch):
    monkeypatch.setattr(daemon_module, "COMPOSE_TIMEOUT", 0.1)
    command("exec sleep 600")
    with pytest.raises(EngineError, match="did not exit in time"):
        daemon.compose("up", capture=True)


def test_ctrl_c_must_be_raised_after_compose_has_ended(tmp_path):
    class Interrupted(subprocess.Popen[str]):
        counts = 0

        def communicate(self, *arguments: Any, **options: Any) -> tuple[str, str]:
            self.counts += 1
            if self.counts == 1:
                raise KeyboardInterrupt
            return super().communicate(*arguments, **options)

    process = Interrupted(["sh", "-c", f"sleep 0.3; touch {tmp_path}/made"], stdout=subprocess.PIPE, text=True)
    with process:
        with pytest.raises(KeyboardInterrupt):
            daemon_module._output_of(process, lambda: False, 10.0)
        assert (tmp_path / "made").exists() and process.returncode == 0


@pytest.mark.parametrize("capture", [True, False])
def test_ctrl_c_must_reach_us_and_not_compose(daemon, command, tmp_path, capture):
    """A session has to remove what compose starts, and a build is ended with all that it has started."""
    command(f"echo $$ > {tmp_path}/pid; ps -o pgid= -p $$ > {tmp_path}/group")
    daemon.compose("up", capture=capture)
    assert (tmp_path / "group").read_text().split() == (tmp_path / "pid").read_text().split()


# --- error messages


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            requests.ConnectionError("('Connection aborted.', PermissionError(13, 'Permission denied'))"),
            "permission denied",
        ),
        (requests.ConnectionError("[Errno 2] No such file or directory"), "no such file or directory"),
        (requests.ReadTimeout("HTTPConnectionPool: Read timed out. (read timeout=60)"), "timed out"),
        (docker.errors.APIError("500 Server Error", explanation="no\n  room"), "no room"),
        (docker.errors.DockerException("x" * 1000), "x" * 300),
    ],
)
def test_an_engine_error_must_be_reported_in_one_line(error, expected):
    assert reason(error) == expected
