"""Output and exit code of `doctor`."""

import json

import pytest

from orchestrate.cli.main import main
from orchestrate.doctor import checks


@pytest.mark.parametrize(
    ("states", "code"),
    [(["ok", "warning"], 0), (["ok", "error", "error", "ok"], 5), (["error", "warning"], 4), ([], 0)],
)
def test_doctor_must_fail_if_a_finding_keeps_jobs_from_running(capsys, monkeypatch, tmp_path, states, code):
    (tmp_path / "app.py").touch()  # doctor starts no job that it could be taken for
    monkeypatch.chdir(tmp_path)
    findings = [
        checks.Finding(state, f"thing {at}", "do it" * (state == "error"), 4 + at) for at, state in enumerate(states)
    ]
    asked: list[str] = []
    monkeypatch.setattr(checks, "doctor", lambda spec, _: (asked.append(spec.image), iter(findings))[1])
    assert (main(["doctor", "--image", "mine:1"]), asked) == (code, ["mine:1"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("hint: do it" in line for line in lines) == states.count("error")
    shown = [line.split() for line in lines if "hint" not in line]
    assert shown == [[one.state, *one.what.split()] for one in findings]
    assert main(["doctor", "--image", "mine:1", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == [
        {"state": one.state, "what": one.what, "hint": one.hint} for one in findings
    ]
