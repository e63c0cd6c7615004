"""Whatever ranks do, a test with the marker `nodes` must have a result, the next test run, and nothing be left."""

import os
import signal

import pytest
from support.agents import WITHOUT_CAPABILITIES
from support.suites import Suite
from support.waiting import eventually

from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths

NEXT = """

@pytest.mark.nodes(2)
def test_next(rank):
    pass
"""
HEAD = "import os, sys, time\nimport pytest\n\n@pytest.mark.nodes(2, timeout=100)\ndef test_first(rank, monkeypatch):\n"


@pytest.fixture
def first(cli):
    """Run a test on two ranks, and another one after it; return the output."""

    def run(*lines: str) -> str:
        suite = Suite(cli, HEAD + "".join(f"    {line}\n" for line in lines) + NEXT)
        out = suite("--tb=short")
        assert "1 failed, 1 passed" in out, out
        return out

    return run


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["os._exit(0) if rank else time.sleep(1000)"], "rank 1 exited with code 0 during the test\nrank 0:\n"),
        (
            ["os._exit(0) if rank else time.sleep(1)", "raise OSError('Connection reset by peer')"],
            "rank 1 exited with code 0",
        ),
        (
            ["if rank:", "  try: assert not 'the cause'", "  finally: time.sleep(1)", "time.sleep(.5)"]
            + ["raise OSError('Connection closed by peer [::1]:9')"],
            "rank 1: failed first, as shown; rank 0: failed: lost its connection to another rank",
        ),
        (["if rank: raise KeyboardInterrupt", "time.sleep(1000)"], "rank 1 on trainer-1 was killed by SIGINT"),
        (["import shutil", "shutil.rmtree(f'{os.environ[\"JOB_DIR\"]}/results')"], "exited with code 3\n"),
        (["if rank and (child := os.fork()):", "  os.waitpid(child, 0)", "  assert 0, 'the rank'"], "rank 1: failed"),
    ],
    ids=["exit", "peer", "order", "interrupt", "results", "fork"],
)
def test_a_rank_that_leaves_must_end_the_test_long_before_its_timeout(first, lines, shown):
    assert shown in first(*lines)


def test_ranks_that_do_not_start_within_the_limit_of_pytest_timeout_must_not_end_the_session(cli):
    slow = "import os, time, pytest\nif 'RANK' in os.environ: time.sleep(3)\n"
    out = Suite(cli, f"{slow}@pytest.mark.timeout(1)\n@pytest.mark.nodes(2)\ndef test_first(rank): pass\n{NEXT}")()
    assert "the ranks did not start in time: Timeout (>1.0s)" in out and "1 passed, 1 error" in out, out


def test_what_the_plugin_imports_must_not_count_towards_the_limit_of_pytest_timeout(cli):
    suite = Suite(
        cli, f"import pytest\n@pytest.mark.timeout(0.3)\n@pytest.mark.nodes(2)\ndef test_first(rank): pass\n{NEXT}"
    )
    (suite.folder / "conftest.py").write_text(
        "import sys, time\n\nclass Slow:\n    def find_spec(self, name, path=None, target=None):\n"
        "        time.sleep(0.5 * (name == 'orchestrate.testing.session'))\n\nsys.meta_path.insert(0, Slow())\n"
    )
    assert "1 passed, 1 error" in (out := suite()) and "the ranks did not start in time" in out, out


def test_ranks_must_accept_a_strict_configuration_of_plug_ins_that_they_do_not_load(cli):
    suite = Suite(cli, f"import pytest\npytestmark = pytest.mark.timeout(99)\n{NEXT}")
    with (suite.folder / "pytest.ini").open("a") as file:
        file.write("timeout = 99\nfilterwarnings = error\nstrict_markers = true\nstrict_config = true\n")
    assert "1 passed" in (out := suite()), out


def test_a_test_may_replace_what_writes_its_result(first):
    out = first(
        "def broken(*args, **kwargs): raise OSError('of the test')",
        "for name in ('os.replace', 'builtins.open', 'json.dump', 'time.time'):",
        "    monkeypatch.setattr(name, broken)",
        "assert not rank, 'the cause'",
        "while True: time.sleep(1)",
    )
    assert "E   AssertionError: the cause" in out and "rank 0: was at test_it.py:" in out


def test_what_a_rank_reports_must_not_end_the_session(first):
    out = first(
        "main, write = sys.modules['__main__'], sys.modules['__main__'].Rank.write",
        "def forged(self, result):",
        "    main.Rank.write = write",
        "    write(self, result | {'reports': [each | {'duration': 'abc'} for each in result['reports']]})",
        "main.Rank.write = forged",
    )
    assert "of rank 0 cannot be read: ValueError" in out or "of rank 1 cannot be read: ValueError" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_must_end_with_the_pytest_that_has_started_them(cli, number):
    text = "import os, time\nimport pytest\n\n@pytest.mark.nodes(2)\ndef test_it(rank):\n"
    text += "    open(f\"{os.environ['SEEN']}/{os.getpid()}\", 'w').close()\n    time.sleep(1000)\n"
    suite = Suite(cli, text)
    with suite.start() as process:
        ranks = eventually(lambda: found if len(found := [*suite.seen.iterdir()]) == 2 else None)
        process.send_signal(number)
        process.communicate()
    (job,) = suite.folder.glob("runs/tests-*")
    assert eventually(lambda: run_dir.ended(JobPaths(job)))
    assert eventually(lambda: not any(os.path.exists(f"/proc/{path.name}") for path in ranks))
    clusters = [*suite.folder.glob("runs/cluster-*")]
    assert len(clusters) == (number == signal.SIGKILL)  # pytest itself removes it on SIGTERM
    for cluster in clusters:
        assert cli("down", "--runs", "runs", cluster.name).returncode == 0


def test_a_job_folder_that_cannot_be_written_must_fail_the_next_test_only(cli):
    (cli.folder / "conftest.py").write_text(WITHOUT_CAPABILITIES)  # root could write everywhere
    head = "\n@pytest.mark.nodes(1)\ndef test_"
    closes = "(rank):\n    os.chmod(os.environ['JOB_DIR'], 0o555)\n"
    suite = Suite(
        cli, f"import os\nimport pytest\n{head}first{closes}{head}second(rank):\n    pass\n{head}third{closes}"
    )
    out = suite()
    assert "1 failed, 2 passed" in out and "the ranks cannot be asked for the test: " in out, out
    assert not [*suite.folder.glob("runs/cluster-*")]


def test_output_that_is_not_captured_must_be_in_the_logs_of_the_ranks(cli):
    suite = Suite(cli, "")
    (suite.folder / "test_it.py").write_text(
        "import os, pytest\n\n@pytest.mark.nodes(2)\ndef test_it(rank):\n"
        "    print('I am', rank, flush=True)\n    os.abort()\n"
    )
    suite("-s")
    assert ["I am 1\n" in log.read_text() for log in suite.folder.glob("runs/*/logs/rank-1.log")] == [True]


def test_ranks_that_cannot_start_must_end_and_not_keep_other_tests_from_running(cli):
    text = 'import os, pytest\n\nif os.environ.get("RANK") == "1":\n    raise ValueError("x" * (17 << 20))\n'
    for number in (2, 3):
        text += f"\n@pytest.mark.nodes({number})\ndef test_on_{number}(rank):\n    pass\n"
    suite = Suite(cli, f"{text}\ndef test_plain():\n    pass\n")
    out = suite("--tb=short")
    assert "1 passed, 2 errors" in out and "the result of rank 1 cannot be read" in out, out


def test_the_summary_of_xdist_must_have_one_line_for_a_rank_that_has_ended(cli):
    test = "import os, pytest\n@pytest.mark.nodes(2)\ndef test_x(rank): os._exit(rank)\n"
    out = Suite(cli, test)("-n", "1", CI="true")  # in which pytest shortens nothing
    assert "FAILED test_it.py::test_x - rank 1 on trainer-1 exited with code 1\n=" in out, out
