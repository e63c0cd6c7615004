"""Kubeflow's status protocol: what a script posts must become metrics, whatever it posts."""

import http.client
import json
import os
import socket
import threading
import urllib.parse
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from kubeflow_trainer_api import models
from support.loops import ManualLoop

from orchestrate.node.loop import Loop
from orchestrate.node.status import MAX_CLIENTS, MAX_METRICS, MAX_REQUEST, TIMEOUT, TOKEN, URL, StatusServer


@pytest.fixture
def status(tmp_path, monkeypatch):
    """A server, the variables of rank 0, and functions that send requests and read what was written."""
    loop = ManualLoop()
    server = StatusServer(cast(Loop, loop))
    variables = server.variables({"RANK": "0", "JOB_DIR": str(tmp_path)})
    address = urllib.parse.urlsplit(variables[URL])

    def answered(send, to=None) -> int:
        """Send a request in a thread, with the variables of a worker, and return the status of the answer."""
        found: list[int] = []
        place = urllib.parse.urlsplit(to[URL]) if to else address
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=20)

        def exchange() -> None:
            send(connection)
            found.append(connection.getresponse().status)
            connection.close()

        thread = threading.Thread(target=exchange)
        thread.start()
        while thread.is_alive():
            loop.turn()
        return found[0]

    def post(body, token=None, path="/", to=None) -> int:
        text = body if isinstance(body, bytes | str) else json.dumps(body)
        token = Path((to or variables)[TOKEN]).read_text() if token is None else token
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        return answered(lambda connection: connection.request("POST", path, text, headers), to)

    def rows(folder=tmp_path) -> list[dict]:
        path = folder / "metrics.jsonl"
        return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []

    yield SimpleNamespace(**locals())
    server.close()
    assert not loop.watched


def request(percent, **metrics) -> dict:
    """A request as Kubeflow's own client builds it."""
    found = [{"name": name, "value": str(value)} for name, value in metrics.items()]
    trainer = models.TrainerV1alpha1TrainerStatus.from_dict(
        {"progressPercentage": percent, "metrics": found, "lastUpdatedTime": datetime.now(timezone.utc).isoformat()}
    )
    return models.TrainerV1alpha1UpdateTrainJobStatusRequest(trainerStatus=trainer).to_dict() | {
        "trainerStatus": json.loads(json.dumps(trainer.to_dict(), default=str))
    }


def test_posts_must_become_rows_of_what_has_changed(status):
    assert status.post(request(0, total_steps=90)) == 200
    assert status.post(request(10, loss=0.5, current_step=9, total_steps=90, current_epoch=0.1)) == 200
    assert status.post(request(20, loss=0.5, current_step=18, total_steps=90, current_epoch=0.2)) == 200
    assert status.post(request(20, loss=0.5, current_step=18, total_steps=90, current_epoch=0.2)) == 200
    assert status.post(request(100, loss=0, train_runtime=3)) == 200
    assert status.rows() == [
        {"total_steps": 90},
        {"step": 9, "total_steps": 90, "loss": 0.5, "epoch": 0.1},
        {"step": 18, "total_steps": 90, "epoch": 0.2},
        {"step": 90, "total_steps": 90, "loss": 0, "train_runtime": 3},
    ]


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("", 400),
        ("{", 400),
        ("[" * 5000, 400),
        ("[]", 400),
        ({"trainerStatus": []}, 400),
        ({"trainerStatus": {"metrics": 7}}, 400),
        ({"trainerStatus": {"metrics": [{"name": "a"}]}}, 400),
        ({"trainerStatus": {}}, 200),
        ({"trainerStatus": {"metrics": [{"name": "a", "value": "nan"}, {"name": "b" * 99, "value": "1"}]}}, 200),
        ({"trainerStatus": {"progressPercentage": "x", "metrics": [{"name": "a", "value": "Infinity"}]}}, 200),
        (b"x" * (MAX_REQUEST + 1), 413),
    ],
)
def test_anything_else_must_be_answered_and_write_nothing(status, body, answer):
    assert status.post(body) == answer
    assert status.rows() == []
    assert status.server.clients == []


def test_only_so_many_metrics_must_be_written_of_a_post_and_remembered(status):
    posts = [request(0, **{f"m-{number}-{i}": 1 for i in range(MAX_METRICS + 1)}) for number in range(11)]
    assert {status.post(post) for post in [*posts[:9], posts[0], *posts[9:], posts[0]]} == {200}
    rows = status.rows()
    assert [len(row) for row in rows] == [MAX_METRICS] * 12 and rows[-1] == rows[0]  # not the first repetition


def test_a_post_without_the_token_must_be_refused(status):
    assert status.server.server.getsockname()[0] == "127.0.0.1"
    assert [status.post(request(0, loss=1), token=token) for token in ("", "x", "ü")] == [401] * 3
    assert status.answered(lambda connection: connection.request("GET", "/")) == 401
    assert status.rows() == []
    assert os.stat(status.variables[TOKEN]).st_mode & 0o777 == 0o400


@pytest.mark.parametrize(
    ("method", "size", "answer"),
    [
        ("GET", 21, 400),
        ("POST", "", 400),
        ("POST", "²", 400),
        pytest.param("POST", "9" * 5000, 400, id="many digits"),
        ("POST", MAX_REQUEST + 1, 413),
    ],
)
def test_a_request_that_is_no_post_of_an_allowed_size_must_be_refused_by_its_header(status, method, size, answer):
    def send(connection) -> None:
        connection.putrequest(method, "/")
        connection.putheader("Authorization", f"Bearer {Path(status.variables[TOKEN]).read_text()}")
        connection.putheader("Content-Length", size)
        connection.endheaders(b'{"trainerStatus": {}}')

    assert status.answered(send) == answer


def test_a_request_may_arrive_in_pieces_but_not_forever(status):
    def slowly(connection) -> None:
        connection.putrequest("POST", "/")
        connection.putheader("Authorization", f"Bearer {Path(status.variables[TOKEN]).read_text()}")
        body = json.dumps(request(0, loss=1)).encode()
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        for byte in body:
            connection.send(bytes([byte]))

    assert status.answered(slowly) == 200
    assert status.rows() == [{"loss": 1}]
    silent = [http.client.HTTPConnection(str(status.address.hostname), status.address.port) for _ in range(12)]
    for each in silent:
        each.connect()
        status.loop.turn()
    assert len(status.server.clients) == MAX_CLIENTS
    silent[0].sock.setblocking(False)
    assert silent[0].sock.recv(1) == b""  # the oldest one makes room
    status.loop.turn(TIMEOUT)
    assert status.server.clients == []
    for each in silent:
        each.close()


def test_only_rank_0_of_a_job_without_another_server_must_post(status):
    job = {"JOB_DIR": str(status.tmp_path)}
    assert status.server.variables(job | {"RANK": "1"}) == status.server.variables({"RANK": "0"}) == {}
    assert status.server.variables(job | {"RANK": "0", URL: "https://elsewhere"}) == {}
    assert status.server.variables(job | {"RANK": "0"}) == status.variables  # as the next generation gets them
    assert status.server.variables({"RANK": "0", "JOB_DIR": status.variables[TOKEN]}) == {}  # not a folder


def test_a_link_must_not_be_followed(status, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("")
    (tmp_path / "metrics.jsonl").symlink_to(outside)
    assert status.post(request(0, loss=1)) == 500
    assert outside.read_text() == ""


def test_the_next_job_on_a_node_must_have_all_its_metrics_and_its_own_token(status, tmp_path):
    """Also those that are equal to the last ones of the job before."""
    before = Path(status.variables[TOKEN]).read_text()
    assert status.post(request(10, current_step=1, loss=0.5)) == 200
    with socket.create_connection((status.address.hostname, status.address.port), timeout=5) as late:
        status.loop.turn()
        following = status.server.variables({"RANK": "0", "JOB_DIR": str(tmp_path / "next")})
        assert late.recv(1) == b""
    assert status.post(request(10, current_step=1, loss=0.5), to=following) == 200
    assert status.post(request(20, loss=0.4), token=before, to=following) == 401
    assert status.rows(tmp_path / "next") == status.rows() == [{"step": 1, "loss": 0.5}]
