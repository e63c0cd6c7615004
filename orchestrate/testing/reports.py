"""One result of a test that ran on several ranks."""

from __future__ import annotations

import builtins
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from orchestrate import console
from orchestrate.supervise.diagnosis.root_cause import COMPLAINT
from orchestrate.supervise.hang import late
from orchestrate.supervise.stacks import Position, grouped, position

PHASES, OUTCOMES = ("setup", "call", "teardown"), ("passed", "failed", "skipped")
MAX_WARNINGS = 100  # of a test on one rank
MAX_DEPTH = 50  # of lists and dictionaries in a result; a worker of xdist sends it on
MAX_LINES = 2000  # of an error, for pytest to color
MAX_TEXT = 200  # characters that are shown of another rank's error
ADDRESS = re.compile(r" ?(?:\[[0-9a-f.:]+\]|(?:[0-9]+\.){3}[0-9]+):[0-9]+")  # of a peer, which differs among ranks
STREAMS = ("Captured stdout", "Captured stderr")
LOST = "lost its connection to another rank"
UNEXPECTED = "[XPASS(strict)]", "Unexpected success"


class Warned(NamedTuple):
    """A warning on a rank."""

    category: str
    text: str
    file: str
    number: int  # of the line
    line: str  # as the rank has read it: nothing is opened that a rank names


class Ran(NamedTuple):
    """What one rank has reported of a test."""

    reports: Mapping[str, pytest.TestReport]  # by phase
    time: float  # when it failed, or else when it ended, in seconds since 1970
    store: Mapping[str, int]  # port of torch's store for the next test, and whether it is there already
    done: bool  # whether it has ended the test, with its fixtures
    error: str  # why the rank could not collect the test; empty if it could
    warnings: tuple[Warned, ...] = ()

    def failure(self) -> pytest.TestReport | None:
        """Return the report of the phase that has failed first."""
        return next((self.reports[each] for each in PHASES if each in self.reports and self.reports[each].failed), None)


def read(data: Any, load: Callable[[Any], Any], hide: Callable[[str], str] = str) -> Ran:
    """Return what a rank has written, without secrets, which `hide` masks; raises ValueError for anything else."""
    try:
        data = _cleaned(data, hide)
        found = [_checked(_lines(each["longrepr"]), load(each)) for each in data["reports"]]
        phases, error = dict[str, pytest.TestReport](), "\n".join(map(str, data["errors"][:1]))
        for each in found:
            if each.when not in phases or not phases[each.when].failed:  # a failed subtest is one of several reports
                phases[each.when] = each
        store = {"port": int(data["port"]), "hosted": bool(data["hosted"])}
        warned = tuple(map(_warned, data["warnings"][:MAX_WARNINGS]))
        return Ran(phases, float(data["time"]), store, bool(data["done"]), error, warned)
    except Exception as error:  # whatever is in there
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _warned(data: list[Any]) -> Warned:
    category, text, file, number, line = data
    assert category.isidentifier()
    return Warned(category, str(text), str(file), int(number), str(line))


def _cleaned(value: Any, hide: Callable[[str], str], depth: int = 0) -> Any:
    """Return what a rank has written without control characters, except those of colors, and without surrogates."""
    assert depth < MAX_DEPTH
    if isinstance(value, str):
        return masked(value, hide).encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_cleaned(key, hide): _cleaned(each, hide, depth + 1) for key, each in value.items()}
    return [_cleaned(each, hide, depth + 1) for each in value] if isinstance(value, list) else value


def masked(text: str, hide: Callable[[str], str]) -> str:
    """Text without control characters and secrets; with its colors, but not in lines in which they are in a secret."""
    lines = hide(console.clean(text, colors=True)).split("\n")
    plain = map(console.clean, lines)
    return "\n".join(hidden if (hidden := hide(text)) != text else line for text, line in zip(plain, lines))


def _lines(value: Any) -> int:
    """Return the number of lines in all texts of a value."""
    if isinstance(value, str):
        return value.count("\n") + 1
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_lines, inner))


def _checked(lines: int, report: Any) -> pytest.TestReport:
    """Check the fields of a report that pytest uses without a check; raises some exception.

    `lines` is the number of those of its error.
    """
    assert isinstance(report, pytest.TestReport) and report.when in PHASES and report.outcome in OUTCOMES
    for name in [name for name in vars(report) if callable(getattr(type(report), name, None))]:
        delattr(report, name)  # it would replace a method
    report.duration = float(report.duration)
    assert 0 <= report.duration < float("inf")
    report.sections = [(str(name), str(text)) for name, text in report.sections]
    report.user_properties = [(str(name), value) for name, value in report.user_properties]
    if expected := hasattr(report, "wasxfail") and not report.failed:
        report.wasxfail = str(report.wasxfail)
    elif report.failed:  # pytest does not count a failure with this attribute
        vars(report).pop("wasxfail", None)
    if isinstance(report.longrepr, list):  # of a skipped test: file, line and reason
        file, line, reason = report.longrepr
        report.longrepr = str(file), int(line), str(reason)
    elif report.skipped and not expected:
        report.longrepr = "", 0, str(report.longrepr)
    elif report.failed and report.longrepr is None:
        report.longrepr = "no message"
    if crash := getattr(report.longrepr, "reprcrash", None):
        crash.message = str(crash.message)
    text = report.longreprtext
    assert isinstance(text, str)  # it can be shown
    if lines > MAX_LINES:  # pytest takes quadratic time to color some
        report.longrepr = _explanation(text, crash)
    return report


def merged(
    item: pytest.Item, ran: Mapping[int, Ran], missing: Mapping[int, str], output: Callable[[int], str]
) -> list[pytest.TestReport]:
    """Return one report for each phase: that of the rank that has failed first, with a line about the others.

    `missing` says what ranks do that have not ended the test; `output` returns what a rank and its child processes have
    printed.
    """
    chosen = []
    for phase in PHASES:
        here = {rank: each.reports[phase] for rank, each in sorted(ran.items()) if phase in each.reports}
        if here:
            rank = _choose(here, {rank: each.time for rank, each in ran.items()})
            report = here[rank]
            report.nodeid, report.location = item.nodeid, item.location  # whatever the rank says
            report.keywords = dict.fromkeys(item.keywords, 1)
            report.duration = max(each.duration for each in here.values())
            if report.failed:
                _explain(report, rank, outcomes({other: each for other, each in ran.items() if other != rank}, missing))
                kept = [each for each in report.sections if not each[0].startswith(STREAMS)]
                report.sections = [*kept, *_printed({rank: output(rank)})]
            chosen.append(report)
            if report.failed and phase == "setup":  # other ranks may be in the test: it has not run, however
                break
    return chosen


def warned(ran: Mapping[int, Ran]) -> Iterator[warnings.WarningMessage]:
    """Return the warnings of ranks, equal ones once."""
    for each in dict.fromkeys(each for one in ran.values() for each in one.warnings):
        kind, text = getattr(builtins, each.category, None), each.text
        if not (isinstance(kind, type) and issubclass(kind, Warning)):  # xdist looks for it in its module
            kind, text = UserWarning, f"{each.category}: {text}"
        yield warnings.WarningMessage(kind(text), kind, each.file, each.number, line=each.line)


def _choose(here: Mapping[int, pytest.TestReport], ends: Mapping[int, float]) -> int:
    """Return the rank whose report is that of the phase: one that has failed as expected, else the first to fail."""
    expected = [rank for rank, each in here.items() if each.skipped and hasattr(each, "wasxfail")]
    failed = [rank for rank, each in here.items() if each.failed]
    if expected:
        failed = [rank for rank in failed if not here[rank].longreprtext.startswith(UNEXPECTED)]
    passed = [rank for rank, each in here.items() if each.passed]
    if not failed:
        return (expected or passed or [*here])[0]
    return min(failed, key=lambda rank: (_complains(here[rank]), ends[rank], rank))


def _complains(report: pytest.TestReport) -> bool:
    """Whether a failure is about another rank that is gone, and so cannot be the first."""
    return bool(COMPLAINT.search(_message(report)))


def lost_others(ran: Mapping[int, Ran]) -> bool:
    """Whether all failures are about other ranks that are gone."""
    return all(_complains(failure) for each in ran.values() if (failure := each.failure()))


def outcomes(ran: Mapping[int, Ran], missing: Mapping[int, str] | None = None) -> str:
    """Return what became of ranks, in one line."""
    groups: dict[str, list[int]] = {}
    for rank, what in sorted({**{rank: _outcome(each) for rank, each in ran.items()}, **(missing or {})}.items()):
        groups.setdefault(what, []).append(rank)
    return "; ".join(f"{named(ranks)}: {what}" for what, ranks in groups.items())


def _outcome(ran: Ran) -> str:
    if failure := ran.failure():
        return f"failed: {LOST if _complains(failure) else _message(failure)}"
    return "skipped" if any(each.skipped for each in ran.reports.values()) else "passed"


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    line = ADDRESS.sub("", (text.strip()[: 4 * MAX_TEXT].splitlines() or [""])[0])  # its time is quadratic
    return line if len(line) <= MAX_TEXT else f"{line[:MAX_TEXT]}…"


def places(ranks: list[int], stacks: Mapping[int, str]) -> dict[int, str]:
    """Return where each of these ranks was in its test."""
    found = {rank: _position(stacks.get(rank, "")) for rank in ranks}
    return {rank: f"was at {at.where}" if at else "had not ended" for rank, at in found.items()}


def _position(stacks: str) -> Position | None:
    """Return where a rank is in its test; None if it is not there, for example since it reports its own failure."""
    found = position(f"Stack (of a test):\n{_own(stacks)}")
    return found if found and found.own else None


def stacks(found: Mapping[int, str], ranks: list[int]) -> tuple[str, str]:
    """Return which rank the others wait for, if it can be told, and the stacks of ranks, equal ones once."""
    places = {rank: _position(found.get(rank, "")) for rank in ranks}
    groups = grouped({rank: _own(found.get(rank, "")) if places[rank] else "" for rank in ranks})
    rank, what = late({}, places)
    shown = [f"{named(group)}:\n{text or '  not in the test'}" for group, text in groups]
    return f"rank {rank} {what}" if len(groups) > 1 else "", "\n".join(shown)


def _own(stacks: str) -> str:
    """Return the stack of the main thread, up to the code of pytest."""
    lines = stacks.rpartition("hread 0x")[2].splitlines()[1:]
    of_pytest = (number for number, line in enumerate(lines) if "/_pytest/" in line or "/pluggy/" in line)
    return "\n".join(lines[: next(of_pytest, len(lines))])


def named(ranks: list[int]) -> str:
    """Return the names of ranks: `rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _explain(report: pytest.TestReport, rank: int, others: str) -> None:
    """Add which rank failed, and what became of the others."""
    shown: Any = report.longrepr
    if crash := getattr(shown, "reprcrash", None):
        crash.message = f"rank {rank}: {crash.message}"
    if hasattr(shown, "addsection"):
        shown.addsection("ranks", "; ".join(filter(None, (f"rank {rank}: failed first, as shown", others))))
    else:
        report.longrepr = "\n".join(filter(None, (f"rank {rank}: {shown}", others)))


def _printed(output: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return the sections of a report with what ranks have printed."""
    return [(f"Captured output of rank {rank}", text) for rank, text in output.items() if text]


def _explanation(text: str, crash: ReprFileLocation | None) -> ReprExceptionInfo:
    """Why a test has failed, as a text in which pytest colors nothing, with one line of it for pytest's summary.

    It has the form of an exception, which pytest-xdist sends on as a whole.
    """
    return ReprExceptionInfo(ReprTraceback([ReprEntryNative([f"{text}\n"])], None, "native"), crash)


def unfinished(
    item: pytest.Item, text: str, when: str = "call", output: Mapping[int, str] = {}, line: str = ""
) -> list[pytest.TestReport]:
    """Return the reports of a test that no rank has ended, or that could not start; `text` says why.

    `output` is what ranks have printed; `line` is for pytest's summary, by default the first one of the text.
    """
    sections, made = _printed(output), []
    crash = ReprFileLocation(str(item.path), item.location[1] or 0, line or text.partition("\n")[0])
    for phase in PHASES:
        failed = phase == when
        if failed or when == "call":
            made.append(
                pytest.TestReport(
                    item.nodeid,
                    item.location,
                    dict.fromkeys(item.keywords, 1),
                    "failed" if failed else "passed",
                    _explanation(text, crash) if failed else None,
                    phase,  # type: ignore[arg-type]
                    sections if failed else (),
                )
            )
    return made
