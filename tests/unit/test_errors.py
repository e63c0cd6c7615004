"""Errors as a program sees them; the command line prints them itself."""

import sys
import traceback

import pytest

from orchestrate.errors import OrchestrateError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_the_traceback_of_an_error_must_show_its_hint_if_it_has_one():
    shown = traceback.format_exception(OrchestrateError("no engine", "start it"))
    assert [line.rstrip() for line in shown][-2:] == [
        "orchestrate.errors.OrchestrateError: no engine",
        "hint: start it",
    ]
    assert traceback.format_exception(OrchestrateError("no engine"))[-1].endswith("no engine\n")
