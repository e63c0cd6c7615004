"""Odd arguments, folders and environments: each must give one error that names its cause, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commanded import Whole, create, end
from support.methods import raising
from support.pairs import pairs
from support.repo import ROOT

from orchestrate.cli.main import main
from orchestrate.engines import registry
from orchestrate.record.paths import JobPaths

PROCESS = ("--engine", "process", "--trainers", "0", "--gpus", "none")
COMMANDS = [
    ("run", *PROCESS, "--", "hello.py"),
    ("run", "--detach", *PROCESS, "--", "hello.py"),
    ("up", *PROCESS),
    ("plan", *PROCESS, "--", "hello.py"),
    ("ps",),
    ("logs", "a-1"),
    ("attach", "a-1"),
    ("wait", "a-1"),
    ("stop", "a-1"),
    ("rm", "a-1"),
    ("down", "a-1"),
]
NAMED = [arguments for arguments in COMMANDS if arguments[-1] == "a-1"]


def check_refused(code: int, message: str, capsys, *arguments: str) -> str:
    """Run a command in this process; it must end with one error and one hint."""
    assert main([*arguments]) == code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[0].startswith("error: ") and message in lines[0], err
    assert len(lines) == 2 and lines[1].startswith("hint: ") and out == "", err
    return err


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script, and no engine except local processes."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "hello.py").write_text("print('hello')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    return folder


@pytest.fixture
def scripted(here, monkeypatch):
    """The same with a scripted engine, so that nothing starts even if a command is accepted."""
    monkeypatch.setattr(registry, "select_engine", lambda spec: Whole())
    return here


# --- jobs


@pytest.mark.parametrize(
    ("arguments", "name"),
    pairs(NAMED, ["", "../*", "/", "a/..", ".", "..", "_A", " a", "a*", "a\n1", "ä", "x" * 300]),
    ids=ascii,
)
def test_an_invalid_job_name_must_not_be_looked_up(do, tmp_path, arguments, name):
    end(create(JobPaths(tmp_path / "a-1")))
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = do(arguments[0], name)
    assert (code, out) == (2, [])
    what = "CLUSTER" if arguments[0] == "down" else "JOB"
    assert err[0].startswith(f"error: argument {what}: ") and "lowercase letters, digits and hyphens" in err[0]
    assert err[1:] == [f"hint: python -m orchestrate {arguments[0]} --help"]
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before and do.engine.calls == []


@pytest.mark.parametrize("arguments", NAMED, ids=" ".join)
def test_a_folder_that_is_not_a_job_must_not_be_taken_for_one(do, tmp_path, arguments):
    (tmp_path / "some" / "folder").mkdir(parents=True)
    (tmp_path / "some" / "folder" / "plan.json").write_text("{}")
    for name in ("/etc", f"{tmp_path}/some/folder", f"{tmp_path}/none/a-1"):
        code, out, err = do(arguments[0], name)
        assert code in (1, 2) and not out and err[0].startswith("error: ")
    assert [*(tmp_path / "some" / "folder").iterdir()] and do.engine.calls == []


# --- folders


@pytest.mark.parametrize(
    ("arguments", "kind"), pairs(COMMANDS, ["loop", "file", "below a file", "long", "long below", "nul", "empty"])
)
def test_an_invalid_folder_for_runs_must_be_refused(scripted, capsys, arguments, kind):
    (scripted / "loop").symlink_to("loop")
    (scripted / "file").touch()
    runs = {"below a file": "file/runs", "long": "x" * 300, "long below": "x/" * 3000, "nul": "a\0b", "empty": ""}
    at = arguments.index("--") if "--" in arguments else len(arguments)
    check_refused(2, "argument --runs: ", capsys, *arguments[:at], "--runs", runs.get(kind, kind), *arguments[at:])
    assert {path.name for path in scripted.iterdir()} == {"hello.py", "loop", "file"}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("arguments", COMMANDS[:3], ids=" ".join)
def test_a_folder_for_runs_that_cannot_be_written_must_be_refused(scripted, capsys, arguments):
    at = arguments.index("--") if "--" in arguments else len(arguments)
    check_refused(2, "cannot write to /proc/", capsys, *arguments[:at], "--runs", "/proc/x", *arguments[at:])


@pytest.mark.parametrize("arguments", [*COMMANDS, ("doctor",), ("export", "slurm", "--", "hello.py")], ids=" ".join)
def test_a_deleted_current_folder_must_be_an_error(scripted, capsys, arguments):
    (scripted / "hello.py").unlink()
    scripted.rmdir()
    check_refused(2, "the current folder no longer exists", capsys, *arguments)


def test_help_must_be_printed_in_a_deleted_current_folder(here):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = 'mkdir gone; cd gone; rmdir "$PWD"; exec "$0" -m orchestrate "$@"'
    for arguments, code in ((["--help"], 0), (["ps"], 2), (["plan", "--", "x.py"], 2)):
        done = subprocess.run(
            ["sh", "-c", command, sys.executable, *arguments], env=env, capture_output=True, text=True
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("script", ["x" * 300 + ".py", "x/" * 3000, "loop/x.py", "hello.py/x"])
def test_a_script_that_cannot_be_accessed_must_be_refused(here, capsys, script):
    (here / "loop").symlink_to("loop")
    check_refused(2, "the script ", capsys, "plan", *PROCESS, "--", script)


# --- engines


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("tcp://localhost:99999", "99999"),
        ("tcp://localhost:x", "localhost:x"),
        ("tcp://localhost:-1", "localhost:-1"),
        ("tcp://localhost:0", "localhost:0"),
        ("tcp://localhost", "tcp://localhost"),
        ("tcp://", "tcp://"),
        ("tcp://[::1", "[::1"),
        ("tcp://[x]:1", "[x]"),
        ("npipe://", "npipe://"),
        ("npipe:////./pipe/docker_engine", "npipe://"),
        ("ssh://", "ssh://"),
        ("ssh://me@", "ssh://me@"),
        ("fd://", "fd://"),
        ("http://localhost:1", "http://localhost:1"),
        ("garbage", "garbage"),
        ("unix//var/run/docker.sock", "unix//"),
        ("/var/run/docker.sock", "/var/run"),
        ("unix:///none?x=1", "unix:///none"),
        ("unix:///" + "x" * 300, "unix:///"),
        ("\x1b[2J", ""),
        ("tcp://\udcff:1", ""),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("engine", ["docker", pytest.param("swarm", marks=pytest.mark.exhaustive)])
def test_an_invalid_docker_host_must_be_an_error_of_the_engine(here, capsys, monkeypatch, host, message, engine):
    monkeypatch.setenv("DOCKER_HOST", host)
    error = check_refused(3, message, capsys, "plan", "--engine", engine, "--", "hello.py")
    assert "\x1b" not in error
    assert main(["ps"]) == 0


@pytest.mark.parametrize(
    "config", ["[]", "5", "{", '{"currentContext": 5}', '{"proxies": 5}', '{"auths": 5}', "\0", '{"auths": {"a": 5}}']
)
def test_a_damaged_configuration_of_docker_must_not_cause_a_traceback(here, capsys, monkeypatch, tmp_path, config):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(config)
    check_refused(
        3, "cannot connect to Docker at unix:///nowhere.sock", capsys, "plan", "--engine", "docker", "--", "hello.py"
    )
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONTEXT", "nope")
    check_refused(3, "'nope'", capsys, "plan", "--engine", "docker", "--", "hello.py")


# --- environment


@pytest.mark.parametrize(
    "env",
    [
        {"OMP_NUM_THREADS": "x"},
        {"OMP_NUM_THREADS": ""},
        {"COLUMNS": "0"},
        {"COLUMNS": "x"},
        {"COLUMNS": "1"},
        {"COLUMNS": "-5", "LINES": "-5"},
        {"HOME": ""},
        {"HOME": "/nowhere"},
        {"TMPDIR": "/nowhere"},
        {"PATH": ""},
        {"TERM": "dumb"},
        {"PYTHONINTMAXSTRDIGITS": "640"},
        {"PYTHONINTMAXSTRDIGITS": "0"},
        {"PYTHONDEVMODE": "1"},
        {"PYTHONOPTIMIZE": "2"},
        {"PYTHONDONTWRITEBYTECODE": "1"},
        {"PYTHONWARNDEFAULTENCODING": "1"},
        {"PYTHONMALLOC": "debug"},
        {"LC_ALL": "nonesuch"},
        {"TZ": "nonesuch"},
        {"http_proxy": "garbage", "NO_PROXY": "["},
        {"DOCKER_CERT_PATH": "/nowhere", "DOCKER_TLS_VERIFY": "1"},
        {"DOCKER_API_VERSION": "x"},
        {"COMPOSE_FILE": "nope", "NODE_MODE": "nope"},
    ],
    ids=str,
)
def test_a_plan_must_be_printed_in_an_odd_environment(here, env):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHONUNBUFFERED"))}
    done = subprocess.run(
        [sys.executable, "-m", "orchestrate", "plan", *PROCESS, "--", "hello.py"],
        env=inherited | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_plan_must_be_printed_in_an_empty_environment(here):
    done = subprocess.run(
        [sys.executable, "-m", "orchestrate", "plan", *PROCESS, "--", "hello.py"],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_of_ten_thousand_characters_must_be_refused(here, capsys):
    check_refused(
        2,
        "name must be text of at most 200 characters",
        capsys,
        "plan",
        *PROCESS,
        "--name",
        "x" * 10_000,
        "--",
        "hello.py",
    )


def test_a_file_system_error_must_be_reported_with_the_file(here, capsys, monkeypatch):
    for about in (["/some/file"], []):
        monkeypatch.setattr(
            "orchestrate.record.run_dir.new_paths", raising(PermissionError(13, "Permission denied", *about))
        )
        assert main(["plan", *PROCESS, "--", "hello.py"]) == 1
        assert capsys.readouterr().err == f"error: {': '.join(['Permission denied', *about])}\n"


def test_arguments_that_are_not_utf_8_must_be_refused(cli):
    refused: list[list[str | bytes]] = [
        ["--", "x.py", b"\xff"],
        ["--set", b"env.A=\xff", "--", "x.py"],
        ["--name", b"\xff", "--", "x.py"],
    ]
    for arguments in refused:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrate", "plan", *PROCESS, *arguments],
            cwd=cli.folder,
            env=cli.env,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 2 and b"UTF-8" in done.stderr and b"Traceback" not in done.stderr
        assert Path(cli.folder, "runs").exists() is False


def test_characters_outside_the_locales_encoding_must_be_refused_if_a_process_needs_them(cli):
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    (cli.folder / "é.py").touch()
    (cli.folder / "x.py").touch()
    for arguments in (["--set", "env.A=é", "--", "x.py"], ["--", "x.py", "é"], ["--", "é.py"]):
        done = cli("plan", *PROCESS, *arguments, **locale)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "this locale's encoding, ascii" in done.stderr and "hint: export LC_ALL=C.UTF-8" in done.stderr
    assert cli("plan", *PROCESS, "--name", "é", "--", "x.py", **locale).returncode == 0
