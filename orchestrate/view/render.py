"""The picture of a running job, for a terminal of any size. Pure; the only module that needs `rich` to draw."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrate.job.limits import format_bytes
from orchestrate.job.metrics import listed
from orchestrate.view.state import IDLE, SHOWN_METRICS, Rank, View, clock, seconds_left, worst_first

BLOCKS = "▁▂▃▄▅▆▇█"
MIN_ROWS = 2  # ranks that are shown on the smallest terminal
NARROW, MEDIUM, WIDE = 60, 80, 100  # columns of the terminal
SPARK = 12  # characters of a sparkline
GAP = 2  # columns between two parts of a line
STYLES = {"failed": "bold red", "stopping": "yellow", "running": "green", "succeeded": "green", "waiting": "dim"}


def picture(view: View, now: float, width: int, height: int, keys: str = "") -> RenderableType:
    """Draw a job on `width` columns, and at most half of `height` lines; `keys` describes what Ctrl-C does."""
    room = max(MIN_ROWS, height // 2 - 4 - len(view.events))
    parts: list[RenderableType] = [_head(view, now, width)]
    if bar := _bar(view, width):
        parts.append(bar)
    ranks = worst_first(view.ranks, now)
    shown = ranks if len(ranks) <= room else ranks[: room - 1]
    parts.append(_table(sorted(shown, key=lambda rank: rank.number), now, width))
    if left := len(ranks) - len(shown):
        parts.append(Text(f"  and {left} more like these", style="dim"))
    parts += [Text(f"  {seconds:7.1f} s  {text}", no_wrap=True, overflow="ellipsis") for seconds, text in view.events]
    parts.append(Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _head(view: View, now: float, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(view.job_id, style="bold")
    text.append(f"  {clock(now - view.began)}")
    if view.generation:
        text.append(f"  generation {view.generation}", style="yellow")
    if view.phase:
        text.append(f"  {view.phase} ({clock(now - view.phase_began)})", style="cyan")
    if view.saved is not None and width >= MEDIUM:
        text.append(f"  checkpoint {clock(now - view.saved)} ago", style="green")
    if (goodput := view.goodput(now)) is not None and width >= MEDIUM:
        text.append(f"  goodput {100 * goodput:.0f}%", style="dim")
    for metric in listed(view.lead.progress.metrics)[:SHOWN_METRICS]:
        text.append(f"  {metric}")
    text.truncate(width, overflow="ellipsis")
    return text


def _bar(view: View, width: int) -> RenderableType | None:
    progress = view.lead.progress
    if progress.step is None:
        return None
    if not progress.total:
        return Text(f"step {progress.step:,}")
    left = seconds_left(view.lead)
    row = Table.grid(padding=(0, 1))
    tail = f"{100 * (progress.fraction or 0):.0f}%" + (f"  {clock(left)} left" if left is not None else "")
    steps = f"step {progress.step:,} of {progress.total:,}"
    size = max(8, min(40, width - len(steps) - len(tail) - 4))
    row.add_row(steps, ProgressBar(total=progress.total, completed=progress.step, width=size), tail)
    return row


def _table(ranks: Sequence[Rank], now: float, width: int) -> Table:
    wide, rows = width >= WIDE, []
    columns = range(8) if wide else (0, 1, 2, 4, 5, 7) if width >= NARROW else (0, 1, 2)
    for rank in ranks:
        step = rank.progress.step
        pace = rank.progress.step_seconds or rank.pace
        metrics = listed(rank.progress.metrics)[: SHOWN_METRICS if wide else 1]
        idle = rank.idle(now)
        cells = [
            Text(f"{rank.number:>3} {rank.node}"),
            Text(rank.state, style=STYLES.get(rank.state, "")),
            Text("" if step is None else f"step {step:,}"),
            Text(spark(rank.paces) if wide else ""),
            Text("" if pace is None else f"{pace * 1000:.3g} ms/step" if pace < 1 else f"{pace:.3g} s/step"),
            Text(f"{rank.cores:.1f} cores" if rank.measured else ""),
            Text(format_bytes(rank.memory) if rank.memory else ""),
            Text(f"idle {clock(idle)}", style="bold yellow") if idle > IDLE else Text("  ".join(metrics)),
        ]
        rows.append([cells[index] for index in columns])
    table = Table.grid(padding=(0, GAP))
    left = width
    for column in zip(*rows):  # the last one, with metrics, gets what is left
        size = min(max(cell.cell_len for cell in column), max(0, left))
        table.add_column(width=size, no_wrap=True, overflow="ellipsis")
        left -= size + GAP
    for row in rows:
        table.add_row(*row)
    return table


def spark(values: Sequence[float]) -> str:
    """Draw the last values as a sparkline, from 0 to their maximum."""
    last = list(values)[-SPARK:]
    most = max(last, default=0.0)
    return "".join(BLOCKS[min(7, int(8 * value / most))] if most else BLOCKS[0] for value in last)
