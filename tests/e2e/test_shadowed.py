"""Files in the current folder that shadow modules must not run on the host; workers keep that folder first."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import Cli
from support.repo import ROOT

OTHERS = ["docker", "yaml", "_yaml", "requests", "torch", "numpy", "urllib3", "idna", "certifi", "charset_normalizer"]
OTHERS += ["chardet", "simplejson", "websocket", "paramiko", "brotli", "zstandard", "OpenSSL", "cryptography", "socks"]
JOB = ("--engine", "process", "--trainers", "1", "--gpus", "none")
SCRIPT = ("--", "hello.py")


def imported_by_python(folder: Path) -> set[str]:
    """The modules that `python -m` itself imports, also from the current folder, before it runs any package."""
    package = folder / "empty"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys\nprint(*sys.modules)")
    found = subprocess.run(
        [sys.executable, "-m", "empty"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    shutil.rmtree(package)
    return set(found.split())


def set_traps(cli: Cli) -> Path:
    """Create a file for every module in the working directory; return the file to which each appends when imported."""
    mark = cli.folder / "marks"
    excluded = imported_by_python(cli.folder)
    names = {name for name in sys.stdlib_module_names if not name.startswith("__")} | {*OTHERS}
    assert {"queue", "random", "docker", "yaml", "requests", "torch"} <= names - excluded
    for name in names - excluded:
        (cli.folder / f"{name}.py").write_text(
            f"import sys\ntry:\n    with open({str(mark)!r}, 'a') as file:\n"
            f"        file.write(f'{{__name__}} in {{sys.argv}}\\n')\nexcept OSError:\n    pass\n"
        )
    (cli.folder / "hello.py").write_text("print('hello')\n")
    return mark


def run(cli, mark: Path, *arguments: str, code: int = 0) -> str:
    """Run a command; check its exit code and that no trap ran; return its stdout."""
    done = cli(*arguments)
    assert not mark.exists(), (arguments, mark.read_text())
    assert done.returncode == code, (arguments, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_commands_must_not_import_a_module_from_the_current_folder(cli, nothing_left):
    mark = set_traps(cli)
    cli.env["DOCKER_HOST"] = "unix:///nowhere.sock"
    run(cli, mark, "--help")
    run(cli, mark, "--version")
    run(cli, mark, "plan", *JOB, *SCRIPT)
    run(cli, mark, "doctor", "--engine", "docker", code=3)
    for arguments in (["kubernetes", "--image", "a.example/b:1"], ["slurm"], ["pbs"], ["compose"]):
        run(cli, mark, "export", *arguments, "--trainers", "1", "--gpus", "none", *SCRIPT)
    first = Path(run(cli, mark, "run", "--print-path", *JOB, *SCRIPT).strip()).name
    second = Path(run(cli, mark, "run", "--detach", *JOB, *SCRIPT).strip()).name
    run(cli, mark, "attach", second)
    for arguments in (["ps"], ["wait", second], ["logs", first], ["stop", first], ["rm", first]):
        run(cli, mark, *arguments)
    cluster = run(cli, mark, "up", *JOB, "--set", "warm=false").strip()  # a node preloads modules of the user
    run(cli, mark, "run", *JOB, *SCRIPT)
    run(cli, mark, "down", cluster)
    assert "hello" in (cli.folder / "runs" / second / "logs" / "rank-1.log").read_text()


def test_commands_of_a_checkout_must_not_import_a_module_from_its_folder(cli, nothing_left):
    shutil.copytree(ROOT / "orchestrate", cli.folder / "orchestrate", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("docker-compose.yml", "Dockerfile"):
        shutil.copy(ROOT / name, cli.folder)
    del cli.env["PYTHONPATH"]
    mark = set_traps(cli)
    cli.env["DOCKER_HOST"] = "unix:///nowhere.sock"
    run(cli, mark, "export", "compose", *JOB[2:], *SCRIPT)
    run(cli, mark, "attach", Path(run(cli, mark, "run", "--detach", *JOB, *SCRIPT).strip()).name)


@pytest.mark.docker
def test_docker_commands_must_not_import_a_module_from_the_current_folder(cli, docker_engine, nothing_left):
    mark = set_traps(cli)
    run(cli, mark, "ps")
    run(cli, mark, "doctor")
    run(cli, mark, "run", "--engine", "docker", "--trainers", "1", "--gpus", "none", *SCRIPT)


def test_commands_without_a_script_must_ignore_the_users_app_module(cli, nothing_left):
    (cli.folder / "app.py").write_text("print('mine')\n")
    assert cli("doctor", "--engine", "process").returncode == 0
    cluster = cli("up", *JOB, "--set", "warm=false").stdout.strip()
    assert cli("down", cluster).returncode == 0
    refused = cli("run", *JOB)
    assert (refused.returncode, "would run instead of the default job" in refused.stderr) == (2, True)


def test_workers_must_find_modules_in_their_working_directory(cli, nothing_left):
    (cli.folder / "queue.py").write_text("print('their own queue')\n")
    (cli.folder / "hello.py").write_text("import queue\n")
    for warm in ("true", "false"):
        assert cli("run", *JOB, "--set", f"warm={warm}", *SCRIPT).returncode == 0
    assert all("their own queue" in path.read_text() for path in cli.folder.glob("runs/*/logs/rank-*.log"))


@pytest.mark.parametrize("safe", ["", "-P", "PYTHONSAFEPATH"])
def test_entries_of_pythonpath_must_be_kept(cli, safe):
    if safe == "-P" and sys.version_info < (3, 11):
        pytest.skip("this Python has no -P")
    mark = set_traps(cli)
    env = cli.env | {"PYTHONPATH": f"{cli.folder}{os.pathsep}{ROOT}"}
    env |= {"PYTHONSAFEPATH": "1"} if safe == "PYTHONSAFEPATH" else {}
    for path in cli.folder.glob("*.py"):
        if path.name != "yaml.py":
            path.unlink()
    command = [sys.executable, *([safe] if safe == "-P" else []), "-m", "orchestrate", "doctor", "--quick"]
    env |= {"DOCKER_HOST": "unix:///nowhere.sock"}
    subprocess.run(command, cwd=cli.folder, env=env, capture_output=True, timeout=60)
    assert "yaml" in mark.read_text()


def test_an_empty_entry_of_pythonpath_must_not_add_the_current_folder(cli, nothing_left):
    """Python takes it for the current folder; `PYTHONPATH=$PYTHONPATH:/x` creates one if the variable was empty."""
    mark = set_traps(cli)
    del cli.env["PYTHONWARNINGS"]  # with it, Python itself imports `re` at start-up
    cli.env["DOCKER_HOST"] = "unix:///nowhere.sock"
    for path in (":{root}", "{root}:", ":{root}:", "{root}::/none"):
        cli.env["PYTHONPATH"] = path.format(root=ROOT).replace(":", os.pathsep)
        run(cli, mark, "doctor", "--engine", "docker", code=3)
    run(cli, mark, "plan", *JOB, *SCRIPT)
    run(cli, mark, "run", *JOB, *SCRIPT)
    first = Path(run(cli, mark, "run", "--detach", *JOB, *SCRIPT).strip()).name
    run(cli, mark, "attach", first)


@pytest.mark.parametrize("path", [".:{root}", ":.:{root}", "{root}::{here}"])
def test_a_current_folder_named_in_pythonpath_must_be_kept(cli, path):
    mark = set_traps(cli)
    for module in cli.folder.glob("*.py"):
        if module.name != "yaml.py":
            module.unlink()
    named = path.format(root=ROOT, here=cli.folder).replace(":", os.pathsep)
    env = cli.env | {"PYTHONPATH": named, "DOCKER_HOST": "unix:///nowhere.sock"}
    command = [sys.executable, "-m", "orchestrate", "doctor", "--quick"]
    subprocess.run(command, cwd=cli.folder, env=env, capture_output=True)
    assert "yaml" in mark.read_text()


def test_workers_must_get_pythonpath_unchanged(cli, nothing_left):
    (cli.folder / "beside.py").write_text("print('beside')\n")
    (cli.folder / "below").mkdir()
    (cli.folder / "below" / "hello.py").write_text("import beside, os\nprint(os.environ['PYTHONPATH'])\n")
    cli.env["PYTHONPATH"] = f"{os.pathsep}{ROOT}"
    for warm in ("true", "false"):
        assert cli("run", *JOB, "--set", f"warm={warm}", "--", "below/hello.py").returncode == 0
    logs = [path.read_text() for path in cli.folder.glob("runs/*/logs/rank-*.log")]
    assert logs == [f"beside\n{cli.env['PYTHONPATH']}\n"] * 4


def test_a_background_supervisor_must_be_imported_from_the_commands_package(cli, nothing_left):
    """With `-P`, not from the current folder."""
    if sys.version_info < (3, 11):
        pytest.skip("this Python has no -P")
    (cli.folder / "orchestrate.py").write_text(f"open({str(cli.folder / 'mark')!r}, 'w')\n")
    (cli.folder / "hello.py").write_text("print('hello')\n")
    command = [sys.executable, "-P", "-m", "orchestrate", "run", "--detach", *JOB, *SCRIPT]
    done = subprocess.run(command, cwd=cli.folder, env=cli.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    job = cli.run_dir().name
    command[4:] = ["attach", job]
    assert subprocess.run(command, cwd=cli.folder, env=cli.env, capture_output=True, timeout=120).returncode == 0
    assert not (cli.folder / "mark").exists()


@pytest.fixture
def script(cli) -> Path:
    """The `orchestrate` command, as pip creates it."""
    text = (ROOT / "pyproject.toml").read_text()
    module, function = re.findall(r'^\[project\.scripts\]\norchestrate = "([\w.]+):(\w+)"$', text, re.M)[0]
    path = cli.folder / "bin" / "orchestrate"
    path.parent.mkdir()
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return path


def test_the_command_and_its_supervisor_must_not_run_a_file_with_their_name(cli, script, nothing_left):
    mark = set_traps(cli)
    (cli.folder / "orchestrate.py").write_text(f"open({str(mark)!r}, 'w')\n")

    def orchestrate(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, cwd=cli.folder, env=cli.env, capture_output=True, text=True, timeout=120)

    done = orchestrate("run", "--detach", *JOB, *SCRIPT)
    assert done.returncode == 0 and not mark.exists(), done.stderr
    assert orchestrate("wait", cli.run_dir().name).returncode == 0 and not mark.exists()
    assert "hello" in cli.log(0)
    done = orchestrate("--bogus")
    assert done.returncode == 2 and "expected a command" in done.stderr
