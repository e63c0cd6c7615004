"""Pages of `serve`: the list of jobs, and a job that is running. They update themselves with a small script."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from orchestrate import __version__
from orchestrate.dataclass import dataclass
from orchestrate.pages import charts
from orchestrate.pages.curves import Curve
from orchestrate.pages.page import SCRIPT, TEMPLATES, UNPRINTABLE, duration, scripted
from orchestrate.record.metrics import listed, shown
from orchestrate.show.state import SHOWN_METRICS, View, status, worst_first
from orchestrate.spec.sizes import format_bytes

MAX_RANKS = 64  # rows of the table of workers
# Replaces the content by that of the same address, every two seconds while the page is visible, except under the
# user's hands; `main` has an id, so that the reports of jobs, which have none, are loaded as a whole.
REFRESH = """
document.querySelectorAll("pre.log").forEach(log => { log.scrollTop = log.scrollHeight; });
const update = async () => {
  if (document.hidden || document.querySelector("input:checked") || String(getSelection())) return;
  const answer = await fetch(location.href);
  if (answer.status >= 500) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live"), main = document.getElementById("live");
  if (!answer.ok || !fresh) return location.reload();
  const before = document.querySelector("pre.log"), top = before && before.scrollTop;
  const atEnd = !before || top + 1 >= before.scrollHeight - before.clientHeight;
  main.replaceChildren(...fresh.childNodes);
  const after = document.querySelector("pre.log");
  if (after) after.scrollTop = atEnd ? after.scrollHeight : top;
};
const later = () => setTimeout(() => update().catch(() => {}).finally(later), 2000);
later();
"""


@dataclass(frozen=True)
class Row:
    """A job in the list; one that waits in the queue has no page."""

    name: str
    state: str
    started: str
    seconds: float | None  # duration, if it has ended
    metrics: str
    page: bool = True


def jobs(rows: Sequence[Row], folder: str) -> str:
    """Return the page that lists jobs."""
    return _page("jobs.html", rows=rows, folder=folder)


def logs(name: str, workers: int) -> str:
    """Return the page that lists the logs of a job."""
    return _page("logs.html", name=name, ranks=range(workers))


def live(
    view: View,
    state: str,
    seconds: float,
    curves: Mapping[str, Curve],
    axis: str,
    events: Sequence[tuple[float, str]],
    lines: Sequence[str],
) -> str:
    """Return the page about a job that is running: `seconds` since its start, and its last events and lines."""
    return _page(
        "live.html",
        name=view.job_id,
        view=view,
        state=state,
        seconds=seconds,
        status=status(view, time.monotonic()),
        charts=charts.charts({name: {name: curve} for name, curve in curves.items()}, axis),
        ranks=sorted(worst_first(view.ranks, time.monotonic())[:MAX_RANKS], key=lambda rank: rank.number),
        events=events,
        lines="\n".join(lines),
        metrics=metrics,
        bytes=format_bytes,
    )


def metrics(values: Mapping[str, Any]) -> str:
    """Return the first numbers of some metrics as text."""
    return ", ".join(listed(shown(values))[:SHOWN_METRICS])


def _page(template: str, **values: Any) -> str:
    script, policy = scripted(SCRIPT + REFRESH)
    policy = Markup("; connect-src 'self'") + policy
    text = TEMPLATES.get_template(template).render(
        **values, version=__version__, duration=duration, refresh=script, script_policy=policy
    )
    return UNPRINTABLE.sub("�", text)
