"""Requests to an engine for the packet filter of nodes, and what happens if it refuses them."""

import dataclasses
import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait

import pytest
from support.answers import Job

from orchestrate.engines.docker import labels
from orchestrate.engines.docker.session import DockerSession
from orchestrate.node.trees import identity
from orchestrate.spec.spec import IMAGE, JobSpec

SPEC = JobSpec(trainers=1, image="mine:1")
CREATE, END = "POST /containers/create", "POST /containers/made/wait"


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[Job]:
    instance = Job(tmp_path, monkeypatch)
    yield instance
    instance.close()


def protected(job: Job, spec: JobSpec = SPEC) -> DockerSession:
    """A session with two nodes whose helper containers have ended."""
    for number, name in enumerate(("master", "trainer-1")):
        network = {"EndpointID": f"first-{number}", "IPAddress": f"172.18.0.{number + 2}", "IPPrefixLen": 16}
        job.answers.container(name)["NetworkSettings"]["Networks"]["j_job"] = network
    engine = job.session(spec)
    engine.up(job.plan(spec))
    again(engine)
    return engine


def again(engine: DockerSession) -> None:
    """Wait for helpers, as before a generation starts."""
    engine.alive()
    if engine.guard:
        engine.guard.finish(engine._healthy_nodes)
    engine._warn()


def helped(job: Job) -> list[str]:
    """The nodes that had a helper."""
    modes = [body["HostConfig"]["NetworkMode"] for request, _, body in job.answers.asked if request == CREATE]
    return sorted(mode.removeprefix("container:").rstrip("0") for mode in modes)


def test_a_helper_must_have_one_capability_and_no_files_of_this_machine(job):
    protected(job)
    assert helped(job) == ["j-master-", "j-trainer-1-"]
    _, body = job.answers.query_of(CREATE)
    host = body["HostConfig"]
    assert (host["CapDrop"], host["CapAdd"], host["ReadonlyRootfs"]) == (["ALL"], ["NET_ADMIN"], True)
    assert host["SecurityOpt"] == ["no-new-privileges:true"] and host["PidsLimit"] == 8 and host["Memory"] == 64 << 20
    assert (host["MemorySwap"], host["OomScoreAdj"]) == (64 << 20, 500)
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "1m"}}
    assert not host.get("Binds") and not host.get("Mounts") and not host.get("Privileged") and not body.get("Volumes")
    assert body["Entrypoint"][:4] == ["python", "-I", "-S", "-c"] and body["User"] == "0:0"
    networks = [word for word in body["Entrypoint"] if word.startswith("net:")]
    assert networks == ["net:172.18.0.0/255.255.0.0"]
    assert body["Env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    assert body["Labels"] == labels.only({"orchestrate.guard": "j", "orchestrate.run": str(job.run)})
    assert job.answers.query_of(CREATE)[0]["name"].startswith("j-guard-")
    assert "169.254.0.0/255.255.0.0" in body["Entrypoint"]
    assert job.answers.requests("DELETE") == ["DELETE /containers/made"] * 2
    assert job.answers.query_of("DELETE /containers/made")[0] == {"v": "true", "force": "true"}
    assert job.warnings() == []


@pytest.mark.parametrize("names", ["", "/none", "/etc/hosts"])
def test_a_node_whose_process_is_not_here_must_get_a_helper(job, names):
    """As for root in a container with the engine's socket, where that number is another process."""
    engine = protected(job)
    for node in job.answers.containers:
        state = {"Pid": os.getpid(), "StartedAt": job.answers.started, "Running": True}
        facts = {"State": state, "HostConfig": {"Runtime": "runc"}, "ResolvConfPath": names}
        job.answers.replies[f"GET /containers/{node['Id']}/json"] = {"Id": node["Id"], **facts}
        node["NetworkSettings"]["Networks"]["j_job"] = {"EndpointID": f"second-{node['Id']}"}
    again(engine)
    assert len(helped(job)) == 4 and job.warnings() == []


def test_a_node_must_get_a_helper_each_time_it_starts_and_only_then(job):
    engine = protected(job)
    again(engine)
    assert len(helped(job)) == 2
    job.answers.containers[1]["NetworkSettings"]["Networks"]["j_job"] = {"EndpointID": "second"}
    again(engine)
    assert helped(job) == ["j-master-", "j-trainer-1-", "j-trainer-1-"]


def test_a_worker_must_start_only_behind_the_packet_filter_unless_its_setup_failed(job):
    engine = protected(job)
    worker = job.plan().workers[0]
    request = engine.request(worker, ("x.py",))
    assert request.filtered is True and request.folders == {"/job": identity(job.run.stat())}
    job.answers.refusals[CREATE] = 500, "no room"
    job.answers.containers[0]["NetworkSettings"]["Networks"]["j_job"] = {"EndpointID": "second"}
    again(engine)
    engine.nodes = engine._list_nodes()
    assert [engine.request(worker, ("x.py",)).filtered for worker in job.plan().workers[:2]] == [False, True]
    job.answers.containers[0]["NetworkSettings"]["Networks"]["j_job"] = {"EndpointID": "third"}
    engine.nodes = engine._list_nodes()  # it was started again since
    assert engine.request(worker, ("x.py",)).filtered is True


def test_this_machine_must_reach_only_the_ports_of_the_master_that_a_job_publishes(job):
    protected(job, dataclasses.replace(SPEC, ports=["16006:6006"]))
    bodies = [body for request, _, body in job.answers.asked if request == CREATE]
    opened = {
        body["HostConfig"]["NetworkMode"].rstrip("0"): [word for word in body["Entrypoint"] if word.startswith("tcp:")]
        for body in bodies
    }
    assert opened == {"container:j-master-": ["tcp:6006"], "container:j-trainer-1-": []}


def test_a_node_that_has_restarted_must_get_its_filter_before_workers_start(job):
    engine = protected(job)
    engine.connect = lambda node: None
    job.answers.containers[1]["NetworkSettings"]["Networks"]["j_job"] = {"EndpointID": "second"}
    engine.start(job.plan(SPEC))
    assert len(helped(job)) == len(job.answers.requests("DELETE")) == 3


def test_nodes_of_a_cluster_must_be_filtered_when_up_returns(job):
    job.answers.refusals[CREATE] = REFUSALS[CREATE]
    for name in ("master", "trainer-1"):
        job.answers.container(name, "c")
    engine = job.session(SPEC, cluster="c")
    engine.up(job.plan(SPEC, cluster="c"))
    assert len(job.warnings()) == 1
    job.answers.asked.clear()
    engine.down(0)
    with pytest.raises(RuntimeError, match="after shutdown"):  # no helper starts while nodes are removed
        engine.guard.pool.submit(print)


def test_a_helper_that_runs_must_be_awaited_before_its_node_is_removed(job):
    ending = threading.Event()
    job.answers.on_request = lambda request: request == END and ending.wait(30)
    node, spec = job.answers.container("master"), JobSpec(trainers=0)
    engine = job.session(spec)
    engine.up(job.plan(spec))
    threading.Timer(0.05, ending.set).start()
    engine.down(0)
    assert job.answers.requests("DELETE") == ["DELETE /containers/made", f"DELETE /containers/{node['Id']}"]


@pytest.mark.parametrize("options", [{"host_access": True}, {"network": "host"}])
def test_no_helper_must_be_created_if_nodes_may_reach_their_host(job, options):
    spec = JobSpec(trainers=1, **options)
    for name in ("master", "trainer-1"):
        job.answers.container(name)["NetworkSettings"]["Networks"] = {options.get("network", "j_job"): {}}
    engine = job.session(spec)
    engine.up(job.plan(spec))
    again(engine)
    assert engine.guard is None and helped(job) == [] and job.warnings() == []
    assert engine.request(job.plan(spec).workers[0], ("x.py",)).filtered is False


def test_a_helper_must_never_use_the_jobs_image_and_a_missing_image_must_be_reported(job):
    job.answers.refusals[CREATE] = 404, f"No such image: {IMAGE}"
    protected(job)
    assert {body["Image"] for request, _, body in job.answers.asked if request == CREATE} == {IMAGE}
    (warning,) = job.warnings()
    assert f"the engine has no image {IMAGE}" in warning and "docker compose build" in warning


REFUSALS = {
    CREATE: (500, "no space left"),
    "POST /containers/made/start": (400, 'exec: "python": executable file not found in $PATH'),
    END: (500, "the helper was lost"),
}


@pytest.mark.parametrize("refused", REFUSALS)
def test_the_user_must_be_warned_once_of_unprotected_nodes(job, refused):
    job.answers.refusals[refused] = REFUSALS[refused]
    engine = protected(job)
    (warning,) = job.warnings()
    assert REFUSALS[refused][1] in warning and "host_access: true" in warning
    assert job.warnings() == []
    job.answers.containers[1]["NetworkSettings"]["Networks"]["j_job"] = {"EndpointID": "second"}
    again(engine)
    assert job.warnings() == []
    assert len(job.answers.requests("DELETE")) == (0 if refused == CREATE else 3)


def test_the_user_must_be_warned_of_helpers_that_failed_before_they_were_awaited(job):
    job.answers.refusals[CREATE] = REFUSALS[CREATE]
    job.answers.container("master")
    spec = JobSpec(trainers=0)
    engine = job.session(spec)
    engine.up(job.plan(spec))
    wait(engine.guard.begun.values())
    engine.connect = lambda node: None
    engine.start(job.plan(spec))
    engine.down(0)  # at once
    assert len(job.warnings()) == 1


def test_the_output_of_a_failed_helper_must_be_in_the_warning(job):
    job.answers.code = 1
    job.answers.output = b"Traceback ...\nOSError: [Errno 95] Operation not supported\n"
    protected(job)
    (warning,) = job.warnings()
    assert "OSError: [Errno 95] Operation not supported" in warning
    assert job.answers.query_of("GET /containers/made/logs")[0]["tail"] == "1"


def test_there_must_be_no_warning_about_a_node_that_is_gone(job):
    job.answers.refusals[CREATE] = (409, "cannot join network of a non running container")
    job.answers.on_request = lambda request: (
        job.answers.containers[1].update(State="exited") if request == CREATE else None
    )
    for name in ("master", "trainer-1"):
        job.answers.container(name)
    engine = job.session()
    engine.up(job.plan())
    job.answers.containers[0]["State"] = "exited"
    again(engine)
    assert job.warnings() == []


def test_helpers_left_by_a_dead_orchestrator_must_be_found_and_removed(job):
    left = job.answers.container("guard-1a2b3c4d")
    left["Names"] = ["/j-guard-1a2b3c4d"]
    left["Labels"] = {"orchestrate.guard": "j", "orchestrate.run": "/runs/j"}
    job.answers.container("other")["Labels"] = {"orchestrate.guard": "other"}
    job.answers.container("strange")["Labels"] = {"orchestrate.guard": "j"}  # without our other labels
    like = job.answers.container("like")
    like |= {"Names": ["/j-guardian"], "Labels": {"orchestrate.guard": "j"}}
    engine = job.engine()
    assert engine.resources("j") == ["container j-guard-1a2b3c4d"]
    assert engine.jobs() == []  # it is no node
    engine.remove("j", 30)
    assert job.answers.requests() == [f"DELETE /containers/{left['Id']}"]
