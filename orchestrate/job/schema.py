"""The job file for readers and editors: its JSON Schema, and its reference as a table in Markdown. Pure."""

from __future__ import annotations

from typing import Any

from orchestrate.job.spec import FIELDS, NODES, JobSpec, default_of, description
from orchestrate.job.values import TEXT, VARIABLE, list_of


def schema() -> dict[str, Any]:
    """The schema (draft 7); our own check also knows what keys mean together."""
    properties = {}
    for key, field in FIELDS.items():
        properties[key] = {"description": description(key), **field.metadata["kind"].schema}
        if not field.metadata["absent"] and (default := getattr(JobSpec(), key)) not in (None, ""):
            properties[key]["default"] = default_of(key) if isinstance(default, float) else default
    properties["optional"] |= list_of({"enum": [*FIELDS]})
    properties["nodes"] = {"description": "nodes including the master, in place of trainers", **NODES.schema}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Job file of orchestrate",
        "type": "object",
        "properties": properties,
        "patternProperties": {rf"^env\.{VARIABLE}$": {"description": "one variable of env", **TEXT}},
        "not": {"required": ["nodes", "trainers"]},
        "additionalProperties": False,
    }


def table() -> str:
    """A row for each key: name, default, description."""
    rows = ["| key | default | meaning |", "| --- | --- | --- |"]
    for key, field in FIELDS.items():
        words, value = default_of(key), getattr(JobSpec(), key)
        plain = field.metadata["absent"] or not words or (type(value) is int)
        rows.append(f"| `{key}` | {words if plain else f'`{words}`'}{' ' * bool(words)}| {field.metadata['doc']} |")
    return "\n".join(rows)
