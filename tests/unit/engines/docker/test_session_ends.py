"""Ends of Docker nodes as the engine's events report them, and their removal; with a simulated engine."""

import select
import selectors
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.answers import Job
from support.ends import connected
from support.messages import encoded
from support.scripted import Clock
from support.waiting import eventually

from orchestrate.engines.base import JobState, Stop
from orchestrate.engines.docker import session as docker_module
from orchestrate.errors import EngineError, EngineLost
from orchestrate.record.outcomes import WorkerExit
from orchestrate.record.paths import JobPaths


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[Job]:
    job = Job(tmp_path, monkeypatch)
    yield job
    job.close()


# --- periodic checks


def lists(job: Job) -> int:
    """How often containers have been listed."""
    return job.answers.requests("GET").count("GET /containers/json")


def test_containers_must_be_listed_periodically_while_workers_run(job):
    clock = Clock()
    engine = job.settled("master", "trainer-1", "trainer-2")
    engine.clock = clock
    _, paused, cut_off = job.answers.containers
    engine.clients.connections = dict.fromkeys(engine.nodes)  # all nodes are connected
    engine.clients.drop = lambda node: None
    paused["State"] = "paused"
    cut_off["NetworkSettings"]["Networks"] = {}
    assert engine.wait(0).exits == [] and lists(job) == 1
    assert engine.troubles == {"trainer-1": "paused", "trainer-2": "partition"}
    assert engine.wait(0).starting == {0, 1, 2}
    engine.wait(0).troubles.clear()
    assert engine.troubles
    clock.now += 4
    assert engine.wait(0).exits == [] and lists(job) == 1
    clock.now += 2
    paused["State"] = "running"
    assert engine.wait(0).exits == [] and lists(job) == 2
    assert engine.troubles == {"trainer-2": "partition"} and not engine.clients.broken
    clock.now += 6
    engine.clients.running, running = {}, engine.clients.running
    assert engine.wait(0).exits == [] and lists(job) == 2  # no worker is running
    engine.clients.running = running
    for change in ("pause", "unpause", "die", "network"):
        kind = "network" if change == "network" else "container"
        action = "disconnect" if change == "network" else change
        engine.last_listed, before = clock.now, lists(job)
        engine._record_event({"Type": kind, "Action": action, "Actor": {"ID": "x", "Attributes": {}}})
        assert engine.wait(0).exits == [] and lists(job) == before  # the list lags slightly behind events
        clock.now += 0.05
        assert engine.wait(0).exits == [] and lists(job) == before
        clock.now += 0.2
        assert engine.wait(0).exits == [] and lists(job) == before + 1
    engine.clients.connections = {}


def test_a_node_that_vanished_or_has_no_connection_must_be_detected(job, monkeypatch):
    engine = job.settled("master", "trainer-1")
    monkeypatch.setattr(engine, "connect", lambda node: None)
    engine.clients.connections = dict.fromkeys(["master", "trainer-2"])
    engine.clients.running[2] = "trainer-2"
    engine._reconcile()
    assert engine.clients.broken == {"trainer-1", "trainer-2"}
    engine.clients.connections = {}


def test_only_events_of_the_job_must_be_kept(job):
    engine = job.settled("master")
    (node,) = job.answers.containers

    def event(attributes: dict[str, str]) -> dict[str, Any]:
        return {"Actor": {"ID": "x", "Attributes": attributes}}

    assert engine._is_ours(event({"orchestrate.job": "j"})) and engine._is_ours(event({"name": "j_job"}))
    assert not engine._is_ours(event({"orchestrate.job": "k", "name": "k_job"})) and not engine._is_ours(event({}))
    job.happened("oom", node, **{"orchestrate.job": "k"})
    job.happened("die", node)
    eventually(lambda: engine.clients.listen(0.01) or engine.seen_events)
    assert engine.seen_events == {node["Id"]: {"die"}}


def test_events_of_the_previous_generation_must_be_discarded(job):
    engine = job.settled("master", "trainer-1")
    engine.seen_events = {"x": {"oom"}}
    job.happened("oom", job.answers.containers[1])  # it is read only at the start of the next one
    eventually(lambda: select.select([engine.events.bell], [], [], 0)[0])
    engine.connect = lambda node: None
    engine.start(job.plan())
    assert engine.seen_events == {}
    assert [end.rank for end in engine.wait(0).exits] == [0]


# --- why a worker ended


@pytest.mark.parametrize(
    ("code", "hint", "events", "state", "cause"),
    [
        (137, "oom", set(), "running", "out of memory"),
        (1, "oom", set(), "running", "out of memory in a child"),
        (137, None, {"oom"}, "exited", "out of memory"),
        (137, None, {"oom", "kill"}, "exited", "out of memory"),
        (137, "", {"oom"}, "running", None),
        (143, "ending", set(), "running", "node stopped"),
        (137, None, {"kill"}, "exited", "node stopped"),
        (137, None, {"destroy"}, "", "node stopped"),
        (137, None, {"die"}, "exited", "node lost"),
        (137, None, set(), "", "node lost"),
        (137, None, set(), "paused", "node lost"),
        (1, "", set(), "running", None),
        (1, "", set(), "cut off", "partition"),
    ],
)
def test_the_exit_of_a_worker_must_be_explained_by_the_state_of_its_node(
    job, monkeypatch, code, hint, events, state, cause
):
    monkeypatch.setattr(docker_module, "EVENT_TIMEOUT", 0.0)
    engine = job.settled("master", "trainer-1")
    node = job.answers.containers[1]
    engine.clients.exit_hints = {} if hint is None else {1: hint}
    engine.seen_events = {node["Id"]: events, job.answers.containers[0]["Id"]: {"oom", "kill"}}
    if state == "cut off":
        node["NetworkSettings"]["Networks"] = {}
    else:
        node["State"] = state
    if not state:
        job.answers.containers.remove(node)
    assert engine.explain(WorkerExit(1, code), "trainer-1") == cause


def test_explain_must_wait_briefly_for_an_event_after_the_loss_of_a_node(job, monkeypatch):
    monkeypatch.setattr(docker_module, "EVENT_TIMEOUT", 30.0)
    engine = job.settled("master", "trainer-1")
    node = job.answers.containers[1]
    node["State"] = "exited"
    clock = Clock()  # it stands still while the session listens
    engine.clock = clock
    listen = engine.clients.listen

    def listen_and_advance(timeout: float) -> None:
        assert timeout > 0
        listen(timeout)
        clock.now += 31 if engine.seen_events else 0.1

    monkeypatch.setattr(engine.clients, "listen", listen_and_advance)
    threading.Timer(0.1, job.happened, ("kill", node), {"signal": "9"}).start()
    assert engine.explain(WorkerExit(1, 137), "trainer-1") == "node stopped"
    engine.clients.exit_hints = {0: "ending"}  # sufficient without an event
    monkeypatch.setattr(engine.clients, "listen", lambda timeout: 1 / 0)
    assert engine.explain(WorkerExit(0, 137), "master") == "node stopped"


@pytest.mark.parametrize("events", [(), ("die",)])
def test_a_node_that_reports_its_shutdown_must_be_awaited(job, events):
    engine = job.settled("master", "trainer-1")
    node = job.answers.containers[1]
    engine.clients.exit_hints = {1: "ending"}
    engine.seen_events = {node["Id"]: set(events)}
    assert engine.explain(WorkerExit(1, 143), "trainer-1") == "node stopped"
    job.answers.asked.clear()
    job.answers.on_request = lambda request: len(job.answers.asked) == 3 and node.update(State="exited")
    assert {*engine.alive()} == ({"master", "trainer-1"} if events else {"master"})


def test_a_node_that_restarts_immediately_must_not_be_awaited_any_longer(job):
    engine = job.settled("master", "trainer-1")
    node = job.answers.containers[1]
    engine.dying = {node["Id"]}
    job.answers.on_request = lambda request: len(job.answers.asked) == 3 and job.happened("die", node)
    engine.alive()
    assert len(job.answers.asked) < 20 and not engine.dying


def test_an_unavailable_engine_must_not_hide_the_exit_of_a_worker(job, monkeypatch):
    monkeypatch.setattr(docker_module, "EVENT_TIMEOUT", 0.0)
    engine = job.settled("master", "trainer-1")
    job.answers.on_request = lambda request: 1 / 0
    engine.clients.exit_hints = {1: ""}
    assert engine.explain(WorkerExit(1, 1), "trainer-1") is None  # its node is alive
    engine.clients.exit_hints = {}
    with pytest.raises(EngineLost):
        engine.explain(WorkerExit(1, 137), "trainer-1")


def test_the_loss_of_all_nodes_must_be_distinguished_from_an_engine_shutdown(job, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(docker_module, "EVENT_TIMEOUT", 0.0)
    engine = job.settled("master")
    engine.clock = clock
    job.answers.containers[0]["State"] = "exited"
    began = clock.now
    assert engine.explain(WorkerExit(0, 137), "master") == "node lost"
    assert clock.now - began > 3  # the time that an engine may take to shut down
    engine.events.broken = clock.now - 10
    assert engine.explain(WorkerExit(0, 137), "master") == "node lost"
    engine.events.broken = clock.now - 2
    with pytest.raises(EngineLost, match="the engine was restarted"):
        engine.explain(WorkerExit(0, 137), "master")
    other = job.answers.container("trainer-1")
    assert engine.explain(WorkerExit(0, 137), "master") == "node lost"  # because the other node is running
    other["State"], engine.events.broken = "exited", 0.0
    job.answers.on_request = lambda request: request == "GET /version" and 1 / 0
    with pytest.raises(EngineLost, match="does not respond"):
        engine.explain(WorkerExit(0, 137), "master")


@pytest.mark.parametrize("how", Stop)
def test_paused_nodes_must_continue_so_that_their_workers_can_end_except_for_a_dump(job, how):
    engine = job.settled("master", "trainer-1", "trainer-2")
    engine.troubles = {"trainer-1": "paused", "trainer-2": "partition", "gone": "paused"}
    engine.stop(how)
    unpaused = [f"POST /containers/{engine.nodes['trainer-1'].id}/unpause"]
    assert job.answers.requests() == ([] if how is Stop.DUMP else unpaused)


# --- removal


def test_nodes_must_be_removed_by_force_with_their_volumes(job):
    engine = job.settled("master", "trainer-1")
    engine.discard(["trainer-1", "trainer-7"])
    (request,) = job.answers.requests()
    query, _ = job.answers.query_of(request)
    assert request == f"DELETE /containers/{engine.nodes['trainer-1'].id}"
    assert query == {"v": "true", "force": "true"}


@pytest.mark.parametrize("runs", [True, False])
def test_down_must_stop_running_nodes_and_remove_only_what_belongs_to_the_job(job, runs):
    job.answers.container("master", "jj")
    job.answers.network("jj")
    job.answers.network()
    before = {*threading.enumerate()}
    engine = job.settled("master", "trainer-1")
    (listener,) = (one for one in {*threading.enumerate()} - before if one.name.endswith("(_listen)"))
    job.happened("oom", job.answers.containers[0])
    eventually(lambda: engine.clients.listen(0.01) or engine.seen_events)
    other = JobPaths(job.paths.root.with_name("jj"))
    other.root.mkdir()
    for folder in (job.sockets, other.sockets):
        folder.mkdir()
    engine.clients.running = {0: "master"} if runs else {}
    ids = [node.id for node in engine.nodes.values()]
    engine.down(30.5)
    requests = job.answers.requests()
    assert sorted(requests[:-3]) == sorted(f"POST /containers/{id}/stop" for id in ids * runs)
    assert sorted(requests[-3:-1]) == sorted(f"DELETE /containers/{id}" for id in ids)
    assert requests[-1] == "DELETE /networks/net-j"
    if runs:
        assert job.answers.query_of(requests[0])[0]["t"] == "30"
    removed, _ = job.answers.query_of(requests[-2])
    assert (removed["v"].lower(), removed["force"].lower()) == ("true", "true")
    assert [node["Names"] for node in job.answers.containers] == [["/jj-master-1"]]
    assert [network["Name"] for network in job.answers.networks] == ["jj_job"]
    assert not job.sockets.exists() and other.sockets.exists() and job.run.exists()
    listener.join(30)
    assert not listener.is_alive()


@pytest.mark.parametrize("left", ["nodes", "network"])
def test_remove_must_delete_sockets_only_in_the_run_directory_of_the_job(job, left, tmp_path):
    other = JobPaths(tmp_path / "runs" / "k")
    for folder in (job.sockets, other.sockets):
        (folder / "deep" / "er").mkdir(parents=True)
    (job.sockets / "link").symlink_to(other.sockets)
    things = []
    if left == "nodes":
        things.append(job.answers.container("master"))
        things.append(job.answers.container("trainer-1"))
    job.answers.network()
    things.append(job.answers.networks[0])
    for thing, run in zip(reversed(things), (job.run, other.shared)):
        thing["Labels"]["orchestrate.run"] = str(run)
    job.engine().remove("j", 0)
    assert not job.sockets.exists() and (other.sockets / "deep" / "er").exists()
    assert job.answers.containers == job.answers.networks == []


def test_the_nodes_of_a_cluster_must_be_cleaned_and_kept(job):
    job.answers.container("master", "c")
    silent = job.answers.container("trainer-1", "c")
    job.answers.container("master", "")  # a node of plain Compose
    engine = job.settled(cluster="c")
    engine.clients.connections["master"], node = connected()
    engine.clients.selector.register(engine.clients.connections["master"].sock, selectors.EVENT_READ, "master")
    node.send(encoded("cleaned"))
    for name in (str(engine.nodes["master"].short_id), "left"):
        (job.sockets / name).mkdir(parents=True)
    job.sockets.chmod(0o777)
    assert engine.project == "c" and engine.env["JOB_ID"] == "c" and engine.network == "c_job"
    engine.connect = lambda node: None
    engine.down(30.0)
    assert job.answers.requests() == [f"DELETE /containers/{silent['Id']}"]  # processes of the job may remain in it
    with node.sock:
        assert node.hear() == {"ask": "clean"}
    assert engine.clients.cleaned == {"master"}
    assert [path.name for path in job.sockets.iterdir()] == [str(engine.nodes["master"].short_id)]
    assert stat.S_IMODE(job.sockets.stat().st_mode) == 0o700


def test_a_network_that_is_in_use_must_be_an_error(job):
    job.answers.network()
    job.answers.container("master")  # its folder is gone
    job.answers.refusals["DELETE /networks/net-j"] = 403, "has active endpoints"
    with pytest.raises(EngineError, match="could not remove a network of j: has active endpoints"):
        job.engine().remove("j", 0)


# --- from another shell


def test_jobs_must_list_jobs_with_containers_but_not_plain_compose_projects(job):
    for name in ("master", "trainer-1", "trainer-2"):
        job.answers.container(name, "b", state="exited")
    job.answers.container("master", "a", **{"orchestrate.owner": "0"})
    job.answers.container("master", "", **{"orchestrate.run": ""})
    job.answers.network("b")
    engine = job.engine()
    assert engine.jobs() == [
        JobState("a", "docker", 1, Path("/runs/a/job"), 0),
        JobState("b", "docker", 3, Path("/runs/b/job"), 7),
    ]
    containers = ["container b-master-1", "container b-trainer-1", "container b-trainer-2"]
    job.answers.containers.reverse()
    assert engine.resources("b") == [*containers, "network b_job"]
    job.answers.networks[0]["Driver"] = "overlay"  # a network of a Swarm
    assert engine.resources("b") == containers and engine.resources("none") == []


def test_containers_must_be_removed_but_not_a_run_directory_that_they_name(job, tmp_path):
    other = tmp_path / "other" / "job"
    other.mkdir(parents=True)
    job.answers.container("master")["Labels"]["orchestrate.run"] = str(other)
    job.engine().remove("j", 0)
    assert job.answers.containers == []
    assert other.exists() and job.run.exists()
