"""Test suites with the marker `nodes`, and pytest in their folder."""

import subprocess
import sys
import xml.etree.ElementTree as ET

from support.repo import ROOT

SMALL = """
import os
import pytest
import pkg

@pytest.mark.nodes(2)
def test_one(rank):
    assert pkg.name(rank) == ("second" if rank else "first")

@pytest.mark.nodes(2)
def test_two(rank, request):
    if os.environ.get("FAIL"):
        assert request.config.getoption("tbstyle") == rank
"""
PACKAGE = """
def name(rank):
    if rank == 0:
        return "first"
    if rank == 1:
        return "second"
    return "third"
"""


class Suite:
    """A folder with tests, and pytest in it."""

    def __init__(self, cli, text: str) -> None:
        self.folder, self.seen = cli.folder, cli.folder / "seen"
        self.seen.mkdir()
        (self.folder / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = -p no:cacheprovider\n")
        (self.folder / "test_it.py").write_text(text)
        (self.folder / "pkg.py").write_text(PACKAGE)
        # With CI or BUILD_NUMBER, pytest shortens no line of its summary.
        theirs = ("PYTEST_", "COV_", "CI", "BUILD_NUMBER")
        env = {name: value for name, value in cli.env.items() if not name.startswith(theirs)}
        self.env = env | {"PYTHONPATH": str(ROOT), "SEEN": str(self.seen)}

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", "--junit-xml", "results.xml", "--nodes-runs", "runs", *arguments],
            cwd=self.folder,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *arguments: str, **env: str) -> str:
        """Run pytest; return its output."""
        with self.start(*arguments, **env) as process:
            return process.communicate(timeout=200)[0]

    def seconds(self, name: str) -> float:
        """How long a test took."""
        cases = ET.parse(self.folder / "results.xml").iter("testcase")
        return next(float(case.attrib["time"]) for case in cases if case.attrib["name"] == name)

    def results(self) -> dict[str, list[str]]:
        """How tests have ended, by name: what `<testcase>` contains."""
        cases = ET.parse(self.folder / "results.xml").iter("testcase")
        found: dict[str, list[str]] = {}
        for case in cases:
            found.setdefault(case.attrib["name"], []).extend(child.tag for child in case if child.tag != "system-out")
        return found
