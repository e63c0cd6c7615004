"""The examples in docs/testing.md."""

import re
import textwrap

import pytest
from support.repo import ROOT
from support.suites import SMALL, Suite

TEXT = (ROOT / "docs" / "testing.md").read_text()


@pytest.fixture
def small(cli):
    return Suite(cli, SMALL)


@pytest.mark.slow
def test_the_example_of_the_documentation_must_print_what_it_shows(small):
    blocks = re.findall(r"```(python|console)\n(.*?)```", TEXT, re.S)
    (_, code), (_, shown), *_ = blocks
    (small.folder / "test_it.py").unlink()
    (small.folder / "test_mean.py").write_text(code)
    shown = shown.partition("\n")[2].replace(
        "ranks 0, 2: failed: lost its connection to another rank", "[…]"
    )  # or one is still in the test
    parts = [re.escape(part.strip()) for part in shown.split("[…]")]
    assert re.search(".*?".join(parts), out := small("--tb=short"), re.S), out


@pytest.mark.slow
def test_the_example_of_a_failure_on_purpose_must_be_a_test_that_passes(small):
    kills, test = re.findall(r"```python\n(.*?)```", TEXT.partition("## Failures on purpose")[2], re.S)
    loop = f"for step in range(1, 40):\n    time.sleep(0.02)\n{textwrap.indent(kills, '    ')}"
    (small.folder / "train.py").write_text(f"import os, signal, time\n{loop}")
    (small.folder / "test_train.py").write_text(f"import orchestrate\n{test}")
    out = small("test_train.py")
    assert "1 passed" in out, out
