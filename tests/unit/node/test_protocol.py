"""Only valid reports must be accepted from a node, since untrusted code may send them in its place."""

import contextlib
import json
import os

import pytest
from support.messages import DEFAULTS, encoded, fields, message

from orchestrate.node.messages.protocol import REPORTS, encode, reason, report

USE = {
    "exchanged": 7,
    "connected": 1.0,
    "sampled": 2.0,
    "gpu": False,
    "torch": True,
    "version": "2.9.1+cpu",
    "launcher": "torchrun",
}
BUSY = fields("status", codes={"0": 0}, hints={"0": "oom"}, running={"1": {}}, tags={"/job": "ab"}, uses={"0": USE})


@pytest.mark.parametrize("say", DEFAULTS)
def test_a_report_of_a_node_must_be_parsed(say):
    assert DEFAULTS.keys() == REPORTS.keys()
    assert report(encoded(say)) == message(say) == report(encode(message(say)))
    assert report(encoded(say, more=[1])) == message(say)  # from a newer or compromised node


@pytest.mark.parametrize("say", DEFAULTS)
def test_long_messages_must_be_refused_except_file_lists_and_contents(say):
    line = encoded(say, more="x" * (1 << 20))
    if say in ("changes", "piece"):
        assert report(line) == message(say)
    else:
        with pytest.raises(ValueError, match="too long"):
            report(line)


def test_a_long_report_must_not_turn_into_another_one():
    line = encoded("status", more="x" * (1 << 20)).replace(b'{"say": "status"', b'{"say": "changes", "say": "status"')
    assert line.startswith(b'{"say": "changes", "say": "status"')
    with pytest.raises(ValueError, match="too long"):
        report(line)


def test_a_report_of_many_small_values_must_be_refused_before_it_is_parsed():
    for value in (b"[],", b'{"a":1}', b'"",'):
        with pytest.raises(ValueError, match="too many values"):
            report(b'{"say": "changes", "x": [' + value * 1_300_000)


def test_an_invalid_report_must_be_refused():
    for line in (
        b'{"say": "failed", "error": 3}',
        b'{"say": "refused"}',
        b'{"say": "other", "error": "no"}',
        b"[]",
        b"",
    ):
        with pytest.raises(ValueError):
            report(line)


@pytest.mark.parametrize("say", ["started", "ended", "status"])
def test_an_error_must_not_replace_missing_fields_of_a_message(say):
    with pytest.raises(ValueError):
        report(json.dumps({"say": say, "error": "x"}).encode())


@pytest.mark.parametrize(("say", "field"), [(say, field) for say, default in DEFAULTS.items() for field in default])
@pytest.mark.parametrize(
    "value", [None, {"a": None}, [None], -2, 1 << 70, 10**400, float("nan"), "\udc00" * 2, ["x", {}]]
)
def test_a_message_with_a_field_of_a_wrong_type_must_be_refused(say, field, value):
    with pytest.raises(ValueError):
        report(json.dumps({key: one for key, one in fields(say).items() if key != field}).encode())
    valid = (value == -2 and field in ("at", "time")) or (isinstance(value, str) and field in ("error", "data", "text"))
    with contextlib.nullcontext() if valid else pytest.raises(ValueError):
        report(json.dumps(fields(say) | {field: value}).encode())


@pytest.mark.parametrize(
    "facts",
    [
        {"codes": {"0": 256}},
        {"codes": {"0": True}},
        {"codes": {"0": 1.0}},
        {"hints": {"0": "gone"}},
        {"running": {"1": {"pid": -1, "state": "R", "cpu": 1.0}}},
        {"running": {"1": {"pid": 7, "state": "R"}}},
        {"running": {"1": {"pid": 7, "state": 1, "cpu": 1.0}}},
        {"running": {"1": {"pid": 7, "state": "RR", "cpu": 1.0}}},
        {"running": {"1": {"pid": 7, "state": "\x9d", "cpu": 1.0}}},
        {"running": {"1": {"pid": 7, "state": "R", "cpu": float("inf")}}},
        {"running": {"1": {"pid": 7, "state": "R", "cpu": 1.0, "memory": -1}}},
        {"running": {"1": 7}},
        {"running": {"one": {"pid": 7, "state": "R", "cpu": 1.0}}},
        {"codes": {"": 0}},
        {"codes": {"-1": 0}},
        {"codes": {"1" * 5000: 0}},
        {"hints": {"²": ""}},
        {"tags": {"/job": 1}},
        {"generation": -2},
        {"generation": True},
        {"time": True},
        {"uses": {"one": USE}},
        {"uses": {"0": {}}},
        *({"uses": {"0": USE | wrong}} for wrong in ({"exchanged": -1}, {"connected": "1"}, {"sampled": float("inf")})),
        *({"uses": {"0": USE | wrong}} for wrong in ({"gpu": 1}, {"torch": None}, {"version": "\x1b[31m"})),
        {"uses": {"0": USE | {"version": "2" * 41}}},
        *({"uses": {"0": USE | {"launcher": wrong}}} for wrong in ("rm -rf", None, ["torchrun"])),
    ],
)
def test_a_status_with_invalid_worker_fields_must_be_refused(facts):
    assert report(json.dumps(BUSY).encode()).codes == BUSY["codes"]
    with pytest.raises(ValueError):
        report(json.dumps(BUSY | facts).encode())


@pytest.mark.parametrize("facts", [{"code": 256}, {"use": {}}, {"use": USE | {"torch": 1}}])
def test_an_end_with_an_impossible_value_must_be_refused(facts):
    with pytest.raises(ValueError):
        report(encoded("ended", **facts))


@pytest.mark.parametrize("facts", [[0, -1, 1, 0], [1, 1 << 92, 1 << 64, 0o7777]])
def test_a_file_with_an_odd_time_must_not_invalidate_the_whole_list(facts):
    line = fields("changes", files={"odd": facts, os.fsdecode(b"no text \xff"): [0, 1, 1, 0]})
    assert report(json.dumps(line).encode()).files == line["files"]


@pytest.mark.parametrize("name", ["\ud800", "a\0b"])
@pytest.mark.parametrize("where", ["files", "links", "gone"])
def test_an_invalid_file_name_must_be_refused(name, where):
    value = {"files": {name: [0, 1, 1, 0]}, "links": {name: "a"}, "gone": [name]}[where]
    with pytest.raises(ValueError):
        report(json.dumps(fields("changes", **{where: value})).encode())


@pytest.mark.parametrize(
    "line",
    [b"", b"null", b"3", b"[]", b"{}", b'{"say": 1}', b'{"say": []}', b'{"say": "stop"}', b"\xff", b"[" * 100_000]
    + [b'{"say": "cleaned"} x', b'{"say": "cleaned", "a": ' + b"[" * 100_000, b"9" * 5000],
)
def test_a_line_that_is_not_a_message_must_be_refused(line):
    with pytest.raises(ValueError):
        report(line)


def test_a_reason_must_be_a_short_line_without_control_characters():
    assert reason("a\x1b[2K\r\n b\u202e  c" + " d" * 10_000)[:13] == "a [2K b c d d" and len(reason("e" * 9000)) == 200
