"""The JSON Schema of job files, for editors. Pure."""

from __future__ import annotations

from typing import Any

from orchestrate.spec.spec import FIELDS, MAPPINGS, NODES, JobSpec, default_of, description
from orchestrate.spec.values import list_of


def schema() -> dict[str, Any]:
    """JSON Schema (draft 7) of a job file; `layers.resolve` also checks keys against each other."""
    properties = {}
    for key, field in FIELDS.items():
        properties[key] = {"description": description(key), **field.metadata["kind"].schema}
        if not field.metadata["absent"] and (default := getattr(JobSpec(), key)) not in (None, "", ()):
            properties[key]["default"] = default_of(key) if isinstance(default, float) else default
    properties["optional"] |= list_of({"enum": [*FIELDS]})
    properties["nodes"] = {"description": "number of nodes including the master, instead of trainers", **NODES.schema}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Job file of orchestrate",
        "type": "object",
        "properties": properties,
        "patternProperties": {
            rf"^{key}\.{names[1:]}": {"description": f"a single entry of {key}", **entry}
            for key in MAPPINGS
            for names, entry in [_entry(key)]
        },
        "not": {"required": ["nodes", "trainers"]},
        "additionalProperties": False,
    }


def _entry(key: str) -> tuple[str, dict[str, Any]]:
    """Pattern of the names in a mapping, and schema of one value."""
    whole = FIELDS[key].metadata["kind"].schema
    form = next(form for form in whole.get("anyOf", [whole]) if "additionalProperties" in form)
    return form["propertyNames"]["pattern"], dict(form["additionalProperties"])
