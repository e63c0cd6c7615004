"""Secret values must be only in a job's record and its workers' environment, and in nothing else that it leaves.

Output that workers write themselves is in their logs unchanged.
"""

import dataclasses
import json

import pytest
from support.commanded import create
from support.leaks import CANARY, ENV, leaks
from support.plans import HERE, plan
from support.repo import ROOT
from support.scripted import ALL_WELL, KILLED

from orchestrate.cli.main import main
from orchestrate.cli.parser import EXPORTS
from orchestrate.errors import EngineError
from orchestrate.host import records
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import objects
from orchestrate.spec.redact import HIDDEN
from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(trainers=2, grace=0.01, env=ENV, secrets={"PHRASE": "variable"}, command=("-m", "app.train"))


@pytest.fixture
def printing(do):
    """An engine whose workers print a secret, write it as a metric, and fail at first."""
    do.engine.generations = [[KILLED], [ALL_WELL]]
    start = do.engine.start

    def write(plan, stopped=None) -> None:
        start(plan)
        folder = next(do.runs.glob("*/logs")).parent
        for worker in plan.workers:
            with (folder / "logs" / f"rank-{worker.rank}.log").open("a") as file:
                file.write(f"[node] generation {len(do.engine.plans) - 1}\nlogin with {worker.env['HF_TOKEN']}\n")
                file.write(f"and {worker.env['PHRASE']}\n")
        (folder / "job" / "checkpoints" / f"step-1-{worker.env['HF_TOKEN']}").touch()
        (folder / "metrics.jsonl").write_text(
            json.dumps({"config": {"token": worker.env["HF_TOKEN"], "phrase": worker.env["PHRASE"]}}) + "\n"
        )

    do.engine.start = write
    return do.engine


def test_a_run_must_show_no_secret_even_if_its_workers_print_it(do, printing, tmp_path, monkeypatch):
    job = tmp_path / "files" / "secret.yaml"
    job.parent.mkdir()
    job.write_text(SPEC.to_yaml())
    monkeypatch.chdir(ROOT)
    for command in (["plan", job], ["run", job, "--dry-run"], ["run", job]):
        code, out, err = do(*command)
        assert code == 0 and CANARY not in "\n".join(out + err)
    assert f"login with {HIDDEN}" in "\n".join(out)
    (run,) = (path.parent for path in do.runs.glob("*/report.json"))
    assert leaks(run) == {"job/metrics.jsonl", *(f"job/logs/rank-{rank}.log" for rank in range(3))}
    report = json.loads((run / "report.json").read_text())
    assert report["final_metrics"] == {"config": {"token": HIDDEN, "phrase": HIDDEN}}
    assert report["checkpoints"] == [str(run / "checkpoints" / f"step-1-{HIDDEN}")]
    assert report["failures"][0]["last_lines"][-2:] == [f"login with {HIDDEN}", f"and {HIDDEN}"]
    shown = json.loads((run / "plan.json").read_text())["workers"][0]["env"]
    assert (shown["A"], shown["PHRASE"], shown["HF_TOKEN"]) == ("b", HIDDEN, HIDDEN)
    for command in (["logs", run.name], ["ps"], ["attach", run.name]):
        code, out, err = do(*command)
        assert code == 0 and CANARY not in "\n".join(out + err)


@pytest.mark.parametrize("target", EXPORTS)
def test_an_export_must_require_a_secret_that_the_job_file_names(do, tmp_path, target, monkeypatch):
    job = tmp_path / "secret.yaml"
    job.write_text(SPEC.to_yaml())
    monkeypatch.chdir(ROOT)
    assert main(["export", target, str(job)]) == 0
    out = do.capsys.readouterr().out
    assert "PHRASE" in out and CANARY not in out
    job.write_text(dataclasses.replace(SPEC, command=(*SPEC.command, f"--token={CANARY}-1")).to_yaml())
    assert main(["export", target, str(job)]) == 2
    assert "error: a command with a secret cannot be exported" in do.capsys.readouterr().err


def test_a_plan_must_have_no_content_of_a_secret_file(paths):
    spec = dataclasses.replace(SPEC, command=("a.py", 'pass"é-1234'), contents={"DB": 'pass"é-1234'})
    run_dir.keep(paths, plan(spec, HERE, "a-1"), spec)
    assert json.loads(paths.plan.read_text())["command"] == ["a.py", HIDDEN]


@pytest.mark.parametrize(
    "arguments",
    [["logs", "a-1"], ["logs", "a-1", "--rank", "1"], ["attach", "a-1"], ["attach", "a-1", "--progress", "json"]],
)
def test_the_output_of_a_job_must_be_shown_without_secrets(do, printing, paths, arguments):
    records.forget(paths.root)
    records.make(paths.root, bytes(32), ENV)
    records.write(paths.spec, dataclasses.replace(SPEC, env=dict.fromkeys(ENV, HIDDEN)).to_yaml())
    records.write(paths.plan, paths.plan.read_text())
    paths.log(1).write_text(f"before {CANARY}-3 after\n")
    _, out, err = do(*arguments)
    shown = "\n".join(out + err)
    assert f"before {HIDDEN} after" in shown and CANARY not in shown


def test_a_second_supervisor_must_start_workers_with_the_secrets(do, printing, tmp_path):
    started, start = [], printing.start
    printing.start = lambda plan, stopped=None: (started.append(plan.command), start(plan))
    command = (*SPEC.command, f"--token={CANARY}-1")
    paths = create(JobPaths(tmp_path / "b-1"), dataclasses.replace(SPEC, command=command))
    assert leaks(paths.root) == {"job.yaml"}
    assert json.loads(paths.plan.read_text())["command"] == [*SPEC.command, f"--token={HIDDEN}"]
    assert do("attach", "b-1")[0] == 0
    assert len(printing.plans) == 2 and started == [command, command]
    for made in printing.plans:
        assert all(worker.env.items() >= ENV.items() for worker in made.workers)


def test_our_own_keywords_must_be_readable_even_if_a_secret_equals_them(do, printing, tmp_path):
    secrets = {f"TOKEN_{at}": word for at, word in enumerate(("succeeded", "killed", "trainer-1", "docker"))}
    spec = dataclasses.replace(SPEC, env=ENV | {"PHRASE": "failed"} | secrets)
    paths = create(JobPaths(tmp_path / "b-1"), spec)
    assert do("attach", "b-1")[0] == 0
    assert json.loads(paths.report.read_text())["outcome"] == "succeeded"
    events = [*objects(paths.events.read_bytes().splitlines())]
    assert [event["outcome"] for event in events if event["event"] == "generation_ended"] == ["failed", "succeeded"]
    assert {event["engine"] for event in events if event["event"] == "nodes_starting"} == {"docker"}
    assert "trainer-1" in [event["node"] for event in events if event["event"] == "worker_ended"]
    assert do("wait", "b-1")[0] == 0


@pytest.mark.parametrize("key", ["generation", "outcome", "final_metrics", "seconds"])
def test_a_secret_that_equals_one_of_our_keys_must_not_break_a_job(do, tmp_path, key):
    paths = create(JobPaths(tmp_path / "b-1"), dataclasses.replace(SPEC, env=ENV | {"DB_PASSWORD": key}))
    do.engine.generations = [[ALL_WELL]]
    paths.metrics.write_text(json.dumps({f"loss of {key}": 1.0, "step": 1}) + "\n")
    code, _, err = do("attach", "b-1")
    assert code == 0, err
    report = json.loads(paths.report.read_text())
    assert report["outcome"] == "succeeded" and f"loss of {HIDDEN}" in report["final_metrics"]
    assert do("wait", "b-1")[0] == 0


def test_events_must_contain_no_secret(do, printing, tmp_path):
    paths = create(JobPaths(tmp_path / "b-1"), dataclasses.replace(SPEC, max_restarts=0))
    up = printing.up
    printing.up = lambda *arguments, **how: (up(*arguments, **how), fail())[0]

    def fail() -> None:
        raise EngineError(f"no {CANARY}-1")

    assert do("attach", "b-1")[0] != 0
    assert leaks(paths.root) == set() and f"no {HIDDEN}" in paths.events.read_text()
