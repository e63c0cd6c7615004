"""Labels of containers and services are untrusted input from images and from users of the engine."""

from collections.abc import Iterator

import pytest
from support.answers import Job
from support.manager_stub import container, settled

from orchestrate.engines.base import JobState
from orchestrate.engines.docker import labels
from orchestrate.engines.docker.session import DockerSession
from orchestrate.spec.spec import JobSpec

COMPOSE = "com.docker.compose."
BAD = [
    {"orchestrate.owner": "abc"},
    {"orchestrate.owner": ""},
    {"orchestrate.owner": "-1"},
    {"orchestrate.owner": "1" * 5000},  # too long for Python to parse
    {"orchestrate.owner": "٣"},
    {"orchestrate.job": "../j"},
    {"orchestrate.job": "J"},
    {"orchestrate.job": "j\n"},
    {"orchestrate.job": ""},
    {"orchestrate.run": ""},
    {"orchestrate.run": "runs/j/job"},
    {"orchestrate.run": "/runs/\0/job"},
    {"orchestrate.run": "/runs/\ud800/job"},
]
NOT_A_NODE = [
    {f"{COMPOSE}project": "k"},
    {f"{COMPOSE}project": ""},
    {f"{COMPOSE}service": "outcome"},
    {f"{COMPOSE}service": "master/../x"},
    {f"{COMPOSE}container-number": "x"},
    {f"{COMPOSE}container-number": ""},
    {f"{COMPOSE}container-number": "0"},
    {f"{COMPOSE}container-number": "1" * 9},
]


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[Job]:
    job = Job(tmp_path, monkeypatch)
    yield job
    job.close()


def label_names() -> list[str]:
    return ["orchestrate.job", "orchestrate.run", "orchestrate.owner"] + [
        f"{COMPOSE}{key}" for key in ("project", "service", "container-number")
    ]


def assert_only_master_counts(session: DockerSession, job: Job) -> None:
    """Check that only the real node counts as one and is removed."""
    engine, ids = job.engine(), [one["Id"] for one in job.answers.containers]
    assert engine.jobs() == [JobState("j", "docker", 1, engine.jobs()[0].run, 7)]
    assert engine.resources("j") == ["container j-master-1"] and engine.resources("k") == []
    assert session._list_nodes().keys() == {"master"}
    job.answers.asked.clear()
    engine.remove("j", 30)
    assert [one["Id"] for one in job.answers.containers] == ids[1:]


@pytest.mark.parametrize("change", [*BAD, *NOT_A_NODE])
def test_a_container_with_malformed_labels_must_be_ignored(job, change):
    engine = job.settled("master")
    job.answers.container("trainer-1")["Labels"] |= change
    assert_only_master_counts(engine, job)


@pytest.mark.parametrize("missing", label_names())
def test_a_container_with_a_missing_label_must_be_ignored(job, missing):
    engine = job.settled("master")
    del job.answers.container("trainer-1")["Labels"][missing]
    assert_only_master_counts(engine, job)


@pytest.mark.parametrize("names", [["/stranger"], [], None, ["/j-trainer-11"], ["/x/j-trainer-1"]])
def test_a_container_with_a_nodes_labels_but_another_name_must_be_ignored(job, names):
    engine = job.settled("master")
    job.answers.container("trainer-1")["Names"] = names
    assert_only_master_counts(engine, job)


def test_a_helper_must_inherit_none_of_our_labels_from_its_image():
    others = [f"orchestrate.{name}" for name in ("job", "owner", "role", "guard", "relay", "look", "services")]
    assert labels.only({"orchestrate.run": "/r"}) == {**dict.fromkeys(others, ""), "orchestrate.run": "/r"}


def test_a_container_without_labels_must_not_be_a_node(job):
    engine = job.settled("master")
    node = engine.nodes["master"]
    assert labels.node(node) == "master"
    node.attrs["Labels"] = None
    assert labels.node(node) == "" and not labels.helps(node, labels.GUARD, "j")


@pytest.fixture
def managed(stub, tmp_path):
    return settled(tmp_path, JobSpec(trainers=2))


@pytest.mark.parametrize("change", BAD)
def test_a_service_with_malformed_labels_must_be_ignored(stub, managed, change):
    spec = {"Name": "j-master", "Labels": {**managed.labels, **change}}
    stub.services.append({"ID": "x", "Spec": spec})
    assert managed.manager.jobs() == []
    assert [kind for kind, _, _ in managed.manager.objects("j")] == ["network"]


@pytest.mark.parametrize("name", ["j", "x-master", "j-master-1"])
def test_a_service_with_another_name_must_be_ignored(stub, managed, name):
    stub.services.append({"ID": "x", "Spec": {"Name": name, "Labels": managed.labels}})
    assert managed.manager.jobs() == [] and [kind for kind, _, _ in managed.manager.objects("j")] == ["network"]


@pytest.mark.parametrize(
    "change",
    [
        {"Spec": {"ContainerSpec": {"Labels": {}}}},
        {"Spec": {"ContainerSpec": {}}},
        {"Spec": {"ContainerSpec": {"Labels": {"orchestrate.role": "../x"}}}},
        {"Spec": {"PluginSpec": {}}},
    ],
)
def test_a_task_without_a_valid_role_must_not_be_a_node(stub, managed, change):
    task = {"ID": "t", "Slot": 1, "CreatedAt": "2026", "Labels": managed.labels, **change}
    stub.tasks.append(task)
    assert managed.tasks() == []
    stub.tasks[0] |= {"Spec": {"ContainerSpec": {"Labels": {"orchestrate.role": "master"}}}}
    assert [task["Name"] for task in managed.tasks()] == ["master"]
    del stub.tasks[0]["Slot"]  # a task of a global service
    assert managed.tasks() == []


def test_a_relay_with_another_name_must_be_ignored(stub, managed):
    stub.containers.append(container("stranger", "x", Labels={"orchestrate.relay": "j"}))
    assert [kind for kind, _, _ in managed.manager.objects("j")] == ["network"]
