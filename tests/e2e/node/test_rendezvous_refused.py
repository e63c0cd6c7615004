"""The master of a plain Compose project must accept only valid messages about the trainer that sends them."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from typing import Any

import pytest
from support.agents import NODE
from support.joining import HELLO, NINE, TEN, WAITS
from support.waiting import eventually


def hello(**facts: object) -> dict:
    return {"say": "hello", **HELLO, **facts}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "the message has no request in it"),
    ({"ask": "status"}, "the message has no request in it"),
    ({"say": "status"}, "unknown request 'status'"),
    ({"say": 7}, "the message has no request in it"),
    ({"say": "hello"}, "hello: name is missing"),
    (hello(host=["a"]), "hello: host must be text"),
    (hello(cpus="8"), "hello: cpus must be a whole number"),
    (hello(cpus=-1), "hello: cpus must be a whole number"),
    (hello(cpus=True), "hello: cpus must be a whole number"),
    (hello(gpus="GPU-a"), "hello: gpus must be a list of texts"),
    (hello(gpus=[7]), "hello: gpus must be a list of texts"),
    (hello(gpus=["a\0"]), "hello: gpus must not contain a NUL byte"),
    (hello(more=1), "hello: unknown field 'more'"),
    (hello(rank=0), "hello: unknown field 'rank'"),
    ({"say": "exited", "rank": 0}, "exited: code is missing"),
    ({"say": "exited", "rank": "0", "code": 0}, "exited: rank must be a whole number"),
    ({"say": "exited", "rank": 0, "code": None}, "exited: code must be a whole number"),
    *(
        ({"say": "exited", "rank": 0, "code": code}, "exited: code must be a whole number from 0 to 255")
        for code in (256, -1, 0.0, True)
    ),
    (hello(cpus=(1 << 20) + 1), "hello: cpus must be a whole number from 0 to 1048576"),
    ({"say": "exited", "rank": 0, "code": 0, "start": []}, "exited: unknown field 'start'"),
    ({"say": "exited", "rank": 0, "code": 0}, "rank 0 does not run on trainer-10"),
    ({"say": "exited", "rank": 2, "code": 0}, "rank 2 does not run on trainer-10"),  # not yet
]


def test_an_invalid_message_must_be_refused_by_field_without_ending_the_gang(project):
    project.start("print('ready')")
    ten = project.trainer(TEN, hello=False)
    for message, reason in REFUSED:
        ten.say(**message)
        assert ten.hears()["error"].startswith(reason)
    project.trainer(NINE)
    ten.say(**hello())
    assert ten.ranks() == ["2"] and project.trainers[1].ranks() == ["1"]
    project.ready()
    for message in (
        hello(),
        {"say": "exited", "rank": 2, "code": 256},
        {"say": "exited", "rank": 2, "code": 1 << 32},
        {"say": "exited", "rank": 0, "code": 9},
        {"say": "exited", "rank": 1, "code": 9},
        {"say": "exited", "rank": 3, "code": 9},
    ):
        ten.say(**message)
        assert ten.hears()["say"] == "refused"
    ten.say(say="exited", rank=2, code=0)
    ten.say(say="exited", rank=2, code=9)
    assert ten.hears()["error"] == "rank 2 does not run on trainer-10"
    project.trainers[1].say(say="exited", rank=1, code=0)
    assert project.ends()[0] == 0


@pytest.mark.parametrize(
    "text",
    [b"GET / HTTP/1.1\r\n", b"[]\n", b"7\n", b"[" * 100_000 + b"\n", b"x" * (2 << 20)],
    ids=["http", "list", "number", "nested", "endless"],
)
def test_a_trainer_with_another_protocol_must_be_refused_and_reported(project, text):
    project.start(WAITS)
    ten = project.trainer(TEN, hello=False)
    with contextlib.suppress(ConnectionError):
        ten.file.write(text)
        ten.file.flush()
    assert ten.hears()["say"] == "refused"
    code, out = project.ends()
    assert (code, out.count("disconnected before the job started")) == (1, 1)


def test_a_connection_without_a_free_descriptor_must_be_accepted_later(project):
    project.start("print('ran')")
    ten = project.trainer(TEN)
    eventually(lambda: ten.sock.send(b"{}\n") and ten.hears())  # the master has accepted it
    limits = resource.prlimit(project.node.pid, resource.RLIMIT_NOFILE, (4, 1000))
    nine = [project.trainer(NINE, hello=False), *(project.trainer("127.0.0.4", hello=False) for _ in range(50))][0]
    ten.sock.send(b"{}\n")
    assert ten.hears()["say"] == "refused"  # and the master is alive
    resource.prlimit(project.node.pid, resource.RLIMIT_NOFILE, (1000, 1000))
    nine.say(**hello())
    assert (nine.ranks(), ten.ranks()) == (["1"], ["2"])
    assert limits[0] > 4


def test_the_exit_code_of_a_failed_trainer_must_become_the_masters(project):
    project.start(WAITS)
    nine, ten = project.both()
    assert nine.ranks() == ["1"] and ten.ranks() == ["2"]
    project.ready()
    nine.say(say="exited", rank=1, code=256)  # as an exit code, it would become 0
    assert nine.hears()["say"] == "refused"
    nine.say(say="exited", rank=1, code=255)
    assert project.ends()[0] == 255


@pytest.mark.parametrize("count", ["0", "-1", "many", "1025"])
def test_an_invalid_number_of_workers_must_be_reported(project, count):
    project.start("print('ran')", NODE_NPROC=count)
    project.both()
    code, out = project.ends()
    assert code and f"error: NODE_NPROC must be a whole number from 1 to 1024, not '{count}'\n" in out
    assert "[rank 0]" not in out


@pytest.mark.parametrize("role", ["master", "trainer"])
def test_an_invalid_join_timeout_must_be_reported(role):
    env = os.environ | {"NODE_MODE": "rendezvous", "NODE_JOIN_TIMEOUT": "2m", "NODE_ROLE": role}
    done = subprocess.run([sys.executable, NODE, "x.py"], env=env, capture_output=True, text=True)
    expected = "[node] error: NODE_JOIN_TIMEOUT must be a number of seconds, not '2m'\n"
    assert (done.returncode, done.stdout) == (2, expected)


# --- a trainer


STARTS: list[tuple[dict[str, Any], str]] = [
    ({"ask": "run", "envs": 7}, "run: envs must be a list of environments"),
    ({"ask": "run", "envs": [7]}, "run: envs must be an object of names and values"),
    ({"ask": "run", "envs": [{"RANK": "1"}, {}]}, "run: envs: RANK is missing"),
    ({"ask": "run", "envs": [{"RANK": "x"}]}, "run: envs: RANK must be a whole number"),
    ({"ask": "run", "envs": [{"RANK": "1", "A": "\0"}]}, "run: envs: 'A' must not contain a NUL byte"),
    ({"ask": "run", "envs": [{"RANK": "1", "A": 7}]}, "run: envs: 'A' must be text"),
    ({"ask": "start"}, "unknown request 'start'"),
    ({}, "the message has no request in it"),
]


def test_a_trainer_must_refuse_invalid_requests_and_run_valid_ones(project, master):
    side = master("import os\nprint(os.environ['RANK'])").side
    for message, reason in STARTS:
        side.say(**message)
        assert reason in side.hears()["error"]
    side.say(ask="run", envs=[{"RANK": "1"}])
    assert side.hears() == {"say": "exited", "rank": 1, "code": 0}
    code, out = project.ends()
    assert (code, out) == (0, "[rank 1] 1\n")


def test_a_trainer_must_start_its_workers_once(project, master):
    side = master(WAITS).side
    for rank in ("1", "2"):
        side.say(ask="run", envs=[{"RANK": rank}])
    assert json.loads(side.file.readline())["error"] == "the workers were started already"
    side.say(ask="end")
    assert side.hears() == {"say": "exited", "rank": 1, "code": 143}
    assert project.ends()[0] == 143


def test_a_refused_trainer_must_report_why_and_fail(project, master):
    master(WAITS).side.say(say="refused", error="hello: cpus is missing\n\x1b[31m")
    code, out = project.ends()
    assert code == 1
    assert out == r"[node] error: the master refused this trainer: 'hello: cpus is missing\n\x1b[31m'" + "\n"
