"""The output of workers as text: prefixes, times, colors, and one line for what several ranks print."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter

from orchestrate.console import RESET
from orchestrate.dataclass import dataclass
from orchestrate.plan.plan import Plan
from orchestrate.record.logs import Block

COLORS = ("\x1b[36m", "\x1b[33m", "\x1b[32m", "\x1b[35m", "\x1b[34m", "\x1b[31m")  # of prefixes, by rank
LOOK_AHEAD = 8  # lines of a rank in which a line of another one is searched
MANY = 64  # ranks, from which on that would take long
LINES = 500  # that are printed at a time
MAX_LABEL = 20  # characters of a list of ranks


@dataclass(frozen=True)
class Style:
    """How the output of workers is printed."""

    ranks: frozenset[int] | None = None  # None: all
    timestamps: bool = False
    colors: bool = False
    prefixes: bool = True
    as_json: bool = False


PLAIN = Style()


class Printer:
    """Turns lines into text."""

    def __init__(self, plan: Plan, style: Style = PLAIN) -> None:
        """`plan` names the node of each rank."""
        self.style = style
        self.planned(plan)

    def planned(self, plan: Plan) -> None:
        """Record the plan of a generation."""
        self.nodes = {worker.rank: worker.node for worker in plan.workers}
        several = len(self.nodes) > len(set(self.nodes.values()))  # workers on a node
        names = {rank: f"{node} {rank}" if several else str(rank) for rank, node in self.nodes.items()}
        width = max(map(len, names.values()), default=0)
        self.names = {rank: name.ljust(width) if several else name.rjust(width) for rank, name in names.items()}

    def texts(self, blocks: Iterable[Block], now: float | None = None) -> Iterator[str]:
        """Yield the text of lines that were read together, many at a time, each rank's in their order.

        `now` is when that was.
        """
        wanted = (block for block in blocks if self.style.ranks is None or block.rank in self.style.ranks)
        if self.style.as_json or not self.style.prefixes:
            yield from (self.text([block.rank], block.colored, now) for block in wanted)
            return
        for ranks, text in merged(wanted):
            yield self.text(ranks, text, now)

    def text(self, ranks: list[int], text: str, now: float | None = None) -> str:
        """Return lines that some ranks have printed."""
        if self.style.as_json:
            facts = {"rank": ranks[0], "node": self.nodes.get(ranks[0], "")}
            return "\n".join(json.dumps({**facts, "line": line, "time": now}) for line in text.split("\n"))
        label = self.names.get(ranks[0], str(ranks[0])) if len(ranks) == 1 else brief(ranks)
        prefix = f"[{label}] " if self.style.prefixes else ""
        if prefix and self.style.colors:
            prefix = f"{COLORS[ranks[0] % len(COLORS)]}[{label}]{RESET} "
        prefix = prefix if now is None or not self.style.timestamps else f"{stamp(now)} {prefix}"
        return prefix + (text.replace("\n", f"\n{prefix}") if prefix else text)

    def bar(self, bars: Mapping[int, str], now: float | None = None) -> str:
        """Return the progress bar of the first rank that has one; empty if there is none."""
        shown = {rank: bar for rank, bar in bars.items() if self.style.ranks is None or rank in self.style.ranks}
        return next((self.text([rank], bar, now) for rank, bar in shown.items()), "")


def merged(blocks: Iterable[Block]) -> Iterator[tuple[list[int], str]]:
    """Yield lines with the ranks that have printed them: one line for all that print the same at about the same place.

    The lines of each rank stay in their order.
    """
    lines: dict[int, list[str]] = {}
    for block in blocks:
        lines.setdefault(block.rank, []).extend(block.colored.split("\n"))
    if _share(lines.values()):
        for ranks, group in itertools.groupby(_line_by_line(lines), key=itemgetter(0)):
            while some := [text for _, text in itertools.islice(group, LINES)]:
                yield ranks, "\n".join(some)
        return
    for rank, own in sorted(lines.items()):
        yield from (([rank], "\n".join(own[at : at + LINES])) for at in range(0, len(own), LINES))


def _share(texts: Iterable[list[str]]) -> bool:
    """Whether several ranks have printed the same line."""
    seen: set[str] = set()
    for own in map(set, texts):
        if not seen.isdisjoint(own):
            return True
        seen |= own
    return False


def _line_by_line(lines: Mapping[int, list[str]]) -> Iterator[tuple[list[int], str]]:
    waiting = {rank: deque(own) for rank, own in lines.items()}
    ahead = LOOK_AHEAD if len(waiting) <= MANY else 1
    for rank, own in sorted(waiting.items()):
        others = [(one, waiting[one]) for one in sorted(waiting) if one != rank]
        while own:
            text, ranks = own.popleft(), [rank]
            for other, queue in others:
                same = queue and queue[0] == text
                place = 0 if same else next((at for at, found in zip(range(ahead), queue) if found == text), None)
                if place is not None:
                    yield from (([other], queue.popleft()) for _ in range(place))
                    queue.popleft()
                    ranks.append(other)
            yield ranks, text


def brief(ranks: Iterable[int]) -> str:
    """Return ranks as a list of ranges, such as `0-3,8`, or their number if that is too long."""
    ordered, parts = sorted(ranks), list[list[int]]()
    for rank in ordered:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return text if len(text) <= MAX_LABEL else f"{len(ordered)} ranks"


def stamp(now: float) -> str:
    """Return a time of day, in the local time zone."""
    return f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 10 % 10)}"
