"""The supervisor's decisions, on an engine that plays a script: who is to blame, and when it gives up."""

import pytest
from test_plan import HERE

from orchestrate.engines import Exit
from orchestrate.errors import EngineError
from orchestrate.plan import plan
from orchestrate.spec import JobSpec
from orchestrate.supervisor import Outcome, supervise


class Scripted:
    """An engine whose workers end as told: a list of exits per call of `wait`, the rest when asked to stop."""

    def __init__(self, *batches: list[Exit], after_stop: list[Exit] | None = None) -> None:
        self.batches, self.after_stop = list(batches), after_stop or []
        self.calls: list[str] = []

    def up(self, spec, plan, run) -> None:
        self.calls.append("up")

    def start(self, workers, command) -> None:
        self.calls.append("start")

    def wait(self, timeout):
        return self.batches.pop(0) if self.batches else []

    def explain(self, end, node) -> str:
        return ""

    def stop(self, kill) -> None:
        self.calls.append("kill" if kill else "stop")
        if not kill:
            self.batches.append(self.after_stop)

    def down(self, grace) -> None:
        self.calls.append("down")


def outcome_of(engine, spec=None, stops=lambda: 0, complaining=()) -> Outcome:
    spec = spec or JobSpec(trainers=2, grace=0.01)
    return supervise(
        spec, plan(spec, HERE, "j"), None, engine, lambda *_, **__: None, stops, lambda rank: rank in complaining
    )


def test_the_job_must_succeed_only_when_all_have():
    engine = Scripted([Exit(1, 0)], [], [Exit(0, 0), Exit(2, 0)])
    assert outcome_of(engine) == Outcome("succeeded", "finished")
    assert engine.calls == ["up", "start", "down"]


def test_one_failure_must_stop_the_gang_and_be_the_cause():
    engine = Scripted([Exit(1, 0)], [Exit(2, 3)], after_stop=[Exit(0, 143)])
    assert outcome_of(engine) == Outcome("failed", "worker failed", Exit(2, 3))
    assert engine.calls == ["up", "start", "stop", "down"]


@pytest.mark.parametrize("code", [134, 135, 137, 139])
def test_a_death_by_signal_must_be_the_cause_though_its_peers_are_heard_first(code):
    engine = Scripted([Exit(0, 1)], after_stop=[Exit(2, 1), Exit(1, code)])
    assert outcome_of(engine).root == Exit(1, code)


def test_an_error_of_its_own_must_be_the_cause_though_peers_that_complain_are_heard_first():
    engine = Scripted([Exit(0, 1)], after_stop=[Exit(2, 1), Exit(1, 1)])
    assert outcome_of(engine, complaining={0, 1}).root == Exit(2, 1)


def test_where_all_complain_the_first_must_be_the_cause():
    engine = Scripted([Exit(1, 1)], after_stop=[Exit(0, 1), Exit(2, 1)])
    assert outcome_of(engine, complaining={0, 1, 2}).root == Exit(1, 1)


def test_what_we_stopped_must_never_be_the_cause():
    engine = Scripted([Exit(0, 1)], after_stop=[Exit(1, 143), Exit(2, 143)])
    assert outcome_of(engine, complaining={0}).root == Exit(0, 1)


def test_a_request_to_stop_must_stop_the_gang():
    engine = Scripted([], after_stop=[Exit(0, 143), Exit(1, 143), Exit(2, 0)])
    assert outcome_of(engine, stops=lambda: 1 if "start" in engine.calls else 0) == Outcome(
        "stopped", "stopped by the user"
    )


def test_a_request_before_the_workers_start_must_start_none():
    engine = Scripted()
    assert outcome_of(engine, stops=lambda: 1).word == "stopped"
    assert engine.calls == ["up", "down"]


def test_only_a_second_request_may_kill():
    engine = Scripted([], [], after_stop=[])
    requests = iter([0, 1, 1, 1, 1, 1, 2] + [2] * 1000)

    def stops() -> int:
        count = next(requests)
        if engine.calls[-1] == "kill":
            engine.batches.append([Exit(rank, 137) for rank in range(3)])
        return count

    assert outcome_of(engine, JobSpec(trainers=2, grace=30), stops=stops).word == "stopped"
    assert engine.calls == ["up", "start", "stop", "kill", "down"]


def test_what_we_killed_must_never_be_the_cause():
    engine = Scripted([Exit(0, 1)], after_stop=[Exit(1, 137), Exit(2, 137)])
    assert outcome_of(engine, JobSpec(trainers=2, grace=0.000001)).root == Exit(0, 1)


def test_a_peer_that_aborts_because_one_has_gone_must_not_be_the_cause():
    engine = Scripted([Exit(0, 134)], after_stop=[Exit(2, 134), Exit(1, 1)])
    assert outcome_of(engine, JobSpec(trainers=2, grace=30), complaining={0, 2}).root == Exit(1, 1)


def test_an_engine_that_does_not_answer_any_more_must_lose_the_job():
    engine = Scripted()
    engine.wait = lambda timeout: (_ for _ in ()).throw(EngineError("gone"))
    assert outcome_of(engine) == Outcome("lost", "gone")
    assert engine.calls == ["up", "start", "down"]


def test_the_maximum_run_time_must_stop_the_gang():
    engine = Scripted(after_stop=[Exit(0, 143), Exit(1, 143), Exit(2, 143)])
    spec = JobSpec(trainers=2, max_run=0.01)
    assert outcome_of(engine, spec) == Outcome("stopped", "max_run")


def test_nodes_that_cannot_come_up_must_be_taken_down():
    engine = Scripted()
    engine.up = lambda *_: (_ for _ in ()).throw(EngineError("no"))
    with pytest.raises(EngineError, match="no"):
        outcome_of(engine)
    assert engine.calls == ["down"]


def test_a_failed_clean_up_must_not_replace_the_outcome():
    engine = Scripted([Exit(0, 0), Exit(1, 0), Exit(2, 0)])
    engine.down = lambda grace: (_ for _ in ()).throw(EngineError("stuck"))
    assert outcome_of(engine) == Outcome("succeeded", "finished", left="stuck")
