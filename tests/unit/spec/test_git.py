"""Git must end in time, with all that it has started, and whatever it prints."""

import os
import re

import pytest
from support.memory import peak
from support.processes import gone
from support.waiting import eventually

from orchestrate.spec import git

ENV = {"PATH": os.environ["PATH"]}


def test_what_git_has_started_must_end_with_it(tmp_path):
    command = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; wait"]
    with pytest.raises(git.Late, match=re.escape("git did not finish within 0.5 s")):
        git.run(command, ENV, 100, 0.5, errors=True)
    assert eventually(lambda: gone(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize("errors", [True, False])
def test_what_git_prints_must_be_limited(errors):
    flood = "head -c 200000000 /dev/zero | tr '\\0' x; echo last >&2; exit 3"
    (code, output), most = peak(lambda: git.run(["sh", "-c", flood], ENV, 1000, 60, errors=errors))
    assert (len(output), output.endswith(b"last\n"), code) == (1000, errors, 3 if errors else -9)
    assert most < 4 << 20
