"""The Docker Engine must be the one that the user's `docker` command uses."""

import sys

import pytest
from support.contexts import CASES, NAMES, assert_tls_refused, configure, context

from orchestrate.cli.main import main
from orchestrate.engines import registry
from orchestrate.engines.docker.api import SOCKET, TLS, address, socket_of
from orchestrate.errors import EngineError, ResourceError
from orchestrate.spec.layers import resolve


@pytest.mark.parametrize(("host", "name", "current", "expected"), CASES)
def test_docker_host_must_take_precedence_over_docker_context_and_the_configured_context(
    config, monkeypatch, host, name, current, expected
):
    configure(config, monkeypatch, host, name, current)
    if expected:
        assert address() == expected
    else:
        with pytest.raises(EngineError, match="the Docker context 'nope' does not exist") as error:
            address()
        assert error.value.hint == "list contexts with docker context ls"


def test_the_default_address_must_be_used_without_a_configuration(monkeypatch, tmp_path):
    for name in (*NAMES, "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert address() == SOCKET
    context(tmp_path / ".docker", "mine", "unix:///mine.sock")  # without config.json, as after `docker context create`
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    monkeypatch.setenv("DOCKER_CONFIG", "")
    assert address() == "unix:///mine.sock"


def test_a_context_must_not_be_read_from_the_current_folder(config, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("DOCKER_CONTEXT", "mine")
    monkeypatch.chdir(config)  # has a folder `contexts`
    with pytest.raises(EngineError, match="does not exist"):
        address()


@pytest.mark.parametrize(
    "content", ["", "[]", "5", "{}", '{"Endpoints": []}', '{"Endpoints": {"docker": 5}}', "[" * 99_999]
)
def test_a_damaged_context_must_be_reported_by_name(config, monkeypatch, content):
    path = context(config, "bad", "")
    path.write_text(content)
    monkeypatch.setenv("DOCKER_CONTEXT", "bad")
    with pytest.raises(EngineError, match="cannot read the Docker context 'bad'"):
        address()
    (config / "config.json").write_text(content)
    monkeypatch.delenv("DOCKER_CONTEXT")
    assert address() == SOCKET


def test_a_context_without_an_address_must_use_the_default_address(config, monkeypatch):
    context(config, "empty", "")
    monkeypatch.setenv("DOCKER_CONTEXT", "empty")
    assert address() == SOCKET


@pytest.mark.parametrize(
    "host", [" ", "unix://", "unix:///a", "unix://a", "tcp://localhost:1", "tcp://127.0.0.1:1", "tcp://[::1]:1"]
)
def test_an_engine_on_this_machine_must_be_accepted(config, monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "")  # as if it were not set
    assert address() == (host.strip() or SOCKET)


@pytest.mark.parametrize("host", ["http://localhost:1", "localhost", "tcp://localhost:0", "tcp://localhost:x"])
def test_an_address_of_no_engine_must_be_refused_with_a_hint(config, monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineError, match=f"{host} is not an address of a Docker Engine") as error:
        address()
    assert "docker context use default" in error.value.hint


@pytest.mark.parametrize("name", TLS)
def test_tls_variables_must_be_refused_only_with_a_tcp_address(config, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DOCKER_HOST", "tcp://localhost:2376")
    assert_tls_refused("tcp://localhost:2376")
    monkeypatch.setenv("DOCKER_HOST", "unix:///a")
    assert address() == "unix:///a"


# --- local processes, if no engine answers


def assert_all_commands_refuse(capsys, message: str) -> None:
    """Check that no command falls back to local processes, and that each suggests `--engine process`."""
    for command in ("run", "up", "plan"):
        assert main([command, *(["--", "-m", "app.train"] if command != "up" else [])]) == 3
        out, err = capsys.readouterr()
        error, hint = err.splitlines()
        assert message in error and not out
        assert hint.startswith("hint: ") and hint.count("--engine process") == 1


@pytest.mark.parametrize(
    ("host", "name", "current", "message"),
    [
        ("ssh://me@box", None, None, "is on another machine"),
        ("tcp://localhost:2376", None, None, "uses TLS, which is not supported"),
        (None, "nope", None, "the Docker context 'nope' does not exist"),
    ],
)
def test_an_unusable_engine_must_not_be_replaced_by_local_processes(
    config, monkeypatch, capsys, host, name, current, message
):
    configure(config, monkeypatch, host, name, current)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.chdir(config)
    assert_all_commands_refuse(capsys, message)


@pytest.mark.parametrize(
    ("host", "name", "current"), [("unix:///nowhere.sock", None, None), (None, "mine", None), (None, None, "other")]
)
def test_auto_must_report_the_fallback_to_local_processes_if_no_engine_answers(
    config, monkeypatch, capsys, host, name, current
):
    configure(config, monkeypatch, host, name, current)
    assert registry.select_engine(resolve({})).name == "process"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cannot connect to Docker at unix:///") and "running as local processes" in line
    with pytest.raises(EngineError, match="cannot connect to Docker"):
        registry.select_engine(resolve({"engine": "docker"}))


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("unix:///a/b.sock", "/a/b.sock"),
        ("unix:///a b/c#d?e%20.sock", "/a b/c#d?e%20.sock"),
        ("unix://", "/var/run/docker.sock"),
        ("tcp://localhost:1", ""),
    ],
)
def test_the_path_of_a_socket_must_be_as_docker_reads_it(host, path):
    assert socket_of(host) == path


def test_an_engine_without_compose_must_count_as_no_engine(config, monkeypatch, capsys, answers):
    monkeypatch.setattr("orchestrate.engines.docker.client.PLUGINS", [])
    monkeypatch.setenv("PATH", "")
    assert registry.select_engine(resolve({})).name == "process"
    notice = capsys.readouterr().err
    assert notice.startswith("no docker command on PATH; running as local processes")
    assert notice.endswith(". Install it, with its Compose plugin to use containers, or set --engine process.\n")
    with pytest.raises(ResourceError, match="no docker command on PATH"):
        registry.select_engine(resolve({"engine": "docker"}))
    assert [engine.name for engine in registry.available_engines()] == ["process"]


def test_all_engines_must_be_found_whichever_of_them_is_missing(answers, daemon):
    assert [engine.name for engine in registry.available_engines()] == ["docker", "process"]


def test_a_missing_sdk_must_be_reported_with_the_command_that_installs_it(daemon, monkeypatch):
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(ResourceError, match="the Python package docker is missing") as error:
        print(daemon.client)
    assert error.value.hint == f"install it ({sys.executable} -m pip install docker)"
