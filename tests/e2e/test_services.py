"""What surrounds a job's nodes in containers: services, ports, labels, and a network without a way out."""

import json
import os
import textwrap
import urllib.request

import pytest
from support.leftovers import docker
from support.waiting import eventually

from orchestrate.engines.docker import objects
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.services import Services
from orchestrate.spec.redact import Mask

pytestmark = pytest.mark.docker
OPTIONS = ("--engine", "docker", "--trainers", "1", "--gpus", "none")
SERVICES = textwrap.dedent("""
    version: "3"  # Compose warns that it is obsolete
    services:
      store:
        image: orchestrate-node:0.1
        entrypoint: [python, -m, http.server, "8000", --directory, /srv]
        volumes: [./served:/srv:ro, kept:/kept]
        healthcheck:
          test: [CMD, python, -c, "import socket; socket.create_connection(('localhost', 8000))"]
          interval: 1s
    volumes: {kept: {}}
""")
NO_FOLDER = """
services:
  a:
    image: orchestrate-node:0.1
    volumes: [kept:/kept, {type: bind, source: /no/such/folder, target: /b, bind: {create_host_path: false}}]
volumes: {kept: {}}
"""
READS = "import urllib.request; print(urllib.request.urlopen('http://store:8000/hello').read())\n"


@pytest.fixture
def served(cli, docker_engine, nothing_left):
    """The command line in a folder with a service that serves a file."""
    (cli.folder / "compose.yaml").write_text(SERVICES)
    (cli.folder / "served").mkdir()
    (cli.folder / "served" / "hello").write_text("hello from $a service")
    (cli.folder / "reads.py").write_text(READS)
    return cli


def test_nodes_must_reach_services_by_name_and_their_files_must_end_with_the_job(served):
    done = served("run", *OPTIONS, "--set", "services=compose.yaml", "reads.py")
    assert done.returncode == 0, done.stderr
    assert served.log(1).count("b'hello from $a service'") == 1
    name = f"{served.run_dir().name}-services"
    for kind in ("container", "volume", "network"):
        assert docker(kind, "ls", "--quiet", "--filter", f"label=com.docker.compose.project={name}") == ""


def test_services_must_be_listed_and_removed_with_a_job_whose_orchestrator_was_killed(served):
    (served.folder / "reads.py").write_text(READS + "print(flush=True)\nimport time; time.sleep(1000)\n")
    process = served.start("run", *OPTIONS, "--set", "services=compose.yaml", "reads.py")
    served.wait_for("hello from", rank=1)
    process.kill()
    process.communicate()
    name = served.run_dir().name
    assert f"container {name}-services-store-1" in served("stop", name, "--dry-run").stdout
    assert served("stop", name).returncode == 0


def test_a_service_that_runs_must_be_kept_although_its_file_has_changed(served):
    daemon, name = Daemon(), f"job-{os.getpid()}"
    docker("network", "create", name)
    services = Services(daemon, name, str(served.folder / "compose.yaml"), name, Mask({}))
    try:
        services.up(lambda: False)
        first = objects.services_of(daemon, name)
        (served.folder / "compose.yaml").write_text(SERVICES.replace("8000, --", "8000, --bind, 0.0.0.0, --"))
        services.up(lambda: False)
        assert [each.id for each in objects.services_of(daemon, name)] == [each.id for each in first] != []
    finally:
        objects.remove_services(daemon, name)
        docker("network", "rm", name)


def test_each_job_must_have_its_own_services_also_on_nodes_that_are_kept(served):
    try:
        done = served("run", *OPTIONS, "--keep", "5m", "--set", "services=compose.yaml", "reads.py")
        assert done.returncode == 0 and "b'hello from" in done.stdout, done.stderr
        (run,) = served.folder.glob("runs/reads-*")
        assert docker("ps", "--quiet", "--filter", f"label=orchestrate.services={run.name}") == ""
    finally:
        served("down", "kept")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("services: {master: {image: x}}", "has a service master, which is the name of a node"),
        ("services: {a: {image: orchestrate-node:0.1, entrypoint: [false]}}", "did not start"),
        ("services: {a: {image: orchestrate-node:0.1, entrypoint: [sh, -c, echo canary-7c1; exit 3]}}", "| ***"),
        ("nothing", "did not start"),
        (NO_FOLDER, "did not start"),
    ],
)
def test_services_that_cannot_start_must_end_the_job_with_a_reason(served, content, message):
    (served.folder / "compose.yaml").write_text(content)
    done = served("run", *OPTIONS, "-e", "DB_TOKEN=canary-7c1", "--set", "services=compose.yaml", "reads.py")
    assert done.returncode in (2, 4) and message in done.stderr, done.stderr
    assert "canary" not in done.stderr
    for kind in ("volume", "network"):
        assert served.run_dir().name not in docker(kind, "ls", "--format", "{{.Name}}")


def test_a_port_of_the_master_must_be_open_on_this_machine_only(cli, docker_engine, nothing_left):
    (cli.folder / "serves.py").write_text(
        "import http.server, os, threading, time, pathlib\n"
        "server = http.server.ThreadingHTTPServer(('', 6006), http.server.SimpleHTTPRequestHandler)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "print('serving', flush=True)\n"
        "while not pathlib.Path(os.environ['JOB_DIR'], 'finish').exists(): time.sleep(0.05)\n"
    )
    port = 10_000 + os.getpid() % 10_000
    process = cli.start("run", *OPTIONS, "--set", f"ports={port}:6006", "serves.py")
    cli.wait_for("serving", rank=0)
    assert eventually(lambda: b"serves.py" in urllib.request.urlopen(f"http://127.0.0.1:{port}/").read())
    master = json.loads(docker("inspect", cli.container("master")))[0]
    assert master["NetworkSettings"]["Ports"]["6006/tcp"] == [{"HostIp": "127.0.0.1", "HostPort": f"{port}"}]
    other = cli("run", *OPTIONS, "--set", f"ports={port}:80", "serves.py")
    assert (other.returncode, f"error: port {port} of this machine is in use\n" in other.stderr) == (3, True), (
        other.stderr
    )
    cli.finish_jobs()
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_isolated_nodes_must_have_no_way_out_and_labels_must_be_set(cli, docker_engine, nothing_left):
    (cli.folder / "looks.py").write_text(
        "routes = open('/proc/net/route').read().splitlines()[1:]\n"
        "print('default routes', sum(line.split()[1] == '00000000' for line in routes))\n"
    )
    (cli.folder / "meets.py").write_text(
        "import looks, os, socket, time\nrank = os.environ['RANK']\n"
        "if rank == '0':\n    with socket.create_server(('', 5005)) as server: server.accept()[0].sendall(b'met')\n"
        "while rank == '1':\n"
        "    try:\n        print(socket.create_connection((os.environ['MASTER_ADDR'], 5005)).recv(3))\n        break\n"
        "    except ConnectionRefusedError: time.sleep(0.1)\n"
    )
    labels = ("--set", f"labels={{team: a$b, cost/center: {os.getpid()}}}")
    for how, routes in (["--isolated", "meets.py"], 0), (["looks.py"], 1):
        done = cli("run", *OPTIONS, *labels, *how)
        assert done.returncode == 0 and f"default routes {routes}" in done.stdout, done.stderr
        assert ("[1] b'met'" in done.stdout) == ("--isolated" in how)
    assert cli("up", *OPTIONS[:4], "--gpus", "none", *labels, "--set", "warm=false").returncode == 0
    filters = ("--filter", "label=team=a$b", "--filter", f"label=cost/center={os.getpid()}")
    assert docker("ps", "--quiet", *filters).count("\n") == 2
    assert cli("down", "cluster").returncode == 0


FAILS = """
services:
  store:
    image: orchestrate-node:0.1
    entrypoint: [sh, -c, "echo no configuration; sleep SECONDS; exit 9"]
"""


def test_the_output_of_a_service_that_does_not_start_must_be_shown(served):
    (served.folder / "compose.yaml").write_text(FAILS.replace("SECONDS", "0"))
    done = served("run", *OPTIONS, "--set", "services=compose.yaml", "reads.py")
    assert done.returncode == 4 and "-services-store-1 | no configuration\n" in done.stderr, done.stderr
    assert "no configuration" in (served.run_dir() / "services.log").read_text()


def test_a_service_that_ends_during_a_job_must_be_reported_and_its_output_kept(served):
    (served.folder / "compose.yaml").write_text(FAILS.replace("SECONDS", "4"))
    waits = "import pathlib, socket, time\n"
    waits += "try:\n    while socket.gethostbyname('store'): time.sleep(0.1)\nexcept OSError: pass\n"
    (served.folder / "reads.py").write_text(waits)
    done = served("run", *OPTIONS, "--set", "services=compose.yaml", "reads.py")
    assert done.returncode == 0, done.stderr
    assert f"warning: the service {served.run_dir().name}-services-store-1 has ended with exit code 9" in done.stderr
    assert "no configuration" in (served.run_dir() / "services.log").read_text()


def test_a_job_must_be_stopped_while_its_services_start(served):
    unhealthy = SERVICES.replace("[CMD, python, -c, ", "[CMD, 'false', ").replace("interval: 1s", "interval: 1h")
    (served.folder / "compose.yaml").write_text(unhealthy)
    process = served.start("run", *OPTIONS, "--set", "services=compose.yaml", "reads.py")
    eventually(lambda: list(served.folder.glob("runs/*/plan.json")))
    name = f"{served.run_dir().name}-services-store-1"
    eventually(lambda: docker("ps", "--quiet", "--filter", f"name={name}"))
    process.terminate()
    process.communicate(timeout=120)
    assert (process.returncode, served.report()["outcome"]) == (130, "stopped")


def test_a_job_must_be_stopped_while_compose_waits_for_a_file(served):
    pipe = served.folder / ".env"
    os.mkfifo(pipe)
    process = served.start("run", *OPTIONS, "--set", "services=compose.yaml", "reads.py")

    def opened() -> int | None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nothing reads it yet
            return None

    writer = eventually(opened)
    process.terminate()
    process.communicate(timeout=120)
    os.close(writer)
    assert (process.returncode, served.report()["outcome"]) == (130, "stopped")
