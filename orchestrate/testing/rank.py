"""Runs tests on one rank of a job; the plug-in for pytest copies this file to the job folder.

It is a separate pytest process, as a worker of xdist is. It collects the files in `tests.json`, then runs what the
plug-in asks for in `test.json`, and writes the reports of test N to `results/N-RANK.json`; 0 means that it is ready.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import signal
import socket
import sys
import time
import warnings
from typing import Any

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MAX_WARNINGS = 100  # of a test that are reported
SHORTEST, LONGEST = 0.001, 0.02  # seconds between two looks for the next test
# How a process ends that does not run tests any longer, by what pytest returns.
BROKEN = {pytest.ExitCode.INTERRUPTED: 128 + signal.SIGINT, pytest.ExitCode.INTERNAL_ERROR: 3}
# A test can replace them while its result is written.
open_, replace, dump, now, process, leave = open, os.replace, json.dump, time.time, os.getpid, os._exit
PROCESS = process()


@pytest.fixture(scope="session")
def rank() -> int:
    """Rank of this process."""
    return RANK


@pytest.fixture(scope="session")
def world_size() -> int:
    """Number of ranks."""
    return WORLD_SIZE


class Rank:
    """Runs the tests that the plug-in asks for, one after the other."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.errors: list[str] = []  # of the collection
        self.reports: list[Any] = []
        self.warnings: list[Any] = []
        self.failed = 0.0  # when the test failed, in seconds since 1970; 0 if it has not
        self.number = 0
        self.bound = socket.socket()
        self.stores: list[Any] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register what the plug-in registers, and the plug-ins that ranks do not load."""
        for marker in ("nodes", "timeout", "no_cover", "flaky"):
            config.addinivalue_line("markers", marker)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file cannot be collected."""
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests until the plug-in asks for the end."""
        items = {item.nodeid: item for item in session.items}
        os.makedirs(f"{HERE}/results", exist_ok=True)
        stacks = os.open(f"{HERE}/results/stacks-{RANK}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        faulthandler.register(signal.SIGTERM, stacks, chain=True)  # at the end of a test that hangs
        self.done([], self.errors)
        while asked := self.asked():
            item = items.get(asked["item"])
            self.reports, self.warnings, self.failed, following = [], [], 0.0, items.get(asked["next"])
            os.environ |= {"MASTER_PORT": str(asked["port"]), "TORCHELASTIC_USE_AGENT_STORE": str(asked["hosted"])}
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a test may have reset it, as Lightning does
                faulthandler.unregister(signal.SIGTERM)
                faulthandler.register(signal.SIGTERM, stacks, chain=True)
            if item:
                with contextlib.suppress(OSError):
                    os.write(1, f"== {item.nodeid}\n".encode(errors="replace"))  # in the log
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.done(self.reports, [] if item else self.errors or [f"{asked['item']} is not there"])
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a phase of the test."""
        config = self.config
        self.reports.append(config.hook.pytest_report_to_serializable(config=config, report=report))
        if report.failed and not self.failed:
            self.failed = getattr(report, "stop", 0.0) or now()  # before its traceback was made, which takes a while
        entered = report.when == "setup" and report.passed  # if it crashes then, it is the test that fails
        # The teardown of a failed test may wait for ranks that wait for this one.
        if entered or (report.failed and report.when != "teardown"):
            self.write(
                {"reports": self.reports, "errors": [], "warnings": [], "port": 0, "hosted": False, "done": False}
            )

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Keep a warning of the test; this process has no summary."""
        if when == "runtest" and len(self.warnings) < MAX_WARNINGS:
            kind, place = warning_message.category.__name__, (warning_message.filename, warning_message.lineno)
            self.warnings.append([kind, str(warning_message.message), *place, linecache.getline(*place)])

    def asked(self) -> Any:
        """Wait for the next request; None is the end."""
        self.number += 1
        delay, seen = SHORTEST, None
        while True:
            try:
                stat = os.stat(f"{HERE}/test.json")
                if (found := (stat.st_ino, stat.st_mtime_ns)) != seen:
                    seen = found
                    with open(f"{HERE}/test.json") as file:
                        request = json.load(file)
                    if request["number"] == self.number:
                        return request["test"]
            except FileNotFoundError:
                pass
            time.sleep(delay)
            delay = min(delay * 1.05, LONGEST)

    def done(self, reports: list[Any], errors: list[str]) -> None:
        """Write the result of a request, and remove the one before, which has been read."""
        self.write({"reports": reports, "errors": errors, "warnings": self.warnings, **self.store(), "done": True})
        if self.number:
            os.remove(f"{HERE}/results/{self.number - 1}-{RANK}.json")

    def write(self, result: dict[str, Any]) -> None:
        """Write a result, whole or so far; a forked process that returns from a test ends instead."""
        if process() != PROCESS:
            leave(1)
        path = f"{HERE}/results/{self.number}-{RANK}.json"
        with open_(f"{path}.new", "w") as file:
            dump({**result, "time": self.failed or now()}, file, default=str)
        replace(f"{path}.new", path)

    def store(self) -> dict[str, Any]:
        """Return the port of torch's store for the next test, and whether this process hosts it already.

        Each test has its own: keys of an earlier process group would be taken for new ones.
        """
        dist = sys.modules.get("torch.distributed")
        if RANK == 0 and dist is not None and dist.is_available():
            if not dist.is_initialized():  # a process group that is still there needs its store
                self.stores.clear()
            self.stores.append(dist.TCPStore("localhost", 0, WORLD_SIZE, is_master=True, wait_for_workers=False))
            return {"port": self.stores[-1].port, "hosted": True}
        self.bound.close()
        self.bound = socket.socket()  # does not listen, and so keeps the port until a process does
        self.bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bound.bind(("", 0))
        return {"port": self.bound.getsockname()[1], "hosted": False}


def measured(coverage: dict[str, Any]) -> Any:
    """Start to measure the coverage of this process."""
    import coverage as package  # type: ignore[import-not-found, unused-ignore]

    found = package.Coverage(**coverage, data_suffix=True)
    found.start()
    return found


def main() -> None:
    """Run pytest with the options of the plug-in's session."""
    with open(f"{HERE}/tests.json") as file:
        asked = json.load(file)
    sys.path[:1] = asked["path"]
    coverage = measured(asked["coverage"]) if asked["coverage"] else None
    options = asked["options"] | {"basetemp": f"{HERE}/tmp-{RANK}"}
    config = pytest.Config.fromdictargs(options, asked["arguments"])
    config.workerinput = {"workerid": f"rank{RANK}", "workercount": WORLD_SIZE}  # type: ignore[attr-defined]
    config.pluginmanager.register(Rank(config), "orchestrate-rank")
    config.pluginmanager.register(sys.modules[__name__], "orchestrate-rank-fixtures")
    try:
        code = config.hook.pytest_cmdline_main(config=config)
    finally:
        if coverage:
            coverage.stop()
            coverage.save()
    sys.exit(BROKEN.get(code, 0))


if __name__ == "__main__":
    main()
