"""The picture of a running job, for a terminal of any size. Pure; the only module that needs `rich` to draw."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrate.console import called
from orchestrate.record.metrics import listed
from orchestrate.record.steps import SHORT
from orchestrate.show.state import (
    IDLE,
    OF_EPOCH,
    SHOWN_METRICS,
    Rank,
    View,
    clock,
    seconds_left,
    some_work,
    worst_first,
)
from orchestrate.spec.sizes import format_bytes

BLOCKS = "▁▂▃▄▅▆▇█"
MIN_ROWS = 2  # ranks that are shown on the smallest terminal
MEDIUM = 80  # columns of the terminal that show more about the job
DROPPED = (3, 6, 5, 4, 2)  # what a line leaves out where it does not fit: paces, memory, cores, pace, step
LEAST = 12  # characters for metrics
SPARK = 12  # characters of a sparkline
NODE = 14  # characters of a rank and its node that are always shown
HANGING = 20.0  # seconds after which idle workers may hang
GAP = 2  # columns between two parts of a line
STYLES = {"failed": "bold red", "stopping": "yellow", "running": "green", "succeeded": "green", "waiting": "dim"}


def picture(view: View, now: float, width: int, height: int, keys: str = "") -> RenderableType:
    """Draw a job on `width` columns, and at most half of `height` lines; `keys` describes what Ctrl-C does."""
    room = max(MIN_ROWS, height // 2 - 4 - len(view.events))
    parts: list[RenderableType] = [_head(view, now, width)]
    if bar := _bar(view, now, width):
        parts.append(bar)
    ranks = worst_first(view.ranks, now)
    shown = ranks if len(ranks) <= room else ranks[: room - 1]
    parts.append(_table(sorted(shown, key=lambda rank: rank.number), now, width, some_work(view.ranks, now)))
    if left := len(ranks) - len(shown):
        parts.append(Text(f"  and {left} more like these", style="dim"))
    parts += [Text(f"  {seconds:7.1f} s  {text}", no_wrap=True, overflow="ellipsis") for seconds, text in view.events]
    least = min((rank.idle(now) if rank.state == "running" else 0.0 for rank in view.ranks.values()), default=0.0)
    if least > HANGING:
        hint = f"all workers are idle: {called()} stacks {view.job_id} shows where each is"
        parts.append(Text(hint, style="bold yellow", no_wrap=True, overflow="ellipsis"))
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
    goodput = view.goodput(now) if now - view.work.since >= SHORT else None
    if goodput is not None and width >= MEDIUM:
        text.append(f"  goodput {100 * goodput:.0f}%", style="dim")
    for metric in listed(view.lead.progress.metrics)[:SHOWN_METRICS]:
        text.append(f"  {metric}")
    text.truncate(width, overflow="ellipsis")
    return text


def _bar(view: View, now: float, width: int) -> RenderableType | None:
    progress = view.lead.progress
    if progress.step is None:
        return None
    what = OF_EPOCH if progress.bar else ""
    if not progress.total:
        return Text(f"{view.lead.unit} {progress.step:,}{what}")
    left = seconds_left(view.lead, now)
    row = Table.grid(padding=(0, 1))
    for _ in range(3):
        row.add_column(no_wrap=True, overflow="ellipsis")  # on a narrow terminal
    tail = f"{100 * (progress.fraction or 0):.0f}%" + (f"  {clock(left)} left" if left is not None else "") + what
    steps = f"{view.lead.unit} {progress.step:,} of {progress.total:,}"
    size = max(8, min(40, width - len(steps) - len(tail) - 4))
    row.add_row(steps, ProgressBar(total=progress.total, completed=progress.step, width=size), tail)
    return row


def _table(ranks: Sequence[Rank], now: float, width: int, awaited: bool) -> Table:
    rows = [_cells(rank, now, awaited) for rank in ranks]
    sizes = [max(cell.cell_len for cell in column) for column in zip(*rows)]
    sizes[0] = min(sizes[0], max(NODE, width // 3))
    idle = [row[-1].cell_len for row, rank in zip(rows, ranks) if rank.idle(now) > IDLE]
    last = max([*idle, min(sizes[-1], LEAST)])
    shown = [*range(len(sizes) - 1)]
    for index in DROPPED:
        if sum(sizes[each] + GAP for each in shown) + last > width:
            shown.remove(index)
    if (left := width - sum(sizes[each] + GAP for each in shown)) > 0:
        shown.append(len(sizes) - 1)
        sizes[-1] = min(left, sizes[-1])
    table = Table.grid(padding=(0, GAP))
    for index in shown:
        table.add_column(width=sizes[index], no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    return table


def _cells(rank: Rank, now: float, awaited: bool) -> list[Text]:
    """Return what a line shows about a worker; `awaited` is whether others work, for which idle ones wait."""
    step, idle = rank.progress.step, rank.idle(now)
    pace = rank.progress.step_seconds or rank.pace
    metrics = listed(rank.progress.metrics)[:SHOWN_METRICS]
    return [
        Text(f"{rank.number:>3} {rank.node}"),
        Text(rank.state, style=STYLES.get(rank.state, "")),
        Text("" if step is None else f"{rank.unit} {step:,}"),
        Text(spark(rank.paces)),
        Text("" if pace is None else f"{pace * 1000:.3g} ms/{rank.unit}" if pace < 1 else f"{pace:.3g} s/{rank.unit}"),
        Text(f"{rank.cores:.1f} cores" if rank.measured else ""),
        Text(format_bytes(rank.memory) if rank.memory else ""),
        _idle(idle, awaited) if idle > IDLE else Text("  ".join(metrics)),
    ]


def _idle(seconds: float, awaited: bool) -> Text:
    what, style = ("waits", "dim") if awaited else ("idle", "bold yellow")
    return Text(f"{what} {clock(seconds)}", style=style)


def spark(values: Sequence[float]) -> str:
    """Draw the last values as a sparkline, from 0 to their maximum."""
    last = list(values)[-SPARK:]
    most = max(last, default=0.0)
    return "".join(BLOCKS[min(7, int(8 * value / most))] if most else BLOCKS[0] for value in last)
