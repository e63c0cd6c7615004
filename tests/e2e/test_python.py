"""Jobs from Python must be those of the command line: scripts and functions, with values, errors and clusters."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from support.cli import Cli
from support.commanded import HOLDS
from support.repo import ROOT
from support.waiting import eventually

FUNCTIONS = """
import os

def rank():
    return int(os.environ["RANK"])

def values(factor=1, *rest, **more):
    print("factor", factor)
    return {"rank": rank(), "list": [factor, 0.5, None, True, "ü"], "rest": rest, "more": more}

def tensors():
    import torch
    row = torch.arange(6).reshape(2, 3).t()
    lazy = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]  # not negated in memory yet
    return [{"a": row + rank(), "b": (torch.tensor(0.5), torch.empty(0, 2))}, torch.ones(2, dtype=torch.bfloat16), lazy]

def fake():
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode():
        import torch
        return torch.empty(2)

def fails(on):
    if rank() == on:
        raise ValueError("the label is missing")

def waits():
    print("waits", flush=True)
    import signal
    signal.pause()

def odd():
    return {1, 2}

class Counts:
    def count(self):
        return 1

def second():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank():
            raise ValueError
        return "first"
    if rank():
        return "second"
    raise SystemExit(0)
"""
OPTIONS = dict(nodes=2, engine="process", gpus="none", max_restarts=0, quiet=True)


class Program:
    """Python programs in a folder with functions.py."""

    def __init__(self, cli: Cli) -> None:
        self.cli, self.folder = cli, cli.folder
        (self.folder / "functions.py").write_text(FUNCTIONS)

    def start(self, code: str) -> subprocess.Popen[str]:
        text = f"import json, functions, orchestrate\nO = {OPTIONS!r}\n{code}\n"
        (self.folder / "program.py").write_text(text)
        return subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=self.folder,
            env=self.cli.env | {"PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, code: str) -> tuple[list[str], str]:
        """Run a program; return the lines that it prints, and its messages."""
        with self.start(code) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out.splitlines(), err


@pytest.fixture
def program(cli):
    return Program(cli)


def test_a_function_must_run_on_every_rank_and_return_its_values(program):
    (program.folder / "sub").mkdir()
    out, err = program("""
result = orchestrate.run(functions.values, 3, "x", key=[1], name="mine", **O)
print(json.dumps([*result.values]), result.run_dir.name.startswith("mine-"), result)
result = orchestrate.run(functions.values, chdir="sub", **O | {"quiet": False})
""")
    values = [
        {"rank": rank, "list": [3, 0.5, None, True, "ü"], "rest": ["x"], "more": {"key": [1]}} for rank in range(2)
    ]
    shown, *lines = out
    assert json.loads(shown.partition("]}}] ")[0] + "]}}]") == values
    assert " True <Result of mine-" in shown and ": succeeded: 2 workers, " in shown
    assert sorted(lines) in (["[0-1] factor 1"], ["[0] factor 1", "[1] factor 1"])
    assert "job values-" in err and "succeeded: 2 workers" in err and "mine" not in err


@pytest.mark.slow
def test_tensors_must_come_back_as_they_are(program):
    out, _ = program("""
import torch
one, two, lazy = orchestrate.run(functions.tensors, **O).values[1]
print(torch.equal(one["a"], torch.arange(6).reshape(2, 3).t() + 1), one["b"], two)
print(*(each.tolist() for each in lazy))
""")
    shown = "True [tensor(0.5000), tensor([], size=(0, 2))] tensor([1., 1.], dtype=torch.bfloat16)"
    assert out == [shown, "[(1-2j)] [-2.0]"]


def test_a_job_that_fails_must_be_an_exception_with_its_root_cause(program):
    out, err = program("""
for call in (functions.fails, 1), (functions.odd,):
    try:
        orchestrate.run(*call, **O)
    except orchestrate.JobFailed as error:
        print(error, error.hint, error.result.report["outcome"])
""")
    assert "stop" not in err  # it has ended
    text = "\n".join(out)
    assert "root cause: rank 1 on trainer-1 exited with code 1\n    Traceback (most recent call last):\n" in text
    assert 'functions.py", line 25, in fails' in text and "call.py" not in text
    assert "ValueError: the label is missing" in text
    assert "TypeError: cannot return a value of type set: only JSON types and dense tensors\n" in text
    assert text.endswith("failed")


def test_a_script_must_run_as_on_the_command_line(program):
    (program.folder / "script.py").write_text("import sys\nprint('words', sys.argv[1:])\n")
    out, _ = program("""
job = orchestrate.submit("script.py", "--lr", 0.1, **{key: value for key, value in O.items() if key != "quiet"})
print(job.wait().values, job.outcome, [*job.logs(rank=1)], [*job.logs()][:1])
print([event["event"] for event in job.events()][-1], job, orchestrate.Job(job.run_dir).outcome)
""")
    name = next(program.folder.glob("runs/script-*")).name
    assert out[0] == "[] succeeded [\"words ['--lr', '0.1']\"] [\"[0-1] words ['--lr', '0.1']\"]"
    assert out[1] == f"job_ended <Job {name}: succeeded> succeeded"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("orchestrate.run(lambda: 1)", "<lambda> cannot be imported by other processes: it is in this program"),
        ("orchestrate.run(functions.values, factor=object())", "the arguments of values() cannot be passed"),
        ("orchestrate.run(functions.fails, **O)", "fails(): missing a required argument: 'on'"),
        ("orchestrate.run(functions.fails, on=1, of=2)", "fails(): got an unexpected keyword argument 'of'"),
        ("orchestrate.run('no.py', **O)", "the script no.py does not exist"),
        ("orchestrate.run('program.py', lr=1)", "unknown key 'lr'"),
        ("orchestrate.run('program.py', stdin=True, engine='process')", "stdin is not supported for jobs from Python"),
        ("orchestrate.Job('runs/none')", "none has no record"),
        ("orchestrate.run(print)", "it is not in a module"),
        ("orchestrate.run(functions.Counts().count, **O)", "it is not in a module"),
        ("orchestrate.run(__import__('functools').partial(functions.values), **O)", "it is not in a module"),
        ("orchestrate.run(None)", "None cannot be run"),
        ("orchestrate.run(functions.values, command='x.py')", "command is for scripts"),
        ("functions.name = lambda name: name; orchestrate.run(functions.name, name='x')", "name is a setting of a job"),
    ],
)
def test_what_cannot_run_must_be_refused_with_the_reason(program, code, error):
    out, _ = program(f"""
try:
    {code}
except orchestrate.OrchestrateError as error:
    print(type(error).__name__, error, bool(error.hint))
""")
    assert out[0].startswith("UsageError ") and error in out[0] and out[0].endswith(" True"), out
    assert not [*program.folder.glob("runs/*")]


def test_a_cluster_must_serve_several_jobs_and_end_with_its_block(program):
    out, err = program("""
del O["quiet"]
with orchestrate.cluster(**O) as cluster:
    for number in range(2):
        print(cluster.run(functions.values, number, quiet=True).values[1]["list"][0])
    try:
        cluster.run(functions.values, nodes=3)
    except orchestrate.OrchestrateError as error:
        print(error)
""")
    assert out[:2] == ["0", "1"]
    assert out[2].endswith("cannot run this job: it has 1 trainer, the job needs 2"), out
    assert not [*program.folder.glob("runs/cluster-*")]


def test_a_cluster_must_be_its_programs_own_and_end_with_its_job_whatever_happens(program):
    out, _ = program("""
del O["quiet"]
try:
    with orchestrate.cluster(grace="1s", **O) as cluster:
        job = cluster.submit(functions.waits)
        other = orchestrate.run(functions.values, quiet=True, **O)
        print(other.report["outcome"], job.outcome)
        raise KeyError("mine")
except KeyError as error:
    print(error, job.outcome)
""")
    assert out == ["succeeded None", "'mine' stopped"]
    assert not [*program.folder.glob("runs/cluster-*")]


def test_a_job_must_wait_for_the_supervisor_of_the_one_before_it(program):
    """It holds its cluster until it exits, for a moment after its job."""
    out, _ = program(f"""
import subprocess, sys, threading
del O["quiet"]
with orchestrate.cluster(**O) as cluster:
    holds = [sys.executable, "-c", {HOLDS!r}, f"runs/{{cluster.name}}"]
    with subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        threading.Timer(0.3, holder.stdin.close).start()
        print(cluster.run(functions.values, 5, quiet=True).values[1]["list"][0])
""")
    assert out == ["5"]


def test_values_must_be_those_of_the_last_generation(program):
    out, _ = program('print(orchestrate.run(functions.second, **O | {"max_restarts": 1}).values)')
    assert out == ["[None, 'second']"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_job_must_end_with_the_program_that_runs_it(program, how):
    with program.start('orchestrate.run(functions.waits, grace="1s", **O)') as process:
        (log,) = eventually(lambda: [*program.folder.glob("runs/waits-*/logs/rank-0.log")])
        eventually(lambda: "waits" in log.read_text())
        process.send_signal(how)
        process.communicate(timeout=60)
    report = log.parents[1] / "report.json"
    eventually(report.exists)
    assert json.loads(report.read_text())["outcome"] == "stopped"
    assert process.returncode == -how


def test_a_job_that_was_submitted_must_outlive_its_program_and_can_be_stopped_and_resumed(program):
    program('del O["quiet"]; orchestrate.submit(functions.waits, grace="1s", **O)')
    (run,) = program.folder.glob("runs/waits-*")
    out, _ = program(f"""
job = orchestrate.Job({str(run)!r})
try:
    job.wait(timeout=0)
except TimeoutError as error:
    print(error)
job.stop()
print(job)
job.resume()
print(job)
job.stop()
""")
    assert out == [f"{run.name} is still running after 0 s", f"<Job {run.name}: stopped>", f"<Job {run.name}: running>"]


@pytest.mark.slow
def test_a_tensor_without_memory_must_be_refused(program):
    out, _ = program("""
try:
    orchestrate.run(functions.fake, **O)
except orchestrate.JobFailed as error:
    print(error)
""")
    assert "TypeError: cannot return a FakeTensor with the layout" in "\n".join(out)


@pytest.mark.slow
def test_a_cluster_must_not_wait_for_a_job_without_a_supervisor(program):
    out, _ = program("""
import os, signal
from orchestrate.record import lock
del O["quiet"]
with orchestrate.cluster(**O) as cluster:
    job = cluster.submit(functions.waits)
    while "waits" not in "".join(job.logs()):
        pass
    os.kill(lock.holder(job._paths).pid, signal.SIGKILL)
    try:
        cluster.run(functions.rank, quiet=True)
    except orchestrate.OrchestrateError as error:
        print(error)
    cluster.down()
""")
    assert len(out) == 1 and out[0].endswith(" has no supervisor, so no result will be reported")


@pytest.mark.slow
def test_the_example_of_the_documentation_must_print_what_it_shows(cli):
    blocks = re.findall(r"```(python|text)\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)
    (_, module), (_, program), (_, output) = blocks
    for text in (module, program):
        (cli.folder / text.split()[1]).write_text(text)
    env = cli.env | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "program.py"], cwd=cli.folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, output), done.stderr


@pytest.mark.docker
def test_a_function_must_run_in_containers(program, docker_engine):
    (program.folder / "src" / "pkg").mkdir(parents=True)
    (program.folder / "src" / "pkg" / "work.py").write_text(
        "import os\ndef work():\n    return [os.getpid(), __file__]\n"
    )
    out, _ = program("""
import sys
sys.path.insert(0, "src")
from pkg.work import work
print(json.dumps([*orchestrate.run(work, **O | {"engine": "docker"}).values]))
""")
    assert [path for _, path in json.loads(out[0])] == ["/job/work/src/pkg/work.py"] * 2


def test_importing_the_package_must_import_nothing_else(tmp_path):
    code = "import sys; before = {*sys.modules}; import orchestrate; print(*sorted({*sys.modules} - before))"
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    found = subprocess.check_output([sys.executable, "-c", code], env=env, text=True, cwd=tmp_path)
    assert {*found.split()} <= {
        "orchestrate",
        "importlib",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
        "warnings",
    }
