"""Requests to the manager of a Swarm, and the time limits of waiting for their effects, without a Swarm."""

import base64
import io
import os
import tarfile
from collections.abc import Callable

import pytest
import requests
from support.ends import KEY
from support.manager_stub import StubManager, container, host, scale, settled
from support.repo import ROOT

from orchestrate.engines.docker import labels
from orchestrate.engines.swarm import manager
from orchestrate.engines.swarm.manager import Manager, total_gpus
from orchestrate.engines.swarm.objects import SwarmJob
from orchestrate.errors import EngineError, EngineLost, ResourceError
from orchestrate.host import users
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import IMAGE, JobSpec


@pytest.mark.parametrize(
    ("offered", "nodes", "spares", "used"),
    [
        ([4, 4], 2, 0, 8),
        ([4, 4], 2, 2, 4),  # two each, so that two are left for each standby node
        ([4, 4], 3, 0, 6),
        ([4, 4], 3, 1, 6),
        ([2, 2, 2], 3, 3, 3),
        ([8, 1], 2, 0, 8),
        ([1, 1], 3, 0, 2),  # too few, which the plan refuses
        ([0, 0], 2, 0, 0),
        ([], 2, 0, 0),
    ],
)
def test_each_node_must_have_as_many_gpus_as_leave_enough_for_standby_nodes(offered, nodes, spares, used):
    assert total_gpus(offered, nodes, spares) == used


@pytest.mark.parametrize(
    ("constraints", "fit"),
    [
        ([], {"h1", "h2", "h3"}),
        (["node.labels.gpu == a100"], {"h1", "h2"}),
        (["node.labels.gpu==A100", "node.hostname != host-1"], {"h2"}),
        (["node.labels.gpu != a100"], {"h3"}),  # it has no such label
        (["node.role==manager"], {"h1"}),
        (["node.platform.os == linux", "node.platform.arch != aarch64"], {"h1", "h3"}),
        (["engine.labels.disk==fast"], {"h3"}),
        (["node.id==h2"], {"h2"}),
        (["node.labels.gpu==h100"], {"h1", "h2", "h3"}),  # Swarm reports why no host takes a node
    ],
)
def test_only_hosts_that_take_nodes_must_count(stub, constraints, fit):
    stub.hosts = [host(1, gpus=1), host(2), host(3), host(4, state="down"), host(5, availability="drain")]
    for one, role, arch, label in zip(stub.hosts, ("manager", *["worker"] * 4), ("x86_64", "aarch64") * 3, "aab"):
        one["Spec"] |= {"Role": role, "Labels": {"gpu": "a100"} if label == "a" else None}
        one["Description"]["Platform"] = {"OS": "linux", "Architecture": arch}
        one["Description"]["Engine"] = {"Labels": {"disk": "fast"} if label == "b" else None}
    assert {one["ID"] for one in Manager().candidate_hosts(JobSpec(constraints=constraints))} == fit
    stub.hosts = stub.hosts[3:]
    with pytest.raises(ResourceError, match="no host of the Swarm is ready"):
        Manager().candidate_hosts(JobSpec())


def test_nodes_on_a_host_that_is_down_must_not_be_waited_for(clock, tmp_path, monkeypatch):
    swarm, began = Manager.__new__(Manager), clock.now
    swarm.clock = clock
    swarm.known = {"h": {"ID": "h", "Status": {"State": "down"}, "Description": {"Hostname": "host-3"}}}
    task = {"Name": "trainer-1", "NodeID": "h", "Status": {"State": "running"}}
    found = {"jobs": list, "objects": lambda _: [], "tasks": lambda _: [task], "hosts": dict}
    for name, answer in found.items():
        monkeypatch.setattr(swarm, name, answer)
    with pytest.raises(EngineError, match="could not remove 1 node on hosts that are down: host-3"):
        swarm.remove("j", 30.0)
    assert clock.now == began


def user_of(managed: SwarmJob) -> str:
    """The owner of the folder that nodes see."""
    status = managed.run.stat()
    return f"{status.st_uid}:{status.st_gid}"


@pytest.fixture
def paths(tmp_path):
    """The files of the job `j`."""
    job = JobPaths(tmp_path / "j")
    job.create(owner=users.nodes_of(JobSpec().user))
    return job


@pytest.fixture
def managed(stub, paths, clock):
    """The objects of the job in the Swarm, with its network."""
    return settled(paths.shared, JobSpec(trainers=2), clock)


@pytest.mark.parametrize(("key", "options"), [("", {}), ("encrypt", {"encrypted": ""}), ("isolated", {})])
def test_a_job_must_have_its_own_network_which_is_created_once(stub, paths, key, options):
    spec = JobSpec(trainers=2, encrypt=key == "encrypt", isolated=key == "isolated")
    for _ in range(2):  # a supervisor that takes the job over finds it
        settled(paths.shared, spec)
    (network,) = stub.overlays()
    assert (network["Name"], network["Driver"], network["Attachable"]) == ("j_job", "overlay", True)
    assert ((network["Options"] or {}), network.get("Internal", False)) == (options, key == "isolated")
    labels = {"orchestrate.job": "j", "orchestrate.run": str(paths.shared), "orchestrate.owner": str(os.getuid())}
    assert network["Labels"] == labels


def test_nodes_on_the_host_network_must_be_reached_at_the_addresses_of_their_hosts(stub, paths):
    spec = JobSpec(trainers=2, network="host")
    on_hosts = settled(paths.shared, spec)
    assert not stub.overlays()
    on_hosts.manager.hosts()
    on_hosts.connect()
    assert on_hosts.relay_address() == ("10.1.1.1", on_hosts.port)
    at = {"NodeID": "h2", "NetworksAttachments": []}
    found = [on_hosts.node_address({**at, "Name": name}) for name in ("master", "trainer-1", "trainer-12")]
    assert found == [("127.0.0.1", on_hosts.port + number) for number in (1, 2, 13)]


def test_a_node_must_be_reached_at_its_address_on_the_network_of_the_job(stub, managed):
    scale(managed, "trainer", 2)
    assert managed.node_address(managed.look()["trainer-2"]) == ("10.0.1.1", managed.port + 1)
    with pytest.raises(EngineError, match="trainer-2 has no address"):
        managed.node_address(managed.look()["trainer-2"] | {"NetworksAttachments": None})


def test_the_relay_must_have_the_key_and_no_unneeded_privileges(stub, managed):
    managed.spec = JobSpec(trainers=2)
    managed.connect()
    assert managed.relay_address() == ("10.0.1.200", 20000)
    (relay,) = stub.containers
    body = relay["Config"]
    assert set(body["Env"]) == {"NODE_MODE=relay", "NODE_PORT=20000", f"NODE_KEY={KEY.hex()}"}
    assert body["Entrypoint"] == ["python", "/opt/orchestrate/node"] and body["Healthcheck"]["Test"] == ["NONE"]
    assert (body["Labels"], body["User"]) == (labels.only({"orchestrate.relay": "j"}), user_of(managed))
    rights = body["HostConfig"]
    assert set(rights["Binds"]) == {f"{ROOT}/orchestrate:/opt/orchestrate:ro"}
    assert (rights["NetworkMode"], rights["CapDrop"]) == ("j_job", ["ALL"])
    assert (rights["SecurityOpt"], rights["ReadonlyRootfs"]) == (["no-new-privileges:true"], True)
    assert rights["Init"] and rights["PidsLimit"] == 4096
    assert (rights["Memory"], rights["MemorySwap"], rights["OomScoreAdj"]) == (224 << 20, 224 << 20, 500)
    assert rights["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "1m"}}


def test_the_relay_must_have_enough_memory_for_connections_to_all_nodes(stub, managed):
    managed.spec = JobSpec(trainers=9, spares=2)
    managed.connect()
    assert stub.containers[0]["Config"]["HostConfig"]["Memory"] == 512 << 20


def test_the_relay_must_never_use_the_jobs_image_and_must_name_a_missing_image(stub, managed):
    managed.spec = JobSpec(image="other:1")
    managed.connect()
    assert stub.containers[0]["Config"]["Image"] == IMAGE
    stub.containers.clear()
    stub.refused["POST /containers/create"] = f"No such image: {IMAGE}"
    stub.status = 404
    with pytest.raises(EngineError, match=f"no image {IMAGE}.*docker compose build"):
        managed.spec = JobSpec(image="other:1")
        managed.connect()
    assert not any(request.startswith("POST /images") for request in stub.asked)  # a pulled image may not be ours


@pytest.mark.parametrize(("status", "kept"), [("running", True), ("exited", False), ("created", False)])
def test_a_relay_must_be_reused_only_if_it_is_running(stub, managed, status, kept):
    stub.containers += [container("x-j-relay", "another"), container("j-relay", "old", status)]
    managed.spec = JobSpec(trainers=2)
    managed.connect()
    assert (managed.relay.id == "old") == kept
    assert len([one for one in stub.containers if one["Name"] == "/j-relay"]) == 1


def test_a_secret_whose_name_only_begins_with_that_of_the_job_must_not_be_used(stub, managed):
    stub.secrets.append({"ID": "another", "Spec": {"Name": "j-node-1-node", "Labels": {}}})
    scale(managed, "master", 1)
    (used,) = stub.services[0]["Spec"]["TaskTemplate"]["ContainerSpec"]["Secrets"]
    assert used["SecretName"] == "j-node" and used["SecretID"] != "another"


def test_a_service_must_use_the_local_image_and_have_the_labels_of_the_job(stub, managed):
    scale(managed, "trainer", 2)
    scale(managed, "master", 1)
    trainer, master = (one["Spec"] for one in stub.services)
    assert (trainer["Name"], master["Name"]) == ("j-trainer", "j-master")
    assert trainer["Labels"] == managed.labels and trainer["EndpointSpec"] == {"Mode": "dnsrr"}
    template = trainer["TaskTemplate"]
    assert template["ContainerSpec"]["Image"] == "orchestrate-node:0.1@sha256:2"  # a tag may differ elsewhere
    assert template["ContainerSpec"]["User"] == user_of(managed)
    assert template["Networks"][0]["Target"] == stub.overlays()[0]["Id"]
    (secret,) = stub.secrets  # one for both
    assert (secret["Spec"]["Name"], secret["Spec"]["Labels"]) == ("j-node", managed.labels)
    for one in (trainer, master):
        assert one["TaskTemplate"]["ContainerSpec"]["Secrets"][0]["SecretID"] == secret["ID"]
        assert f"NODE_KEY={KEY.hex()}" in one["TaskTemplate"]["ContainerSpec"]["Env"]
    given = base64.b64decode(next(body["Data"] for body in stub.made if body["kind"] == "secrets"))
    with tarfile.open(fileobj=io.BytesIO(given)) as archive:
        assert "orchestrate/node/__main__.py" in archive.getnames() and KEY not in given


def test_a_local_image_must_be_used_by_its_id_and_its_volumes_be_emptied(stub, managed):
    get, image = stub.get, {"Id": "sha256:1", "RepoDigests": [], "Config": {"Volumes": {"/data": {}}}}
    stub.get = lambda kind, name, query: image if kind == "images" else get(kind, name, query)
    scale(managed, "trainer", 1)
    node = stub.services[0]["Spec"]["TaskTemplate"]["ContainerSpec"]
    (wiped,) = [item for item in node["Env"] if item.startswith("NODE_WIPE=")]
    assert node["Image"] == "sha256:1" and wiped.endswith(" /data")


def test_adding_nodes_must_leave_existing_nodes_alone(stub, managed):
    for more in (2, 1, 0, -1):
        scale(managed, "trainer", more)
    (first, more) = (body for body in stub.made if body["kind"] == "services")
    assert more == first | {"Mode": {"Replicated": {"Replicas": 3}}}
    assert any(request.endswith("update?version=7") for request in stub.asked)
    assert list(managed.look()) == ["trainer-1", "trainer-2", "trainer-3"]


def test_services_must_be_placed_one_after_the_other_within_a_time_limit(stub, managed, clock):
    stub.placed, began = lambda task: task.pop("NodeID"), clock.now
    scale(managed, "trainer", 2)
    assert 0.9 < clock.now - began < 1.5
    for task in stub.tasks:
        task["NodeID"] = "h1"
    began = clock.now
    scale(managed, "trainer", 1)
    assert 0.9 < clock.now - began < 1.5
    stub.placed, began = lambda task: None, clock.now
    for task in stub.tasks:
        task["NodeID"] = "h1"
    scale(managed, "trainer", 1)
    assert clock.now == began


def start_nodes(managed: SwarmJob) -> None:
    scale(managed, "trainer", 1)
    scale(managed, "master", 1)
    managed.spec = JobSpec(trainers=2)
    managed.connect()


def test_all_objects_of_a_job_must_be_removed_and_no_others(stub, managed, paths):
    start_nodes(managed)
    other = managed.labels | {"orchestrate.job": "x"}
    for things in (stub.services, stub.secrets):
        things.append({"ID": "other", "Spec": {"Name": "x-master", "Labels": other}})
    stub.networks.append({"Id": "other", "Name": "x", "Labels": other})
    stub.containers.append(container("x-relay", "other", Labels={"orchestrate.relay": "x"}))
    names = [f"{kind} {name}" for kind, name, _ in managed.manager.objects("j")]
    expected = ["service j-trainer", "service j-master", "container j-relay", "secret j-node", "network j_job"]
    assert names == expected
    managed.manager.remove("j", 0.0)
    assert not managed.manager.objects("j") and len(managed.manager.objects("x")) == 4
    assert any(
        "DELETE /containers" in request and {"force=true", "v=true"} <= {*request.split("?")[1].split("&")}
        for request in stub.asked
    )


def test_the_removal_of_an_object_in_use_must_be_retried_and_its_failure_reported(stub, managed, clock, monkeypatch):
    start_nodes(managed)
    monkeypatch.setattr(manager, "NETWORK_RELEASE_TIMEOUT", 0.3)
    stub.refused["DELETE /networks"], began = "network j_job has active endpoints", clock.now
    with pytest.raises(EngineError, match="remove the network j_job: network j_job has active endpoints") as raised:
        managed.manager.remove("j", 0.4)
    assert 0.7 <= clock.now - began < 1 and "stop j" in raised.value.hint
    assert [kind for kind, *_ in managed.manager.objects("j")] == ["network"]
    del stub.refused["DELETE /networks"]
    managed.manager.remove("j", 5.0)
    assert not stub.overlays()


def test_a_task_that_does_not_end_must_be_reported_with_its_host(stub, managed, clock, monkeypatch):
    start_nodes(managed)
    later = Manager(clock)  # in the process that removes the job later
    monkeypatch.setattr(manager, "NETWORK_RELEASE_TIMEOUT", 0.3)
    tasks = [stub.tasks[0]]
    monkeypatch.setattr(stub, "delete", lambda kind, number: (StubManager.delete(stub, kind, number), keep()))

    def keep() -> None:
        stub.tasks[:] = tasks

    with pytest.raises(EngineError, match="^could not remove trainer-1 on host-1(\n|$)"):
        later.remove("j", 0.0)
    stub.hosts[0]["Status"]["State"] = "down"
    with pytest.raises(EngineError, match="could not remove 1 node on hosts that are down: host-1"):
        later.remove("j", 0.0)
    tasks[0]["Status"]["State"] = "shutdown"  # its host has reported it
    later.remove("j", 0.0)


def test_an_engine_that_is_lost_must_not_be_waited_for(stub, managed, clock):
    start_nodes(managed)
    things, began = managed.manager.objects("j"), clock.now
    gone = requests.exceptions.ConnectionError("refused")
    managed.manager.objects = lambda _: [(*things[0][:2], raising(gone))]
    with pytest.raises(EngineLost):
        managed.manager.remove("j", 30.0)
    assert clock.now == began


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act
