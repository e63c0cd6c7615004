"""Only what a node may say must count as a message, for other people's code may speak in its place."""

import contextlib
import json
import os

import pytest
from said import WHOLE, said, sent

from orchestrate.engines.messages import FAIL, FORMS, read

BUSY = said("status", codes={"0": 0}, signs={"0": "oom"}, running={"1": {}}, tags={"/job": "ab"})


@pytest.mark.parametrize("say", WHOLE)
def test_what_a_node_says_must_be_a_message(say):
    assert WHOLE.keys() | {"refused"} == FORMS.keys()
    assert read(sent(say)) == said(say)
    assert read(sent(say, more=[1])) == said(say)  # of a node that is newer, or lies
    failed = {"say": say, "error": "no space left"} if say in (*FAIL, "refused") else said(say)
    assert read(sent(say, error="no space left")) == failed


@pytest.mark.parametrize("say", WHOLE)
def test_only_lists_of_files_and_their_content_may_be_long(say):
    line = sent(say, more="x" * (1 << 20))
    if say in ("news", "read"):
        assert read(line) == said(say)
    else:
        with pytest.raises(ValueError, match="too long"):
            read(line)


def test_what_a_node_cannot_do_must_need_no_more_than_why():
    assert read(b'{"say": "put", "error": "no"}') == {"say": "put", "error": "no"}
    assert read(b'{"say": "refused", "error": "no"}')["error"] == "no"
    for line in (b'{"say": "put", "error": 3}', b'{"say": "refused"}', b'{"say": "other", "error": "no"}'):
        with pytest.raises(ValueError):
            read(line)


@pytest.mark.parametrize("say", ["started", "ended", "status"])
def test_an_error_must_not_excuse_a_message_that_lacks_its_facts(say):
    with pytest.raises(ValueError):
        read(json.dumps({"say": say, "error": "x"}).encode())


@pytest.mark.parametrize(("say", "fact"), [(say, fact) for say, facts in WHOLE.items() for fact in facts])
@pytest.mark.parametrize("value", [None, {"a": None}, [None], -2, 1 << 70, float("nan"), "\udc00" * 2, ["x", {}]])
def test_a_message_with_a_fact_of_another_form_must_be_none(say, fact, value):
    with pytest.raises(ValueError):
        read(json.dumps({key: one for key, one in said(say).items() if key != fact}).encode())
    good = (value == -2 and fact in ("at", "time")) or (isinstance(value, str) and fact in ("error", "data"))
    with contextlib.nullcontext() if good else pytest.raises(ValueError):
        read(json.dumps(said(say) | {fact: value}).encode())


@pytest.mark.parametrize(
    "facts",
    [
        {"codes": {"0": 256}},
        {"codes": {"0": True}},
        {"codes": {"0": 1.0}},
        {"signs": {"0": "gone"}},
        {"running": {"1": {"pid": -1, "state": "R", "cpu": 1.0}}},
        {"running": {"1": {"pid": 7, "state": "R"}}},
        {"running": {"1": {"pid": 7, "state": 1, "cpu": 1.0}}},
        {"running": {"1": {"pid": 7, "state": "RR", "cpu": 1.0}}},
        {"running": {"1": {"pid": 7, "state": "R", "cpu": float("inf")}}},
        {"running": {"1": 7}},
        {"running": {"one": {"pid": 7, "state": "R", "cpu": 1.0}}},
        {"codes": {"": 0}},
        {"codes": {"-1": 0}},
        {"codes": {"1" * 5000: 0}},
        {"signs": {"²": ""}},
        {"tags": {"/job": 1}},
        {"generation": -2},
        {"generation": True},
        {"time": True},
    ],
)
def test_what_a_node_says_of_its_workers_must_be_of_that_form(facts):
    assert read(json.dumps(BUSY).encode()) == BUSY
    with pytest.raises(ValueError):
        read(json.dumps(BUSY | facts).encode())


@pytest.mark.parametrize("facts", [[0, -1, 1, 0], [1, 1 << 92, 1 << 64, 0o7777]])
def test_a_file_that_is_dated_oddly_must_not_keep_others_away(facts):
    told = said("news", files={"odd": facts, os.fsdecode(b"no text \xff"): [0, 1, 1, 0]})
    assert read(json.dumps(told).encode()) == told


@pytest.mark.parametrize("name", ["\ud800", "a\0b"])
@pytest.mark.parametrize("where", ["files", "links", "gone"])
def test_what_cannot_be_the_name_of_a_file_must_be_refused(name, where):
    value = {"files": {name: [0, 1, 1, 0]}, "links": {name: "a"}, "gone": [name]}[where]
    with pytest.raises(ValueError):
        read(json.dumps(said("news", **{where: value})).encode())


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"3", b"[]", b"{}", b'{"say": 1}', b'{"say": []}', b'{"say": "stop"}', b"\xff", b"[" * 100_000]
    + [b'{"say": "clean"} x', b'{"say": "clean", "a": ' + b"[" * 100_000, b"9" * 5000],
)
def test_what_is_no_message_must_be_refused_as_such(line):
    with pytest.raises(ValueError):
        read(line)
