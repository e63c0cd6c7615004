"""docs/failures.md must show the table of symptoms as the code has it; a failing test prints what belongs there."""

import re

from support.repo import ROOT

from orchestrate.spec.causes import RULES
from orchestrate.supervise.diagnosis.symptoms import IN_ERRORS, IN_LINES, Symptom

ACTIONS = {rule["cause"]: rule["action"] for rule in RULES}


def row(symptom: Symptom) -> str:
    shown = " … ".join(symptom.example.split("\n")).strip()
    shown = shown if len(shown) <= 90 else f"{shown[:89]}…"
    local = f"; local processes: {symptom.local}" if symptom.local else ""
    hint = re.sub(r"\\(\d)", "`…`", f"{symptom.hint}{local}")
    cells = [f"`{shown}`", f"`{symptom.cause}`", f"`{ACTIONS.get(symptom.cause, 'count')}`", hint]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_the_documented_symptoms_must_match_the_code():
    text = (ROOT / "docs" / "failures.md").read_text()
    head = "| what the worker prints | cause | built-in action | hint |\n| --- | --- | --- | --- |\n"
    assert head in text, head
    table = text.partition(head)[2].partition("\n\n")[0]
    expected = "\n".join(map(row, [*IN_LINES, *IN_ERRORS]))
    assert table == expected, expected
