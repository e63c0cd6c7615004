"""Output of installers and builds."""

import io

import pytest

from orchestrate.engines.quiet import SHOWN_LINES, advice, essence, follow


def test_the_last_lines_of_a_build_must_be_kept_without_internal_steps_and_shown_without_numbers(capsys):
    lines = [
        "#5 [internal] load metadata",
        "#5 DONE 0.1s",
        "",
        *(f"#6 0.{number} step {number}" for number in range(60)),
    ]
    assert [*follow(io.StringIO("\n".join(lines)))] == lines[-SHOWN_LINES:] and SHOWN_LINES == 50
    assert [*follow(io.StringIO("\n".join(lines[:4])))] == lines[3:4]


BUILD = """#5 [1/2] FROM docker.io/library/a
#6 [2/2] RUN install x
#6 0.512 step one
#6 0.930 ERROR: no x
#6 ERROR: process "/bin/sh -c install x" did not complete successfully: exit code: 1
------
 > [2/2] RUN install x:
0.512 step one
0.930 ERROR: no x
------
failed to solve: process "/bin/sh -c install x" did not complete successfully: exit code: 1"""


def test_of_a_failed_build_only_the_step_that_failed_must_be_printed():
    assert essence(BUILD) == "step one\nERROR: no x"


@pytest.mark.parametrize(
    "output", ["ERROR: no x", "one\n------\ntwo", BUILD.replace("0.512 step one\n0.930 ERROR: no x\n", "")]
)
def test_output_of_anything_else_must_be_printed_as_it_is(output):
    assert essence(output) == output


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] x. Max retries exceeded", "CA_BUNDLE"),
        ("Temporary failure in name resolution", "BUILD_NETWORK=host"),
        ("ERROR: No matching distribution found for x", ""),
    ],
)
def test_a_server_that_is_not_reached_or_not_trusted_must_be_told_apart(output, hint):
    assert hint in advice(output) and bool(hint) == bool(advice(output))
    assert ("CA_BUNDLE" in advice(output)) == (hint == "CA_BUNDLE")
