"""Regular expressions of a job file must match as with `re`, and must not delay a job or `stop`."""

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.recording import RecordingEngine
from support.scripted import ALL_WELL, KILLED, Job

from orchestrate.errors import UsageError
from orchestrate.record.outcomes import JobResult, Outcome
from orchestrate.spec import patterns
from orchestrate.spec.layers import resolve
from orchestrate.spec.patterns import Patterns
from orchestrate.spec.spec import JobSpec

EVIL, LOG = "(?:a|aa)+cb", "a" * 100 + " cb"  # which has more ways to match it than can be tried
RULE = {"log": EVIL, "action": "fail"}


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("ECC error", "epoch 3\nuncorrectable ECC error"),
        ("^ECC", "epoch 3\nECC error"),
        ("(?m)^ECC", "epoch 3\nECC error"),
        ("3.uncorrectable", "epoch 3\nuncorrectable"),
        ("ß+\\w", "\ud800 ßßü"),
        ("", ""),
    ],
)
def test_a_pattern_must_match_where_re_matches(pattern, text):
    warnings: list[str] = []
    assert Patterns([pattern], warnings.append).search(pattern, text) is bool(re.search(pattern, text))
    assert warnings == []


def ignored(pattern: str) -> str:
    """The warning about a rule that takes too long."""
    return f"the rule with log {pattern!r} is ignored: the search takes too long ({patterns.LIMIT})"


def test_a_pattern_that_takes_too_long_must_not_match_and_be_reported_once():
    warnings: list[str] = []
    found = Patterns([EVIL, "a+"], warnings.append, 0.5)
    assert not found.search(EVIL, LOG) and not found.search(EVIL, LOG + "!") and not found.search(EVIL, "a")
    assert warnings == [ignored(EVIL)]
    assert found.search("a+", LOG)


def test_all_searches_for_a_decision_must_share_one_time_limit():
    """A hundred rules would otherwise take two seconds each."""
    evil = [f"(?:a|aa)+cb{{0,{number + 1}}}b" for number in range(100)]
    warnings: list[str] = []
    found, start = Patterns([*evil, "a+"], warnings.append, 0.5), time.thread_time()
    assert [found.search(pattern, LOG + end) for pattern in evil for end in ("", "!")] == [False] * 200
    assert time.thread_time() - start < 1.5
    slow = len(warnings) - 1
    assert warnings[:-1] == list(map(ignored, evil[:slow]))
    late = f"{101 - slow} of the rules with log are ignored for this failure: no time is left ({patterns.LIMIT})"
    assert 1 < slow < 10 and warnings[-1] == late


def test_fast_rules_must_be_evaluated_in_spite_of_slow_ones():
    found = Patterns([EVIL, f"{EVIL}$", "a cb"], print, 1.0)
    assert found.search("a cb", LOG)


def test_a_new_decision_must_have_a_new_time_limit():
    slow = [f"(?:a|aa)+cb{{0,{number + 1}}}b" for number in range(10)]
    found = Patterns([*slow, "a"], lambda _: None, 0.5)
    assert not found.search("a", LOG)  # no time was left for it
    found.renew()
    assert found.search("a", "a")


def test_a_text_must_be_searched_only_once():
    warnings: list[str] = []
    found = Patterns([EVIL, "a"], warnings.append, 0.5)
    assert [found.search(EVIL, LOG) for _ in range(10)] == [False] * 10
    assert found.search("a", LOG) and len(warnings) == 1


def job_with_slow_rule(job: Job) -> JobSpec:
    """Write logs on which a rule never finishes; return a job with that rule."""
    for rank in range(3):
        job.paths.log(rank).write_text(f"[node] generation 0\n{LOG}\n")
    return JobSpec(trainers=2, grace=0.01, rules=[RULE])


def test_a_rule_that_backtracks_forever_must_not_delay_the_restart(job):
    assert job.run(RecordingEngine([KILLED], [ALL_WELL]), job_with_slow_rule(job)).outcome == "succeeded"
    assert [event["text"] for event in job.noted("warning_issued")] == [ignored(EVIL)]


def test_a_request_to_stop_must_not_evaluate_any_rule(job):
    spec, engine = job_with_slow_rule(job), RecordingEngine([KILLED], [ALL_WELL])
    job.stops = lambda: int("stop" in engine.calls)
    assert job.run(engine, spec) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert job.noted("warning_issued") == []  # a search for the rule would warn


def test_a_job_of_a_dead_supervisor_must_be_stopped_without_evaluating_a_rule(job, monkeypatch):
    spec, engine = job_with_slow_rule(job), RecordingEngine([KILLED])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("orchestrate.supervise.supervisor.decide", lambda *arguments: 1 / 0)
        job.run(engine, spec)
    job.stops = lambda: 1
    assert job.run(RecordingEngine(), spec) == JobResult(Outcome.STOPPED, "stopped by the user")
    assert job.noted("warning_issued") == []


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([{"log": "a" * 1001, "action": "fail"}], "log is a regular expression of at most 1000 characters"),
        ([RULE] * 101, "a list of at most 100 mappings"),
    ],
)
def test_the_size_of_rules_must_be_limited(rules, reason):
    with pytest.raises(UsageError, match=reason):
        resolve({"rules": rules})
    resolve({"rules": [{"log": "a" * 1000, "action": "fail"}] * 100})


def nested(repeat: str, depth: int) -> str:
    return "(?:" * depth + "x" + f"){repeat}" * depth


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "x{200000}",
            "x{ 200000}",
            "(?:x{450}){450}",
            "x{4294967294}",
            "(?:(?:x{9,}){999}y){20}",
            "(?:abc|def){20000}",
        ),
        *(nested("{2}", 13), nested("+", 17), nested("{2,}", 9), nested("{1,3}", 17)),
        *("(?x)(?:x{450}) {450}", "(?x)(?:x{450})# a\n{450}", "(?:x{450})(?#a){450}", r"\p{L}{200000}"),
        "[" + "".join(f"{chr(0x4E00 + 8 * i)}-{chr(0x4E03 + 8 * i)}" for i in range(315)) + "]{20000}",
    ],
)
def test_a_pattern_that_repeats_too_often_must_be_refused(pattern):
    """Each repetition takes memory: up to 1 KiB for each character."""
    too_many = "with repetitions written out, its patterns have more than 200,000 characters"
    with pytest.raises(UsageError, match=too_many):
        resolve({"rules": [{"log": pattern, "action": "fail"}]})
    with pytest.raises(UsageError, match=too_many):
        resolve({"metrics": {"loss": f"({pattern})"}})


@pytest.mark.parametrize(
    "pattern",
    [
        "x{10000}",
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6} \w+ \[rank\d+\]: +(?:\w+\.)+(\w+Error): (.+)",
        r"(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|(?:[0-9]{1,3}\.){3}[0-9]{1,3}):([0-9]{1,5})",
        "image sha256:[0-9a-f]{64} of sha256:[0-9a-f]{64}, commit ([0-9a-f]{40})",
        r"(\w+)+\s+(\w+)+\s+(\w+)+\s+(\w+)+\s+([0-9.]+)+",
    ],
)
def test_usual_repetitions_must_be_allowed(pattern):
    assert resolve({"rules": [{"log": pattern, "action": "fail"}]}).rules


def test_the_repetitions_of_all_patterns_together_must_be_limited():
    with pytest.raises(UsageError, match="with repetitions written out"):
        resolve({"rules": [{"log": "x{10000}" + "y" * number, "action": "fail"} for number in range(50)]})


PARTS = ["a", "(", "(?:", ")", "|", "*", "+", "?", "{9}", "{2,}", "{100}", "{0,99999}", "[a-z]", "(?i)", "(?=", "(?<="]
PARTS += [r"\1", "(?1)", "(?R)", "(?>", "{e<=3}", "{i<=1,e<=3}", "(?b)", r"\p{L}", r"\X", "^", "$", "(?|", "(?(1)a|b)"]


@given(st.lists(st.sampled_from(PARTS), max_size=60).map("".join), st.integers(1, 20))
@example("(?R)", 1)
@example("(?:" * 300, 1)
@example("(?:a?){1000}", 9)
@example("[[a-z]--[aeiou]]", 50)
def test_any_pattern_must_be_refused_or_searched_in_time(pattern, count):
    start, pattern = time.thread_time(), (pattern * count)[:1000]
    if not patterns.flaw((pattern,)):
        Patterns([pattern], lambda _: None, 0.3).search(pattern, "a" * 300 + "ab ß1 " * 100)
    assert time.thread_time() - start < patterns.MAX_SECONDS


def test_identical_patterns_must_be_compiled_once():
    assert patterns.compiled("a{9}") is patterns.compiled("a{9}")
