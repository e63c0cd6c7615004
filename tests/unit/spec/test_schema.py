"""One description of the job file must serve the documents, --help, errors, and editors as a JSON Schema."""

import json

import pytest
import yaml
from jsonschema import Draft7Validator
from support.job_values import BAD, GOOD
from support.repo import ROOT

from orchestrate.cli.main import main
from orchestrate.cli.options import FLAGS
from orchestrate.spec.layers import read_file, resolve
from orchestrate.spec.schema import schema
from orchestrate.spec.spec import FIELDS, JobSpec, default_of, description

VALIDATOR = Draft7Validator(schema())
# Values accepted in addition to the documented ones: numbers and booleans as text.
LENIENT = [("trainers", "1000"), ("gpus", "2"), ("pin", "true"), ("warm", "false")]
# Errors that only we detect: quotes, invalid patterns, and sizes and durations that are too small.
UNSEEN: list[tuple[str, object]] = [
    ("command", "train.py 'a"),
    ("rules", [{"log": "(", "action": "count"}]),
    ("memory", "67108863"),
]
UNSEEN += [("max_run", "0"), ("grace", "0.0s"), ("cpus", "0.0"), ("preload", "a-b"), ("constraints", "node.labels.a==")]
UNSEEN += [("slurm", value) for value in ({"partition": "a\nb"}, {"requeues": "many"})]


def is_valid(job_file: object) -> bool:
    return VALIDATOR.is_valid(job_file)


def test_the_schema_must_be_valid():
    Draft7Validator.check_schema(schema())
    assert json.loads(json.dumps(schema())) == schema()


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, value, _ in GOOD])
def test_the_schema_must_accept_valid_values(key, value):
    assert is_valid({key: value}) is ((key, value) not in LENIENT)


@pytest.mark.parametrize(("key", "value"), BAD)
def test_the_schema_must_refuse_invalid_values(key, value):
    assert is_valid({key: value}) is ((key, value) in UNSEEN)


def test_the_schema_must_refuse_unknown_and_contradictory_keys():
    assert is_valid({}) and is_valid({"nodes": 4, "env.A": "b"}) and is_valid({"optional": ["memory"]})
    for wrong in ({"trainer": 3}, {"nodes": 0}, {"nodes": 4, "trainers": 3}, {"env.1": "b"}, {"optional": ["x"]}, []):
        assert not is_valid(wrong)


def test_the_examples_and_generated_job_files_must_match_the_schema():
    for path in ROOT.glob("examples/*.yaml"):
        assert is_valid(read_file(path)), path
    assert is_valid(yaml.safe_load(resolve({"command": "x.py", "env": {"A": 1}, "rules": [], "cpus": 1}).to_yaml()))


@pytest.mark.parametrize("key", FIELDS)
def test_each_documented_default_must_be_the_actual_default_and_match_the_schema(key):
    default, absent = default_of(key), FIELDS[key].metadata["absent"]
    if default and not absent:
        assert resolve({key: yaml.safe_load(default)}) == JobSpec()
    else:
        assert absent or getattr(JobSpec(), key) in (None, "", (), [], {})
    if "default" in (described := schema()["properties"][key]):
        assert is_valid({key: described["default"]}) and resolve({key: described["default"]}) == JobSpec()


def test_descriptions_must_have_no_markup_outside_of_the_documents(capsys):
    assert all(mark not in description(key) for key in FIELDS for mark in ("`", "](", "(#"))
    assert description("grace") == "grace period between SIGTERM and SIGKILL, at most 1d (default: 30s)"
    assert main(["run", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert all(description(key) in help_text for key in FLAGS)


def test_the_command_must_print_the_schema(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
