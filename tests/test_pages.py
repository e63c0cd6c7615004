"""Pages about jobs: one file each, with what happened, without trust in what the job wrote."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrate.files.paths import JobPaths
from orchestrate.job.events import (
    CheckpointSaved,
    Event,
    GenerationEnded,
    GenerationStarting,
    JobEnded,
    JobResumed,
    NodeInTrouble,
    NodesStarting,
    OutcomeDecided,
    RestartDecided,
    WorkersStarted,
)
from orchestrate.job.outcomes import Cause, Outcome, Reason
from orchestrate.pages import charts
from orchestrate.pages.curves import BUCKETS, MAX_CURVES, Progress, progress, thinned
from orchestrate.pages.page import drawn, duration
from orchestrate.pages.run import Run
from orchestrate.pages.spans import Moment, Span, moments, spans
from orchestrate.supervise import launch
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.stores import Stores

SCRIPT = """
import json, os, sys
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("<script>alert(1)</script> token", os.environ.get("API_TOKEN"), flush=True)
if rank == "0":
    with open(os.environ["JOB_DIR"] + "/metrics.jsonl", "a") as file:
        for step in range(1 if generation == "0" else 4, 8):
            values = {"step": step, "loss": 1 / step, "<b>" + os.environ.get("API_TOKEN", ""): step}
            file.write(json.dumps(values) + "\\n")
    sys.exit(3 if generation == "0" or "fail" in sys.argv else 0)
"""


class Page(HTMLParser):
    """A page: its elements, its text, and what it refers to."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def references(self) -> set[str]:
        names = ("src", "href", "xlink:href", "action", "data", "srcset")
        return {values[name] or "" for _, values in self.elements for name in names if name in values}


@pytest.fixture
def restarted(cli) -> str:
    """The page of a job that has restarted once."""
    (cli.folder / "writes.py").write_text(SCRIPT)
    cli.env["API_TOKEN"] = "sesame-4711"
    done = cli("run", "--engine", "process", "--trainers", "1", "-e", "API_TOKEN", "--set", "grace=2s", "writes.py")
    assert done.returncode == 0, done.stderr
    return (cli.run_dir() / "report.html").read_text()


def test_the_page_of_a_job_must_show_its_outcome_metrics_time_and_failures(cli, restarted):
    page = Page(restarted)
    name = cli.run_dir().name
    assert page.text.startswith(f"{name}: succeeded {name} succeeded : 2 workers,")
    for text in (
        "loss 0.14286",
        "rank 0 on master exited with code 3 , at step 7",
        "repeating 4 steps after restarts",
        "command writes.py",
        "trainers 1",
    ):
        assert text in page.text, text
    headings = [element for element, _ in page.elements if element in ("h1", "h2")]
    assert headings == ["h1", *["h2"] * 4]
    assert {"header", "main", "footer"} <= {element for element, _ in page.elements}
    figures = [values["aria-label"] for element, values in page.elements if element == "svg"]
    assert figures[0] == "loss, last value 0.1429" and len(figures) == 2


def test_the_page_must_be_there_when_the_job_has_ended_for_others(tmp_path, monkeypatch):
    """`wait` and `attach` return as soon as report.json is there."""
    order: list[str] = []
    monkeypatch.setattr(launch, "_write_page", lambda paths, data: order.append("page"))
    monkeypatch.setattr(launch.records, "write", lambda path, text: order.append(path.name))
    paths = JobPaths(tmp_path / "run")
    paths.create()
    launch._finish(JobFiles(paths), {"left_behind": "nodes"}, Stores(), pytest.fail)
    assert order == ["page", "report.json"]


def test_a_page_must_need_no_network_and_no_script_and_show_what_the_job_wrote_as_text(restarted):
    page = Page(restarted)
    assert "script" not in {element for element, _ in page.elements}
    assert "<script>alert(1)</script>" in page.text and "<b>" in page.text
    assert not {reference for reference in page.references() if ":" in reference or reference.startswith("//")}
    assert "url(" not in restarted and "@import" not in restarted
    assert not [name for _, values in page.elements for name in values if name.startswith("on")]
    (policy,) = [values["content"] for _, values in page.elements if values.get("http-equiv")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_a_page_must_not_contain_secrets(restarted):
    assert "sesame" not in restarted and "***" in restarted


def test_the_page_of_a_failed_job_must_begin_with_the_root_cause(cli):
    (cli.folder / "writes.py").write_text(SCRIPT)
    options = ["--engine", "process", "--trainers", "0", "--max-restarts", "0"]
    assert cli("run", *options, "writes.py", "fail").returncode == 1
    page = Page((cli.run_dir() / "report.html").read_text())
    assert re.match(r"\S+ failed \S+ failed \(max_restarts is 0\): 1 worker, ", page.text)
    before, _, after = page.text.partition(" Root cause ")
    assert after.startswith("rank 0 on master exited with code 3") and "Metrics" in after
    assert "Earlier failures" not in page.text


def test_the_failures_before_the_root_cause_must_be_shown_apart(cli):
    (cli.folder / "fails.py").write_text(
        "import os, sys\nsys.exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\n"
    )
    options = ["--engine", "process", "--trainers", "0", "--max-restarts", "1", "fails.py"]
    assert cli("run", *options).returncode == 1
    page = Page((cli.run_dir() / "report.html").read_text())
    cause, _, earlier = page.text.partition("Earlier failures")
    assert "Root cause rank 0 on master exited with code 4" in cause
    assert "rank 0 on master exited with code 3" in earlier and "with code 4" not in earlier


def test_text_that_no_page_can_hold_must_be_replaced(cli):
    rows = "\n".join(json.dumps({"step": step, "\ud800\x08\u202e": 1.0}) for step in (1, 2))
    (cli.folder / "odd.py").write_text(
        f"import os\nopen(os.environ['JOB_DIR'] + '/metrics.jsonl', 'w').write({rows!r})\n"
    )
    assert cli("run", "--engine", "process", "--trainers", "0", "odd.py").returncode == 0
    text = (cli.run_dir() / "report.html").read_text()
    assert "���" in text and not re.search("[\x00-\x08\u202e]", text)


def test_secrets_in_the_command_and_in_settings_must_be_hidden_however_they_are_quoted(cli):
    (cli.folder / "ok.py").write_text("print('ok')\n")
    cli.env["DB_PASSWORD"] = "it's-my-pass-word1"
    (cli.folder / "job.yaml").write_text("before: ['true', \"it's-my-pass-word1\"]\n")
    options = ["--engine", "process", "--trainers", "0", "-e", "DB_PASSWORD", "job.yaml"]
    done = cli("run", *options, "--", "ok.py", "--pw", "it's-my-pass-word1")
    assert done.returncode == 0, done.stderr
    text = (cli.run_dir() / "report.html").read_text()
    assert "my-pass-word1" not in text and "ok.py --pw &#39;***&#39;" in text


def test_a_comparison_must_mark_what_differs(cli, restarted):
    first = cli.run_dir().name
    assert cli("run", "--engine", "process", "--trainers", "0", "--max-restarts", "2", "writes.py").returncode == 0
    second = next(path.name for path in cli.folder.glob("runs/writes-*") if path.name != first)
    done = cli("report", first, second)
    assert (done.returncode, done.stdout) == (0, "runs/report.html\n"), done.stderr
    text = (cli.folder / "runs" / "report.html").read_text()
    page = Page(text)
    assert page.text.startswith(f"2 jobs 2 jobs Outcomes job {first} {second} outcome succeeded succeeded")
    rows = dict(re.findall(r'<tr><th scope="row">(\w+)</th>(.*?)</tr>', text))
    assert re.findall("<mark>(.*?)</mark>", rows["trainers"]) == ["1", "0"]
    assert re.findall("<mark>(.*?)</mark>", rows["max_restarts"]) == ["not set", "2"]
    assert "<mark>" not in rows["command"] and "<mark>" not in rows["loss"]
    assert page.references() == {f"{first}/report.html", f"{second}/report.html"}
    assert page.text.count(f"{first} {second}") >= 4  # tables, and the legend of the loss


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["nope"], 2, "error: no such job: nope"),
        (["latest", "nope"], 2, "error: no such job: nope"),
        (["runs/nope"], 2, "error: no such job: nope"),
        (["latest"], 2, "has not ended"),
    ],
)
def test_a_page_of_something_else_must_be_an_error(cli, arguments, code, error):
    (cli.folder / "writes.py").write_text(SCRIPT)
    assert cli("run", "--engine", "process", "--trainers", "0", "writes.py").returncode == 0
    (cli.run_dir() / "report.html").unlink()
    if "nope" not in "".join(arguments):
        (cli.run_dir() / "report.json").unlink()
    done = cli("report", *arguments)
    assert (done.returncode, error in done.stderr, "hint: " in done.stderr) == (code, True, True), done.stderr
    assert not [*cli.folder.glob("runs/**/report.html")]


@pytest.mark.parametrize(
    "line",
    [
        r"print({'loss': 1 / step, 'epoch': step / 2}, flush=True)",
        r"print(f'\r 10%|1  | {step}/9 [00:01<00:02, 7.4it/s, loss={1 / step:.3f}]', end='', flush=True)",
        r"print(f'step {step}: loss = {1 / step:.3f}', flush=True)",
    ],
    ids=["Trainer", "tqdm", "text"],
)
def test_metrics_that_a_script_only_prints_must_be_drawn_too(cli, line):
    (cli.folder / "prints.py").write_text(f"for step in range(1, 8):\n    {line}\n")
    assert cli("run", "--engine", "process", "--trainers", "0", "prints.py").returncode == 0
    page = Page((cli.run_dir() / "report.html").read_text())
    assert "order in the log" in page.text
    assert "loss, last value 0.1" in str([values.get("aria-label") for _, values in page.elements])


def test_the_page_must_be_written_again_on_request(cli, restarted):
    (cli.run_dir() / "report.html").unlink()
    done = cli("report")
    assert (done.returncode, done.stdout) == (0, f"runs/{cli.run_dir().name}/report.html\n"), done.stderr
    again = (cli.run_dir() / "report.html").read_text()
    assert [re.sub(r"chart-[0-9a-f-]+", "", text) for text in (again, restarted)] == [  # numbers of charts are random
        re.sub(r"chart-[0-9a-f-]+", "", restarted)
    ] * 2


def test_a_copied_job_must_have_the_same_page_and_events(cli, restarted):
    there = cli.folder / "copied" / cli.run_dir().name
    shutil.copytree(cli.run_dir(), there, ignore=shutil.ignore_patterns("report.html", "sockets"))
    done = cli("report", f"copied/{there.name}")
    assert (done.returncode, done.stdout) == (0, f"copied/{there.name}/report.html\n"), done.stderr
    copy, page = (Page(text).text.partition(" Time ") for text in ((there / "report.html").read_text(), restarted))
    assert copy[2] == page[2] and "How the time was spent" in page[2]
    copied, original = cli("events", f"copied/{there.name}"), cli("events", there.name)
    assert (copied.returncode, copied.stdout) == (0, original.stdout) and "workers_started" in copied.stdout


@pytest.mark.parametrize("damage", ["many", "wrong", "large"])
def test_a_copied_job_must_have_a_page_whatever_its_events_and_its_report_are(cli, restarted, damage):
    there = cli.folder / "copied" / cli.run_dir().name
    shutil.copytree(cli.run_dir(), there, ignore=shutil.ignore_patterns("sockets"))
    events = there / "events.jsonl"
    if damage == "many":  # which once took quadratic time
        events.write_text("".join(f'{{"event": "checkpoint_saved", "seconds": {at}}}\n' for at in range(50_000)))
    elif damage == "wrong":
        events.write_text('{"event": "workers_started", "seconds": NaN}\n')
    else:
        os.truncate(events, 1 << 40)
    report = json.loads((there / "report.json").read_text())
    (there / "report.json").write_text(json.dumps(report | {"torch": ["<b>", 5, "2.9.1"]}))
    done = cli("report", f"copied/{there.name}")
    assert done.returncode == 0, done.stderr
    text = Page((there / "report.html").read_text()).text
    assert "torch 5 and 2.9.1" in text and ("50000 checkpoints saved" in text) == (damage == "many")


def test_a_page_that_cannot_be_written_must_not_change_the_outcome(cli):
    (cli.folder / "writes.py").write_text(
        "import os\nos.makedirs(os.path.dirname(os.environ['JOB_DIR']) + '/report.html/full')\n"
    )
    done = cli("run", "--engine", "process", "--trainers", "0", "writes.py")
    assert done.returncode == 0 and "report.html: " in done.stderr, done.stderr
    assert cli.report()["outcome"] == "succeeded"


# --- time


def ended(outcome: Outcome, seconds: float, generation: int = 0) -> GenerationEnded:
    cause = Cause(rank=1, node="n", exit_code=1, cause=Reason.ERROR, summary="rank 1 failed", hint="")
    known = cause if outcome == Outcome.FAILED else None
    return GenerationEnded(generation=generation, outcome=outcome, why="finished", cause=known, seconds=seconds)


FIRST: list[Event] = [
    NodesStarting(2, "process"),
    GenerationStarting(0, (), 2, 1, seconds=1.0),
    WorkersStarted(seconds=3.0),
    ended(Outcome.FAILED, 10.0),
]
SECOND = [GenerationStarting(1, (), 2, 1, seconds=11.0), WorkersStarted(seconds=12.0)]


def summary(events: list[Event]) -> list[tuple[str, float, float, int, str]]:
    return [(span.kind, span.begin, span.end, span.generation, span.why) for span in spans(events)]


def test_the_time_of_a_job_must_be_divided_without_gaps():
    events = [*FIRST, RestartDecided(True, "", 0.0, seconds=10.0), *SECOND, ended(Outcome.SUCCEEDED, 20.0, 1)]
    events += [OutcomeDecided(Outcome.SUCCEEDED, "", seconds=20.0), JobEnded(Outcome.SUCCEEDED, "", seconds=22.0)]
    assert summary(events) == [
        ("starting", 0.0, 3.0, 0, ""),
        ("working", 3.0, 10.0, 0, "rank 1 failed"),
        ("restarting", 10.0, 12.0, 1, ""),
        ("working", 12.0, 20.0, 1, "finished"),
        ("ending", 20.0, 22.0, 1, ""),
    ]


def test_what_follows_a_last_failure_must_count_as_ending():
    events = [*FIRST, RestartDecided(False, "", 0.0, seconds=10.0), OutcomeDecided(Outcome.FAILED, "", seconds=11.0)]
    assert summary([*events, JobEnded(Outcome.FAILED, "", seconds=12.0)])[2:] == [("ending", 10.0, 12.0, 0, "")]


def test_a_generation_that_never_worked_must_prolong_the_start():
    events = [FIRST[0], FIRST[1], ended(Outcome.FAILED, 4.0), *SECOND, JobEnded(Outcome.STOPPED, "", seconds=13.0)]
    assert [(kind, begin, end) for kind, begin, end, *_ in summary(events)] == [
        ("starting", 0.0, 4.0),
        ("restarting", 4.0, 12.0),
        ("working", 12.0, 13.0),
    ]


def test_the_time_until_a_job_was_resumed_must_not_count_as_work():
    events = [*FIRST, OutcomeDecided(Outcome.FAILED, "", seconds=10.0), JobEnded(Outcome.FAILED, "", seconds=11.0)]
    events += [JobResumed(seconds=50.0), *(type(event)(**vars(event) | {"seconds": 60.0}) for event in SECOND)]
    assert [(kind, begin, end) for kind, begin, end, *_ in summary([*events, ended(Outcome.SUCCEEDED, 70.0, 1)])] == [
        ("starting", 0.0, 3.0),
        ("working", 3.0, 10.0),
        ("ending", 10.0, 11.0),
        ("stopped", 11.0, 50.0),
        ("starting", 50.0, 60.0),
        ("working", 60.0, 70.0),
    ]


def test_what_happened_must_be_listed_with_checkpoints_that_were_saved_one_after_the_other():
    events = [*FIRST[:3], CheckpointSaved(seconds=4.0), CheckpointSaved(seconds=6.0), NodeInTrouble("n", "paused")]
    events += [FIRST[3], RestartDecided(True, "restart 1 of 3", 0.0, seconds=10.5), *SECOND]
    events += [CheckpointSaved(seconds=13.0), JobEnded(Outcome.SUCCEEDED, "", seconds=22.0), JobResumed(seconds=50.0)]
    assert moments(events) == [
        Moment("checkpoint", (4.0, 6.0), "2 checkpoints saved"),
        Moment("trouble", (0.0,), "n is paused; the job waits (to resume: docker unpause)"),
        Moment("trouble", (10.0,), "generation 0 failed: rank 1 failed"),
        Moment("other", (10.5,), "restarting all workers (restart 1 of 3)"),
        Moment("checkpoint", (13.0,), "1 checkpoint saved"),
        Moment("other", (50.0,), "the job was resumed"),
    ]


def test_marks_must_be_on_the_bar_and_few():
    happened = [Moment("checkpoint", tuple(step / 1000 for step in range(100_000)), "")]
    happened += [Moment("trouble", (25.0, 1e9, -5.0), "x"), Moment("other", (50.0,), "y")]
    found = run(progress([]), 90.0, happened).marks
    assert len(found) == 1001 + 3 and all(0 <= percent <= 100 for percent, _, _ in found)
    assert [mark[:2] for mark in found if mark[2].kind != "checkpoint"] == [(25.0, 25.0), (100.0, 1e9), (0.0, -5.0)]


def run(found: Progress, working: float, happened: Sequence[Moment] = ()) -> Run:
    """A job that started within 10 s, and has worked for some time."""
    times = [Span("starting", 0.0, 10.0, 0), Span("working", 10.0, 10.0 + working, 0)]
    return Run("job", {"duration_s": 0.0}, times, [*happened], found, {}, "step", "", {}, "", False)


def test_time_for_checkpoints_and_for_the_slowest_worker_must_not_count_as_running():
    rows: list[dict[str, Any]] = [
        {"step": 1},
        {"step": 10, "rank_seconds": [0.5, 0.25, 0.0]},
        {"step": 10, "save_seconds": 3.0},
    ]
    rows += [{"step": 20, "rank_seconds": [0.0, 0.0, 1.5]}, {"step": 20, "save_seconds": 4.0}]
    found = run(progress(rows), 90.0)
    assert found.times == [
        ("running the script", pytest.approx(90.0 - 7.0 - 12.5)),
        ("saving checkpoints", 7.0),
        ("waiting for the slowest worker", pytest.approx(10 * 0.25 + 10 * 1.0)),
        ("starting nodes and workers", 10.0),
    ]
    assert found.goodput == pytest.approx(70.5 / 100) and found.not_counted == "saving and waiting"


@pytest.mark.parametrize("value", [1e9, -5.0, float("nan"), float("inf"), "1", True, None, [1e9]])
def test_no_more_time_may_be_lost_than_there_was(value):
    rows = [{"step": 1, "save_seconds": value, "rank_seconds": [value, 0.0]}, {"step": 2, "rank_seconds": value}]
    found = run(progress(rows), 90.0)
    assert sum(seconds for _, seconds in found.times) == pytest.approx(100.0)
    assert all(seconds > 0 for _, seconds in found.times) and 0 <= found.goodput <= 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (99.9, "99.9 s"), (100, "1 min 40 s"), (7261, "2 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations_on_pages_must_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


# --- curves


def test_repeated_steps_must_replace_those_before_the_restart():
    rows = [{"step": step, "loss": float(step)} for step in (1, 2, 3, 4)]
    rows += [{"step": step, "loss": 10.0 * step} for step in (3, 4, 5)]
    found = progress(rows, generations=2)
    assert found.curves == {"loss": [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]}
    assert (found.done, found.repeated, found.restarts, found.latest) == (7, 2, 1, 3)


def test_a_metric_that_was_not_written_again_must_end_where_the_job_did():
    rows = [{"step": step, "loss": 1.0, "test": step / 2} for step in (5, 6, 7, 8)]
    found = progress([*rows, {"step": 7, "loss": 3.0}, {"step": 7, "accuracy": 0.5}], generations=2)
    assert found.drawn() == {"loss": [(5, 1), (6, 1), (7, 3)], "test": [(5, 2.5), (6, 3)]}
    assert (found.done, found.repeated, found.latest) == (5, 2, 1)  # the job began with a checkpoint of step 4


def test_steps_that_go_back_without_a_restart_must_leave_other_metrics_alone():
    rows = [{"step": 100 * epoch + step, "loss": 1.0} for epoch in (1, 2) for step in range(100)]
    rows[100:100] = [{"step": 1, "val_loss": 2.0}]
    found = progress([*rows, {"step": 2, "val_loss": 3.0}], generations=2)
    assert {name: len(curve) for name, curve in found.drawn().items()} == {"loss": 200, "val_loss": 2}
    assert (found.done, found.repeated, found.restarts) == (200, 0, 0)


@pytest.mark.parametrize("steps", [[1000, 900], [5, -100, -99], [1e14, 1], [3, 3, 2, 4]])
def test_no_more_steps_may_be_repeated_than_were_done(steps):
    found = progress([{"step": step, "loss": 1} for step in steps], generations=2)
    assert 0 <= found.repeated <= found.done


def test_steps_that_go_back_and_forth_must_take_no_more_time():
    """Several workers may write the same file; this takes minutes if each step back costs time for all steps."""
    rows = ({"step": step, "loss": 1.0} for number in range(100_000) for step in (number, number + 2))
    assert progress(rows, generations=1 << 31).restarts == 99_999


def test_rows_without_a_step_must_be_numbered():
    assert progress([{"loss": 3}, {"loss": 2}]).curves == {"loss": [(1, 3), (2, 2)]}


def test_only_numbers_may_become_curves():
    values = {"step": 1, "loss": 0.5, "ok": True, "nan": float("nan"), "huge": 1e300, "text": "a", "list": [1], "": 1}
    assert progress([values]).curves == {"loss": [(1, 0.5)]}
    assert len(progress([{f"m{number}": 1 for number in range(100)}]).curves) == MAX_CURVES


def test_loss_and_accuracy_must_come_first_and_other_constants_must_not_be_drawn():
    rows = [{"a": step, "val_acc": 1, "train_loss": 1, "samples": 12_000, "zz": -step} for step in range(2)]
    found = progress(rows)
    one = dataclasses.replace(run(found, 1.0), curves=found.drawn())
    assert [*drawn([one])] == ["train_loss", "val_acc", "a", "zz"]
    other = dataclasses.replace(one, name="other", curves={"samples": [(0, 2.0), (1, 2.0)]})
    assert drawn([one, other])["samples"] == {"job": [(1, 12_000), (2, 12_000)], "other": [(0, 2.0), (1, 2.0)]}


def test_a_long_curve_must_keep_its_extremes():
    curve = [(float(step), float(step % 7)) for step in range(100_000)]
    curve[5000] = (5000.0, 99.0)
    curve[7000] = (7000.0, -99.0)
    short = thinned(curve)
    assert {(5000.0, 99.0), (7000.0, -99.0)} <= {*short} and short == sorted(short)
    assert len(short) <= 2 * BUCKETS and thinned(curve[:100]) == curve[:100]


VALUES = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none(), st.booleans())
ROWS = st.lists(st.dictionaries(st.sampled_from(["step", "loss", "<a>", "\x00"]), VALUES, max_size=4), max_size=12)


@settings(deadline=None, derandomize=True)
@given(ROWS)
def test_any_metrics_must_give_a_chart(rows):
    curves = progress(json.loads(json.dumps(rows))).drawn()
    Page(charts.lines(curves)) if curves else None
