"""Output of installers and builds."""

import io

from orchestrate.engines.quiet import SHOWN_LINES, follow


def test_the_last_lines_of_a_build_must_be_kept_without_internal_steps_and_shown_without_numbers(capsys):
    lines = ["#5 [internal] load metadata", "", *(f"#6 0.{number} step {number}" for number in range(60))]
    assert [*follow(io.StringIO("\n".join(lines)))] == lines[-SHOWN_LINES:] and SHOWN_LINES == 50
    assert [*follow(io.StringIO("\n".join(lines[:3])))] == lines[2:3]
