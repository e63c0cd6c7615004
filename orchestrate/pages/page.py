"""Pages about jobs, each one file that needs nothing else, and no script to be read."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup, escape

from orchestrate import __version__
from orchestrate.console import shortened
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files.folder import write_whole
from orchestrate.host import owners, private
from orchestrate.node.trees import opened
from orchestrate.pages.curves import COUNTERS, quantity
from orchestrate.pages.job import Run, load
from orchestrate.record.metrics import FIRST, NOT_FINITE, is_number, place, shown
from orchestrate.record.paths import JobPaths
from orchestrate.record.steps import SHORT

log = logging.getLogger(__name__)

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_VALUE = 60  # characters of a metric
MAX_FAILURES = 100
MAX_COMMAND = 64 << 10  # characters of a command whose options are listed
CACHE = "templates"
SCRIPT = (Path(__file__).parent / "page.js").read_text()


class Compiled(BytecodeCache):
    """Templates in the form in which they are executed, in the user's cache: compiling them takes 30 ms of each job."""

    def load_bytecode(self, bucket: Bucket) -> None:
        """Load a template, unless it has changed since it was compiled, or the file is damaged."""
        with (
            contextlib.suppress(Exception),
            private.opened(owners.cache(CACHE)) as folder,
            open(opened(bucket.key, folder=folder), "rb") as file,
        ):
            bucket.load_bytecode(file)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Save a compiled template."""
        with contextlib.suppress(OSError, UsageError):
            private.make(cache := owners.cache(CACHE))
            with private.opened(cache) as folder:
                write_whole(bucket.key, bucket.bytecode_to_string(), folder)


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    bytecode_cache=Compiled(),
    autoescape=True,  # names, output and metrics are the job's
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["code"] = lambda text: Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def write(
    jobs: Sequence[JobPaths],
    path: Path,
    report: dict[str, Any] | None = None,
    put: Callable[[Path, str], None] = write_whole,
) -> None:
    """Write a page about jobs that have ended, or about one that is about to end with this report.

    `put` writes the file. Raises OrchestrateError if that fails.
    """
    try:
        links = [
            urllib.parse.quote(os.path.relpath(paths.page, path.parent)) if paths.page.exists() else ""
            for paths in jobs
        ]
        put(path, page([load(paths, report) for paths in jobs], links))
    except OrchestrateError:
        raise
    except Exception as error:  # what jobs write may surprise any library
        log.debug("cannot write %s", path, exc_info=True)
        raise OrchestrateError(f"cannot write {path}: {error}") from None


def prepare() -> None:
    """Load the templates of a job's page."""
    for name in ("one.html", "base.html", "parts.html"):
        TEMPLATES.get_template(name)


def page(runs: Sequence[Run], links: Sequence[str], home: str = "") -> str:
    """Return a page about one job, or about the differences of several, as HTML.

    `links` are the addresses of the jobs' own pages, empty for those without one, and `home` is that of the list of
    jobs, if a server has one.
    """
    curves = drawn(runs)
    if curves:
        from orchestrate.pages import charts  # imports pygal
    axis = " or ".join(dict.fromkeys(run.axis for run in runs if run.curves))
    script, policy = scripted(SCRIPT)
    template = TEMPLATES.get_template("one.html" if len(runs) == 1 else "several.html")
    text = template.render(
        run=runs[0],
        runs=runs,
        links=links,
        home=home,
        version=__version__,
        max_failures=MAX_FAILURES,
        charts=charts.charts(curves, axis) if curves else [],
        headline=headline(runs[0]),
        script=script,
        script_policy=policy,
        settings=_differing([_facts(run) | run.settings | _arguments(run.command) for run in runs]),
        finals=_differing([{name: _value(value) for name, value in _finals(run).items()} for run in runs]),
        duration=duration,
        numeric=lambda values: all(re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", value) for value in values if value),
        short=SHORT,
    )
    return UNPRINTABLE.sub("�", text)


def scripted(source: str) -> tuple[Markup, Markup]:
    """Return a script as an element, and the policy that lets only it run."""
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return Markup("<script>{}</script>").format(Markup(source)), Markup("; script-src 'sha256-{}'").format(digest)


def drawn(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return the curves of each chart by label: those of a quantity of one job, or those of a metric of several.

    Counters, and constants that are neither a loss nor an accuracy, are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, curve in run.curves.items():
            if quantity(name) not in COUNTERS:
                title, label = (quantity(name), name) if len(runs) == 1 else (name, run.name)
                found.setdefault(title, {})[label] = curve
    values = {name: {value for curve in curves.values() for _, value in curve} for name, curves in found.items()}
    found = {name: curves for name, curves in found.items() if place(name) < len(FIRST) or len(values[name]) > 1}
    return {[*curves][0] if len(runs) == len(curves) == 1 else name: curves for name, curves in found.items()}


def headline(run: Run) -> list[tuple[str, str]]:
    """Return the three numbers that matter most of a job: its duration, its goodput, and a metric, if there are any."""
    goodput = _facts(run)["goodput"]
    found = [("duration", duration(run.seconds)), *([("goodput", goodput)] if goodput else [])]
    numbers = {name: value for name, value in _finals(run).items() if is_number(value)}
    metrics = sorted((-place(name), quantity(name) == name, name) for name in numbers if place(name) < len(FIRST))
    return found + [(name, _value(numbers[name])) for _, _, name in metrics[:1]]


def _facts(run: Run) -> dict[str, str]:
    """Return what comparisons show of a job besides its settings."""
    report = run.report
    known = run.spans and run.seconds >= SHORT and run.goodput is not None
    goodput = f"{round(100 * (run.goodput or 0))} %" if known else ""
    found = {"goodput": goodput, "workers": str(report["world_size"]), "generations": str(report["generations"])}
    commit = f"{report['commit'][:12]}{' and changes' * bool(report['dirty'])}"
    return found | {"commit": commit, "machine": f"{report['engine']}: {run.machine}"}


def _arguments(command: str) -> dict[str, str]:
    """Return the options of a command by their names, and the rest of it as `command`."""
    if " --" not in command or len(command) > MAX_COMMAND:  # it is split character by character
        return {"command": command}
    words, found, rest = shlex.split(command)[::-1], dict[str, str](), list[str]()
    while words:
        name, equals, value = (word := words.pop()).partition("=")
        if not word.startswith("--"):
            rest.append(word)
        else:
            value = value if equals or not words or words[-1].startswith("--") else words.pop()
            found[name] = f"{found[name]}, {value}" if name in found else value
    return {name: value or "set" for name, value in found.items()} | {"command": shlex.join(rest)}


def _finals(run: Run) -> dict[str, Any]:
    """Return the last values of a job's metrics without text, which says what a line is about."""
    found = shown(run.report["final_metrics"])
    return {name: value for name, value in found.items() if type(value) is not str or value in NOT_FINITE}


def _differing(each: Sequence[dict[str, str]]) -> list[tuple[str, list[str], bool]]:
    """Return for each name its values, empty for a job without one, and whether they differ; these names first."""
    names = dict.fromkeys(name for values in each for name in values)
    rows = [(name, [values.get(name, "") for values in each]) for name in names]
    found = [(name, values, len({*values}) > 1) for name, values in rows if any(values)]
    return sorted(found, key=lambda row: not row[2])


def _value(value: Any) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else json.dumps(value) if type(value) is not str else value
    return shortened(text, MAX_VALUE)


def duration(seconds: float) -> str:
    """Format seconds for display."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
