"""Results of ranks are data of other processes: whatever is in them must be a report, or refused."""

import subprocess
import sys

import pytest

from orchestrate.testing import reports

GOOD = {"reports": [], "errors": [], "port": 1, "hosted": True, "done": True, "time": 1}


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
    ],
)
def test_results_that_are_none_must_be_refused(data):
    with pytest.raises(ValueError):
        reports.read(data, loaded)


def test_the_plug_in_must_import_nothing_that_no_test_uses():
    code = (
        "import sys, orchestrate.testing.plugin; print(*sorted(name for name in sys.modules if 'orchestrate' in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["orchestrate", "orchestrate.testing", "orchestrate.testing.plugin"]
