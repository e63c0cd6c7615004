"""The output of workers must be shown completely, in order, and short."""

import json
import os
import re
import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import HERE, plan
from support.scripted import Clock

from orchestrate import console
from orchestrate.record.logs import Block, Follower
from orchestrate.record.times import Times, TimesWriter
from orchestrate.show.format import LOOK_AHEAD, MANY, Printer, Style, brief, merged, stamp
from orchestrate.spec.spec import JobSpec


def printer(trainers: int, nproc: int = 1, **style) -> Printer:
    return Printer(plan(JobSpec(trainers=trainers, nproc_per_node=nproc), HERE, "digits-4f2a"), Style(**style))


def lines(*texts: tuple[int, str]) -> list[Block]:
    return [Block(rank, text, text, b"", 0) for rank, text in texts]


def test_lines_must_have_the_rank_as_prefix_and_the_node_only_if_that_says_more():
    assert [*printer(10).texts(lines((2, "a"), (10, "b")))] == ["[ 2] a", "[10] b"]
    assert [*printer(1, 2).texts(lines((1, "a"), (2, "b")))] == ["[master 1   ] a", "[trainer-1 2] b"]


def test_what_several_ranks_print_must_be_one_line():
    found = printer(3).texts(
        lines(*((rank, text) for rank in range(4) for text in ("begin", f"rank {rank}", "step 1", "end")))
    )
    assert "\n".join(found).split("\n") == [
        "[0-3] begin",
        *(f"[{rank}] rank {rank}" for rank in range(4)),
        "[0-3] step 1",
        "[0-3] end",
    ]
    assert [*printer(1).texts(lines((0, "a"), (1, "a")))] == ["[0-1] a"]


@pytest.mark.parametrize(
    ("ranks", "between", "joined"),
    [(2, LOOK_AHEAD - 1, True), (2, LOOK_AHEAD, False), (MANY, 1, True), (MANY + 1, 1, False)],
)
def test_only_what_is_printed_at_about_the_same_place_must_be_one_line(ranks, between, joined):
    others = [(1, f"other {number}") for number in range(between)]
    found = [*merged(lines(*others, *((rank, "same") for rank in range(ranks))))]
    assert ([*range(ranks)] in [ranks for ranks, _ in found]) == joined


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abcd")), max_size=60))
def test_no_line_of_a_rank_may_be_lost_or_out_of_order(texts):
    written, shown = defaultdict(list), defaultdict(list)
    for rank, text in texts:
        written[rank].append(text)
    for ranks, text in merged(lines(*texts)):
        assert ranks == sorted(set(ranks)) or len(ranks) == len(set(ranks))
        for rank in ranks:
            shown[rank] += text.split("\n")
    assert shown == written


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "0"),
        ([3, 0, 1, 2, 8], "0-3,8"),
        (range(64), "0-63"),
        ([0, 2, 4], "0,2,4"),
        (range(10, 23, 2), "10,12,14,16,18,20,22"),
        (range(0, 64, 2), "32 ranks"),
    ],
)
def test_ranks_must_be_listed_briefly(ranks, text):
    assert brief(ranks) == text


def test_style_must_select_and_mark_lines():
    some = lines((0, "a"), (1, "b"), (2, "b"))
    assert [*printer(2, ranks=frozenset({1}), timestamps=True).texts(some, 0.25)][0].endswith(":00:00.2 [1] b")
    (first, *_) = printer(2, colors=True).texts(some)
    assert first == "\x1b[36m[0]\x1b[0m a"
    assert [*map(json.loads, printer(2, as_json=True).texts(some, 1.5))] == [
        {"rank": rank, "node": node, "line": text, "time": 1.5}
        for rank, node, text in [(0, "master", "a"), (1, "trainer-1", "b"), (2, "trainer-2", "b")]
    ]
    assert printer(2, ranks=frozenset({1})).bar({0: "10%", 1: "20%"}) == "[1] 20%"
    assert [*printer(2, prefixes=False, colors=True).texts(some)] == ["a", "b", "b"]


def test_a_bar_must_have_a_time_if_lines_have_one():
    bars = printer(2, timestamps=True)
    assert bars.bar({0: "10%"}, 0.96).endswith(":00:00.9 [0] 10%") and bars.bar({0: "10%"}) == "[0] 10%"
    assert bars.bar({}) == "" and printer(2).bar({0: "10%"}, 0.96) == "[0] 10%"


def test_times_must_be_those_of_the_local_time_zone(monkeypatch):
    with monkeypatch.context() as here:
        here.setenv("TZ", "XYZ-5:30")
        time.tzset()
        text = stamp(0.25)
    time.tzset()
    assert text == "05:30:00.2"


def test_lines_of_an_earlier_generation_must_be_shown_under_their_rank():
    assert [*printer(0).texts(lines((8, " indented ")))] == ["[8]  indented "]
    assert json.loads(printer(0, as_json=True).text([8], "a"))["node"] == ""


def test_only_colors_may_reach_a_terminal():
    text = "\x1b[1;31mred\x1b[0m \x1b[2Jgone \x1b]0;title\x07 \x1b[38:5:9mpink"
    assert console.clean(text, colors=True) == "\x1b[1;31mred\x1b[0m gone  \x1b[38:5:9mpink\x1b[0m"
    assert console.clean(text) == "red gone  pink" and console.clean("plain", colors=True) == "plain"


def test_times_of_lines_must_be_those_at_which_they_were_read(tmp_path):
    clock, path = Clock(), tmp_path / "times.jsonl"
    noting = TimesWriter(path, clock)
    for seconds, offsets in [
        (0, {0: 10}),
        (0.1, {0: 20}),
        (9, {0: 30, 1: 5}),
        (20, {0: 30, 1: 5}),
        (30, {1: 9}),
        (40, {0: 30}),
    ]:
        clock.now = 1000.0 + seconds
        noting.note(offsets)
    assert path.read_text().count("\n") == 3  # not the second, too soon; not the fourth and the last, nothing new
    noting.note({1: 12}, end=True)
    clock.now = 2000.0
    TimesWriter(path, clock).note({0: 50, 1: 12})  # another supervisor
    times = Times(path, 2)
    assert [times.at(0, offset) for offset in (0, 9, 10, 29, 30, 49, 50)] == [
        *(1000.0, 1000.0, 1009.0, 1009.0, 2000.0, 2000.0, None),
    ]
    assert [times.at(1, offset) for offset in (0, 5, 9, 12)] == [1009.0, 1030.0, 1040.0, None]
    assert Times(tmp_path / "missing", 2).at(0, 0) is None
    path.write_text('{"time": "x", "read": {"0": 1}}\n{"time": 1.5, "read": {"x": 1, "0": "y", "²": 5}}\n[]\nnull\n')
    with path.open("a") as file:
        file.write('{"time": 1e400, "read": {"0": 1}}\n{"time": 1e300, "read": {"0": 1}}\n')
        file.write('{"time": 1.5, "read": {"2": 1}}\n')  # of no rank of the job
    assert Times(path, 2).notes == {}


@pytest.mark.parametrize(
    ("size", "seconds", "count"),
    [(0, 0.3, 2), (4 << 20, 1.9, 1), (4 << 20, 2.1, 2), (16 << 20, 29.0, 1), (64 << 20, 99.0, 0)],
)
def test_the_file_of_times_must_grow_more_slowly_the_larger_it_is(tmp_path, size, seconds, count):
    clock, path = Clock(), tmp_path / "times.jsonl"
    path.touch()
    os.truncate(path, size)  # by an earlier supervisor
    noting = TimesWriter(path, clock)
    noting.note({0: 1})
    clock.now += seconds
    noting.note({0: 2})
    with path.open("rb") as file:
        file.seek(size)
        assert file.read().count(b"\n") == count


def test_sequences_of_colors_must_not_hide_a_secret_from_the_mask(paths):
    paths.log(0).write_text("\x1b[31mtoken hun\x1b[0mter2\n\x1b[32mfine\n")
    follower = Follower(paths, [0], hide=lambda text: text.replace("hunter2", "***"), colors=True)
    found = [line.text for line in follower.lines()]
    assert found == ["token ***", "\x1b[32mfine\x1b[0m"] and not re.search("hun", found[0])
