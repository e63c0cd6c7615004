"""Services of a job on a simulated engine: what Compose is asked for, and what is reported and removed at the end."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from support.answers import SPEC, Job, framed
from support.ends import KEY

from orchestrate.engines.docker.session import DockerSession
from orchestrate.errors import EngineError, EngineLost, ResourceError, UsageError
from orchestrate.host import records, users, writable
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec


@pytest.fixture
def job(tmp_path, monkeypatch) -> Iterator[Job]:
    job = Job(tmp_path, monkeypatch)
    for name in ("master", "trainer-1"):
        job.answers.container(name)
    compose(job, "store")
    yield job
    job.close()


def spec(job: Job) -> JobSpec:
    return dataclasses.replace(SPEC, services=str(job.folder / "my services.yaml"))


def compose(job: Job, *names: str, up: str = "", **facts: Any) -> None:
    """Make Compose describe these services, after a warning, and run the script `up` to start them."""
    text = json.dumps({"services": dict.fromkeys(names, facts)}, indent=1)
    job.compose(f"case \"$*\" in *config*) echo a warning; echo '{text}';; *) {up or 'true'};; esac")


def up(job: Job, stops: bool = False) -> DockerSession:
    session = job.session(spec(job))
    session.up(job.plan(spec(job)), lambda: stops)
    return session


def service(job: Job, name: str, output: str, status: str = "exited", code: int = 0, **state: Any) -> str:
    """Add the container of a service, and return its id."""
    entry = job.answers.container(name)
    entry["Names"] = [f"/{name}"]
    entry["Labels"] = {"orchestrate.services": "j", "com.docker.compose.project": "j-services"}
    path, state = f"GET /containers/{entry['Id']}", {"Status": status, "ExitCode": code, **state}
    facts = {"Id": entry["Id"], "Name": f"/{name}", "State": state}
    facts["Config"] = {"Tty": False, "Labels": {"com.docker.compose.service": name}}
    job.answers.replies |= {f"{path}/json": facts, f"{path}/logs": framed(1, output.encode())}
    return str(entry["Id"])


def test_services_must_be_started_on_the_jobs_network_and_those_that_run_kept(job):
    up(job)
    file = job.folder / "my services.yaml"
    arguments = f"compose --project-directory {job.folder} --project-name j-services --file {file} --file - up"
    assert " ".join(job.words()[2:]) == f"{arguments} --detach --wait --quiet-pull --no-recreate"
    added = {"labels": {"orchestrate.services": "j"}, "networks": {"orchestrate": {}}}
    networks = {"orchestrate": {"name": "j_job", "external": True}}
    assert yaml.safe_load((job.folder / "given").read_text()) == {"services": {"store": added}, "networks": networks}


@pytest.mark.parametrize("where", ["there", "link"])
@pytest.mark.parametrize(
    "facts",
    [
        {"volumes": [{"type": "bind", "source": "PATH", "target": "/html"}]},
        {"build": {"context": "PATH"}},
        {"configs": [{"file": "PATH"}]},
        {"driver_opts": {"device": "PATH"}},
    ],
)
def test_a_service_must_not_see_what_a_job_could_put_in_the_place_of_a_folder(job, where, facts):
    (job.folder / "cache" / "there").mkdir(parents=True)
    (job.folder / "cache" / "link").symlink_to(job.folder)
    writable.note([job.folder / "cache"])
    compose(job, "store", **json.loads(json.dumps(facts).replace("PATH", f"{job.folder}/cache/{where}")))
    with pytest.raises(UsageError, match="where a job could put another folder|where a job may have made the link"):
        up(job)
    assert "up" not in job.words()
    compose(job, "store", environment={"file": f"{job.folder}/cache/{where}"}, volumes=[{"source": "/no/folder"}])
    up(job)


@pytest.mark.parametrize("name", ["master", "trainer"])
def test_a_service_with_the_name_of_a_node_must_be_refused(job, name):
    compose(job, "store", name)
    with pytest.raises(UsageError, match=f"has a service {name}, which is the name of a node"):
        up(job)
    assert "up" not in job.words()


def test_the_last_lines_of_services_that_failed_must_be_in_the_error_and_of_no_other(job):
    compose(job, "store", up="echo no luck; exit 1")
    ended = service(job, "store", "no\nconfiguration\n", code=1)
    service(job, "sick", "no answer\n", "running", Health={"Status": "unhealthy"})
    service(job, "well", "listening\n", "running", Health={"Status": "healthy"})
    with pytest.raises(ResourceError, match="did not start: docker compose: no luck\n") as error:
        up(job)
    shown = {line.strip() for line in str(error.value).splitlines()[1:]}
    assert shown == {"store | no", "store | configuration", "sick | no answer"}
    assert job.answers.query_of(f"GET /containers/{ended}/logs")[0]["tail"] == "10"
    assert job.answers.query_of("GET /containers/json")[0]["all"] == "1"
    assert error.value.hint.startswith(f"docker compose --file '{job.folder}/my services.yaml' up ")


def test_a_service_that_has_done_its_work_must_not_count_as_failed(job):
    one = 'case "$*" in *no-deps*) ;; *) echo setup exited with 0; exit 1;; esac'
    compose(job, "store", "setup", up=one)
    service(job, "setup", "done\n")
    up(job)
    assert job.words()[-2:] == ["--no-deps", "store"]


@pytest.mark.parametrize(
    ("line", "stops", "kind"),
    [("error during connect: EOF", False, EngineLost), ("it was interrupted", True, EngineError)],
)
def test_services_must_not_be_blamed_for_a_lost_engine_or_a_stopped_job(job, line, stops, kind):
    compose(job, "store", up=f"echo {line}; exit 1")
    with pytest.raises(EngineError, match=line) as error:
        up(job, stops)
    assert type(error.value) is kind


def test_services_that_are_slow_to_start_must_end_at_once_with_a_stopped_job(job):
    compose(job, "store", up="exec sleep 2")  # it would start in the time that nodes get
    with pytest.raises(EngineError, match="did not exit in time"):
        up(job, stops=True)


@pytest.mark.parametrize("lost", ["", "output"])
def test_services_must_be_removed_after_their_failures_and_output_are_reported(job, lost):
    session = up(job)
    ids = [service(job, "store", "oh\n", code=3), service(job, "setup", "done\n")]
    ids.append(service(job, "db", "", "running", code=9))
    stranger = job.answers.container("stranger")
    stranger["Labels"] = {"com.docker.compose.project": "j-services"}
    for name, label in (("net", "j-services"), ("other", "k-services")):
        job.answers.networks.append({"Id": name, "Name": name, "Labels": {"com.docker.compose.project": label}})
    job.answers.replies["GET /volumes"] = {"Volumes": [{"Name": "used"}, {"Name": "kept"}]}
    job.answers.refusals["DELETE /volumes/used"] = 409, "volume is in use"
    job.answers.refusals["DELETE /networks/net"] = 403, "network net has active endpoints"
    if lost == "output":
        job.answers.refusals[f"GET /containers/{ids[0]}/logs"] = 500, "no such file"
    job.answers.asked.clear()
    session.down(0)
    failed, *more = job.warnings()
    assert failed == "the service store has ended with exit code 3"
    if lost:
        assert more[0].startswith("the output of the services is lost: the engine could not read the output")
    else:
        parts = session.services_log.read_text().split("--- ")
        assert not more and sorted(parts) == ["", "db\n", "setup\ndone\n\n", "store\noh\n\n"]
        assert job.answers.query_of(f"GET /containers/{ids[0]}/logs")[0]["tail"] == "10000"
    requests = job.answers.requests()
    assert {*requests[:3]} == {f"POST /containers/{one}/stop" for one in ids}
    assert {*requests[3:6]} == {f"DELETE /containers/{one}" for one in ids}
    assert requests[6:9] == ["DELETE /networks/net", "DELETE /volumes/used", "DELETE /volumes/kept"]
    assert job.answers.query_of(requests[0])[0]["t"] == "5"
    assert job.answers.query_of(requests[3])[0] == {"v": "true", "force": "true"}
    assert '["com.docker.compose.project=j-services"]' in job.answers.query_of("GET /volumes")[0]["filters"]
    assert stranger in job.answers.containers


@pytest.mark.parametrize("cluster", ["c", "j"])
def test_services_must_belong_to_a_job_and_not_to_the_cluster_that_it_runs_on(job, cluster):
    nodes = JobPaths(job.folder / "runs" / "c")
    nodes.create(owner=users.nodes_of(SPEC.user))
    records.make(nodes.root, KEY)
    session = job.session(spec(job), nodes.shared, cluster=cluster)
    if cluster == "j":  # the nodes of the cluster itself
        assert session.services is None
    else:
        assert session.services and session.services.project == "j-services" and session.services.network == "c_job"
        assert session.services_log.parent.name == "j"


def test_of_a_service_that_prints_without_end_only_the_last_bytes_must_be_kept(job, monkeypatch):
    monkeypatch.setattr("orchestrate.engines.docker.services.MAX_BYTES", 10)
    session = up(job)
    service(job, "db", "0123456789abcdef", "running")
    session.down(0)
    assert session.services_log.read_text() == "--- db\n6789abcdef"


def test_the_start_of_what_is_kept_must_have_no_part_of_a_secret(job, monkeypatch):
    monkeypatch.setattr("orchestrate.engines.docker.services.MAX_BYTES", 10)
    asked = dataclasses.replace(spec(job), env={"A_TOKEN": "hunter22"})
    session = job.session(asked)
    session.up(job.plan(asked))
    service(job, "db", "login hunter22 is done", "running")
    session.down(0)
    assert session.services_log.read_text() == "--- db\n is done"


def test_of_a_service_with_a_terminal_little_more_must_be_read_than_is_kept(job, monkeypatch):
    monkeypatch.setattr("orchestrate.engines.docker.services.MAX_BYTES", 3 << 14)
    session = up(job)
    path = f"GET /containers/{service(job, 'db', '', 'running')}"
    job.answers.replies[f"{path}/json"]["Config"]["Tty"] = True
    job.answers.replies[f"{path}/logs"] = b"x" * 60_000
    session.down(0)
    assert session.services_log.read_text() == "--- db\n" + "x" * (3 << 14)
    assert job.answers.query_of(f"{path}/logs")[0]["tail"] == "11"  # and a margin
