"""Output of installers and builds."""

import os
import signal
import subprocess

import pytest
from support.memory import peak
from support.methods import raising
from support.optional import not_none

from orchestrate.engines import build_output
from orchestrate.engines.build_output import SHOWN_LINES, advice, essence, follow
from orchestrate.errors import ResourceError


def started(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def printed(text: str) -> list[str]:
    with started("cat") as process:
        stdin = not_none(process.stdin)
        stdin.write(text)
        stdin.close()
        return [*follow(process, str)]


def test_the_last_lines_of_a_build_must_be_kept_without_internal_steps_and_shown_without_numbers(capsys):
    lines = [
        "#5 [internal] load metadata",
        "#5 DONE 0.1s",
        "",
        *(f"#6 0.{number} step {number}" for number in range(60)),
    ]
    assert printed("\n".join(lines)) == lines[-SHOWN_LINES:] and SHOWN_LINES == 50
    assert printed("\n".join(lines[:4])) == lines[3:4]


def test_a_command_must_end_though_another_process_keeps_its_output_open(tmp_path):
    with started(f"setsid sleep 1000 & echo $! > {tmp_path}/pid; echo done") as process:
        assert [*follow(process, str)] == ["done"]
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


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


def test_an_installation_that_never_ends_must_be_ended_with_all_that_it_has_started(monkeypatch):
    monkeypatch.setattr(build_output, "TIMEOUT", 0.2)
    with (
        started("sleep 600 & echo $!; wait") as process,
        pytest.raises(ResourceError, match="the installation did not end within"),
    ):
        follow(process, str)
    assert process.returncode == -9


def test_ctrl_c_must_end_an_installation(monkeypatch):
    monkeypatch.setattr(build_output, "progress", raising(KeyboardInterrupt()))
    with started("echo a; sleep 600") as process, pytest.raises(KeyboardInterrupt):
        follow(process, str)
    assert process.returncode == -15


def test_an_installation_that_prints_no_line_end_must_not_be_kept_in_memory(monkeypatch):
    monkeypatch.setattr(build_output, "progress", lambda *_: None)
    with started("head -c 20000000 /dev/zero | tr '\\0' x") as process:
        lines, most = peak(lambda: follow(process, str))
    assert len(lines) == SHOWN_LINES and most < 12 << 20
