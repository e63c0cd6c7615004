"""Ranks that run tests: how their world starts."""

import pytest

from orchestrate.console import print_message
from orchestrate.errors import OrchestrateError, ResourceError
from orchestrate.testing.world import inside


def test_an_error_must_contain_the_output_that_it_refers_to(tmp_path, capsys):
    for text, refers in (("it failed: see the output above", True), ("it failed", False)):
        with pytest.raises(OrchestrateError, match="it failed") as failed, inside(tmp_path):
            print_message("no such package")
            raise ResourceError(text, "a hint")
        assert ("no such package" in str(failed.value)) == refers and failed.value.hint == "a hint"
    assert capsys.readouterr().err == ""
