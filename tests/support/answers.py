"""A fake Docker Engine: its API on a Unix socket, with made-up containers and a record of all requests."""

import contextlib
import json
import os
import queue
import re
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import yaml

from orchestrate.engines.docker import client as daemon_module
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.engine import DockerEngine
from orchestrate.engines.docker.session import DockerSession
from orchestrate.host import records, users
from orchestrate.plan.plan import Plan
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec
from support.ends import KEY, End
from support.plans import HERE, plan

INFO = {
    "OperatingSystem": "Debian GNU/Linux 12 (bookworm)",
    "ServerVersion": "26.1.5",
    "NCPU": 4,
    "MemTotal": 8 << 30,
    "Runtimes": {"runc": {}},
    "DefaultRuntime": "runc",
    "SecurityOptions": ["name=seccomp,profile=builtin"],
}
SPEC = JobSpec(trainers=1, host_access=True)  # otherwise requests for helper containers come at any time
VERSION = {"Version": "26.1.5", "ApiVersion": "1.44", "MinAPIVersion": "1.24"}


class Answers:
    """The state of the engine and its answers; `refusals` are status codes and messages by request."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "docker.sock"
        self.info: dict[str, Any] = dict(INFO)
        self.containers: list[dict[str, Any]] = []
        self.networks: list[dict[str, Any]] = []
        self.images: set[str] = set()
        self.started = "2026-01-01T00:00:00.123456789Z"  # start time of all containers
        self.volumes: list[str] = []  # that each image declares
        self.output, self.code = b"", 0  # of a container created through the API
        self.refusals: dict[str, tuple[int, str]] = {}
        self.replies: dict[str, Any] = {}  # content of answers by request, instead of the made-up ones
        self.cut_off: set[str] = set()  # requests whose answers end too early
        self.on_request: Callable[[str], None] = lambda request: None  # called with each request
        self.on_stream: Callable[[str], None] = lambda request: None  # called before events are sent
        self.at_once = b""  # what an exec writes together with the answer to its start
        self.speaks: Callable[[socket], None] = lambda connection: None  # what an exec does with its connection
        self.asked: list[tuple[str, dict[str, str], Any]] = []  # method and path, query, body
        self.events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None ends the stream
        self.server = Server(str(self.path), type("Bound", (Handler,), {"engine": self}))
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"unix://{self.path}"

    def container(self, node: str, job: str = "j", state: str = "running", **labels: str) -> dict[str, Any]:
        """Add a container of a job, in the form of a list entry and with Compose's names."""
        service, _, number = node.partition("-")
        labels = {
            "orchestrate.job": job,
            "orchestrate.run": f"/runs/{job}/job",
            "orchestrate.owner": "7",
            "com.docker.compose.project": job,
            "com.docker.compose.service": service,
            "com.docker.compose.container-number": number or "1",
            **labels,
        }
        entry = {
            "Id": f"{job}-{node}-".ljust(64, "0"),
            "Names": [f"/{job}-{service}-{number or 1}"],
            "Labels": labels,
            "State": state,
            "NetworkSettings": {"Networks": {f"{job}_job": {}}},
        }
        self.containers.append(entry)
        return entry

    def network(self, job: str = "j") -> None:
        labels = {"orchestrate.job": job, "orchestrate.run": f"/runs/{job}/job", "orchestrate.owner": "7"}
        self.networks.append({"Id": f"net-{job}", "Name": f"{job}_job", "Driver": "bridge", "Labels": labels})

    def requests(self, *methods: str) -> list[str]:
        """The requests with these methods; by default, those that change something."""
        return [request for request, _, _ in self.asked if request.split()[0] in (methods or ("POST", "DELETE"))]

    def query_of(self, request: str) -> tuple[dict[str, str], Any]:
        """The query and the body of the last request of this kind."""
        return next((query, body) for asked, query, body in reversed(self.asked) if asked == request)

    def close(self) -> None:
        self.events.put(None)
        self.server.shutdown()
        self.server.server_close()

    def change(self, method: str, path_parts: list[str], body: Any) -> None:
        """Apply the effect of a request to containers and networks."""
        for one in [one for one in self.containers if one["Id"] in path_parts]:
            if method == "DELETE":
                self.containers.remove(one)
            one["State"] = {"start": "running", "kill": "exited", "stop": "exited"}.get(path_parts[-1], one["State"])
        for network in [network for network in self.networks if network["Id"] in path_parts]:
            if method == "DELETE":
                self.networks.remove(network)
            for one in self.containers if path_parts[-1] == "connect" else ():
                if one["Id"] == body["Container"]:
                    one["NetworkSettings"]["Networks"][network["Name"]] = {}

    def answer(self, request: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """The status and the content of the answer to a request."""
        self.asked.append((request, query, body))
        self.on_request(request)
        if request in self.refusals:
            status, message = self.refusals[request]
            return status, {"message": message}
        if request in self.replies:
            return 200, self.replies[request]
        filters = json.loads(query.get("filters", "{}"))
        method, _, path = request.partition(" ")
        if method == "GET" and (name := re.fullmatch(r"/images/(.+)/json", path)):
            config = {"Volumes": dict.fromkeys(self.volumes, {}) or None}
            return (
                (200, {"Id": "sha256:1", "Config": config})
                if name[1] in self.images
                else (404, {"message": "No such image"})
            )
        if request == "POST /images/create":
            self.images.add(f"{query['fromImage']}:{query['tag']}")
            return 200, {"status": "Downloading", "id": "1", "progressDetail": {"current": 3 << 20, "total": 8 << 20}}
        nodes = {f"GET /containers/{one['Id']}/json": one for one in self.containers}
        if request in nodes:
            running = nodes[request]["State"] == "running"
            return 200, {"Id": nodes[request]["Id"], "State": {"Pid": 0, "StartedAt": self.started, "Running": running}}
        known: dict[str, Callable[[], Any]] = {
            "GET /version": lambda: VERSION,
            "GET /info": lambda: self.info,
            "GET /_ping": lambda: "OK",
            "GET /containers/json": lambda: [one for one in self.containers if picked(one, filters)],
            "GET /volumes": lambda: {"Volumes": None},
            "GET /networks": lambda: [one for one in self.networks if picked(one, filters)],
            "POST /containers/create": lambda: {"Id": "made", "Warnings": []},
            "GET /containers/made/json": lambda: {"Id": "made", "Config": {"Tty": False}},
            "POST /containers/made/wait": lambda: {"StatusCode": self.code},
            "GET /containers/made/logs": lambda: framed(1, self.output),
        }
        if request in known:
            return 200, known[request]()
        self.change(method, path.split("/"), body)
        return (201, {"Id": "exec"}) if path.endswith("/exec") else (204, None)


def framed(stream: int, text: bytes) -> bytes:
    """Output of a container in the engine's stream framing."""
    return bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text


class Framed(End):
    """A node's end behind an engine's `exec`, which prefixes all output with a frame header."""

    def __init__(self, sock: socket, greets: bool = True) -> None:
        super().__init__(sock, listens=True, greets=greets)

    def _send(self, line: bytes) -> None:
        self.sock.sendall(framed(1, line + b"\n"))


def picked(thing: dict[str, Any], filters: dict[str, Any]) -> bool:
    """Whether an object matches the engine's list filters; a name filter matches any part of a name."""
    labels = [f"{key}={value}" for key, value in thing["Labels"].items()] + [*thing["Labels"]]
    return (
        set(filters.get("label", [])) <= set(labels)
        and all(name in thing["Name"] for name in filters.get("name", []))
        and all(thing["Driver"] == driver for driver in filters.get("driver", []))
    )


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Answers

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:  # noqa: N802
        parts = urlsplit(self.path)
        request = f"{self.command} {re.sub('^/v[0-9.]+', '', unquote(parts.path))}"
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(text) if text else None
        if request == "GET /events" and request not in self.engine.refusals:
            return self.stream(request, query)
        if request.endswith("/exec/exec/start"):
            self.engine.asked.append((request, query, body))
            head = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            self.wfile.write(head + self.engine.at_once)
            self.engine.speaks(self.connection)
            self.close_connection = True
            return
        if request in self.engine.cut_off:
            self.wfile.write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n30\r\n{"status')
            self.close_connection = True
            return
        status, content = self.engine.answer(request, query, body)
        sent = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        if status != 204:
            self.wfile.write(sent)

    do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815

    def stream(self, request: str, query: dict[str, str]) -> None:
        self.engine.asked.append((request, query, None))
        self.engine.on_stream(request)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while event := self.engine.events.get():
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True


class Job:
    """A job named j on a fake engine, and a fake `docker` command that records its calls."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.folder, self.paths = Answers(folder), folder, JobPaths(folder / "runs" / "j")
        self.paths.create(owner=users.nodes_of(SPEC.user))
        records.make(self.paths.root, KEY)
        self.run = self.paths.shared
        self.made: list[DockerEngine] = []
        self.sessions: list[DockerSession] = []
        self.warned: list[str] = []
        self.compose()
        monkeypatch.setenv("DOCKER_HOST", self.answers.host)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr("orchestrate.engines.docker.client.PLUGINS", ["/"])

    @property
    def sockets(self) -> Path:
        """The folder in which the job's nodes listen."""
        return self.paths.sockets

    def close(self) -> None:
        for session in self.sessions:
            session.events.close()
            session.events.bell.close()
            session.events._alarm.close()
            session.clients.selector.close()
            for connection in session.clients.connections.values():
                connection.close()
        for engine in self.made:
            close(engine.daemon)
        self.answers.close()

    def engine(self) -> DockerEngine:
        self.made.append(DockerEngine())
        return self.made[-1]

    def session(self, spec: JobSpec = SPEC, run: Path | None = None, **site: Any) -> DockerSession:
        """A session of the job; its warnings go to `warned`."""
        opened = self.engine().open(spec, self.plan(spec, **site), run or self.run, self.warned.append)
        self.sessions.append(opened)
        return opened

    def warnings(self) -> list[str]:
        """The warnings since the last call."""
        found = [*self.warned]
        self.warned.clear()
        return found

    def plan(self, spec: JobSpec = SPEC, **site: Any) -> Plan:
        return plan(spec, HERE.but(**{"code": "/code", **site}), "j")

    def settled(self, *nodes: str, spec: JobSpec = SPEC, **site: Any) -> DockerSession:
        """A session of the job with workers running on these nodes."""
        for name in nodes:
            self.answers.container(name)
        session = self.session(spec, **site)
        session.nodes, session.clients.generation = session._list_nodes(), 0
        session.clients.running = dict(enumerate(nodes))
        self.answers.asked.clear()
        return session

    def compose(self, script: str = "") -> None:
        path = self.folder / "docker"
        path.write_text(f"#!/bin/sh\ncd {self.folder}\necho $* > words\nenv > env\ncat > given\n{script}\n")
        path.chmod(0o755)

    def words(self) -> list[str]:
        """The arguments that Compose was called with; empty if it was not called."""
        path = self.folder / "words"
        return path.read_text().split() if path.exists() else []

    def given(self) -> list[dict[str, Any]]:
        """The mounts of a node that were passed to Compose in addition to those in its file."""
        services = yaml.safe_load((self.folder / "given").read_text())["services"]
        assert services["master"] == services["trainer"] and set(services) == {"master", "trainer"}
        return services["master"]["volumes"]

    def env(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.folder / "env").read_text().splitlines() if "=" in line)

    def happened(self, action: str, node: dict[str, Any], **attributes: str) -> None:
        """Make the engine report an event."""
        event = {"Action": action, "Type": "container", "time": 1, "timeNano": len(self.answers.asked)}
        labels = {"orchestrate.job": "j", **attributes}
        self.answers.events.put({**event, "Actor": {"ID": node["Id"], "Attributes": labels}})


def close(daemon: Daemon) -> None:
    """Close the connections of the SDK, if it was used."""
    if "client" in vars(daemon):
        daemon.client.close()


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """The engine that the user's `docker` command talks to."""
    instance = Answers(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", instance.host)
    monkeypatch.setattr(daemon_module, "PLUGINS", ["/"])
    yield instance
    instance.close()


@pytest.fixture
def daemon(answers: Answers) -> Iterator[Daemon]:
    """Our client of that engine."""
    instance = Daemon()
    yield instance
    close(instance)
