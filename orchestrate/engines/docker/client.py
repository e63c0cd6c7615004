"""Access to the Docker Engine and Compose: its API, the Compose command, and a stream of events."""

from __future__ import annotations

import calendar
import contextlib
import functools
import logging
import os
import queue
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrate.console import print_message
from orchestrate.engines.base import never
from orchestrate.engines.build_output import advice, essence, follow
from orchestrate.engines.connection import ANSWER_TIMEOUT, NodeConnection
from orchestrate.engines.docker.api import Api, Container, Refused, Unreachable, address, errors, frames, refusals
from orchestrate.errors import EngineError, EngineLost, ResourceError
from orchestrate.files.paths import PROJECT
from orchestrate.host import users
from orchestrate.spec.spec import JobSpec

if TYPE_CHECKING:
    from docker import DockerClient

log = logging.getLogger(__name__)

NOBODY = "65534:65534"  # user of processes that are started in containers next to a node
COMPOSE_TIMEOUT = 600  # seconds for Compose to start or remove nodes
COMPOSE_STOP_TIMEOUT = 10.0  # seconds to exit after `stopped()`, and again after SIGTERM
GET_DOCKER = "start Docker (systemctl start docker, or Docker Desktop), or use --engine process"
GET_ACCESS = "sudo usermod -aG docker $USER, then log in again; or use --engine process"
PLUGINS = [  # where the `docker` command looks for Compose on Linux
    f"{folder}/cli-plugins/docker-compose"
    for folder in (
        os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"),
        "/usr/local/lib/docker",
        "/usr/local/libexec/docker",
        "/usr/lib/docker",
        "/usr/libexec/docker",
    )
]
TAKEN = re.compile(r"Bind for [\d.]+:(\d+) failed|listen tcp4? [\d.]+:(\d+): bind: address already in use")
FOOTERS = ("For more help on how to use Docker", "Run 'docker --help'")  # of `docker` without its Compose plugin
NO_NETWORKS = (
    "Docker's address pools are used up (31 networks by default): remove networks (docker network prune), "
    "or add default-address-pools to its daemon.json"
)


class Daemon:
    """The Docker Engine that the user's `docker` command uses."""

    def __init__(self) -> None:
        """Connect; raises EngineLost if no engine answers, EngineError or ResourceError if it cannot be used."""
        self.host = address()
        self.api = Api(self.host)
        try:
            self.info: dict[str, Any] = dict(self.api.get("/info"))
        except (Refused, Unreachable, TypeError, ValueError) as error:  # the last two if another program answers
            why = reason(error)
            hint = GET_ACCESS if why == "permission denied" else GET_DOCKER
            raise EngineLost(f"cannot connect to Docker at {self.host}: {why}", hint) from None
        try:
            if not any(map(os.path.exists, PLUGINS)):  # running it takes a tenth of a second
                self.compose("version", capture=True)
        except EngineError as error:
            raise ResourceError(f"Docker Compose v2 is missing: {error}", "install the docker-compose plugin") from None

    @functools.cached_property
    def client(self) -> DockerClient:
        """Docker's SDK, for what few commands need; raises ResourceError without it, EngineError if it fails."""
        try:
            import docker
        except ModuleNotFoundError as error:
            hint = f"install it ({sys.executable} -m pip install docker)"
            raise ResourceError(f"the Python package {error.name} is missing", hint) from None
        try:
            return docker.DockerClient(base_url=self.host, version="auto", max_pool_size=32)
        except Exception as error:  # it also parses Docker's config file, with many kinds of errors
            raise EngineError(f"cannot connect to Docker at {self.host}: {reason(error)}") from None

    def user(self, run: Path, spec: JobSpec) -> str:
        """Return user and group of the nodes: the owner of the folder `run`; 0:0 on a rootless engine.

        Raises EngineError if the owner is root and the job does not ask for root: some file systems store no owners.
        """
        if any("rootless" in option for option in self.info.get("SecurityOptions") or []):
            return "0:0"
        owner = run.lstat()
        if not stat.S_ISDIR(owner.st_mode):
            raise EngineError(f"{run} is not a folder", "start the job, or the cluster, again")
        asked = users.asked(spec.user)
        if owner.st_uid == 0 and (asked is None or asked[0] != 0):
            raise EngineError(
                f"nodes would run as root: {run} is owned by root",
                "use --runs DIR on a file system that stores owners, or --set user=root to run nodes as root",
            )
        ours = owner.st_uid == os.geteuid() != 0  # a folder with set-group-ID passes its group on to new files
        return f"{owner.st_uid}:{os.getegid() if ours else owner.st_gid}"

    def containers(self, label: str) -> list[Container]:
        """Return the containers with a label, running or not."""
        with self.translating_errors("could not list its containers"):
            return self.api.containers(label)

    def started_recently(self, container: Container, seconds: float) -> bool:
        """Whether a container is running and was started less than `seconds` ago."""
        with self.translating_errors(f"could not inspect {name_of(container)}"):
            state = self.api.get(f"/containers/{container.id}/json")["State"]
        started = calendar.timegm(time.strptime(state["StartedAt"][:19], "%Y-%m-%dT%H:%M:%S"))  # always UTC
        return bool(state["Running"]) and time.time() - started < seconds

    @contextlib.contextmanager
    def translating_errors(self, what: str) -> Iterator[None]:
        """Convert errors of requests: EngineError `the engine WHAT: …`, or EngineLost if it does not respond."""
        try:
            yield
        except refusals() as error:
            log.debug("the engine %s", what, exc_info=True)
            raise EngineError(f"the engine {what}: {reason(error)}") from None
        except errors() as error:
            log.debug("the engine does not respond", exc_info=True)
            raise EngineLost(f"the engine does not respond: {reason(error)}", GET_DOCKER) from None

    def image(self, name: str) -> dict[str, Any] | None:
        """Return what the engine knows about an image; None if it does not exist."""
        with self.translating_errors(f"could not inspect {name}"):
            try:
                return dict(self.api.get(f"/images/{name}/json"))
            except Refused as error:
                if error.status_code != HTTPStatus.NOT_FOUND:
                    raise
        return None

    def networks(self, **filters: list[str]) -> list[dict[str, Any]]:
        """Return the networks that match; a name matches all that contain it."""
        return list(self.api.get("/networks", filters=filters))

    def network(self, name: str) -> dict[str, Any]:
        """Return the network with exactly this name; empty if there is none."""
        return next((found for found in self.networks(name=[name]) if found["Name"] == name), {})

    def each(self, containers: Iterable[Container], action: Callable[[Container], Any]) -> None:
        """Call `action` for all containers in parallel; ignore containers that are gone or not running."""

        def run_action(container: Container) -> None:
            with self.translating_errors(f"could not change the state of {name_of(container)}"):
                try:
                    action(container)
                except Refused as error:
                    if error.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                        raise

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(run_action, containers))

    def connect_by_exec(
        self, container: str, command: list[str], key: bytes, patience: float = ANSWER_TIMEOUT
    ) -> NodeConnection | None:
        """Run a command in a container that connects its stdin and stdout to a node; None if the node does not respond.

        `key` is the node's key; the node must answer within `patience` seconds.
        """
        with self.translating_errors(f"could not run a command in {container[:12]}"):
            try:
                # Workers can trace a process that runs as their user, and read its environment.
                options: dict[str, Any] = {"stdin": True, "environment": {"NODE_KEY": ""}, "user": NOBODY}
                exec_id = self.client.api.exec_create(container, command, **options)["Id"]
                stream: Any = self.client.api.exec_start(exec_id, socket=True)
            except refusals() as error:
                if getattr(error, "status_code", 0) in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                    return None
                raise
        frames = Frames()
        sock = stream._sock.dup()  # the SDK's own socket is closed only by the garbage collector
        connection = NodeConnection(sock, key, frames.stdout)
        connection.partial += frames.stdout(_buffered_output(stream))
        stream._response.close()
        return connection if connection.greet(patience) else None

    def compose(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        given: str = "",
        capture: bool = False,
        stopped: Callable[[], bool] = never,
        folder: Path = PROJECT,
        patience: float | None = None,
        hide: Callable[[str], str] = str,
    ) -> str:
        """Run Compose in a folder, with `given` as its stdin; return its output.

        Without `capture`, show its output as progress, masked by `hide`, and print it if it fails; otherwise, stop it
        `patience` seconds (default: COMPOSE_STOP_TIMEOUT) after `stopped()`.
        Raises EngineError with the last line of its output.
        """
        ours = ("COMPOSE_", "NODE_") if folder == PROJECT else ("COMPOSE_",)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stdin:
            stdin.write(given)
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    ["docker", "--host", self.host, "compose", "--project-directory", str(folder), *arguments],
                    cwd="/",  # Compose turns it into a URL, which cannot contain a line break
                    env=inherited | (env or {}),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C must not reach it: we end it, and remove what it starts
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                )
            except (FileNotFoundError, PermissionError) as error:
                what = "no docker command on PATH" if isinstance(error, FileNotFoundError) else "cannot run docker"
                raise ResourceError(what, "install it, with its Compose plugin") from None
        start = time.monotonic()
        with process:
            left = COMPOSE_STOP_TIMEOUT if patience is None else patience
            output = _output_of(process, stopped, left) if capture else "\n".join(follow(process, hide))
        duration = time.monotonic() - start
        log.debug("docker compose %s: exit code %d in %.2f s", shlex.join(arguments), process.returncode, duration)
        if process.returncode:
            if not capture:
                print_message(essence(output))
            lines = [line for line in output.splitlines() if line.strip() and not line.startswith(FOOTERS)]
            line = (lines or ["it failed"])[-1].strip()
            message = f"docker compose: {line}"
            if "Cannot connect to the Docker daemon" in line or "error during connect" in line:
                raise EngineLost(message, GET_DOCKER)
            if taken := TAKEN.search(line):
                port = taken[1] or taken[2]
                hint = f"end the program that uses it, or choose another port: --set ports={int(port) + 1}:THERE"
                raise EngineError(f"port {port} of this machine is in use", hint)
            raise EngineError(message, NO_NETWORKS if "address pool" in line else advice(output))
        return output


def _output_of(process: subprocess.Popen[str], stopped: Callable[[], bool], patience: float) -> str:
    """Return the output of a process, a group leader, once it has exited; raises EngineError if it was killed.

    After `stopped()` or Ctrl-C it gets some time: objects that it is creating can be removed only once they exist.
    """
    deadline, stopping, terminated = time.monotonic() + COMPOSE_TIMEOUT, False, False
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            output = process.communicate(timeout=0.2)[0]
            break
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt as error:
            interrupt = error
        if (interrupt or stopped()) and not stopping:
            deadline, stopping = time.monotonic() + patience, True
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL if terminated else signal.SIGTERM)
            deadline, terminated = time.monotonic() + COMPOSE_STOP_TIMEOUT, True
    if interrupt:
        raise interrupt
    if terminated:
        raise EngineError("docker compose did not exit in time")
    return output


class Frames:
    """Decoder for the output of an exec, which the engine sends in frames."""

    def __init__(self) -> None:
        self.partial = b""

    def stdout(self, chunk: bytes) -> bytes:
        """Return the stdout in the next chunk; a frame is a stream number, three zero bytes, a length and the data."""
        self.partial += chunk
        found = [*frames(self.partial)]
        self.partial = self.partial[sum(8 + len(data) for _, data in found) :]
        return b"".join(data for stream, data in found if stream == 1)


def _buffered_output(stream: Any) -> bytes:
    """Return output of an exec that was read together with the response headers."""
    timeout = stream._sock.gettimeout()
    stream._sock.setblocking(False)  # so that `peek` does not block
    found: bytes = stream._response.raw._fp.fp.peek()
    stream._sock.settimeout(timeout)
    return found


class Events:
    """The engine's events about one job's containers and networks, from now on.

    Events are only hints: the engine keeps 256 of them, drops events for slow readers, and reports nothing that happens
    while its daemon is down.
    """

    def __init__(self, daemon: Daemon, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Listen in the background; `wanted` selects events."""
        self.broken = 0.0  # monotonic time of the last interruption of the stream
        self._daemon, self._wanted = daemon, wanted
        self._found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.bell, self._alarm = socket.socketpair()  # readable after each event, for select
        for end in (self.bell, self._alarm):
            end.setblocking(False)
        self._socket: socket.socket | None = None
        self._closing = False
        threading.Thread(target=self._listen, args=(int(time.time()),), daemon=True).start()

    def taken(self) -> Iterator[dict[str, Any]]:
        """Yield the events since the last call."""
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._found.get_nowait()

    def close(self) -> None:
        """Stop listening."""
        self._closing = True
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _listen(self, since: int) -> None:
        filters = {"type": ["container", "network"]}
        seen: set[tuple[Any, ...]] = set()  # events in the second at which the stream resumes
        while not self._closing:
            with (
                contextlib.suppress(Refused, Unreachable),
                self._daemon.api.events(since=since, filters=filters) as (stream, self._socket),
            ):
                for event in () if self._closing else stream:  # it may have been closed before the stream existed
                    key = event["timeNano"], event["Action"], event["Actor"]["ID"]
                    if event["time"] != since:
                        since, seen = event["time"], set()
                    if key not in seen and self._wanted(event):
                        self._found.put(event)
                        with contextlib.suppress(BlockingIOError):  # already readable
                            self._alarm.send(b"!")
                    seen.add(key)
            if not self._closing:
                log.debug("the event stream was interrupted")
                self.broken = time.monotonic()
                time.sleep(0.5)


def name_of(container: Container) -> str:
    """Return the name of a container from `containers.list`."""
    return str(container.attrs["Names"][0]).lstrip("/")


def reason(error: Exception) -> str:
    """Return the cause of an error of a request, in one line."""
    text = getattr(error, "explanation", None) or str(error)
    for known in ("Permission denied", "No such file or directory", "Connection refused", "timed out"):
        if known in str(text):
            return known.lower()
    return " ".join(str(text).split())[:300]


def begin(node: Container) -> None:
    """Start a container; if that fails, remove it for Compose to recreate: for example, a masked file is gone."""
    try:
        node.start()
    except Refused:
        node.remove()
