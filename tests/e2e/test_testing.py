"""Tests with the marker `nodes` must run on every rank, and have one result that says what went wrong and where."""

import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml
from support.cli import Cli
from support.repo import ROOT
from support.suites import SMALL, Suite
from support.waiting import eventually

SUITE = """
import os
import sys
import time
import unittest
from pathlib import Path

import pytest

def meet(name, rank):
    # Otherwise, a rank that fails at once might not find the other in its test.
    Path(os.environ["SEEN"], f"{name}-{rank}").touch()
    while len([*Path(os.environ["SEEN"]).glob(f"{name}-*")]) < 2:
        time.sleep(0.01)

@pytest.fixture(scope="session")
def process():
    return os.getpid()

@pytest.fixture(scope="module", autouse=True)
def ended(process):
    yield
    Path(os.environ["SEEN"], f"ended-{process}").touch()

@pytest.mark.nodes(2)
@pytest.mark.parametrize("number", [1, 2])
def test_environment(rank, world_size, number, process, tmp_path):
    assert (str(rank), str(world_size)) == (os.environ["RANK"], os.environ["WORLD_SIZE"])
    Path(os.environ["SEEN"], f"ran-{process}-{number}-{world_size}").touch()

def test_here(process):
    assert "RANK" not in os.environ

@pytest.mark.nodes(1, nproc_per_node=3)
def test_workers(rank, world_size):
    assert world_size == 3 and os.environ["LOCAL_RANK"] == str(rank)

@pytest.mark.nodes(2)
def test_values(rank):
    print("rank", rank, "prints")
    os.system("echo a child of rank $RANK prints")
    values = {"a": rank}
    assert values == {"a": 0}

@pytest.mark.nodes(2)
def test_all_fail(rank):
    assert not "always"

@pytest.mark.nodes(2)
def test_one_fails_and_one_waits(rank):
    meet("one", rank)
    if rank:
        time.sleep(1000)
    raise ValueError("no batch")

@pytest.mark.nodes(2)
def test_crashes(rank):
    print("rank", rank, "is about to crash")
    meet("crash", rank)
    if rank:
        os.kill(os.getpid(), 9)
    time.sleep(1000)

@pytest.mark.nodes(2)
def test_crashes_and_its_peer_notices(rank):
    pids = Path(os.environ["SEEN"], "pids")
    if rank:
        pids.symlink_to(f"/proc/{os.getpid()}")
        os.kill(os.getpid(), 9)
    while not pids.is_symlink() or pids.exists():
        time.sleep(0.001)
    raise OSError("Connection reset by peer")

@pytest.mark.nodes(2, timeout=5)
def test_hangs(rank):
    print("rank", rank, "is about to hang")
    if rank:
        time.sleep(1000)
    time.sleep(1000)

@pytest.fixture
def late_on_zero(rank):
    if rank == 0:
        time.sleep(1000)

@pytest.mark.nodes(2)
def test_crashes_before_another_is_ready(late_on_zero):
    os._exit(3)

@pytest.fixture
def waits(rank):
    time.sleep(1000)

@pytest.mark.nodes(2, timeout=2)
def test_hangs_in_a_fixture(waits):
    pass

@pytest.fixture
def fails_on_one(rank):
    assert rank, "no data on rank 0"

@pytest.mark.nodes(2)
def test_setup_of_one(fails_on_one):
    raise OSError("Connection closed by peer")

@pytest.mark.nodes(2)
def test_long_output(rank):
    print("\\n".join(map(str, range(5000))))
    assert rank

@pytest.mark.nodes(2)
def test_subtests(rank, subtests):
    for number in range(3):
        with subtests.test(number=number):
            assert rank == 0 or number != 1

class TestUnit(unittest.TestCase):
    @pytest.mark.nodes(2)
    def test_unit(self):
        for number in range(3):
            with self.subTest(number=number):
                assert os.environ["RANK"] == "0" or number != 1

@pytest.mark.nodes(2)
def test_after(rank):
    pass

@pytest.fixture
def broken(rank):
    yield
    assert rank

@pytest.mark.nodes(2)
def test_fixture(broken):
    pass

@pytest.mark.nodes(2)
@pytest.mark.skipif(True, reason="not today")
def test_skipped(rank):
    assert False

@pytest.mark.nodes(2)
@pytest.mark.xfail(strict=True)
def test_expected(rank):
    assert not rank

@pytest.mark.nodes(2)
@pytest.mark.xfail(strict=True)
def test_unexpected(rank):
    pass

@pytest.mark.nodes
def test_marker(rank):
    pass

@pytest.mark.nodes(2, timeout="1m")
def test_timeout(rank):
    pass

@pytest.mark.nodes(2, timeot=3)
def test_typo(rank):
    pass

@pytest.mark.nodes(2, gpus="no")
def test_settings(rank):
    pass

def test_without_marker(rank):
    pass
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The output of the suite, how its tests ended, and what they left in its folder `seen`."""
    suite = Suite(Cli(tmp_path_factory.mktemp("suite")), SUITE)
    out = suite("-v")
    assert suite.seconds("test_crashes") > 0 and suite.seconds("test_hangs") > 4  # as if their ranks had ended them
    return out, suite.results(), sorted(path.name for path in suite.seen.iterdir())


@pytest.fixture
def small(cli):
    return Suite(cli, SMALL)


def section(out: str, name: str) -> str:
    """The part of pytest's output about a failed test, without empty lines."""
    found = re.search(rf"^_+ (?:ERROR at \w+ of )?{name} _+$(.*?)^(?:_+ |=+ )", out, re.M | re.S)
    assert found, out
    return re.sub(r"\n+", "\n", found[1]).strip()


def test_each_test_must_have_one_result(whole):
    out, results, _ = whole
    failed = {
        "long_output",
        "values",
        "all_fail",
        "one_fails_and_one_waits",
        "crashes",
        "crashes_before_another_is_ready",
        "crashes_and_its_peer_notices",
        "hangs",
        "unexpected",
        "subtests",
        "unit",
    }
    errors = {
        "setup_of_one",
        "hangs_in_a_fixture",
        "fixture",
        "marker",
        "timeout",
        "typo",
        "settings",
        "without_marker",
    }
    passed = {"environment[1]", "environment[2]", "here", "workers", "after"}
    expected = {name: ["failure"] for name in failed} | {name: ["error"] for name in errors}
    expected |= {name: list[str]() for name in passed} | {"skipped": ["skipped"], "expected": ["skipped"]}
    assert results == {f"test_{name}": ended for name, ended in expected.items()}
    assert re.search(r"11 failed, 6 passed, 1 skipped, 1 xfailed, 8 errors in ", out)


def test_ranks_must_keep_fixtures_between_tests_and_end_them(whole):
    _, _, seen = whole
    ran = [re.fullmatch(r"ran-(\d+)-(\d)-2", name) for name in seen if name.startswith("ran")]
    processes = {found[1] for found in ran if found}
    assert len(ran) == 4 and len(processes) == 2
    assert processes < {name.removeprefix("ended-") for name in seen}


def test_the_rank_that_failed_first_must_be_shown_with_values_and_output(whole):
    shown = section(whole[0], "test_values")
    assert "E       AssertionError: assert {'a': 1} == {'a': 0}" in shown
    assert "rank 1: failed first, as shown; rank 0: passed" in shown
    assert re.search(r" Captured output of rank 1 -+\nrank 1 prints\na child of rank 1 prints\Z", shown)
    assert "rank 0 prints" not in shown
    assert "FAILED test_it.py::test_values - rank 1: AssertionError: assert" in whole[0]
    assert re.search(r"rank (\d): failed first, as shown; rank (?!\1)\d: failed: ", section(whole[0], "test_all_fail"))


def test_what_ranks_do_that_do_not_end_a_test_must_be_shown(whole):
    waits = section(whole[0], "test_one_fails_and_one_waits")
    assert "E       ValueError: no batch" in waits
    assert re.search(r"^rank 0: failed first, as shown; rank 1: was at test_it.py:\d+ in test_one_fails", waits, re.M)
    crashed = section(whole[0], "test_crashes").splitlines()
    assert crashed[0] == "rank 1 on trainer-1 was killed by SIGKILL (exit code 137)"
    place = crashed.index("rank 0:")
    assert re.search(r'^  File "test_it.py", line \d+ in test_crashes$', "\n".join(crashed[place:]), re.M)
    assert crashed[-1] == "rank 1 is about to crash"
    crashed = section(whole[0], "test_crashes_and_its_peer_notices").splitlines()
    assert crashed[0] == "rank 1 on trainer-1 was killed by SIGKILL (exit code 137)"
    hangs = section(whole[0], "test_hangs").splitlines()
    assert hangs[0] == "ranks 0, 1 did not end within 5 s"
    assert re.fullmatch(r"rank 0 is not where the others are, but at test_it.py:\d+ in test_hangs; .*", hangs[1])
    assert len([line for line in hangs if "in test_hangs" in line]) == 3
    for rank in "01":
        assert re.search(rf" Captured output of rank {rank} -+\nrank {rank} is about to hang$", "\n".join(hangs), re.M)
    assert "    rank 1 is about to crash" in section(whole[0], "test_crashes")
    assert re.search(r"^FAILED test_it.py::test_hangs - rank 0 is not where the others are", whole[0], re.M)
    kept, first = section(whole[0], "test_long_output").split("\n[the rest is in ")[1].splitlines()[:2]
    assert kept.endswith("/logs/rank-0.log]") and first.isdigit()
    assert re.search(r"File \"test_it.py\", line \d+ in waits$", section(whole[0], "test_hangs_in_a_fixture"), re.M)


def test_wrong_markers_must_be_refused_with_the_next_step(whole):
    assert section(whole[0], "test_marker").endswith("\nhint: write @pytest.mark.nodes(2)")
    assert section(whole[0], "test_timeout").startswith("timeout must be a number of seconds above 0, not '1m'\n")
    assert section(whole[0], "test_typo") == "nodes has no argument timeot\nhint: did you mean timeout?"
    assert "gpus must be" in section(whole[0], "test_settings")
    assert section(whole[0], "test_without_marker") == "the fixture rank is for tests with @pytest.mark.nodes(N)"


@pytest.mark.each_engine
def test_tests_must_run_on_each_engine_and_end_at_the_first_failure(small, engine):
    out = small("--nodes-engine", engine, "-x", "-k", "two or one", FAIL="")
    assert "2 passed" in out, out
    out = small("--nodes-engine", engine, "-x", "--deselect", "test_it.py::test_one", "--tb=short")
    assert "1 passed, 1 deselected" in out, out


@pytest.mark.docker
def test_a_marker_must_be_able_to_name_the_engine_of_its_test(small, docker_engine, nothing_left):
    (small.folder / "test_where.py").write_text(
        "import os, pytest\n@pytest.mark.nodes(2)\ndef test_here(rank): assert os.environ['HOME'] != '/tmp'\n"
        "@pytest.mark.nodes(2, engine='docker')\ndef test_there(rank): assert os.environ['HOME'] == '/tmp'\n"
    )
    out = small("test_where.py")
    assert "2 passed" in out, out


def test_options_of_pytest_must_reach_the_ranks(small):
    out = small("--tb=short", "-x", FAIL="1")
    assert "AssertionError: assert 'short' == " in out and "1 failed, 1 passed" in out


def test_xdist_and_coverage_must_work(small):
    out = small("-n", "2", "--cov", "pkg", "--cov-report", "term-missing")
    assert "2 passed" in out, out
    assert re.search(r"^pkg.py +6 +1 +83% +7$", out, re.M)
    assert not [*small.folder.glob(".coverage.*")]


def test_the_action_must_run_tests_and_keep_their_logs_and_results(small):
    action = yaml.safe_load((ROOT / ".github" / "actions" / "test" / "action.yml").read_text())
    results = small.folder / "results"
    given = {"ARGUMENTS": "-k 'two and not none'", "ENGINE": "process", "RESULTS": str(results)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-e", "-c", action["runs"]["steps"][0]["run"]]
    subprocess.run(command, cwd=small.folder, env=small.env | given | {"PATH": path}, check=True, capture_output=True)
    assert ET.parse(results / "junit.xml").getroot()[0].attrib["tests"] == "1"
    assert len([*results.glob("runs/tests-*/logs/rank-*.log")]) == 2
    wrong = subprocess.run(
        command, cwd=small.folder, env=small.env | given | {"PATH": path, "ARGUMENTS": "a b's"}, capture_output=True
    )
    assert wrong.returncode == 1 and b"No closing quotation" in wrong.stderr


@pytest.mark.parametrize(
    ("schema", "number"),
    [("github-actions", None), ("github-workflows", 0), ("gitlab-ci", 1)],
)
def test_the_action_and_its_examples_must_be_valid(tmp_path, schema, number):
    file = ROOT / ".github" / "actions" / "test" / "action.yml"
    if number is not None:
        blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.S)
        (file := tmp_path / "file.yml").write_text(blocks[number])
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_suites_that_treat_warnings_as_errors_must_pass(small):
    out = small("-W", "error", PYTHONWARNINGS="error")
    assert "2 passed" in out and "Warning" not in out, out


@pytest.mark.parametrize("options", [[], ["-n", "1"]])
def test_warnings_of_ranks_must_be_in_the_summary_once_for_all_ranks(small, options):
    (small.folder / "test_it.py").write_text(
        "import warnings, pytest\n\n@pytest.mark.nodes(2)\ndef test_it(rank):\n"
        "    warnings.warn('of all')\n    if rank == 1:\n        warnings.warn('of one', DeprecationWarning)\n"
    )
    out = small("-W", "default", *options)
    assert "1 passed, 2 warnings in" in out
    assert re.search(
        r"test_it.py::test_it\n +\S+/test_it.py:5: UserWarning: of all\n +warnings.warn\('of all'\)\n", out
    )
    assert "test_it.py:7: DeprecationWarning: of one" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_must_leave_nothing_and_keep_its_results(small, number):
    (small.folder / "test_it.py").write_text(
        "import os, time, pytest, pathlib\n\n@pytest.mark.nodes(2)\ndef test_it(rank):\n"
        "    pathlib.Path(os.environ['SEEN'], str(rank)).touch()\n    time.sleep(1000)\n"
    )
    with small.start() as process:
        eventually(lambda: len([*small.seen.iterdir()]) == 2)
        os.kill(process.pid, number)
        assert "KeyboardInterrupt" in process.communicate(timeout=100)[0]
    assert process.returncode == 2 and (small.folder / "results.xml").exists()


def test_children_of_later_tests_must_end_on_sigterm(small):
    text = "\nimport signal\n\ndef test_three():\n    if not (pid := os.fork()):\n"
    text += (
        "        os._exit(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)\n    assert os.waitpid(pid, 0)[1] == 0\n"
    )
    (small.folder / "test_it.py").write_text(SMALL + text)
    assert "3 passed" in small()


def test_ranks_that_cannot_import_a_test_must_say_why(small):
    text = 'import os\nassert "RANK" not in os.environ, "not for ranks"\n' + SMALL
    (small.folder / "test_it.py").write_text(text)
    out = small()
    assert "AssertionError: not for ranks" in section(out, "test_one"), out
