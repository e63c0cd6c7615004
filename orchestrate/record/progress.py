"""Progress and metrics in the output of workers: bars of tqdm, Lightning and Keras, and dicts of Trainer. Pure."""

from __future__ import annotations

import logging
import math
import re
import time
import warnings
from collections.abc import Mapping

from orchestrate.dataclass import dataclass, field, replace
from orchestrate.spec.patterns import compiled

log = logging.getLogger(__name__)
# Python's parser warns about text that is odd, but valid; what workers print may be any.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")

MAX_LINE = 2000  # characters that are searched; bars and metrics are shorter
NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?"  # all are finite
COUNT = rf"({NUMBER})([kMG]?)"
CLOCK = r"((?:[0-9]{1,6}:)?[0-9]{1,2}:[0-9]{2}|\?)"
# tqdm: `Epoch 3:  45%|####5     | 12/27 [00:01<00:02,  7.41it/s, loss=0.1]`
BAR = re.compile(
    rf"\|\s*{COUNT}/{COUNT} \[{CLOCK}<{CLOCK}(?:,\s*(?:({NUMBER})|\?)(s/)?[A-Za-z]+(/s)?)?([^\]]{{0,500}})\]"
)
# rich, as Lightning sets it up: `Epoch 3/9 ━━━━━━ 12/27 0:00:01 • 0:00:02 7.41it/s loss: 0.1`
RICH = re.compile(rf"━\s+{COUNT}/{COUNT}\s+{CLOCK}\s+•\s+(?:{CLOCK}|-:--:--)(?:\s+({NUMBER})()it(/s))?\s*(.{{0,500}})")
EVALUATES = re.compile(r"\b(?:Validation|Sanity Checking|Testing|Predicting)\b")  # in Lightning, before such a bar
EPOCH_OF = re.compile(r"\bepoch\W{0,3}([0-9]{1,9})\b")  # before a bar
# A dict without nested values, at the end of a line.
FLAT = re.compile(r"^([^{}]{0,60}?)(\{[^(\[{}]*\})\s*$")
WRAPPED = re.compile(r"\b(?:np\.\w{1,20}|tensor)\(([^(),]{1,40})[^()]{0,80}\)")  # numbers of NumPy and torch
# Of such a dict, a name, and a number or its text.
ENTRY = re.compile(r"""\s*(['"])((?:(?!\1)[^\\]|\\.)*)\1\s*:\s*(['"]?)([^'",\s}]+)\3\s*(?:,|(?=}))""")
SWITCHES = {"True": "1", "False": "0"}
PAIR = re.compile(rf"\b([A-Za-z][\w./@]{{0,40}}) ?[=: ] ?(-?{NUMBER})(?![\w.%])")  # after a bar
# In text: `loss: 0.5`, `Val Acc 88.2%`, `Accuracy: 9838/10000 (98%)`, `| test_acc │ 0.9 |` of a table.
VALUE = re.compile(
    rf"\b(?:(train(?:ing)?|val(?:id(?:ation)?)?|test|eval|learning)[ \t])?([a-z][a-z0-9_./@]{{0,40}})"
    rf"[ \t]{{0,30}}(?:[=:|│┃][ \t]{{0,30}}|(?<=[ \t])|'[ ]reached[ ])(-?{NUMBER})"
    rf"(?:/({NUMBER}) ?\( {{0,2}}{NUMBER} ?%\)|%)?(?![\w.]|-[a-z])",  # not in `epoch=3-step=40.ckpt`
)
CELLS, NO_CELLS = "|│┃", str.maketrans("|│┃", ";;;")  # what is between the cells of a table
WORDS = ("loss", "acc", "lr", "learning", "perplexity", "ppl", "epoch")  # one of them is in each name of NAMES
SHORT = {"training": "train", "valid": "val", "validation": "val"}
# `step 7/90`, `iter 7:`, `Iteration: 7 of 90`; a fraction, a version or a date is not a step
STEP_OF = re.compile(  # not in the text of an error, which comes later in its line
    r"^.{0,16}?\b(global[ _])?(?:step|iter|iteration)\b {0,10}[:=#]? {0,10}"
    r"([0-9]{1,15})(?: {0,10}(?:/|of) {0,10}([0-9]{1,15}))?(?![\w.%/-])",
)
# `Epoch 3/10`, `epoch [3/10]`, `Epoch 3 of 10`
EPOCHS_OF = re.compile(r"^.{0,16}?\bepoch\b[ :=#\[(]{0,4}([0-9]{1,9}) {0,3}(?:/|of) {0,3}([0-9]{1,9})(?![\w.%])")
FACTORS = {"": 1, "k": 1000, "M": 1_000_000, "G": 1_000_000_000}
NAMES = re.compile(  # of metrics in text that is not a bar, such as `train_loss` or `acc1`
    r"(?:^|[_./])(?:[a-z]*loss|acc|accuracy|lr|learning_rate|perplexity|ppl|epoch)[0-9]?(?:$|[_./@])"
)
SETTINGS = re.compile(  # in a name: `min_lr`, `loss_weight` and others are printed, but not measured
    r"(?:^|[_./])(?:min|max|base|initial|end|final|warmup|decay|weight|coef|scale|factor|steps|iters|py)(?:$|[_./])"
)
EPOCH = re.compile(r"\W*(?:\w{1,10}\W+)?epoch\b")  # how a line begins that reports one
DIGIT = re.compile("[0-9]")
STEP, TOTAL = ("step", "global_step", "current_step"), ("total_steps", "max_steps")  # metrics that are no metrics
MAX_STEP = 1 << 53  # beyond which not every float is a whole number
MAX_BARS = 8  # of different lengths, such as those of training and evaluation
SEARCH_SECONDS = 0.1  # for one pattern in one line
SPARE_SECONDS, PER_CHARACTER = 1.0, 2e-6  # CPU seconds for one pattern in all lines; a usual search needs 1e-7


@dataclass(frozen=True)
class Progress:
    """The progress of a worker, as a line shows it."""

    step: int | None = None
    total: int | None = None
    seconds_left: float | None = None
    step_seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    bar: bool = False  # whether `step` may start again, as that of a progress bar does in each epoch
    epoch: int | None = None  # whose steps a bar counts, as far as it says so, or that a line reports
    epochs: int | None = None  # of the job, as far as a line says so

    @property
    def of_job(self) -> int | None:
        """The step, unless it may start again."""
        return None if self.bar else self.step

    @property
    def fraction(self) -> float | None:
        """Part of the steps that are done, from 0 to 1."""
        return min(1.0, self.step / self.total) if self.step is not None and self.total else None


def parse(line: str) -> Progress | None:
    """Return what a line says, or None if that is nothing; of several bars in a line, the last one counts."""
    line = line[-MAX_LINE:]
    if not DIGIT.search(line):
        return None
    for pattern, sign in (BAR, "["), (RICH, "•"):
        if sign in line and (bars := [*pattern.finditer(line)]):
            return _of_bar(bars[-1], line[bars[-2].end() if bars[1:] else 0 : bars[-1].start()])
    if "{" in line and (found := _of_dict_at_end(WRAPPED.sub(r"\1", line))):
        return found
    return _of_text(line)


def _of_dict_at_end(line: str) -> Progress | None:
    match = FLAT.search(line)
    if not match or not (found := _of_dict(match[2])):
        return None
    own, before = _of_metrics(found), _of_text(match[1])
    if before is None:
        return own
    step = before.step if own.step is None else own.step
    return replace(own, step=step, metrics=before.metrics | own.metrics, bar=before.bar)


def _of_text(line: str) -> Progress | None:
    lower = line.lower()  # searches for words are much faster than those for patterns
    pairs = {}
    for kind, name, value, whole in _values(lower) if any(word in lower for word in WORDS) else ():
        if NAMES.search(name := _name(kind, name)) and not SETTINGS.search(name):
            pairs[name] = float(value) / (float(whole or 1) or 1)
    if [*pairs] == ["epoch"] and not EPOCH.match(lower):  # `resuming from epoch 3`
        del pairs["epoch"]
    if ("step" in lower or "iter" in lower) and (step := STEP_OF.search(lower)):
        total = int(step[3]) if step[3] else None
        return Progress(step=int(step[2]), total=total, metrics=pairs, bar=not step[1])
    if "epoch" in lower and (found := EPOCHS_OF.search(lower)):
        return Progress(metrics=pairs, epoch=int(found[1]), epochs=int(found[2]))
    return Progress(metrics=pairs) if pairs else None


def _values(line: str) -> list[tuple[str, str, str, str]]:
    """The matches of `VALUE`; in a row of a numbered table, such as Lightning's of layers, no cell names the next."""
    cell = line.lstrip(f" {CELLS}")
    rest = cell.lstrip("0123456789")
    numbered = len(rest) < len(cell) and rest.lstrip(" ").startswith((*CELLS,))
    return VALUE.findall(line.translate(NO_CELLS) if numbered else line)


def _name(kind: str, name: str) -> str:
    """A metric's name after what it was measured on: `val_loss` for `validation loss`."""
    return name if not kind or name == "epoch" else f"{SHORT.get(kind, kind)}_{name}"


class Reader:
    """Reads lines with the patterns of `metrics` in a job file; without patterns, as `parse` does."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        """`patterns` are regular expressions by the name of their metric, which is the first group."""
        self.given, self.patterns = bool(patterns), {name: compiled(pattern) for name, pattern in patterns.items()}
        self.unmatched = {*patterns}  # names whose pattern no line has matched so far
        self.slow: set[str] = set()  # names whose pattern is ignored, since searches took too long
        self.left = dict.fromkeys(patterns, SPARE_SECONDS)

    def parse(self, line: str) -> Progress | None:
        """Return what a line says, as `parse` does; with patterns, its metrics are those that they find."""
        found = parse(line)
        if not self.given:
            return found
        metrics = {name: value for name in [*self.patterns] if (value := self._search(name, line)) is not None}
        if not found:
            return _of_metrics(metrics) if metrics else None
        own = _of_metrics(metrics)
        if own.step is None:
            return replace(found, metrics=own.metrics)
        return replace(found, metrics=own.metrics, step=own.step, total=own.total, bar=False)

    def problems(self) -> list[str]:
        """Describe the patterns that have found nothing or were ignored, at the end of a job."""
        return [
            *(f"no line of rank 0 matches the pattern of the metric {name}" for name in sorted(self.unmatched)),
            *(f"the pattern of the metric {name} was ignored: searches took too long" for name in sorted(self.slow)),
        ]

    def _search(self, name: str, line: str) -> float | None:
        text, began = line[-MAX_LINE:], time.thread_time()
        try:
            match = self.patterns[name].search(text, timeout=SEARCH_SECONDS)
            left = self.left[name] + PER_CHARACTER * len(text) - (time.thread_time() - began)
            if left < 0:
                raise TimeoutError
            self.left[name] = min(SPARE_SECONDS, left)
            value = float(match[1].replace(",", "")) if match and match[1] else math.nan
            self.unmatched -= {name} if match else set()
        except ValueError:  # the group is not a number
            return None
        except (TimeoutError, MemoryError, RecursionError):
            log.warning("the pattern of the metric %s is ignored from now on: searches take too long", name)
            del self.patterns[name]
            self.unmatched -= {name}
            self.slow |= {name}
            return None
        return value if math.isfinite(value) else None


class Epochs:
    """Steps of bars that start again in each epoch."""

    def __init__(self) -> None:
        self.bars: dict[int | None, tuple[int, int]] = {}  # by their length: epochs that are over, and the last step

    def over(self, found: Progress, line: bool = False) -> int:
        """Record a step of a bar; return the epochs that are over by it, or else how often it started again.

        `line` is whether it ends a line, so that another full bar is that of the next epoch.
        """
        assert found.step is not None
        over, last = self.bars.pop(found.total, (0, -1))
        again = found.step < last or (line and found.step == last == found.total)
        over = over + again if found.epoch is None else found.epoch
        self.bars[found.total] = over, found.step
        if len(self.bars) > MAX_BARS:
            del self.bars[next(iter(self.bars))]
        return over

    def restarted(self) -> None:
        """Record that the workers start again, so that a lower step is not one of another epoch."""
        self.bars = {total: (over, -1) for total, (over, _) in self.bars.items()}

    def step(self, found: Progress, line: bool = False) -> int | None:
        """Return the step of the job for one of a bar whose length is known; otherwise None."""
        if found.step is None or not found.total:
            return None
        return _whole(self.over(found, line) * found.total + found.step)


def _of_metrics(found: Mapping[str, float]) -> Progress:
    """Return metrics by name, among which may be the step."""
    numbers = {name: value for name, value in found.items() if name not in (*STEP, *TOTAL)}
    step, total = (_whole(next((found[name] for name in names if name in found), None)) for names in (STEP, TOTAL))
    return Progress(step=step, total=total, metrics=numbers)


def _whole(number: float | None) -> int | None:
    return int(number) if number is not None and 0 <= number < MAX_STEP else None


def _of_bar(bar: re.Match[str], before: str) -> Progress:
    step, step_unit, total, total_unit, _, left, rate, inverse, _, rest = bar.groups()
    if EVALUATES.search(before):
        return Progress(bar=True)
    rate_value = float(rate) if rate else 0.0
    return Progress(
        step=_whole(float(step) * FACTORS[step_unit]),
        total=_whole(float(total) * FACTORS[total_unit]),
        seconds_left=None if left in (None, "?") else _seconds(left),
        step_seconds=(rate_value if inverse else 1 / rate_value) if rate_value else None,
        metrics={name.lower(): float(value) for name, value in PAIR.findall(rest) if name != "v_num"},
        bar=True,
        epoch=int(epoch[-1]) if (epoch := EPOCH_OF.findall(before.lower())) else None,
    )


def _seconds(clock: str) -> float:
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


def _of_dict(line: str) -> dict[str, float]:
    """Parse a dict as Hugging Face's Trainer prints it: `{'loss': 1.2, 'epoch': 0.5}`, with numbers or their text."""
    found, at = {}, 1
    while entry := ENTRY.match(line, at):  # Python's parser would keep each new name for ever, in 3.12 and 3.13
        name, value, at = entry[2][:40], SWITCHES.get(entry[4], entry[4]), entry.end()
        try:
            if name.isprintable() and "\\" not in name:  # an escape sequence could be written as text
                found[name.lower()] = float(int(value) if value.lstrip("-").isdecimal() else value)
        except (ValueError, OverflowError):
            return {}
    return found if line[at:].strip() == "}" else {}
