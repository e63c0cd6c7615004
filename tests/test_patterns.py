"""A regular expression of a job file must be searched for as `re` does, and must hold up neither a job nor `stop`."""

import re
import subprocess

import pytest
from scripted import ALL_WELL, KILLED, Job, Scripted

from orchestrate import patterns
from orchestrate.errors import UsageError
from orchestrate.patterns import Patterns
from orchestrate.spec import JobSpec, resolve
from orchestrate.supervisor import Outcome

EVIL, LOG = "(a+)+$", "a" * 100 + "!"  # 2^100 ways to read it
RULE = {"log": EVIL, "action": "fail"}


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("ECC error", "epoch 3\nuncorrectable ECC error"),
        ("^ECC", "epoch 3\nECC error"),
        ("(?m)^ECC", "epoch 3\nECC error"),
        ("3.uncorrectable", "epoch 3\nuncorrectable"),
        ("ß+\\w", "\ud800 ßßü"),
        ("", ""),
        (EVIL, "a" * 100),
    ],
)
def test_a_pattern_must_be_found_where_re_finds_it(pattern, text):
    warnings: list[str] = []
    assert Patterns(warnings.append).search(pattern, text) is bool(re.search(pattern, text))
    assert warnings == []


def test_a_pattern_that_takes_too_long_must_not_be_found_and_be_reported_once(monkeypatch):
    monkeypatch.setattr(patterns, "TAKES", 1)
    warnings: list[str] = []
    found = Patterns(warnings.append)
    assert not found.search(EVIL, LOG) and not found.search(EVIL, LOG + "!") and not found.search(EVIL, "a")
    assert warnings == ["the rule with log '(a+)+$' is ignored: the search takes more than 1 s"]
    assert found.search("a+", LOG)


def test_a_search_that_something_else_ends_must_not_be_taken_for_an_answer(monkeypatch):
    monkeypatch.setattr(patterns, "SEARCH", "import os\nos.kill(os.getpid(), 9)")
    warnings: list[str] = []
    assert not Patterns(warnings.append).search("a", "a") and len(warnings) == 1


def test_a_search_must_be_done_once_for_each_text(monkeypatch):
    started, run = [], subprocess.run
    monkeypatch.setattr(patterns.subprocess, "run", lambda *words, **how: (started.append(1), run(*words, **how))[1])
    found = Patterns(print)
    assert [found.search("a", "a"), found.search("a", "b"), found.search("a", "a")] == [True, False, True]
    assert len(started) == 2


def test_a_search_must_not_get_the_ctrl_c_of_our_terminal(monkeypatch):
    monkeypatch.setattr(patterns, "SEARCH", "import os, sys\nsys.stdout.write(str(os.getsid(0) == os.getpid()))")
    assert Patterns(print).search("a", "a")


def wordy(job: Job) -> JobSpec:
    """A job whose rule never comes to an end on what its workers write."""
    for rank in range(3):
        job.paths.log(rank).write_text(f"[node] generation 0\n{LOG}\n")
    return JobSpec(trainers=2, grace=0.01, rules=[RULE])


def test_a_rule_that_backtracks_for_ever_must_not_hold_up_the_restart(job):
    assert job.run(Scripted([KILLED], [ALL_WELL]), wordy(job)).word == "succeeded"
    assert [event["text"] for event in job.noted("warning")] == [
        "the rule with log '(a+)+$' is ignored: the search takes more than 2 s"
    ]


def test_a_request_to_stop_must_evaluate_no_rule(job, monkeypatch):
    monkeypatch.setattr(patterns, "_answer", lambda pattern, text: pytest.fail("a rule was evaluated"))
    spec, engine = wordy(job), Scripted([KILLED], [ALL_WELL])
    job.stops = lambda: int("stop" in engine.calls)
    assert job.run(engine, spec) == Outcome("stopped", "stopped by the user")


def test_what_another_supervisor_has_left_must_be_stopped_without_evaluating_a_rule(job, monkeypatch):
    monkeypatch.setattr(patterns, "_answer", lambda pattern, text: pytest.fail("a rule was evaluated"))
    spec, engine = wordy(job), Scripted([KILLED])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("orchestrate.supervisor.decide", lambda *arguments: 1 / 0)
        job.run(engine, spec)
    job.stops = lambda: 1
    assert job.run(Scripted(), spec) == Outcome("stopped", "stopped by the user")


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([{"log": "a" * 1001, "action": "fail"}], "log is a regular expression of at most 1000 characters"),
        ([RULE] * 101, "a list of at most 100 mappings"),
    ],
)
def test_rules_must_have_a_size_that_can_be_read_in_time(rules, reason):
    with pytest.raises(UsageError, match=reason):
        resolve({"rules": rules})
    resolve({"rules": [{"log": "a" * 1000, "action": "fail"}] * 100})
