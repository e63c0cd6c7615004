"""The result of a job as JUnit XML, which CI systems show: one test case, named after the job."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

from orchestrate.record.outcomes import Outcome
from orchestrate.record.report import text

# What XML 1.0 cannot contain (section 2.2), also as a reference.
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
FACTS = ("job_id", "engine", "commit", "world_size", "generations")


def junit(data: dict[str, Any]) -> bytes:
    """Return the JUnit XML for a job's report: a failure if a worker failed, an error if it was stopped or lost."""
    outcome, name, time = data["outcome"], data["job_id"].rpartition("-")[0], f"{data['duration_s']:.3f}"
    failed, stopped = outcome == Outcome.FAILED, outcome in (Outcome.STOPPED, Outcome.LOST)
    root = ET.Element("testsuites")
    counts = {"tests": "1", "failures": str(int(failed)), "errors": str(int(stopped))}
    suite = ET.SubElement(root, "testsuite", {"name": name, **counts, "time": time})
    case = ET.SubElement(suite, "testcase", {"classname": "orchestrate", "name": name, "time": time})
    properties = ET.SubElement(case, "properties")
    for key, value in ({key: data[key] for key in FACTS} | data["final_metrics"]).items():
        ET.SubElement(properties, "property", {"name": _valid(key), "value": _valid(value)})
    if failed or stopped:
        cause = data["root_cause"] or {"summary": data["reason"], "cause": outcome}
        facts = {"message": _valid(cause["summary"]), "type": _valid(cause["cause"])}
        shown = ET.SubElement(case, "failure" if failed else "error", facts)
    else:
        shown = ET.SubElement(case, "system-out")
    shown.text = _valid(text(data))
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def not_run(name: str, error: str) -> bytes:
    """Return the JUnit XML for a job that an error kept from starting, or from ending."""
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", {"name": _valid(name), "tests": "1", "failures": "0", "errors": "1"})
    case = ET.SubElement(suite, "testcase", {"classname": "orchestrate", "name": _valid(name)})
    message = _valid(error.partition("\n")[0])
    ET.SubElement(case, "error", {"message": message, "type": "not_run"}).text = _valid(error)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _valid(value: object) -> str:
    return _INVALID.sub("", str(value))
