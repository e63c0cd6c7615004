"""What `run` and `attach` show of a job, as their options say; on a scripted engine."""

import contextlib
import dataclasses
import json
import os
import pty
import re

import pytest
from support.commanded import SPEC, Meanwhile, create, end, noted, supervised, terminal_text
from support.optional import not_none
from support.plans import HERE, plan
from support.scripted import ALL_WELL, Clock

from orchestrate.cli import display
from orchestrate.cli.arguments import parse
from orchestrate.host import records
from orchestrate.plan.plan import Plan
from orchestrate.record import run_dir, usage
from orchestrate.record.events import Event, GenerationStarting, NodesStarting, WarningIssued, WorkersStarted
from orchestrate.record.outcomes import Activity
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder
from orchestrate.show.feed import Feed, Recorded
from orchestrate.show.live import LiveScreen
from orchestrate.show.screen import Display, Screen
from orchestrate.show.tracking import PlainScreen
from orchestrate.spec.spec import JobSpec


@pytest.mark.parametrize("options", [["--quiet"], ["--progress", "quiet"]])
def test_warnings_errors_and_hints_must_be_shown_with_quiet_too(paths, capsys, options):
    args = parse(["attach", "a-1", *options])
    with display.shown(args, run_dir.load(paths)[1], paths) as shown:
        for text in ("warning: a", "restarting", "error: b", "hint: c"):
            shown.message(text)
        shown.show("[0] output")
    assert capsys.readouterr() == ("", "warning: a\nerror: b\nhint: c\n")


@pytest.mark.parametrize(("progress", "kind"), [("auto", LiveScreen), ("plain", PlainScreen)])
def test_the_view_on_a_terminal_must_be_the_requested_one(paths, monkeypatch, progress, kind):
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    args = parse(["attach", "a-1", "--progress", progress])
    with os.fdopen(follower, "w") as tty, contextlib.redirect_stdout(tty), contextlib.redirect_stderr(tty):
        with display.shown(args, run_dir.load(paths)[1], paths) as shown:
            assert type(shown.screen) is kind and shown.style.colors
        monkeypatch.setenv("NO_COLOR", "1")
        assert not display.style_of(args, run_dir.load(paths)[1]).colors
    os.close(leader)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("attach a-1 --progress plain", "[0] 10%"),
        ("attach a-1 --progress tty", "Ctrl-C detaches; the job continues"),
        ("logs a-1 -f", "[0] 10%"),
    ],
)
def test_a_terminal_must_show_a_progress_bar_or_a_view_while_a_job_is_followed(do, paths, monkeypatch, command, text):
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    ticks = iter([lambda: paths.log(0).write_text("10%\r"), lambda: end(paths)])
    do.clock = Meanwhile(lambda: next(ticks)())
    with (
        supervised(paths.root),
        os.fdopen(follower, "w") as tty,
        contextlib.redirect_stdout(tty),
        contextlib.redirect_stderr(tty),
    ):
        do(*command.split())
    assert text in terminal_text(leader)


def test_progress_must_be_printed_as_strict_json_if_it_has_changed_once_a_second_at_most(paths, capsys):
    spec, planned = run_dir.load(paths)
    now, found = Clock(), []
    screen = display.JsonScreen(planned, paths, spec.mask(), now)
    for step in (5, 5, 5, 6, 7, 8, 8):
        paths.metrics.write_text(f'{{"step": {step}, "loss": NaN, "acc": 0.5}}\n' * step)
        screen.refresh(dict)
        now.sleep(0.6)
        rows = [json.loads(line, parse_constant=int) for line in capsys.readouterr().out.splitlines()]  # int: no NaN
        found.append([(row["progress"]["step"], row["progress"]["metrics"]) for row in rows])
    assert found == [[(5, {"acc": 0.5})], [], [], [(6, {"acc": 0.5})], [], [(8, {"acc": 0.5})], []]


def test_events_must_be_printed_as_json_with_our_own_words_but_without_secrets(paths, capsys):
    mask = JobSpec(env={"API_TOKEN": "hunter2000", "DB_PASSWORD": "docker"}).mask()
    screen = display.JsonScreen(run_dir.load(paths)[1], paths, mask)
    screen.event(NodesStarting(3, "docker"))
    screen.event(WarningIssued("hunter2000 and docker"))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["engine"], second["text"]) == ("docker", "*** and ***")


def test_lines_must_have_times_on_request(do, paths, engine):
    engine.generations = [[ALL_WELL]]
    paths.log(0).write_text("loss 0.5\n")
    (line,) = do("attach", "a-1", "-t")[1]
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d \[0\] loss 0.5", line)


def test_attach_must_print_only_the_result_on_request(do, paths, engine):
    paths.page.touch()
    do.clock = Meanwhile(lambda: end(paths))
    with supervised(paths.root):
        assert do("attach", "a-1", "-q") == (0, [], ["succeeded: 3 workers, 1.0 s", str(paths.root)])
    engine.generations, other = [[ALL_WELL]], create(JobPaths(do.runs / "b-1"))
    code, out, err = do("attach", "b-1", "--progress", "quiet")
    assert (code, out, err[1:]) == (0, [], [str(other.root)]) and err[0].startswith("succeeded: ")


def test_attach_must_show_the_nodes_of_a_new_generation_by_name(do, paths):
    nodes = ("master", "trainer-1", "trainer-3")

    def restart() -> None:
        run_dir.keep(paths, plan(SPEC, HERE, "a-1", generation=1, nodes=nodes), SPEC)
        noted(paths, GenerationStarting(1, nodes, 3, 29501))
        paths.log(2).write_text("hello\n")
        end(paths)

    do.clock = Meanwhile(restart)
    with supervised(paths.root):
        rows = [json.loads(line) for line in do("attach", "a-1", "--progress", "json")[1]]
    assert [(row["rank"], row["node"], row["line"]) for row in rows if "line" in row] == [(2, "trainer-3", "hello")]


def test_a_job_that_is_followed_must_be_shown_from_its_start_and_each_event_once(paths):
    spec, planned = run_dir.load(paths)
    emit = Recorder(paths.events, key=bytes.fromhex(not_none(records.find(paths.root)).events), clock=Clock())
    emit(NodesStarting(3, "docker"))  # in 1970
    emit.close()
    ages: list[float] = []
    seen: list[object] = []  # generations of plans, and types of events

    uses: list[object] = []

    class Kept(Screen):
        watch = staticmethod(uses.append)

        def began(self, seconds: float) -> None:
            ages.append(seconds)

        def planned(self, plan: Plan) -> None:
            seen.append(plan.generation)

        def event(self, event: Event) -> None:
            seen.append(type(event))

    usage.write(paths, {0: Activity("R", 1.0, 7)})
    paths.usage_asked.symlink_to("nowhere")  # it cannot be asked for
    shown: list[str] = []
    feed = Feed(paths, spec, planned, Display(shown.append, screen=Kept()))
    record = Recorded(paths, feed)
    record.turn()
    feed.turn()
    assert shown == []
    run_dir.keep(paths, dataclasses.replace(planned, generation=1), spec)
    noted(paths, GenerationStarting(1, planned.nodes, 3, 29501), WorkersStarted(), WarningIssued("careful"))
    record.turn()
    feed.turn()
    assert seen == [NodesStarting, 1, GenerationStarting, WorkersStarted, WarningIssued]
    assert shown == ["generation 1: 3 workers", "warning: careful"]
    assert len(ages) == 1 and ages[0] > 1e9 and uses == [{0: Activity("R", 1.0, 7)}]


def test_a_job_whose_events_are_damaged_must_still_be_followed(do, paths):
    paths.events.write_text('{"event": "workers_started"}\n')
    paths.log(0).write_text("hello\n")
    do.clock = Meanwhile(lambda: end(paths))
    with supervised(paths.root):
        assert do("attach", "a-1")[:2] == (0, ["[0] hello"])
