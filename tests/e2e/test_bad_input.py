"""Bad input must produce one message and a documented exit code, and create nothing."""

import socket
import threading
from pathlib import Path

import pytest
from support.engines import Engine


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def check_refused(cli, code: int, message: str, *arguments: str, **env: str) -> None:
    before = files(cli.folder)
    done = cli(*arguments, **env)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("pulling the image", "looking for"))]
    assert lines[0].startswith("error: ") and message in lines[0]
    assert lines[1].startswith("hint: ") and len(lines) == 2
    assert done.stdout == ""
    assert files(cli.folder) == before


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("trainers must be a whole number from 0 to 1000, not '-1'", ["run", "--trainers", "-1"]),
        ("trainers must be a whole number from 0 to 1000, not 'x'", ["run", "--trainers", "x"]),
        ("the script nope.py does not exist", ["run", "--", "nope.py"]),
        ("-m takes a module, but probe.py is a file", ["run", "-m", "probe.py"]),
        ("the script . is a folder", ["run", "--", "."]),
        ("the script /etc/passwd is outside", ["run", "--", "/etc/passwd"]),
        ("expected a script or -m MODULE, got --flag", ["run", "--", "--flag"]),
        ("expected a script or -m MODULE, got -m", ["run", "--", "-m"]),
        ("command must be a script", ["run", "--"]),
        ("cannot read job file none.yaml", ["run", "none.yaml"]),
        ("unknown key 'trainer'", ["run", "--set", "trainer=1"]),
        ("run: unknown option '--bogus'", ["run", "--bogus"]),
        ("cannot write to /proc/", ["run", "--engine", "process", "--runs", "/proc/x", "--", "probe.py"]),
        ("no such job: nope", ["logs", "nope"]),
        ("no such job: nope", ["stop", "nope"]),
        ("ps does not take a script", ["ps", "--", "x"]),
        ("unknown command 'x'", ["x"]),
    ],
)
def test_an_invalid_command_line_must_be_refused(cli, message, arguments):
    check_refused(cli, 2, message, *arguments)


@pytest.mark.docker
def test_a_script_that_is_a_link_out_of_the_folder_must_be_refused_in_containers(cli, docker_engine):
    (cli.folder / "link.py").symlink_to("/etc/passwd")
    check_refused(cli, 2, "nodes cannot follow the link link.py to /etc/passwd", "run", "--engine", "docker", "link.py")


@pytest.mark.parametrize(
    ("content", "message"), [("- a\n", "contains a list"), ("a: 1\n", "job.yaml:1:1: unknown key")]
)
def test_an_invalid_job_file_must_be_refused(cli, content, message):
    (cli.folder / "job.yaml").write_text(content)
    check_refused(cli, 2, message, "run", "job.yaml")


def test_a_refused_connection_must_be_distinguished_from_a_missing_socket(cli):
    closed = cli.folder / "closed.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(closed))
    check_refused(cli, 3, "connection refused", "run", "--engine", "docker", DOCKER_HOST=f"unix://{closed}")
    for engine in ("docker", "swarm"):
        check_refused(cli, 3, "no such file", "run", "--engine", engine, DOCKER_HOST=f"unix://{cli.folder}/none.sock")


def test_an_engine_with_invalid_responses_must_be_refused(cli):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

        threading.Thread(target=answer, daemon=True).start()
        host = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        check_refused(cli, 3, f"cannot connect to Docker at {host}", "run", "--engine", "docker", DOCKER_HOST=host)
        server.shutdown(socket.SHUT_RDWR)


def test_an_engine_on_another_machine_must_be_refused(cli):
    check_refused(
        cli, 3, "is on another machine", "run", "--engine", "docker", DOCKER_HOST="ssh://someone@example.invalid"
    )


def test_without_an_engine_auto_must_run_local_processes_with_a_one_line_notice(cli, nothing_left):
    done = cli("run", "--trainers", "1", "--", "probe.py", DOCKER_HOST="unix:///nowhere.sock")
    assert done.returncode == 0
    first = done.stderr.splitlines()[0]
    assert first == (
        "cannot connect to Docker at unix:///nowhere.sock: no such file or directory; "
        "running as local processes, without isolation. Start Docker to use containers, or set --engine process."
    )


@pytest.mark.docker
def test_an_image_that_does_not_exist_must_be_refused(cli, docker_engine, nothing_left):
    check_refused(cli, 4, "cannot find or pull the image nope.invalid/nope:1", "run", "--image", "nope.invalid/nope:1")


@pytest.mark.docker
def test_more_gpus_than_available_must_be_refused_with_the_inventory(cli, nvidia_runtime, nothing_left):
    check_refused(cli, 4, "--gpus 1000: only", "run", "--gpus", "1000", "--", "probe.py")


def test_a_refused_command_must_not_leave_the_process_that_reads_the_script(cli, nothing_left):
    (cli.folder / "long.py").write_text("import torch\nf'" + "{1}" * 300_000 + "'")  # takes Python 3.11 a minute
    check_refused(cli, 3, "no such file", "run", "--engine", "docker", "--", "long.py", DOCKER_HOST="unix:///none.sock")


@pytest.fixture
def plain_engine(docker_engine):
    """A separate Docker Engine, without the NVIDIA runtime and without images."""
    engine = Engine()
    yield engine
    engine.remove()


@pytest.mark.docker
def test_gpus_on_an_engine_without_nvidia_runtime_must_be_refused_before_an_image_is_built(cli, plain_engine):
    message = "--gpus all: the engine has no NVIDIA runtime"
    check_refused(cli, 4, message, "run", "--gpus", "all", DOCKER_HOST=plain_engine.host)


def test_help_must_list_the_exit_codes(cli):
    done = cli("--help")
    assert done.returncode == 0
    assert "130  stopped by the user" in done.stdout
