"""What is shown of a job while it runs: on a screen, and to other processes that ask for it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.commanded import Whole, create, supervise, watched
from support.methods import after, before
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED

from orchestrate import console
from orchestrate.record import stacks, usage
from orchestrate.record.events import Event, JobEnded, SupervisorStarted
from orchestrate.record.paths import JobPaths
from orchestrate.show.screen import Display, Screen
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch
from orchestrate.supervise.context import UsageSink


class Seen(Screen):
    """A screen that records what it gets."""

    def __init__(self) -> None:
        self.plans: list[int] = []
        self.events: list[Event] = []
        self.lines: list[tuple[int, list[int | None]]] = []  # ranks, and steps that they name
        self.bars: list = []
        self.used: list = []
        self.got = threading.Event()
        self.watch = self._watch

    def planned(self, plan) -> None:
        self.plans.append(plan.generation)

    def event(self, event) -> None:
        self.events.append(event)

    def heard(self, rank, found) -> None:
        self.lines.append((rank, [one.step for one in found]))

    def refresh(self, bars) -> None:
        self.bars.append(bars())

    def _watch(self, found) -> None:
        self.used.append(found)
        self.got.set()


def test_a_screen_must_get_all_that_happens_in_a_job(paths):
    screen, engine = Seen(), Whole([[], KILLED], [ALL_WELL])
    engine.start = after(engine.start, lambda: paths.log(1).write_text("hello\nstep 3, loss 0.5\n"))
    asked: list[int] = []
    engine.activity = after(engine.activity, lambda: asked.append(1))
    engine.wait = before(engine.wait, lambda: asked and screen.got.wait(60))  # only the newest picture is shown
    launch.supervise(paths, engine, lambda: 0, watched(paths, Display(print, screen=screen)))
    assert screen.lines == [(1, [3])] and screen.bars[-1] == {}
    assert screen.plans == [0, 1] and {*screen.used[0]} == {0, 1, 2}
    assert isinstance(screen.events[0], SupervisorStarted) and isinstance(screen.events[-1], JobEnded)


def test_what_workers_use_must_be_written_while_another_process_asks_for_it(paths):
    usage.ask(paths)
    engine, seen = Whole([[], ALL_WELL]), []
    engine.wait = before(engine.wait, lambda: seen.append({*usage.read(paths)[1]}))
    supervise(paths, engine)
    assert seen == [set(), {0, 1, 2}]
    assert not paths.usage.exists() and not paths.usage_asked.exists()


def test_stacks_must_be_written_once_each_time_that_another_process_asks_for_them(paths):
    engine, seen, asked = Whole([[], [], [], ALL_WELL]), list[Any](), list[int]()
    engine.wait = before(engine.wait, lambda: seen.append(stacks.read(paths)))
    engine.stacks = before(engine.stacks, lambda: asked.append(len(seen)))
    engine.wait = before(engine.wait, lambda: stacks.ask(paths) if len(seen) == 1 else None)
    supervise(paths, engine)
    assert seen[:2] == [None, None] and {*seen[2]} == {0, 1, 2} and "line 1 in step" in seen[2][1].text
    assert asked == [2] and not paths.stacks.exists() and not paths.stacks_asked.exists()


@pytest.mark.parametrize(("output", "waiting"), [("", True), ("hello\n", False)])
def test_the_phase_of_a_job_must_be_shown_until_its_workers_write(paths, output, waiting):
    engine, phases = Whole([[], ALL_WELL]), []
    engine.start = after(engine.start, lambda: paths.log(0).write_text(output))
    console.attach(SimpleNamespace(above=print, phase=phases.append))
    try:
        supervise(paths, engine)
    finally:
        console.attach(None)
    assert [phase for phase in phases if phase][:2] == ["starting 3 nodes", "starting the workers"]
    assert ("waiting for the workers' first output" in phases) is waiting
    assert "cleaning up" in phases and phases[-1] == ""


def test_nodes_must_be_asked_what_their_workers_use_once_a_second(job):
    class Always(UsageSink):
        wanted = True

        def record(self, found) -> None:
            taken.append({*found})

    taken: list[set[int]] = []
    assert job.run(RecordingEngine([*[[]] * 35, ALL_WELL]), usage=Always()).outcome == "succeeded"
    assert taken == [{0, 1, 2}] * 4


def test_patterns_must_be_searched_in_the_output_and_those_without_a_match_named(tmp_path):
    patterns = {"step": "iteration ([0-9]+)", "loss": "loss ([0-9.]+)"}
    spec = JobSpec(trainers=2, grace=0.01, command=("-m", "app.train"), metrics=patterns)
    paths, engine = create(JobPaths(tmp_path / "a-1"), spec), Whole([ALL_WELL])
    paths.log(0).write_text("iteration 43\n")
    paths.log(1).write_text('{"step": 99, "lr": 0.5}\n')  # only rank 0 counts
    data, shown = supervise(paths, engine)
    assert data["final_metrics"] == {"step": 43}
    assert shown[-1] == "warning: no line of rank 0 matches the pattern of the metric loss"
