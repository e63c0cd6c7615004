"""Progress and metrics in the output of workers: bars of tqdm, Lightning and Keras, and dicts of Trainer. Pure."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

MAX_LINE = 2000  # characters that are searched; bars and metrics are shorter
NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
COUNT = rf"({NUMBER})([kMG]?)"
CLOCK = r"((?:[0-9]+:)?[0-9]{1,2}:[0-9]{2}|\?)"
# tqdm: `Epoch 3:  45%|####5     | 12/27 [00:01<00:02,  7.41it/s, loss=0.1]`
BAR = re.compile(
    rf"\|\s*{COUNT}/{COUNT} \[{CLOCK}<{CLOCK}(?:,\s*(?:({NUMBER})|\?)(s/)?[A-Za-z]+(/s)?)?([^\]]{{0,500}})\]"
)
FLAT = re.compile(r"\{[^(\[{}]*\}")  # a dict without nested values, which Python's parser can take long for
PAIR = re.compile(rf"\b([A-Za-z][\w./]{{0,40}}) ?[=:] ?(-?{NUMBER})(?![\w.%])")
FACTORS = {"": 1, "k": 1000, "M": 1_000_000, "G": 1_000_000_000}
NAMES = ("loss", "acc", "lr", "perplexity", "ppl")  # parts of the names of metrics in text that is not a bar


@dataclass(frozen=True)
class Progress:
    """What a line says about the progress of a worker."""

    step: int | None = None
    total: int | None = None
    seconds_left: float | None = None
    step_seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def fraction(self) -> float | None:
        """Part of the steps that are done, from 0 to 1."""
        return min(1.0, self.step / self.total) if self.step is not None and self.total else None


def parse(line: str) -> Progress | None:
    """Return what a line says, or None if that is nothing; of several bars in a line, the last one counts."""
    line = line[-MAX_LINE:]
    bars = list(BAR.finditer(line))
    if bars:
        return _of_bar(bars[-1])
    if FLAT.fullmatch(line) and (found := _of_dict(line)):
        return Progress(metrics=found)
    pairs = {name: float(value) for name, value in PAIR.findall(line) if any(part in name.lower() for part in NAMES)}
    return Progress(metrics=pairs) if pairs else None


def _of_bar(bar: re.Match[str]) -> Progress:
    step, step_unit, total, total_unit, _, left, rate, inverse, _, rest = bar.groups()
    rate_value = float(rate) if rate else 0.0
    return Progress(
        step=int(float(step) * FACTORS[step_unit]),
        total=int(float(total) * FACTORS[total_unit]),
        seconds_left=None if left == "?" else _seconds(left),
        step_seconds=(rate_value if inverse else 1 / rate_value) if rate_value else None,
        metrics={name: float(value) for name, value in PAIR.findall(rest) if name != "v_num"},
    )


def _seconds(clock: str) -> float:
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def _of_dict(line: str) -> dict[str, float]:
    """Parse a dict as Hugging Face's Trainer prints it: `{'loss': 1.2, 'epoch': 0.5}`, with numbers or their text."""
    try:
        values = ast.literal_eval(line)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    found = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            found[str(name)[:40]] = float(value)
        except (TypeError, ValueError, OverflowError):
            return {}
    return found
