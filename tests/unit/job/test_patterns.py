"""Regular expressions of a job file must match as with `re`, and must not delay a job or `stop`."""

import re

import pytest
from support.scripted import ALL_WELL, KILLED, Job

from orchestrate.engines.recording import RecordingEngine
from orchestrate.errors import UsageError
from orchestrate.files import bounded
from orchestrate.job import patterns
from orchestrate.job.layers import resolve
from orchestrate.job.outcomes import JobResult, Outcome
from orchestrate.job.patterns import Patterns
from orchestrate.job.spec import JobSpec

EVIL, LOG = "(a+)+$", "a" * 100 + "!"  # 2^100 ways to match it
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
def test_a_pattern_must_match_where_re_matches(pattern, text):
    warnings: list[str] = []
    assert Patterns([pattern], warnings.append).search(pattern, text) is bool(re.search(pattern, text))
    assert warnings == []


def ignored(pattern: str) -> str:
    """The warning about a rule that takes too long."""
    return f"the rule with log {pattern!r} is ignored: the search takes too long ({patterns.LIMIT})"


def test_a_pattern_that_takes_too_long_must_not_match_and_be_reported_once():
    warnings: list[str] = []
    found = Patterns([EVIL, "a+"], warnings.append)
    assert not found.search(EVIL, LOG) and not found.search(EVIL, LOG + "!") and not found.search(EVIL, "a")
    assert warnings == [ignored(EVIL)]
    assert found.search("a+", LOG)


def test_all_searches_for_a_decision_must_share_one_time_limit(monkeypatch):
    """A hundred rules would otherwise take two seconds each."""
    evil = [f"(a+)+{number}" for number in range(100)]
    used, call = [], bounded.call
    monkeypatch.setattr(
        bounded, "call", lambda *arguments, **options: (used.append(done := call(*arguments, **options)), done)[1]
    )
    warnings: list[str] = []
    found = Patterns([*evil, "a+"], warnings.append)
    assert [found.search(pattern, LOG + end) for pattern in evil for end in ("", "!")] == [False] * 200
    assert sum(took for _, took in used) < patterns.MAX_CPU_SECONDS + 1
    slow = len(warnings) - 1
    assert warnings[:-1] == list(map(ignored, evil[:slow]))
    late = f"{101 - slow} of the rules with log are ignored for this failure: no time is left ({patterns.LIMIT})"
    assert 1 < slow < 10 and warnings[-1] == late


def test_fast_rules_must_be_evaluated_in_spite_of_slow_ones():
    found = Patterns([EVIL, f"{EVIL}$", "a!"], print)
    assert found.search("a!", LOG)


def test_a_new_decision_must_have_a_new_time_limit(monkeypatch):
    found = Patterns(["a"], print)
    monkeypatch.setattr(bounded, "call", lambda *arguments, **options: [[False], 2.0])
    assert not found.search("a", "b")
    monkeypatch.undo()
    assert not found.search("a", "a")
    found.renew()
    assert found.search("a", "a")


def test_a_search_that_is_killed_must_not_be_taken_for_a_result(monkeypatch):
    warnings: list[str] = []
    found = Patterns(["a"], warnings.append)
    with monkeypatch.context() as patch:
        patch.setattr(bounded, "CALL", "import os\nos.kill(os.getpid(), 9)")
        assert not found.search("a", "a")
    assert "1 of the rules with log" in warnings[0] and len(warnings) == 1
    found.renew()
    assert found.search("a", "a")


def test_a_text_must_be_searched_only_once(monkeypatch):
    started, call = [], bounded.call
    monkeypatch.setattr(
        bounded, "call", lambda *arguments, **options: (started.append(1), call(*arguments, **options))[1]
    )
    found = Patterns(["a", "b"], print)
    assert [found.search("a", "a"), found.search("a", "b"), found.search("b", "b")] == [True, False, True]
    assert len(started) == 2


def job_with_slow_rule(job: Job) -> JobSpec:
    """Write logs on which a rule never finishes; return a job with that rule."""
    for rank in range(3):
        job.paths.log(rank).write_text(f"[node] generation 0\n{LOG}\n")
    return JobSpec(trainers=2, grace=0.01, rules=[RULE])


def test_a_rule_that_backtracks_forever_must_not_delay_the_restart(job):
    assert job.run(RecordingEngine([KILLED], [ALL_WELL]), job_with_slow_rule(job)).outcome == "succeeded"
    assert [event["text"] for event in job.noted("warning_issued")] == [ignored(EVIL)]


def test_a_request_to_stop_must_not_evaluate_any_rule(job, monkeypatch):
    monkeypatch.setattr(bounded, "call", lambda *arguments, **options: pytest.fail("a rule was evaluated"))
    spec, engine = job_with_slow_rule(job), RecordingEngine([KILLED], [ALL_WELL])
    job.stops = lambda: int("stop" in engine.calls)
    assert job.run(engine, spec) == JobResult(Outcome.STOPPED, "stopped by the user")


def test_a_job_of_a_dead_supervisor_must_be_stopped_without_evaluating_a_rule(job, monkeypatch):
    monkeypatch.setattr(bounded, "call", lambda *arguments, **options: pytest.fail("a rule was evaluated"))
    spec, engine = job_with_slow_rule(job), RecordingEngine([KILLED])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("orchestrate.supervise.supervisor.decide", lambda *arguments: 1 / 0)
        job.run(engine, spec)
    job.stops = lambda: 1
    assert job.run(RecordingEngine(), spec) == JobResult(Outcome.STOPPED, "stopped by the user")


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


SLOW = "(?i)" + "[a-\ufffd]" * 198


def test_rules_that_take_too_long_to_compile_must_be_refused():
    """Compiling these takes twenty seconds, again in each command that reads the job."""
    rules = [{"log": f"{SLOW}{number:03}", "action": "fail"} for number in range(100)]
    with pytest.raises(UsageError, match="compiling all of them takes more than 2 s; use simpler ones"):
        resolve({"rules": rules})


def test_identical_patterns_must_be_compiled_once(monkeypatch):
    resolve({"rules": [{"log": "compiled", "action": "fail"}]})
    monkeypatch.setattr(bounded, "call", lambda *arguments, **options: pytest.fail("compiled again"))
    resolve({"rules": [{"log": "compiled", "action": "count"}]})
    resolve({"rules": [{"cause": "hang", "action": "count"}]})
