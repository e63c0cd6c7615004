"""Show a job that another process supervises."""

from __future__ import annotations

from orchestrate.clock import SYSTEM, Clock
from orchestrate.plan.plan import Plan
from orchestrate.record import lock, run_dir
from orchestrate.record.logs import Follower
from orchestrate.record.paths import JobPaths
from orchestrate.show.feed import Feed, Recorded
from orchestrate.show.screen import Display
from orchestrate.spec.spec import JobSpec

INTERVAL = 0.1  # seconds between two reads of the logs


def follow(
    paths: JobPaths,
    spec: JobSpec,
    plan: Plan,
    display: Display,
    follower: Follower | None = None,
    clock: Clock = SYSTEM,
    past: bool = False,
    queued: bool = True,
) -> None:
    """Show a job until it has ended, or has no supervisor anymore, or is back in a queue unless `queued`.

    Continues where `follower` has read (default: begins with the first line); `past` shows what has happened before.
    """
    feed, running = Feed(paths, spec, plan, display, follower), True
    record = Recorded(paths, feed, past)
    while running:
        running = run_dir.runs(paths) and (queued or not lock.is_queued(paths))
        record.turn()
        if running:
            feed.turn()
            clock.sleep(INTERVAL)
    feed.last()
