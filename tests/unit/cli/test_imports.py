"""What commands import: a module takes a third of a millisecond and more, in every run."""

import re
import subprocess
import sys

import pytest
from support.commanded import end

from orchestrate.files.paths import PACKAGE

LIBRARIES = ("docker", "jinja2", "obstore", "pygal", "regex", "requests", "rich", "yaml")
OF_HELP = """
orchestrate orchestrate.cli orchestrate.cli.args orchestrate.cli.arguments orchestrate.cli.main
orchestrate.cli.options orchestrate.cli.parser orchestrate.cli.table orchestrate.clock orchestrate.console
orchestrate.errors orchestrate.patience
"""


def imported(*arguments: str) -> set[str]:
    """The modules that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrate", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return set(re.findall(r"import time: .*\| +(\S+)$", done.stderr, re.MULTILINE))


def test_the_help_must_import_nothing_of_jobs():
    found = imported("--help")
    assert {name for name in found if name.startswith("orchestrate")} == set(OF_HELP.split())
    assert not found & {*LIBRARIES, "asyncio", "dataclasses", "inspect", "json", "logging", "socket", "subprocess"}


@pytest.mark.parametrize("command", ["logs", "events"])
def test_a_command_that_reads_an_ended_job_must_import_neither_engines_nor_the_supervisor(paths, command):
    paths.log(0).write_text("hello\n")
    end(paths)
    found = imported(command, "a-1", "--runs", str(paths.root.parent))
    assert found & {*LIBRARIES} == {"yaml"}
    rooms = ("docker", "doctor", "export", "pages", "process", "storage", "supervise")
    assert not [name for name in found if name.startswith("orchestrate") and {*name.split(".")} & {*rooms}]


def test_local_processes_must_not_import_dockers_sdk(tmp_path, monkeypatch):
    (tmp_path / "hello.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    assert imported("plan", "--engine", "process", "hello.py") & {*LIBRARIES} == {"yaml"}
