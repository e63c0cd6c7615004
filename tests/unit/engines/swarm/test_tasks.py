"""How the engine interprets the tasks and hosts of a Swarm, with a fake Swarm."""

import os

import pytest
from support.manager_stub import host, scale, settled
from support.swarm_nodes import SPEC

from orchestrate.engines.swarm import manager
from orchestrate.spec.spec import JobSpec


@pytest.fixture
def managed(stub, tmp_path, clock):
    """The objects of the job `j` in the Swarm, with its network."""
    return settled(tmp_path, SPEC, clock)


@pytest.mark.parametrize(
    ("state", "error", "impatient", "reported"),
    [
        ("rejected", "No such image: x", False, True),
        ("failed", "starting container failed: no such device", False, True),
        ("failed", "task: non-zero exit (1)", False, True),
        ("complete", "", False, True),
        ("shutdown", "", True, False),  # another task replaces it
        ("pending", "no suitable node (insufficient resources)", True, True),
        ("pending", "no suitable node (insufficient resources)", False, False),
        ("pending", "", True, False),
        ("running", "", True, False),
    ],
)
def test_the_reason_why_a_new_task_does_not_start_must_be_reported(stub, managed, state, error, impatient, reported):
    scale(managed, "trainer", 1)
    stub.tasks[0]["Status"] = {"State": state, "Err": error}
    managed.manager.hosts()
    managed.spec = JobSpec(image="image:1")
    assert bool(managed.refusal(set(), impatient)) == reported
    assert managed.refusal({"t0"}, impatient) is None
    if state == "rejected":
        assert managed.refusal(set(), impatient)[0] == "host-1 has no image image:1"


@pytest.mark.parametrize("how", ["failed", "complete", "shutdown", "orphaned", "host down"])
def test_a_task_that_does_not_start_must_be_replaced_once_by_one_of_its_role(stub, managed, how):
    for role in ("trainer", "master"):
        scale(managed, role, 1)
    if how == "host down":
        stub.hosts[1]["Status"]["State"] = "down"
    else:
        stub.task("master")["Status"] = {"State": how}
    managed.manager.hosts()
    old, gone = {"t9"}, manager.failed if how in ("failed", "complete") else managed.manager.lost
    assert managed.replace(old, gone) and old == {"t1", "t9"}
    assert [task["role"] for task in stub.tasks] == ["trainer", "master", "master"]
    assert not managed.replace(old, gone)


def test_the_newest_of_the_tasks_of_a_node_must_count(stub, managed):
    scale(managed, "trainer", 1)
    stub.place(stub.services[0], 1)
    other = {
        **stub.services[0],
        "ID": "other",
        "Spec": {**stub.services[0]["Spec"], "Labels": {"orchestrate.job": "x"}},
    }
    stub.place(other, 1)  # of another job
    stub.tasks.reverse()
    assert managed.look()["trainer-1"]["ID"] == "t1"
    assert [task["ID"] for task in managed.tasks()] == ["t0", "t1"]


def test_a_task_must_count_as_dead_only_if_its_host_is_up_and_reports_it(stub, managed):
    scale(managed, "trainer", 4)
    for task, state in zip(stub.tasks, ("failed", "failed", "running", "shutdown")):
        task["Status"]["State"] = state
    stub.hosts[0]["Status"]["State"] = "down"  # the host of t0 and t2
    assert managed.dead() == {"t1", "t3"}
    stub.hosts[1]["Status"]["State"] = "down"
    assert managed.dead() == set()


def test_jobs_must_be_listed_with_the_number_of_nodes_that_should_run(stub, managed, tmp_path):
    scale(managed, "trainer", 3)
    scale(managed, "master", 1)
    stub.tasks[0]["DesiredState"] = "shutdown"
    other = {**managed.labels, "orchestrate.job": "a", "orchestrate.owner": "7"}
    stub.services.append({"ID": "x", "Spec": {"Name": "a-master", "Labels": other}})
    stub.services.append({"ID": "y", "Spec": {"Name": "of another user", "Labels": {}}})
    found = [(one.job_id, one.engine, one.nodes, one.run, one.owner) for one in managed.manager.jobs()]
    assert found == [("a", "swarm", 0, tmp_path, 7), ("j", "swarm", 3, tmp_path, os.getuid())]


def test_only_the_lines_of_one_task_must_be_taken_from_swarms_log(stub, managed):
    scale(managed, "trainer", 2)

    def line(task: str, text: bytes) -> bytes:
        frame = f"com.docker.swarm.service.id=s,com.docker.swarm.task.id={task} ".encode() + text + b"\n"
        return bytes([1, 0, 0, 0]) + len(frame).to_bytes(4, "big") + frame

    stub.log = line("t0", b"[rank 1] a b") + line("t1", b"[rank 2] x") + line("t0", b"[rank 1]  c")
    assert managed.output(managed.look()["trainer-1"]) == b"[rank 1] a b\n[rank 1]  c"
    request = stub.asked[-1]
    assert "stdout=True" in request and "stderr=False" in request and "tail=2000" in request
    stub.refused["GET /services"] = "the log cannot be read"
    assert managed.output(managed.look()["trainer-1"]) == b""
    managed.api.service_logs = lambda *_, **__: 1 / 0  # any other error
    assert managed.output(managed.look()["trainer-1"]) == b""


@pytest.mark.parametrize(
    ("state", "wanted", "found"),
    [
        ("running", "running", {"is_healthy"}),
        ("running", "shutdown", set()),
        ("starting", "running", {"is_starting"}),
        *((state, "running", {"is_starting"}) for state in ("new", "pending", "assigned", "accepted", "preparing")),
        ("preparing", "shutdown", set()),
        ("ready", "ready", {"is_starting"}),
        *(
            (state, "running", {"ended"})
            for state in ("complete", "shutdown", "failed", "rejected", "orphaned", "remove")
        ),
    ],
)
def test_a_task_must_be_classified_by_swarms_state_of_it(state, wanted, found):
    task = {"Status": {"State": state}, "DesiredState": wanted}
    assert {test.__name__ for test in (manager.is_healthy, manager.is_starting, manager.ended) if test(task)} == found


@pytest.mark.parametrize(
    ("state", "availability", "takes"),
    [("ready", "active", True), ("ready", "drain", False), ("ready", "pause", False), ("down", "active", False)],
)
def test_only_a_host_that_is_ready_and_active_must_get_nodes(state, availability, takes):
    assert manager.ready(host(1, state=state, availability=availability)) == takes


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ([{"NamedResourceSpec": {"Kind": "NVIDIA-GPU", "Value": f"GPU-{i}"}} for i in range(3)], 3),
        ([{"DiscreteResourceSpec": {"Kind": "NVIDIA-GPU", "Value": 4}}], 4),
        ([{"DiscreteResourceSpec": {"Kind": "SSD", "Value": 4}}, {"NamedResourceSpec": {"Kind": "SSD"}}], 0),
        (None, 0),
    ],
)
def test_gpus_of_a_host_must_be_counted_as_named_and_as_discrete_resources(resources, count):
    found = host(1)
    found["Description"]["Resources"]["GenericResources"] = resources
    assert manager.gpus(found) == count
