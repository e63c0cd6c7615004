"""Results of ranks are data of other processes: whatever is in them must be a report, or refused."""

import io
import json
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from support.optional import not_none
from support.repo import ROOT

from orchestrate.spec.redact import Mask
from orchestrate.testing import reports

GOOD = {"reports": [], "errors": [], "port": 1, "hosted": True, "done": True, "time": 1, "warnings": []}


def loaded(data):
    return pytest.TestReport._from_json(data)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        *({name: value for name, value in GOOD.items() if name != missing} for missing in GOOD),
        GOOD | {"reports": 1},
        GOOD | {"reports": [1]},
        GOOD | {"reports": [{}]},
        GOOD | {"reports": [{"nodeid": 1, "when": "x", "longrepr": None}]},
        GOOD | {"time": "now"},
        GOOD | {"port": "x"},
        GOOD | {"warnings": [["UserWarning", "text", "file"]]},
        GOOD | {"warnings": [["UserWarning", "text", "file", "line", ""]]},
        GOOD | {"warnings": [["\ud800", "text", "file", 1, ""]]},
    ],
)
def test_results_that_are_none_must_be_refused(data):
    with pytest.raises(ValueError):
        reports.read(data, loaded)


REPORT: dict[str, object] = {
    "nodeid": "t.py::test",
    "location": ["t.py", 1, "test"],
    "keywords": {},
    "outcome": "failed",
    "when": "call",
}
REPORT |= {"longrepr": "x", "sections": [["a", "b"]], "user_properties": [["c", 1]], "duration": 1.0}


def long_text(lines: object = ("assert x",), message: object = "assert x") -> dict:
    """A failure as pytest sends it between processes."""
    place = {"path": "t.py", "lineno": 1, "message": message}
    data = {"lines": lines, "reprfuncargs": None, "reprlocals": None, "reprfileloc": place, "style": "long"}
    trace = {"reprentries": [{"type": "ReprEntry", "data": data}], "extraline": None, "style": "long"}
    return {"reprcrash": place, "reprtraceback": trace, "sections": [], "chain": [[trace, place, None]]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("duration", value) for value in ("abc", -1, float("nan"), float("inf"), None)),
        *((name, value) for name in ("sections", "user_properties") for value in (5, [1], [["a"]], [["a", "b", "c"]])),
        *(("outcome", value) for value in ("weird", 1, None)),
        ("when", "collect"),
        *(("longrepr", value) for value in ([], ["a"], ["a", "b", "c"])),
    ],
)
def test_a_report_with_a_field_that_pytest_cannot_use_must_be_refused(field, value):
    assert reports.read(GOOD | {"reports": [REPORT]}, loaded).reports["call"].failed
    with pytest.raises(ValueError):
        reports.read(GOOD | {"reports": [REPORT | {field: value}]}, loaded)


def test_a_failure_must_not_count_as_expected():
    (found,) = reports.read(GOOD | {"reports": [REPORT | {"wasxfail": "a reason"}]}, loaded).reports.values()
    assert found.failed and not hasattr(found, "wasxfail")  # pytest would exit with 0


LIES: list[dict] = [
    {"toterminal": "x", "get_sections": 5},
    {"wasxfail": {"a": 1}},
    {"longrepr": None},
    {"longrepr": "abc"},
    {"longrepr": {"reprcrash": {"path": 1, "lineno": "x", "message": 7}, "lines": 5}},
    {"longrepr": long_text(lines=5)},
    {"longrepr": long_text(message=["a"])},
    {"longrepr": long_text()},
]
FORGING = """
import json, pathlib, pytest
from orchestrate.spec.redact import Mask
from orchestrate.testing import reports

def pytest_runtest_protocol(item, nextitem):
    data = json.loads(pathlib.Path("lies.json").read_text())[item.callspec.params["number"]]
    try:
        (report,) = reports.merged(item, {0: reports.read(data, pytest.TestReport._from_json)}, {}, str)
    except ValueError as error:
        _, report, _ = reports.unfinished(item, str(error))
    item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


@pytest.mark.parametrize("options", [["-rA", "--color=yes", "--junit-xml=j.xml"], ["-v", "--tb=line", "-rs"]])
def test_pytest_must_be_able_to_show_what_a_rank_reports_or_it_must_be_refused(tmp_path, options):
    lies = [REPORT | lie | {"outcome": outcome} for lie in LIES for outcome in ("failed", "skipped", "passed")]
    (tmp_path / "lies.json").write_text(json.dumps([GOOD | {"reports": [lie]} for lie in lies]))
    (tmp_path / "conftest.py").write_text(FORGING)
    test = f"import pytest\n@pytest.mark.parametrize('number', range({len(lies)}))\ndef test_it(number): pass\n"
    (tmp_path / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    passed, skipped = (int(not_none(re.search(rf"(\d+) {word}", done.stdout))[1]) for word in ("passed", "skipped"))
    assert passed >= 5 and skipped >= 5 and "AssertionError" not in done.stdout


class Colored(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("lines", [["     "] * 20_000, ["     \n" * 20_000]])
def test_an_error_that_takes_long_to_color_must_be_shown_without_colors(lines):
    (found,) = reports.read(
        GOOD | {"reports": [REPORT | {"longrepr": long_text(lines=lines)}]}, loaded
    ).reports.values()
    writer = TerminalWriter(Colored())
    writer.hasmarkup = True
    error: Any = found.longrepr
    error.toterminal(writer)  # which would take minutes
    assert error.reprcrash.message == "assert x" and "t.py:1: assert x" in found.longreprtext


def test_the_name_and_place_of_a_test_must_not_be_what_a_rank_says(request):
    forged = REPORT | {"nodeid": "other", "location": 5, "keywords": 7}
    ran = reports.read(GOOD | {"reports": [forged]}, loaded)
    (report,) = reports.merged(request.node, {0: ran}, {}, str)
    assert (report.nodeid, report.location) == (request.node.nodeid, request.node.location)
    assert {*report.keywords} == {*request.node.keywords}


@pytest.mark.parametrize("text", ["[XPASS(strict)] a reason", "Unexpected success", "assert 0"])
def test_one_rank_that_fails_as_expected_must_be_enough(request, text):
    expected = REPORT | {"outcome": "skipped", "wasxfail": "a reason"}
    found = {0: REPORT | {"longrepr": text}, 1: expected}
    ran = {rank: reports.read(GOOD | {"reports": [one]}, loaded) for rank, one in found.items()}
    (report,) = reports.merged(request.node, ran, {}, str)
    assert report.failed is (text == "assert 0")


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "[127.0.0.1]:{}", "[fe80::1]:{}"])
def test_ranks_with_the_same_error_must_be_one_group_whatever_the_addresses_of_their_peers(address):
    texts = {rank: f"RuntimeError: closed by peer {address.format(40000 + rank)}" for rank in range(3)}
    ran = {
        rank: reports.read(GOOD | {"reports": [REPORT | {"longrepr": text}]}, loaded) for rank, text in texts.items()
    }
    assert reports.outcomes(ran) == "ranks 0, 1, 2: failed: RuntimeError: closed by peer"


def test_a_long_error_must_be_cut_before_it_is_searched():
    ran = reports.read(GOOD | {"reports": [REPORT | {"longrepr": "1" * 1_000_000}]}, loaded)  # for hours otherwise
    assert reports.outcomes({1: ran}) == f"rank 1: failed: {'1' * reports.MAX_TEXT}…"


def test_what_xdist_could_not_send_on_must_be_replaced_or_refused():
    odd = {"user_properties": [["a\ud800", {"b\ud800": "c\ud800"}]], "d\ud800": 1}
    report = reports.read(GOOD | {"reports": [REPORT | odd]}, loaded).reports["call"]
    json.dumps(vars(report), ensure_ascii=False).encode()
    deep: list = []
    for _ in range(60):
        deep = [deep]
    with pytest.raises(ValueError):
        reports.read(GOOD | {"reports": [REPORT | {"user_properties": [["a", deep]]}]}, loaded)


def test_control_characters_must_be_removed_except_colors():
    assert reports.read(GOOD | {"errors": ["\x1b]0;title\x07\x1b[2Jx"]}, loaded).error.removesuffix("\x1b[0m") == "x"
    texts = {"longrepr": "\x1b]0;title\x07\x1b[2Ja\r", "sections": [["Captured\x1b[5n", "\x1b[31mred\x1b[0m\b"]]}
    report = reports.read(GOOD | {"reports": [REPORT | texts]}, loaded).reports["call"]
    assert report.longreprtext.removesuffix("\x1b[0m") == "a" and "\x1b[31mred" in report.sections[0][1]
    hide = Mask({"A_TOKEN": "hunter2000"})
    texts = {"longrepr": "\x1b[31mhunt\x1b[1mer2000\x1b[0m\n\x1b[31mred\x1b[0m"}
    hidden = reports.read(GOOD | {"reports": [REPORT | texts]}, loaded, hide).reports["call"].longreprtext
    assert hidden.startswith("***\n\x1b[31mred")
    assert not {"\a", "\b", "\r"} & {*str(report.longreprtext), *report.sections[0][1]} and "[5n" not in str(report)


def test_the_plug_in_must_import_nothing_that_no_test_uses():
    code = (
        "import sys, orchestrate.testing.plugin; print(*sorted(name for name in sys.modules if 'orchestrate' in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["orchestrate", "orchestrate.testing", "orchestrate.testing.plugin"]


def test_a_file_that_a_rank_names_in_a_warning_must_not_be_opened(tmp_path):
    (tmp_path / "private").write_text("secret\n")
    data = ["OddWarning", "\x1b[2Jtext", str(tmp_path / "private"), 1, ""]
    (found,) = reports.warned({0: reports.read(GOOD | {"warnings": [data]}, loaded)})
    assert found.category is UserWarning and str(found.message).startswith("OddWarning: ")  # also for xdist
    assert "\x1b[2J" not in str(found.message)
    shown = warnings.formatwarning(found.message, found.category, found.filename, found.lineno, found.line)
    assert "private:1: UserWarning: " in shown and "secret" not in shown
