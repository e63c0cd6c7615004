"""What a job spent its time on, and what happened when. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrate.dataclass import dataclass, replace
from orchestrate.record import events, report
from orchestrate.record.events import Event
from orchestrate.record.outcomes import Outcome

CHECKPOINT, TROUBLE, OTHER = "checkpoint", "trouble", "other"
TROUBLES = (
    *(events.GenerationEnded, events.NodeInTrouble, events.NodesMissing, events.HangFound, events.WorkersLost),
    *(events.WorkersIsolated, events.GpusUnused, events.EngineLost, events.DiskFull, events.WarningIssued),
)
STARTING, WORKING, HANGING, RESTARTING = "starting", "working", "hanging", "restarting"
ENDING, STOPPED = "ending", "stopped"
LOST = {
    STARTING: "starting nodes and workers",
    HANGING: "hanging, until it was found",
    RESTARTING: "restarting",
    ENDING: "ending: final copies, removal of the nodes",
    STOPPED: "stopped, until it was resumed",
}


@dataclass(frozen=True)
class Span:
    """A part of a job's time."""

    kind: str
    begin: float  # seconds since the job's start
    end: float
    generation: int
    why: str = ""  # how it ended, for display

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.begin


@dataclass(frozen=True)
class Moment:
    """Something that happened, or checkpoints that were saved one after the other."""

    kind: str  # checkpoint, trouble or other
    times: tuple[float, ...]  # seconds since the job's start
    text: str


def moments(found: Iterable[Event]) -> list[Moment]:
    """Return when checkpoints were saved, and what disturbed a job or changed its course."""
    done: list[Moment] = []
    saved: list[float] = []

    def add(event: Event, text: str) -> None:
        if saved:
            what = "checkpoints" if len(saved) > 1 else "checkpoint"  # without their number: an event may be of several
            done.append(Moment(CHECKPOINT, tuple(saved), f"{what} saved"))
            saved.clear()
        if text:
            done.append(Moment(TROUBLE if isinstance(event, TROUBLES) else OTHER, (event.seconds,), text))

    for event in found:
        match event:
            case events.CheckpointSaved():
                saved.append(event.seconds)
            case events.JobResumed():
                add(event, "the job was resumed")
            case events.NodesStarting() | events.NodesUp() | events.GenerationStarting() | events.CodeCopied():
                pass
            case _ if text := report.line(event):
                add(event, text.partition("\n")[0])
    add(Event(), "")
    return done


def spans(found: Iterable[Event]) -> list[Span]:
    """Return the spans of a job from its start to its last event, in order and without gaps."""
    done: list[Span] = []
    now = Span(STARTING, 0.0, 0.0, 0)

    def turn(kind: str, at: float, why: str = "") -> None:
        nonlocal now
        done.append(replace(now, end=max(now.begin, at), why=why))
        now = Span(kind, done[-1].end, done[-1].end, now.generation)

    for event in found:
        match event:
            case events.GenerationStarting():
                now = replace(now, generation=event.generation)
            case events.WorkersStarted():
                turn(WORKING, event.seconds)
            case events.HangFound() if now.kind == WORKING:
                turn(HANGING, event.seconds - event.after)
            case events.GenerationEnded():
                kind = RESTARTING if event.outcome == Outcome.FAILED else ENDING
                turn(kind, event.seconds, event.cause.summary if event.cause else event.why)
            case events.OutcomeDecided() if now.kind != WORKING:
                now = replace(now, kind=ENDING)
            case events.JobEnded():
                turn(STOPPED, event.seconds)
            case events.JobResumed():
                turn(STARTING, event.seconds)
        now = replace(now, end=max(now.end, event.seconds))
    done += [now] if now.kind != STOPPED else []
    return [span for span in done if span.seconds > 0]
