"""The jobs of one pytest session: one at a time runs tests, on nodes that stay up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from orchestrate.api.job import Cluster
from orchestrate.errors import OrchestrateError, UsageError, did_you_mean
from orchestrate.plan import imports
from orchestrate.spec.spec import FIELDS
from orchestrate.testing import reports
from orchestrate.testing.world import DEFAULTS, Broken, World, inside, path_below

TIMEOUT = 300.0  # seconds
SETUP = " in pytest_runtest_setup\n"  # in the stack of a rank that runs a fixture
MARGIN = 5.0  # seconds that are left to pytest-timeout: it would end the whole session
# Plug-ins that do in this process what they should do once, and not on every rank.
BLOCKED = (
    "terminal",
    "orchestrate",
    "orchestrate.testing.plugin",
    "timeout",
    "pytest_cov",
    "randomly",
    "rerunfailures",
)
# Options that select tests, or start a debugger or more processes: this process has done so.
ONCE: dict[str, Any] = {
    **dict(keyword="", markexpr="", deselect=None, maxfail=0, collectonly=False, usepdb=False, trace=False),
    **dict(lf=False, failedfirst=False, newfirst=False, stepwise=False, stepwise_skip=False, cacheclear=False),
    **dict(dist="no", distload=False, numprocesses=None, maxprocesses=None, looponfail=False, tx=[]),
    **dict(xmlpath=None, pastebin=None, setupplan=False, setuponly=False, help=False, version=0),
    "strict_config": False,  # this process has checked the configuration, and knows the options of all plug-ins
}
# The same for what the configuration file says of that, in pytest 9.
UNCHECKED = ("-W", "ignore:Unknown config option", "-o", "strict_config=false")


class Shape(NamedTuple):
    """Nodes and settings of a job that runs tests."""

    nodes: int
    settings: str  # as JSON

    @classmethod
    def of(cls, item: pytest.Item) -> Shape:
        """Return the shape in a test's marker; raises UsageError."""
        marker = item.get_closest_marker("nodes")
        assert marker
        hint = "write @pytest.mark.nodes(2)"
        if len(marker.args) != 1 or type(marker.args[0]) is not int or marker.args[0] < 1:
            given = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
            raise UsageError(
                f"nodes({', '.join(given)}): the first argument must be the number of nodes, from 1 on", hint
            )
        known = [*FIELDS, "timeout"]
        for name in marker.kwargs.keys() - {*known}:
            meant = did_you_mean(name, known, cutoff=0.5)
            raise UsageError(
                f"nodes has no argument {name}", meant or "its arguments are timeout, and keys of a job file"
            )
        if own := {"nodes", "trainers", "command", "keep", "chdir"} & {*marker.kwargs}:
            raise UsageError(f"{min(own)} cannot be set in the marker nodes", hint)
        limit = marker.kwargs.get("timeout", TIMEOUT)
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
            raise UsageError(f"timeout must be a number of seconds above 0, not {limit!r}", "write timeout=60")
        try:
            settings = {name: value for name, value in marker.kwargs.items() if name != "timeout"}
            return cls(marker.args[0], json.dumps(settings, sort_keys=True))
        except TypeError as error:
            raise UsageError(f"the marker nodes has no valid settings: {error}", hint) from None


class Worlds:
    """Runs tests, each on all ranks of a job that fits."""

    def __init__(self, session: pytest.Session) -> None:
        """Start nothing yet."""
        self.session, self.config, self.root = session, session.config, session.config.rootpath
        self._world: World | None = None
        self._shape: Shape | None = None
        self._cluster: Cluster | None = None
        self._on: Shape | None = None  # of the cluster
        self._errors: dict[Shape, str] = {}
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job of CI that is cancelled, as Ctrl-C
            os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        """Run a test on all ranks; return the reports of its phases."""
        began = time.perf_counter()
        found = self._reports(item, nextitem, began)
        for report in found:
            if report.failed and not report.duration:  # no rank has reported one
                report.duration = time.perf_counter() - began
        return found

    def _reports(self, item: pytest.Item, nextitem: pytest.Item | None, began: float) -> list[pytest.TestReport]:
        try:
            shape = Shape.of(item)
            world = self._fitting(shape)
        except OrchestrateError as error:
            return reports.unfinished(item, _text(error), "setup")
        except pytest.fail.Exception as error:  # by pytest-timeout
            self.close()
            hint = "it includes the start of the ranks, which a limit in the marker, nodes(…, timeout=…), does not"
            return reports.unfinished(item, f"the ranks did not start in time: {error}\nhint: {hint}", "setup")
        try:
            limit = limit_of(item, time.perf_counter() - began)
            return self._run(world, item, self._following(item, nextitem, shape), limit)
        except (Broken, OrchestrateError, pytest.fail.Exception) as error:  # the last by pytest-timeout
            self._give_up()
            return reports.unfinished(item, str(error))
        except BaseException:  # Ctrl-C
            stacks = self._give_up()
            for text in reports.stacks(stacks, sorted(stacks)) if stacks else ():
                self.config.get_terminal_writer().line(f"\n{text}")
            raise

    def _run(self, world: World, item: pytest.Item, following: str | None, limit: float) -> list[pytest.TestReport]:
        ran = world.run(item.nodeid, following, limit)
        for rank, each in ran.items():
            if each.error:
                raise Broken(self._not_collected(rank, each.error))
        for message in reports.warned(ran):
            known = {"warning_message": message, "when": "runtest", "nodeid": item.nodeid, "location": None}
            self.config.hook.pytest_warning_recorded.call_historic(kwargs=known)
        if world.whole(ran):
            return reports.merged(item, ran, {}, world.output)
        missing = [rank for rank in range(world.size) if rank not in ran]
        stacks = self._give_up()
        ended = world.why_ended()  # a rank may have crashed just before
        left = [rank for rank in missing if rank in world.left]  # without an error, as by os._exit(0)
        crashed = ended or (left and reports.lost_others(ran))
        merged = [] if crashed else reports.merged(item, ran, reports.places(missing, stacks), world.output)
        if found := [each for each in merged if each.failed]:  # after a crash, others fail because of it
            return found
        gone = "; ".join(f"rank {rank} exited with code {world.left[rank]} during the test" for rank in left)
        what = ended or gone or f"{reports.named(missing)} did not end within {limit:g} s"
        what += f", of the {_timeout(item):g} s of pytest-timeout" * (
            not ended and not gone and limit < _own_limit(item)
        )
        waiting = [rank for rank in missing if rank in stacks or not (ended or rank in left)]
        head, shown = reports.stacks(stacks, waiting) if waiting else ("", "")
        head = "" if crashed else head  # the others wait for a rank that is gone
        parts = what, head, shown, reports.outcomes(ran)
        output = {rank: world.output(rank) for rank in missing}
        in_setup = waiting and all(SETUP in stacks.get(rank, "") for rank in waiting)
        phase = "setup" if in_setup and not world.entered & {*missing} else "call"
        return reports.unfinished(item, "\n".join(filter(None, parts)), phase, output, head)

    def _not_collected(self, rank: int, error: str) -> str:
        last = (error.rstrip().splitlines() or [""])[-1].removeprefix("E").strip()
        text = f"rank {rank} cannot collect the test: {last}\n{error}"
        if "ModuleNotFoundError" in error and self.config.getoption("nodes_engine") != "process":
            text += "\nhint: containers have the packages of the image, and those of pip=[...] in @pytest.mark.nodes,"
            text += f" and a copy of {self.root}, pytest's root folder; --rootdir names another one"
        return text

    def _read(self, data: Any, hide: Callable[[str], str]) -> reports.Ran:
        load = self.config.hook.pytest_report_from_serializable
        return reports.read(data, lambda report: load(config=self.config, data=report), hide)

    def _fitting(self, shape: Shape) -> World:
        """Return ranks of this shape, started if they do not run; raises OrchestrateError."""
        if shape in self._errors:
            raise OrchestrateError(f"{self._errors[shape].splitlines()[0]} (see the first test on these nodes)")
        if self._world and self._shape == shape:
            return self._world
        self._end_world()
        try:
            with inside(self.root):
                cluster = self._nodes(shape)
                self._world = World(self.root, cluster, self._settings(shape), self._tests, self._read)
                self._shape = shape
        except OrchestrateError as error:
            self._errors[shape] = _text(error)  # not tried again for each test
            raise
        return self._world

    def _settings(self, shape: Shape) -> dict[str, Any]:
        engine = self.config.getoption("nodes_engine")
        settings = {"engine": engine, "nodes": shape.nodes, **json.loads(shape.settings)}
        if settings["engine"] != "process":
            settings["pip"] = [f"pytest=={pytest.__version__}", *settings.get("pip", [])]
        return settings

    def _nodes(self, shape: Shape) -> Cluster:
        """Return nodes on which the ranks can be started; as many as any test needs."""
        if self._cluster and self._on and self._on.settings == shape.settings and self._on.nodes >= shape.nodes:
            return self._cluster
        self._end_nodes()
        same = [each.nodes for each in self._shapes if each.settings == shape.settings]
        self._on = Shape(max([shape.nodes, *same]), shape.settings)
        settings = DEFAULTS | {"preload": self._imports, "command": imports.COPIED[1:]} | self._settings(self._on)
        self._cluster = Cluster(self._runs, **settings)
        return self._cluster

    @cached_property
    def _runs(self) -> Path:
        if given := self.config.getoption("nodes_runs"):
            return Path(self.config.invocation_params.dir, given).absolute()
        factory: pytest.TempPathFactory = self.config._tmp_path_factory  # type: ignore[attr-defined]
        return factory.mktemp("nodes")

    @cached_property
    def _shapes(self) -> set[Shape]:
        found = set()
        for item in self._items:
            with contextlib.suppress(UsageError):
                found.add(Shape.of(item))
        return found

    @cached_property
    def _items(self) -> list[pytest.Item]:
        return [item for item in self.session.items if item.get_closest_marker("nodes")]

    @cached_property
    def _files(self) -> list[str]:
        return [*dict.fromkeys(os.path.relpath(item.path, self.root) for item in self._items)]

    @cached_property
    def _imports(self) -> list[str]:
        """Modules for nodes to import ahead of time."""
        found = {name for file in self._files for name in imports.uses([file], str(self.root))}
        torch = ["torch", "torch.distributed"] if found else []
        return [*torch, *({"torch._dynamo"} & found), "pytest"]

    @cached_property
    def _tests(self) -> dict[str, Any]:
        """What ranks need to collect the same tests."""
        options = {name: value for name, value in vars(self.config.option).items() if _is_plain(value)} | ONCE
        options.pop("file_or_dir", None)  # which pytest parses
        if options["capture"] != "no":  # output is in the log, too, for a rank that does not end the test
            options["capture"] = "tee-sys"
        options["plugins"] = [name for name in self.config.getoption("plugins") if name not in BLOCKED]
        options["rootdir"] = "."
        if self.config.inipath:
            options["inifilename"] = os.path.relpath(self.config.inipath, self.root)
        blocked = [word for name in BLOCKED for word in ("-p", f"no:{name}")]
        return {
            "arguments": [*blocked, *UNCHECKED, *self._files],
            "options": options,
            "path": path_below(self.root),
            "coverage": self._coverage(),
        }

    def _coverage(self) -> dict[str, Any] | None:
        """Return what ranks need to measure coverage for pytest-cov, which combines their files with its own."""
        controller = getattr(self.config.pluginmanager.getplugin("_cov"), "cov_controller", None)
        if not controller or self.config.getoption("nodes_engine") != "process":  # files have other paths elsewhere
            return None
        file = Path(controller.cov.get_option("run:data_file")).absolute()
        return {"source": controller.cov_source, "branch": self.config.option.cov_branch, "data_file": str(file)}

    def _following(self, item: pytest.Item, nextitem: pytest.Item | None, shape: Shape) -> str | None:
        """Return the test that these ranks run next, which may use the same fixtures; None if that is not known."""
        if nextitem and not nextitem.get_closest_marker("nodes") and not hasattr(self.config, "workerinput"):
            later = self._items[self._places[item.nodeid] + 1 :]
            nextitem = later[0] if later else None
        with contextlib.suppress(UsageError, AssertionError):
            return nextitem.nodeid if nextitem and Shape.of(nextitem) == shape else None
        return None

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {item.nodeid: place for place, item in enumerate(self._items)}

    def _end_world(self) -> None:
        world, self._world = self._world, None
        if world:
            world.end()

    def _give_up(self) -> dict[int, str]:
        """End ranks that do not run tests any longer, and return their stacks; the next test starts others."""
        world, self._world = self._world, None
        return world.kill() if world else {}

    def _end_nodes(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster:
            cluster.down()

    def close(self) -> None:
        """End the ranks, and remove the nodes."""
        try:
            with inside(self.root):
                try:
                    self._end_world()
                finally:
                    self._end_nodes()
        except OrchestrateError as error:
            self.config.get_terminal_writer().line(f"\nnodes of tests were not removed: {_text(error)}")


def _timeout(item: pytest.Item) -> float:
    """Return the time limit of pytest-timeout in seconds; 0 without one."""
    marker = item.get_closest_marker("timeout")
    values: list[Callable[[], Any]] = [
        lambda: marker and (marker.kwargs.get("timeout") or marker.args[0]),
        lambda: item.config.getoption("timeout", None),
        lambda: item.config.getini("timeout"),
    ]
    for value in values:
        with contextlib.suppress(ValueError, TypeError, IndexError, KeyError):
            if found := float(value() or 0):
                return found
    return 0.0


def _own_limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("nodes")
    return float(marker.kwargs.get("timeout", TIMEOUT)) if marker else TIMEOUT


def limit_of(item: pytest.Item, used: float) -> float:
    """Return the time limit of a test in seconds: its own, or most of what is left of pytest-timeout's."""
    left = _timeout(item) - used
    return min(_own_limit(item), left - min(MARGIN, left / 2)) if left > 0 else _own_limit(item)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _text(error: OrchestrateError) -> str:
    """Return the text of an error, whose hint names options of the command line."""
    hint = re.sub(r"--(engine|runs)\b", r"--nodes-\1", error.hint)
    hint = re.sub(r"--gpus (\w+)", r'gpus="\1" in the marker nodes', hint)
    return f"{error}\nhint: {hint}" if hint else str(error)
