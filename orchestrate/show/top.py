"""The table of `top`: what each worker and GPU of a job uses, now and in the last minutes."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrate.plan.plan import Plan
from orchestrate.record.outcomes import Activity
from orchestrate.show.render import BLOCKS
from orchestrate.spec.sizes import format_bytes

HISTORY = 300  # samples that are kept, one per second
COLUMNS = 30  # characters of a curve
SHADES = ((0.2, "dim"), (0.6, "green"), (0.9, "yellow"), (10.0, "red"))  # colors of means up to a share of the whole
WIDTH = 160  # characters of a line, without a terminal
STATES = {"R": "running", "S": "sleeping", "D": "disk", "T": "stopped", "Z": "ended"}  # letters of proc(5)


@dataclass
class Meter:
    """A quantity over time, as shares of a whole."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def curve(self) -> Text:
        """Draw it: the height of a character is the peak of its time, and its color the mean."""
        size = -(-len(self.samples) // COLUMNS) or 1
        text, values = Text(no_wrap=True), list(self.samples)
        for start in range(0, len(values), size):
            part = values[start : start + size]
            mean = sum(part) / len(part)
            style = next(style for most, style in SHADES if mean <= most or style == SHADES[-1][1])
            text.append(BLOCKS[min(7, int(8 * max(part)))], style=style)
        return text


class Top:
    """What the workers and GPUs of a job use."""

    def __init__(self, plan: Plan, cores: float) -> None:
        """`cores` is how many a worker can use, at most."""
        self.plan, self.cores = plan, cores
        self.last: tuple[float, Mapping[int, Activity]] = 0.0, {}
        self.now: dict[int, float] = {}  # by rank: cores in use
        self.cpu: dict[int, Meter] = {worker.rank: Meter() for worker in plan.workers}
        self.gpu: dict[str, Meter] = {}  # by UUID
        self.memory: dict[str, int] = {}  # bytes, by UUID

    def record(self, when: float, found: Mapping[int, Activity]) -> None:
        """Record the activity of the workers until a time, in seconds."""
        before, earlier = self.last
        if when <= before:
            return
        self.now = {}
        for rank, doing in found.items():
            if rank in earlier and rank in self.cpu:
                self.now[rank] = max(0.0, (doing.cpu - earlier[rank].cpu) / (when - before))
                self.cpu[rank].samples.append(self.now[rank] / self.cores)
        self.last = when, found

    def take_gpus(self, found: Mapping[str, tuple[float, int]]) -> None:
        """Record the share of time for which each GPU of the machine computes, and its memory in use."""
        for uuid, (share, memory) in found.items():
            if uuid in self.plan.gpus:
                self.gpu.setdefault(uuid, Meter()).samples.append(share)
                self.memory[uuid] = memory

    def table(self, height: int, hint: str = "") -> Table:
        """Draw all workers, or as many as fit on `height` lines, the busiest first, with a hint in the title."""
        table = Table(box=None, pad_edge=False, title=f"{self.plan.job_id}  {hint}".rstrip(), title_justify="left")
        columns = (("rank", "right"), ("node", "left"), ("pid", "right"), ("state", "left"), ("cores", "right"))
        for title, justify in columns:
            table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("", no_wrap=True, width=COLUMNS)
        table.add_column("memory", justify="right", no_wrap=True)
        gpus = bool(self.gpu)
        for title in ("gpu", "", "memory") if gpus else ():
            table.add_column(title, justify="left" if not title else "right", no_wrap=True)
        rows = sorted(self.plan.workers, key=lambda worker: -self.now.get(worker.rank, 0.0))[: max(1, height)]
        for worker in sorted(rows, key=lambda worker: worker.rank):
            doing = self.last[1].get(worker.rank)
            table.add_row(
                str(worker.rank),
                worker.node,
                str(doing.pid or "") if doing else "",
                _state(doing) if doing else "",
                f"{self.now[worker.rank]:.1f}" if worker.rank in self.now else "",
                self.cpu[worker.rank].curve(),
                format_bytes(doing.memory) if doing and doing.memory else "",
                *(self._of_gpu(worker.gpu) if gpus else ()),
            )
        if left := len(self.plan.workers) - len(rows):
            table.caption = f"and {left} more"
        return table

    def lines(self) -> list[str]:
        """The table as lines of text."""
        lines = Console(width=WIDTH).render_lines(self.table(len(self.plan.workers)), pad=False)
        return ["".join(part.text for part in line).rstrip() for line in lines]

    def _of_gpu(self, uuid: str) -> Sequence[Text | str]:
        if uuid not in self.gpu:
            return ("", "", "")
        meter = self.gpu[uuid]
        return f"{100 * meter.samples[-1]:.0f}%", meter.curve(), format_bytes(self.memory[uuid])


def _state(doing: Activity) -> str:
    """Describe the state of a worker, or that its node still imports modules, with what is known of that process."""
    return STATES.get(doing.state, doing.state) if doing.pid else "starting"


@contextlib.contextmanager
def full_screen(top: Top) -> Iterator[Callable[[], None]]:
    """Show a table on the whole terminal during a `with` block; yields a function that draws it again."""
    console = Console(file=sys.stdout, highlight=False)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield lambda: live.update(top.table(console.size.height - 5, "Ctrl-C quits; the job continues"), refresh=True)
