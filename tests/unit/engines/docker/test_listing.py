"""Jobs of an engine must be listed without Docker's SDK as with it, and nothing else at its address may end `ps`."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.answers import Answers

from orchestrate.engines.base import JobState
from orchestrate.engines.docker import client, listing
from orchestrate.engines.docker.engine import DockerEngine


@pytest.fixture
def answers(tmp_path, monkeypatch) -> Iterator[Answers]:
    found = Answers(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", found.host)
    yield found
    found.close()


def test_jobs_must_be_those_that_the_sdk_lists(answers, monkeypatch):
    for name in ("master", "trainer-1"):
        answers.container(name, "b", state="exited")
    answers.container("master", "a", **{"orchestrate.owner": "0"})
    answers.container("master", "", **{"orchestrate.run": ""})
    monkeypatch.setattr(client, "PLUGINS", [__file__])  # Compose is not needed here
    assert [*listing.jobs()] == DockerEngine().jobs()
    assert [(job.job_id, job.nodes, job.owner) for job in listing.jobs()] == [("a", 1, 0), ("b", 2, 7)]


def test_services_of_a_swarm_must_be_jobs_with_the_tasks_that_run(answers):
    labels = {"orchestrate.job": "s", "orchestrate.run": "/runs/s/job", "orchestrate.owner": "7"}
    names = ["s-master", "s-trainer", "other"]
    services = [{"ID": name, "Spec": {"Name": name, "Labels": labels}} for name in names]
    tasks = [("s-master", "running"), ("s-trainer", "running"), ("s-trainer", "shutdown"), ("other", "running")]
    answers.replies["GET /services"] = services
    answers.replies["GET /tasks"] = [{"ServiceID": name, "DesiredState": state} for name, state in tasks]
    assert [*listing.jobs()] == [JobState("s", "swarm", 2, Path("/runs/s/job"), 7)]


def test_an_engine_outside_of_a_swarm_must_have_no_services(answers):
    answers.container("master", "a")
    answers.refusals["GET /services"] = 503, "This node is not a swarm manager"
    assert [job.job_id for job in listing.jobs()] == ["a"]


def test_the_memory_of_a_job_must_be_that_of_all_its_nodes_without_cached_files(answers):
    for name, used in (("master", 50), ("trainer-1", 7), ("trainer-2", 0)):
        node = answers.container(name)
        stats = {"usage": used, "stats": {"inactive_file": 5}} if used else {}  # it is not running
        answers.replies[f"GET /containers/{node['Id']}/stats"] = {"memory_stats": stats}
    answers.container("master", "other")
    assert listing.memory("j") == 47 and listing.memory("none") == 0


@pytest.mark.parametrize("found", [b"<html>", b"{", b"[1]", b"7", b'{"a": 1}', b'[{"Labels": 1}]', b"[" * 200_000])
def test_another_program_at_the_address_must_not_end_a_command(answers, found):
    answers.replies["GET /containers/json"] = found
    assert [*listing.jobs()] == [] and listing.memory("j") == 0


@pytest.mark.parametrize("address", ["unix:///nowhere.sock", "tcp://localhost:1", "ssh://host", "tcp://host:1", "x"])
def test_without_an_engine_on_this_machine_there_must_be_no_jobs(monkeypatch, address):
    monkeypatch.setenv("DOCKER_HOST", address)
    assert [*listing.jobs()] == [] and listing.memory("j") == 0


def test_an_engine_must_be_asked_over_tcp_too(monkeypatch):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]"
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(1 << 16).split()[1])
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://localhost:{server.getsockname()[1]}")
        assert listing.memory("j") == 0
        thread.join()
    assert asked[0].startswith(b"/containers/json?all=1&filters=")


def test_a_list_of_jobs_must_not_import_the_sdk(answers):
    code = "import sys; from orchestrate.engines import registry; print({*registry.jobs()}, 'docker' in sys.modules)"
    answers.container("master", "a")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "JobState(job_id='a', engine='docker', nodes=1, " in done.stdout and done.stdout.endswith(" False\n")
