"""Commands must do what the command line asks for; on a scripted engine."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.optional import not_none
from support.repo import ROOT
from support.scripted import ALL_WELL, KILLED
from support.waiting import eventually

from orchestrate.cli.main import main
from orchestrate.engines import registry
from orchestrate.errors import (
    EngineError,
    EngineLost,
    OrchestrateError,
    ResourceError,
    StorageError,
    StorageLost,
    UsageError,
)
from orchestrate.files.paths import STDIN
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.layers import resolve

APP = ("--gpus", "none", "--", "-m", "app.train")


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


# --- a job


def test_run_must_print_the_run_directory_and_exit_as_the_job_ends(do, engine, runs):
    engine.generations = [[ALL_WELL]]
    code, out, err = do("run", "--trainers", "2", "--name", "mine", *APP)
    (folder,) = runs.iterdir()
    assert (code, out) == (0, [])
    assert err[0].startswith(f"job {folder.name}: 3 nodes")
    assert err[-2].startswith("succeeded: 3 workers") and err[-1] == str(folder)
    assert engine.calls == ["prepare", "up", "start", "down"]
    spec, plan = run_dir.load(JobPaths(folder))
    assert (spec.name, spec.trainers, spec.command) == ("mine", 2, ("-m", "app.train"))
    assert plan.workers[0].env["MASTER_PORT"] == "29500"


@pytest.mark.parametrize(("arguments", "code"), [(["--max-restarts", "0"], 1), (["--max-run", "0.01"], 124)])
def test_run_must_exit_with_the_code_of_the_jobs_outcome(do, engine, runs, arguments, code):
    engine.generations = [[KILLED] if code == 1 else []]
    ended, out, err = do("run", "--trainers", "2", "--set", "grace=0.01s", *arguments, *APP)
    assert (ended, out, err[-1]) == (code, [], str(next(runs.iterdir())))


def test_standard_input_must_be_in_the_job_folder_for_rank_0(do, engine, runs, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    engine.generations = [[ALL_WELL]]
    assert do("run", "--trainers", "2", "--stdin", *APP)[0] == 0
    assert next(runs.iterdir()).joinpath("job", STDIN).read_bytes() == b"hello"
    monkeypatch.setattr(sys, "stdin", None)
    engine.calls.clear()
    assert do("plan", "--stdin", *APP)[0] == 0
    assert do("run", "--stdin", "--keep", "1h", *APP)[0] == 2 and "up" not in engine.calls


def test_stdout_must_hold_worker_output_or_what_was_requested_instead(do, engine, runs):
    start = engine.start

    def prints(plan, stopped=None) -> None:
        start(plan)
        JobPaths(next(runs.iterdir())).log(0).write_text("loss 0.5\n")

    engine.start, found = prints, {}
    for flag in ("", "--print-path", "--json"):
        engine.generations = [[ALL_WELL]]
        code, out, err = do("run", "--trainers", "2", *filter(None, [flag]), *APP)
        assert code == 0 and ("[0] loss 0.5" in err) == bool(flag)
        (folder,) = runs.iterdir()
        found[flag] = out, folder
        assert do("attach", folder, *filter(None, [flag]))[1] == (out if flag else [])
        assert do("rm", folder)[0] == 0
    assert found[""][0] == ["[0] loss 0.5"]
    assert found["--print-path"][0] == [str(found["--print-path"][1])]
    report = json.loads("\n".join(found["--json"][0]))
    assert (report["job_id"], report["outcome"]) == (found["--json"][1].name, "succeeded")
    assert report["run_directory"] == str(found["--json"][1])
    assert do("run", "--json", "--print-path", *APP)[0] == 2


def test_run_must_exit_with_the_code_of_the_error_if_the_job_could_not_start(do, engine, runs):
    engine.missing = {"trainer-1"}
    code, out, err = do("run", "--trainers", "2", *APP)
    assert (code, out) == (3, [])
    assert err[-2:] == ["error: no such node", "hint: python -m orchestrate doctor checks this machine"]
    assert not_none(run_dir.ended(JobPaths(next(runs.iterdir()))))["outcome"] == "failed"


@pytest.mark.parametrize("arguments", [["plan"], ["run", "--dry-run"]], ids=" ".join)
def test_plan_must_print_the_plan_and_create_nothing(do, engine, runs, arguments):
    code, out, err = do(*arguments, "--trainers", "2", *APP)
    assert (code, err, engine.calls) == (0, [], ["look"])
    assert out[0].startswith("job app-train-") and out[-1].startswith("  rank 2   trainer-2")
    assert not runs.exists()


def test_all_arguments_after_the_first_dashes_must_go_to_the_script(do, engine, runs):
    engine.generations = [[ALL_WELL]]
    do("run", "--trainers", "2", *APP, "--trainers", "7", "--", "-x", "--help")
    spec, _ = run_dir.load(JobPaths(next(runs.iterdir())))
    assert spec.command == ("-m", "app.train", "--trainers", "7", "--", "-x", "--help")
    assert spec.trainers == 2


def test_every_flag_must_reach_the_job(do, engine, runs, tmp_path):
    (tmp_path / "job.yaml").write_text("name: of-the-file\ntrainers: 9\ngrace: 5s\n")
    engine.generations = [[ALL_WELL]]
    flags = {"trainers": 2, "nproc_per_node": 1, "engine": "docker", "image": "mine:1", "name": "", "max_run": 7200.0}
    flags |= {"max_restarts": 5, "min_trainers": 1, "spares": 0, "gpus": "none"}
    arguments = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    more = ("--set", "max_restarts=1", "--set", "memory=2g", "--set", "env.A=b")
    code, _, err = do("run", tmp_path / "job.yaml", *arguments, *more, "--", "-m", "app.train")
    assert code == 0, err
    spec, _ = run_dir.load(JobPaths(next(runs.iterdir())))
    assert {name: getattr(spec, name) for name in flags} == flags
    assert (spec.grace, spec.memory, spec.env) == (5.0, "2g", {"A": "b"})


def test_a_script_on_the_command_line_must_override_the_job_files_command(do, engine, runs, tmp_path):
    (tmp_path / "job.yaml").write_text("command: nonesuch.py\n")
    assert do("plan", tmp_path / "job.yaml", "--set", "command=none.py", *APP)[1][0].startswith("job app-train-")


@pytest.mark.parametrize("nodes", ["its own", "a cluster's"])
def test_a_detached_job_must_be_supervised_by_a_background_process(do, engine, runs, tmp_path, monkeypatch, nodes):
    monkeypatch.chdir(tmp_path)
    if nodes == "a cluster's":
        do("up", "--trainers", "2", "--gpus", "none")
    python = tmp_path / "python"
    facts = '"$PWD" session of $(($(cut -d" " -f6 /proc/$$/stat) - $$))'
    python.write_text(f'#!/bin/sh\necho "$@"\necho {facts} >&2\n')  # prints its arguments and exits
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    before, engine.calls = signal.getsignal(signal.SIGINT), []
    code, out, err = do("run", "--detach", "--trainers", "2", *APP)
    (folder,) = runs.glob("app-train-*")
    assert (code, out, engine.calls) == (1, [], ["prepare"])
    log = folder / "supervisor.log"
    facts = f"{ROOT} session of 0"  # not in a folder that may have another orchestrate.py
    assert log.read_text() == f"-m orchestrate attach {folder.name} --runs {runs}\n{facts}\n"
    assert log.stat().st_mode & 0o777 == 0o600
    assert err[0].startswith(f"job {folder.name}: ")
    hint = f"hint: see {log}; python -m orchestrate attach {folder.name} starts it again"
    assert err[-2:] == [f"error: the supervisor of {folder.name} has ended at once", hint]
    assert signal.getsignal(signal.SIGINT) is before  # Ctrl-C ends the command, not the job


def test_ctrl_c_must_end_a_supervisor_that_has_not_begun(do, engine, runs, tmp_path, monkeypatch):
    python = tmp_path / "python"
    threads = f"/proc/{os.getpid()}/task"  # with a new one once the command waits for its supervisor
    known = " ".join(f"-e {thread}" for thread in os.listdir(threads))
    waits = f"until ls {threads} | grep -q -v -x {known}; do :; done"
    python.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\n{waits}\nkill -INT {os.getpid()}\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    code, out, err = do("run", "--detach", "--trainers", "2", *APP)
    assert (code, out, err[-1]) == (130, [], "stopped")
    eventually(lambda: not Path("/proc", (tmp_path / "pid").read_text().strip()).exists())


# --- errors


@pytest.mark.parametrize("command", ["up", "ps", "down c", "logs a", "attach a", "wait a", "stop a", "rm a"])
def test_a_command_that_takes_no_script_must_refuse_one(do, engine, runs, command):
    code, out, err = do(*command.split(), "--", "train.py")
    name = command.split()[0]
    assert (code, out) == (2, [])
    assert (
        err[0].startswith(f"error: {name} does not take a script")
        and err[1] == f"hint: python -m orchestrate {name} --help"
    )


def test_an_invalid_argument_must_point_to_the_help_of_its_command(do):
    assert do("logs", "a", "--xyz")[2][1].startswith("hint: python -m orchestrate")
    assert do("logs", "a", "--rank", "x") == (
        2,
        [],
        ["error: argument --rank: invalid int value: 'x'", "hint: python -m orchestrate logs --help"],
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OrchestrateError("what", "next"), 1),
        (UsageError("what", "next"), 2),
        (EngineError("what", "next"), 3),
        (EngineLost("what", "next"), 3),
        (StorageError("what", "next"), 3),
        (StorageLost("what", "next"), 3),
        (ResourceError("what", "next"), 4),
        (OrchestrateError("what"), 1),
    ],
)
def test_an_error_must_be_printed_with_its_hint_and_exit_code(do, monkeypatch, error, code):
    def fail() -> None:
        raise error

    monkeypatch.setattr(registry, "jobs", fail)
    assert do("ps") == (code, [], ["error: what", *["hint: next"] * bool(error.hint)])


def test_ctrl_c_must_end_a_command_without_a_traceback(do, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "jobs", interrupt)
    assert do("ps") == (130, [], ["stopped"])


class Full(io.StringIO):
    """A stdout on a full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_lost_output_must_not_hide_another_failure(engine, monkeypatch, capsys, runs):
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["ps", "--runs", str(runs)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert main(["rm", "a", "--runs", str(runs)]) == 2


def test_a_command_without_stdout_must_work(engine, monkeypatch, runs):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["ps", "--runs", str(runs)]) == 0


def test_ctrl_c_before_the_arguments_are_parsed_must_exit_without_a_traceback(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Finder:\n    def find_spec(self, name, *_):\n"
        "        if name == 'orchestrate.cli': raise KeyboardInterrupt\nsys.meta_path.insert(0, Finder())\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-m", "orchestrate", "ps"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_local_processes_must_not_need_a_docker_engine(monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert registry.select_engine(resolve({"engine": "process"})).name == "process"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "command",
    [*(f"{name} --trainers 2 --gpus none" for name in ("run", "up", "plan")), "prune", "rm a-1", "down c-1"],
)
def test_a_link_in_a_project_must_not_redirect_run_directories(engine, tmp_path, monkeypatch, capsys, command):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: runs is a symbolic link",
        "hint: pass the folder that it points to: --runs DIR",
    ]
    assert not [*(tmp_path / "elsewhere").iterdir()]
    assert main(["ps"]) == 0


def test_the_users_own_app_must_not_run_as_the_default_job(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text("print('mine')\n")
    assert main(["run", "--gpus", "none"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "`app` in this folder would run" in error and hint == "hint: python -m orchestrate run SCRIPT.py"
    assert main(["plan", "--gpus", "none", "--", "-m", "app"]) == 0
    assert main(["up", "--trainers", "0", "--gpus", "none"]) == 0
