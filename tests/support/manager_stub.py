"""A fake Docker Engine that manages a Swarm of made-up hosts and answers the SDK's requests over HTTP."""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from orchestrate import clock as clocks
from orchestrate.engines.swarm.manager import Manager
from orchestrate.engines.swarm.objects import SwarmJob
from orchestrate.spec.spec import JobSpec
from support.ends import KEY
from support.plans import HERE, plan
from support.scripted import Clock

NAMES: dict[str, Callable[[str, str], bool]] = {  # how the engine's filter `name` compares
    "networks": lambda wanted, name: wanted in name,
    "secrets": lambda wanted, name: name.startswith(wanted),
    "containers": lambda wanted, name: bool(re.search(wanted, name)),
}


def host(number: int, cpus: int = 4, gpus: int = 0, state: str = "ready", availability: str = "active") -> dict:
    resources: dict[str, Any] = {"NanoCPUs": cpus * 1_000_000_000, "MemoryBytes": number << 33}
    if gpus:
        resources["GenericResources"] = [{"DiscreteResourceSpec": {"Kind": "NVIDIA-GPU", "Value": gpus}}]
    return {
        "ID": f"h{number}",
        "Description": {"Hostname": f"host-{number}", "Resources": resources},
        "Status": {"State": state, "Addr": "127.0.0.1"},
        "Spec": {"Availability": availability},
    }


def settled(run: Path, spec: JobSpec, clock: clocks.Clock = clocks.SYSTEM) -> SwarmJob:
    """A job `j` with a network and a key."""
    job = SwarmJob(Manager(clock), spec, plan(spec, HERE, "j"), run, KEY)
    job.prepare()
    return job


def scale(job: SwarmJob, role: str, more: int) -> None:
    job.spec = JobSpec(trainers=2, user=str(os.getuid()))  # the owner of the test's folder
    job.scale(role, more)


class StubManager:
    """The state of the Swarm, for tests to read and change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer as the engine that the user's `docker` command talks to, until `close`."""
        swarm = {"ControlAvailable": True, "LocalNodeState": "active", "NodeAddr": "10.1.1.1"}
        self.info = {"ServerVersion": "26.1.5", "Swarm": swarm}
        self.hosts = [host(1), host(2)]
        self.tasks: list[dict] = []
        self.services: list[dict] = []
        self.secrets: list[dict] = []
        self.networks: list[dict] = [{"Id": name, "Name": name, "Labels": {}} for name in ("bridge", "host", "ingress")]
        self.containers: list[dict] = []
        self.state = "running"  # of new tasks
        self.refused: dict[str, str] = {}  # reasons by prefix of the request, such as DELETE /networks
        self.status = 409  # of refused requests
        self.log = b""  # of every service
        self.asked: list[str] = []  # each request: method, path and query
        self.made: list[dict] = []  # the bodies of requests that create or change something
        self.placed: Callable[[dict], None] = lambda task: None  # called for each new task
        self.last_listed: Callable[[], None] = lambda: None  # called before tasks are listed
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.server.daemon_threads = True
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{self.server.server_port}")
        # Compose need not be installed.
        monkeypatch.setattr("orchestrate.engines.docker.client.PLUGINS", [__file__])
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def overlays(self) -> list[dict]:
        """The networks that were created."""
        return self.networks[3:]

    def task(self, name: str) -> dict:
        """The newest task of a node."""
        role, _, slot = name.partition("-")
        return [one for one in self.tasks if one["role"] == role and one["Slot"] == int(slot or 1)][-1]

    def place(self, service: dict, slot: int, on: str = "") -> dict:
        """Add a task of a service."""
        template, number = service["Spec"]["TaskTemplate"], len(self.tasks)
        ready = [one["ID"] for one in self.hosts if one["Status"]["State"] == "ready"]
        task = {
            "ID": f"t{number}",
            "CreatedAt": f"2026-01-01T00:00:{number:02}Z",
            "role": template["ContainerSpec"]["Labels"]["orchestrate.role"],
            "Labels": service["Spec"]["Labels"],
            "ServiceID": service["ID"],
            "Slot": slot,
            "NodeID": on or ready[number % len(ready)],
            "Spec": template,
            "Status": {"State": self.state},
            "DesiredState": "running",
            "NetworksAttachments": [
                {"Network": {"Spec": {"Name": "ingress"}}, "Addresses": ["10.0.0.99/24"]},
                *(
                    {"Network": {"Spec": {"Name": network["Name"]}}, "Addresses": [f"10.0.1.{number}/24"]}
                    for network in self.networks
                    if network["Id"] == template["Networks"][0]["Target"]
                ),
            ],
        }
        self.tasks.append(task)
        self.placed(task)
        return task

    # --- the requests

    def get(self, kind: str, name: str, query: dict[str, str]) -> Any:
        if kind in ("version", "info"):
            return {"ApiVersion": "1.43"} if kind == "version" else self.info
        if kind == "images":
            return {"Id": "sha256:1", "RepoDigests": [f"{name}@sha256:2"]}
        found = self.hosts if kind == "nodes" else getattr(self, kind)
        if name and name != "json":
            (one,) = [one for one in found if name in (one.get("ID"), one.get("Id"), one.get("Name", "").lstrip("/"))]
            return one
        if kind == "tasks":
            self.last_listed()
        filters = json.loads(query.get("filters", "{}"))
        return [one for one in found if matches(kind, one, filters)]

    def create(self, kind: str, query: dict[str, str], body: dict) -> Any:
        number = f"{kind[0]}{len(self.made)}"
        if kind == "services":
            self.services.append({"ID": number, "Version": {"Index": 7}, "Spec": body})
            for slot in range(body["Mode"]["Replicated"]["Replicas"]):
                self.place(self.services[-1], slot + 1)
            return {"ID": number}
        if kind == "secrets":
            self.secrets.append({"ID": number, "Spec": {"Name": body["Name"], "Labels": body["Labels"]}})
            return {"ID": number}
        if kind == "networks":
            self.networks.append({"Id": number, **body})
        else:
            self.containers.append(container(query["name"], number, "created", **body))
        return {"Id": number}

    def update(self, number: str, body: dict) -> Any:
        (service,) = [one for one in self.services if one["ID"] == number]
        before, service["Spec"] = service["Spec"]["Mode"]["Replicated"]["Replicas"], body
        for slot in range(before, body["Mode"]["Replicated"]["Replicas"]):
            self.place(service, slot + 1)
        return {}

    def delete(self, kind: str, number: str) -> None:
        found = getattr(self, kind)
        found[:] = [one for one in found if number not in (one.get("ID"), one.get("Id"))]
        self.tasks[:] = [task for task in self.tasks if task["ServiceID"] != number or not self.answers(task)]

    def answers(self, task: dict) -> bool:
        return any(one["ID"] == task.get("NodeID") and one["Status"]["State"] == "ready" for one in self.hosts)


def container(name: str, number: str = "c", status: str = "running", **body: Any) -> dict:
    address = "10.0.1.200" if status == "running" else ""
    labels, network = body.get("Labels") or {}, (body.get("HostConfig") or {}).get("NetworkMode", "")
    return {
        "Id": number,
        "Name": f"/{name}",
        "Names": [f"/{name}"],
        "Labels": labels,
        "Config": {**body, "Labels": labels},
        "State": {"Status": status},
        "NetworkSettings": {"Networks": {network: {"IPAddress": address}}},
    }


def matches(kind: str, thing: dict, filters: dict[str, list[str]]) -> bool:
    spec = thing.get("Spec", {})
    labels = thing.get("Labels") or spec.get("Labels") or {}
    name = thing.get("Name") or spec.get("Name", "")
    return all(
        key in labels and (not equal or labels[key] == value)
        for key, equal, value in (label.partition("=") for label in filters.get("label", []))
    ) and all(NAMES[kind](wanted, name) for wanted in filters.get("name", []))


def handler(stub: StubManager) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self) -> None:
            url = urlsplit(self.path)
            path = re.sub(r"^/v[\d.]+/", "/", unquote(url.path))
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            request = f"{self.command} {path}"
            stub.asked.append(f"{request}?{url.query}")
            why = [why for start, why in stub.refused.items() if request.startswith(start)]
            _, kind, name, action, *_ = [*path.split("/"), "", ""]
            if why:
                return self.say(stub.status, json.dumps({"message": why[0]}).encode())
            if self.command == "GET" and action == "logs":
                return self.say(200, stub.log)
            if self.command == "GET":
                return self.say(200, json.dumps(stub.get(kind, name, query)).encode())
            if action == "start":
                one = stub.get(kind, name, query)
                one.update(container(one["Name"][1:], name, **one["Config"]))
            if self.command == "DELETE":
                stub.delete(kind, name)
            if self.command == "POST" and (name == "create" or action == "update"):
                stub.made.append({**body, "kind": kind})
                created = stub.create(kind, query, body) if name == "create" else stub.update(name, body)
                return self.say(201, json.dumps(created).encode())
            self.say(204, b"")

        do_GET = do_POST = do_DELETE = answer

        def say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubManager]:
    """The engine that the user's `docker` command talks to."""
    instance = StubManager(monkeypatch)
    yield instance
    instance.close()


@pytest.fixture
def clock() -> Clock:
    """A clock that advances only while the Swarm engine waits."""
    return Clock()
