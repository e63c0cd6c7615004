"""Ranks that run tests: how their world starts."""

import pytest

from orchestrate.console import print_message
from orchestrate.errors import OrchestrateError, ResourceError, UsageError
from orchestrate.testing.session import Shape, limit_of
from orchestrate.testing.world import inside


def test_an_error_must_contain_the_output_that_it_refers_to(tmp_path, capsys):
    for text, refers in (("it failed: see the output above", True), ("it failed", False)):
        with pytest.raises(OrchestrateError, match="it failed") as failed, inside(tmp_path):
            print_message("no such package")
            raise ResourceError(text, "a hint")
        assert ("no such package" in str(failed.value)) == refers and failed.value.hint == "a hint"
    with pytest.raises(OrchestrateError) as failed, inside(tmp_path):
        print_message("a line\nERROR: no such package\na hint")
        raise ResourceError("it failed: see the output above", "")
    assert str(failed.value).startswith("it failed: ERROR: no such package\n")  # the line of pytest's summary
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("marker", "error", "hint"),
    [
        (pytest.mark.nodes(count=2), "nodes(count=2): the first argument must be the number of nodes", "(2)"),
        (pytest.mark.nodes("3"), "nodes('3'): the first argument must be the number of nodes, from 1 on", "(2)"),
        (pytest.mark.nodes(2, nproc=2), "nodes has no argument nproc", "did you mean nproc_per_node?"),
        (pytest.mark.nodes(2, timeout=0), "timeout must be a number of seconds above 0, not 0", "timeout=60"),
    ],
)
def test_a_wrong_marker_must_be_refused_with_what_to_write(request, marker, error, hint):
    request.node.add_marker(marker, append=False)
    with pytest.raises(UsageError) as raised:
        Shape.of(request.node)
    assert error in str(raised.value) and raised.value.hint.endswith(hint)


@pytest.mark.parametrize(
    ("own", "theirs", "used", "limit"),
    [(300, 0, 9, 300), (300, 60, 0, 55), (300, 60, 20, 35), (300, 6, 0, 3), (300, 6, 4, 1), (2, 6, 1, 2)],
)
def test_a_test_must_end_within_what_is_left_of_pytest_timeout(request, own, theirs, used, limit):
    """The start of the ranks counts, too; pytest-timeout would end the test without the stacks of the ranks."""
    request.node.add_marker(pytest.mark.nodes(2, timeout=own), append=False)
    request.node.add_marker(pytest.mark.timeout(theirs), append=False)
    assert limit_of(request.node, used) == limit
