"""What `run` and `attach` show of a job, as their options say; on a scripted engine."""

import contextlib
import json
import os
import pty
import re

import pytest
from support.commanded import SPEC, Meanwhile, end, noted, supervised
from support.methods import after
from support.optional import not_none
from support.plans import HERE, plan
from support.scripted import ALL_WELL, Clock

from orchestrate.cli import watch
from orchestrate.cli.arguments import parse
from orchestrate.cli.follow import Following
from orchestrate.files import records
from orchestrate.files.paths import JobPaths
from orchestrate.job import store
from orchestrate.job.events import GenerationStarting, NodesStarting, WorkersStarted
from orchestrate.job.recorder import Recorder
from orchestrate.supervise import launch
from orchestrate.view.folded import PlainScreen
from orchestrate.view.live import LiveScreen
from orchestrate.view.printer import Style
from orchestrate.view.screen import Screen


@pytest.mark.parametrize("options", [["--quiet"], ["--progress", "quiet"]])
def test_warnings_errors_and_hints_must_be_shown_with_quiet_too(paths, capsys, options):
    args, _ = parse(["attach", "a-1", *options])
    with watch.shown(args, store.load(paths)[1], paths) as shown:
        for text in ("warning: a", "restarting", "error: b", "hint: c"):
            shown.message(text)
        shown.show("[0] output")
    assert capsys.readouterr() == ("", "warning: a\nerror: b\nhint: c\n")


@pytest.mark.parametrize(("progress", "kind"), [("auto", LiveScreen), ("plain", PlainScreen)])
def test_the_view_on_a_terminal_must_be_the_requested_one(paths, monkeypatch, progress, kind):
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    args, _ = parse(["attach", "a-1", "--progress", progress])
    with os.fdopen(follower, "w") as tty, contextlib.redirect_stdout(tty), contextlib.redirect_stderr(tty):
        with watch.shown(args, store.load(paths)[1], paths) as shown:
            assert type(shown.screen) is kind and shown.style.colors
        monkeypatch.setenv("NO_COLOR", "1")
        assert not watch.style_of(args, store.load(paths)[1]).colors
    os.close(leader)


def test_output_must_have_times_on_request_and_progress_must_be_strict_json(do, engine):
    def write() -> None:
        JobPaths(next(do.runs.iterdir())).log(0).write_text("step 5 loss nan acc 0.5\n")

    engine.start, found = after(engine.start, write), []
    for options in (["-t"], ["--progress", "json"]):
        engine.generations = [[[], ALL_WELL]]
        code, out, err = do("run", "--trainers", "2", *options, "--", "-m", "app.train")
        assert code == 0
        found.append(out)
        do("rm", err[-1])
    assert len(found[0]) == 1 and re.fullmatch(r"\d\d:\d\d:\d\d\.\d \[0\] step 5 loss nan acc 0.5", found[0][0])
    rows = [json.loads(line, parse_constant=int) for line in found[1]]  # which fails for NaN
    assert [row["progress"]["metrics"] for row in rows if "progress" in row and "event" not in row] == [{"acc": 0.5}]


def test_attach_must_show_the_nodes_of_a_new_generation_by_name(do, paths):
    nodes = ("master", "trainer-1", "trainer-3")

    def restart() -> None:
        store.keep(paths, plan(SPEC, HERE, "a-1", generation=1, nodes=nodes))
        noted(paths, GenerationStarting(1, nodes, 3, 29501))
        paths.log(2).write_text("hello\n")
        end(paths)

    do.clock = Meanwhile(restart)
    with supervised(paths.root):
        rows = [json.loads(line) for line in do("attach", "a-1", "--progress", "json")[1]]
    assert [(row["rank"], row["node"], row["line"]) for row in rows if "line" in row] == [(2, "trainer-3", "hello")]


def test_a_job_that_is_followed_must_be_shown_from_its_start_and_each_event_once(paths):
    spec, planned = store.load(paths)
    emit = Recorder(paths.events, key=bytes.fromhex(not_none(records.find(paths.root)).events), clock=Clock())
    emit(NodesStarting(3, "docker"))  # in 1970
    emit.close()
    screen, ages, events = Screen(), [], []
    screen.began, screen.event = ages.append, events.append
    following = Following(paths, spec, launch.rest(paths, spec, planned), screen, Style())
    assert [*following.turn()] == []
    noted(paths, WorkersStarted())
    assert [*following.turn()] == []
    assert [type(event) for event in events] == [NodesStarting, WorkersStarted]
    assert len(ages) == 1 and ages[0] > 1e9
