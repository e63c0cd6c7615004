"""The report must contain what a user wants to know, from the data available."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.plans import HERE, plan
from support.repo import ROOT

from orchestrate.files import folder
from orchestrate.record import events
from orchestrate.record.metrics import NAMES, listed
from orchestrate.record.outcomes import Cause, GenerationResult, JobResult, Outcome
from orchestrate.record.report import Copied, Written, line, phase, readable, report, text
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec

NODES = ("master", "trainer-1", "trainer-2")
PLAN = plan(JobSpec(trainers=2), HERE, "j", 29500)


def test_the_root_cause_must_be_from_the_last_generation_with_its_last_lines():
    def ended(generation: int, rank: int) -> GenerationResult:
        lines = [f"word {word} of rank {rank}" for word in range(3)]
        facts: dict[str, Any] = {
            "exit_code": 1,
            "cause": Reason.ERROR,
            "hint": "look",
            "last_lines": lines,
            "log": f"rank-{rank}.log",
        }
        cause = Cause(rank=rank, node=f"trainer-{rank}", summary=f"rank {rank} failed", **facts)
        return GenerationResult(
            generation=generation, outcome=Outcome.FAILED, why="a worker failed", cause=cause, step=5 * generation
        )

    data = report(PLAN, JobResult(Outcome.FAILED, "max_restarts is 1"), [ended(0, 1), ended(1, 2)], 0.0, [], [])
    assert data["root_cause"]["rank"] == 2
    assert [failure["rank"] for failure in data["failures"]] == [1, 2]
    assert text(data).splitlines() == [
        "failed: 3 workers, 0.0 s (max_restarts is 1)",
        "generation 0: rank 1 failed",
        "root cause: rank 2 failed",
        "    word 0 of rank 2",
        "    word 1 of rank 2",
        "    word 2 of rank 2",
        "full log: rank-2.log",
        "hint: look",
    ]


def test_the_report_of_a_restarted_job_must_list_what_failed():
    cause = Cause(rank=1, node="n", exit_code=137, cause=Reason.KILLED, summary="rank 1 was killed", hint="")
    ended = [
        GenerationResult(generation=0, outcome=Outcome.FAILED, why="", cause=cause, step=7),
        GenerationResult(generation=1, outcome=Outcome.SUCCEEDED, why="finished"),
    ]
    data = report(PLAN, JobResult(Outcome.SUCCEEDED, "finished"), ended, 3.0, [], [])
    assert data["root_cause"] is None
    assert text(data).splitlines() == [
        "succeeded: 3 workers, 3.0 s, 2 generations",
        "generation 0: rank 1 was killed, at step 7",
    ]
    long = [dataclasses.replace(ended[0], lasted=60.0), ended[1]]
    finished, written = JobResult(Outcome.SUCCEEDED, "finished"), Written(Path("/w"), ["a.txt", "logs/last.ckpt"], True)
    saved = report(PLAN, finished, long, 3.0, [], [Path("last.pt")], written=written)
    assert "warning" not in text(saved)
    assert text(report(PLAN, finished, long, 3.0, [], [], written=written)).splitlines()[2:] == [
        "the workers wrote 2 files: /w",
        "warning: $JOB_DIR/checkpoints is empty: unless the script saves elsewhere, it started over",
        "hint: if logs/last.ckpt is a checkpoint, let the script save it to $JOB_DIR/checkpoints",
    ]


@pytest.mark.parametrize(
    ("code", "lines", "shown"),
    [
        (1, ["Traceback", "[rank1]: FileNotFoundError: last.new"], ": FileNotFoundError: last.new"),
        (1, ["torch.OutOfMemoryError: x" * 99, ""], ": torch.OutOfMemoryError: "),
        (139, ["ValueError: an old one"], ""),
        (1, ["nothing of the kind"], ""),
    ],
)
def test_an_earlier_failure_must_be_listed_with_its_exception(code, lines, shown):
    cause = Cause(rank=1, node="n", exit_code=code, cause=Reason.ERROR, summary="it ended", hint="", last_lines=lines)
    ended = [
        GenerationResult(generation=0, outcome=Outcome.FAILED, why="", cause=cause),
        GenerationResult(generation=1, outcome=Outcome.SUCCEEDED, why="finished"),
    ]
    line = text(report(PLAN, JobResult(Outcome.SUCCEEDED, "finished"), ended, 3.0, [], [])).splitlines()[1]
    assert line.startswith(f"generation 0: it ended{shown}") and len(line) < 230 and (shown or line.endswith("ended"))


def pace(*rows: object) -> dict:
    return report(PLAN, JobResult(Outcome.SUCCEEDED, "finished"), [], 0.0, [{"rank_seconds": row} for row in rows], [])


def test_a_worker_that_is_slow_in_most_steps_must_be_named_with_its_node():
    data = pace(*[[0.01, 0.012, 0.05]] * 9, [0.01, 0.012, 0.2])
    assert data["pace"][2] == {"rank": 2, "node": "trainer-2", "step_s": 0.05, "step_p95_s": 0.2, "others_s": 0.011}
    assert text(data).splitlines()[1:] == [
        "slow: rank 2 on trainer-2 spent 50 ms per step on its own work, the others 11 ms",
    ]


def test_a_worker_that_is_occasionally_slow_must_not_be_named():
    data = pace(*[[0.01, 0.01, 0.01]] * 6, *[[0.01, 0.01, 0.5]] * 4)
    assert "slow" not in text(data)


def test_whole_numbers_of_seconds_must_be_accepted():
    assert [rank["step_s"] for rank in pace(*[[1, 0.5, 0]] * 10)["pace"]] == [1, 0.5, 0]


@pytest.mark.parametrize("row", [3, [0.1, 0.2], [0.1, 0.2, "0.3"], [0.1, 0.2, None], [0.1, 0.2, True], []])
def test_malformed_rank_seconds_must_not_count(row):
    assert pace(*[row] * 20)["pace"] == []


def test_the_last_value_of_each_metric_must_be_the_final_one():
    rows = [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25},
        {"epoch": 1, "accuracy": 0.9},
        {"step": 3, "loss": 0.2},
    ]
    data = report(PLAN, JobResult(Outcome.SUCCEEDED, "finished"), [], 0.0, rows, [])
    assert data["final_metrics"] == {"step": 3, "loss": 0.2, "epoch": 1, "accuracy": 0.9}


MANY = "\N{ROCKET}" * 1000  # 12 bytes each as JSON
LEFT_OUT: dict[str, dict[str, list[Any]]] = {
    "checkpoints": {"checkpoints": [Path(f"{number:05}", *["\N{ROCKET}" * 60] * 30) for number in range(10_000)]},
    "final_metrics": {"metrics": [{f"{number:04}": [MANY] * 8} for number in range(1000)]},
    "failures": {"lines": ["\ufffd" * (5 << 10)] * 12},
}


def full(checkpoints=(), metrics=(), lines=()) -> dict:
    """The report of a job that has failed 200 times, each with last lines."""
    facts: dict[str, Any] = {
        "exit_code": 1,
        "cause": Reason.ERROR,
        "hint": "look",
        "last_lines": [*lines],
        "log": "log",
    }
    cause = Cause(rank=1, node="n", summary="rank 1 failed", **facts)
    ended = [
        GenerationResult(generation=number, outcome=Outcome.FAILED, why="a worker failed", cause=cause)
        for number in range(200)
    ]
    return report(PLAN, JobResult(Outcome.FAILED, "why"), ended, 0.0, metrics, checkpoints)


@pytest.mark.parametrize("key", LEFT_OUT)
def test_a_report_that_is_too_large_must_keep_the_last_entries_and_warn(key):
    data = full(**LEFT_OUT[key])
    assert data["truncated"] == [key]
    warning = f"warning: report.json does not list all {key}: too many or too large"
    assert [line for line in text(data).splitlines() if "warning" in line] == [warning]
    entries = {
        "checkpoints": list(map(str, LEFT_OUT["checkpoints"]["checkpoints"])),
        "final_metrics": [f"{number:04}" for number in range(1000)],
        "failures": [*range(200)],
    }
    kept = [failure["generation"] for failure in data[key]] if key == "failures" else [*data[key]]
    assert 9 < len(kept) < len(entries[key]) and kept == entries[key][-len(kept) :]


def test_the_size_of_a_report_must_be_bounded_whatever_a_job_has_left():
    everything = {name: value for each in LEFT_OUT.values() for name, value in each.items()}
    data = full(**everything)
    assert data["truncated"] == ["failures", "checkpoints", "final_metrics"]
    assert len(json.dumps(data, indent=2)) < folder.MAX_FILE / 3


def test_a_complete_report_must_not_warn():
    data = full([Path("a")], [{"loss": 0.5}], ["word"])
    assert data["truncated"] == [] and "warning" not in text(data)
    assert (len(data["failures"]), data["checkpoints"], data["final_metrics"]) == (200, ["a"], {"loss": 0.5})


def test_long_messages_from_nodes_must_be_truncated():
    data = report(PLAN, JobResult(Outcome.FAILED, "x" * 10_000, left="y" * 10_000), [], 0.0, [], [])
    assert (data["reason"], data["left_behind"]) == ("x" * 1000, "y" * 1000)


CAUSE = Cause(
    rank=1, node="n", exit_code=1, cause=Reason.ERROR, summary="rank 1 exited with code 1", hint="look", log="log"
)
FAILED = GenerationResult(generation=0, outcome=Outcome.FAILED, why="a worker failed", cause=CAUSE, lasted=2.5)


def test_the_report_must_identify_the_job_and_state_its_duration():
    data = report(PLAN, JobResult(Outcome.LOST, "gone", left="no answer"), [FAILED], 12.25, [], [Path("a"), Path("b")])
    assert {key: data[key] for key in ("job_id", "outcome", "reason", "engine", "world_size", "generations")} == {
        "job_id": "j",
        "outcome": "lost",
        "reason": "gone",
        "engine": "docker",
        "world_size": 3,
        "generations": 1,
    }
    assert (data["duration_s"], data["left_behind"], data["checkpoints"]) == (12.25, "no answer", ["a", "b"])
    (failure,) = data["failures"]
    assert (failure["generation"], failure["step"], failure["lasted_s"], failure["rank"]) == (0, 0, 2.5, 1)


@pytest.mark.parametrize("word", ["succeeded", "stopped", "lost"])
def test_only_a_failed_job_must_have_a_root_cause(word):
    data = report(PLAN, JobResult(word, "why"), [FAILED], 0.0, [], [])
    assert data["root_cause"] is None
    assert text(data).splitlines()[1:] == ["generation 0: rank 1 exited with code 1"]  # without a step if none is known


def test_a_job_that_failed_without_a_worker_to_blame_must_have_no_root_cause():
    stopped = GenerationResult(generation=1, outcome=Outcome.RESCALED, why="a node is back")
    data = report(
        PLAN, JobResult(Outcome.FAILED, "the job cannot continue: no such node"), [FAILED, stopped], 0.0, [], []
    )
    assert (data["root_cause"], len(data["failures"])) == (None, 1)
    assert report(PLAN, JobResult(Outcome.FAILED, "could not start"), [], 0.0, [], [])["root_cause"] is None


@pytest.mark.parametrize(("word", "expected"), [("succeeded", ""), ("stopped", " (why)"), ("lost", " (why)")])
def test_the_reason_must_be_shown_unless_the_job_succeeded(word, expected):
    once = GenerationResult(generation=0, outcome=word, why="why")
    data = report(PLAN, JobResult(word, "why"), [once], 0.0, [], [])
    assert text(data) == f"{word}: 3 workers, 0.0 s{expected}"


@pytest.mark.parametrize(
    ("word", "step", "said"),
    [("succeeded", 40, ", at step 40 of 150"), ("succeeded", 150, ""), ("stopped", 40, " (why)")],
)
def test_a_success_before_the_last_step_must_be_visible(word, step, said):
    metrics = [{"step": 39, "total_steps": 150}, {"step": step}]
    assert text(report(PLAN, JobResult(word, "why"), [], 0.0, metrics, [])) == f"{word}: 3 workers, 0.0 s{said}"


def test_leftover_nodes_must_be_reported_with_the_command_that_removes_them():
    data = report(PLAN, JobResult(Outcome.SUCCEEDED, "finished", left="stuck"), [], 0.0, [], [])
    assert text(data).splitlines()[1:] == [
        "warning: not all nodes were removed: stuck",
        "hint: python -m orchestrate stop j",
    ]


def test_a_worker_must_not_be_called_slow_after_a_few_steps_or_if_it_is_alone():
    assert pace(*[[0.01, 0.01, 0.05]] * 4)["pace"] == []
    assert "slow: rank 2" in text(pace(*[[0.01, 0.01, 0.05]] * 5))
    assert "slow" not in text(pace(*[[0.01, 0.01, 0.02]] * 5))  # twice as long is not slow yet
    alone = plan(JobSpec(trainers=0), HERE, "j", 29500)
    (found,) = report(alone, JobResult(Outcome.SUCCEEDED, ""), [], 0.0, [{"rank_seconds": [0.5]}] * 5, [])["pace"]
    assert (found["step_s"], found["others_s"]) == (0.5, 0.5)


def test_the_report_must_be_json_without_nan():
    rows = [{"loss": float("nan"), "parts": {"a": [1, float("nan")]}, "note": "x"}]
    found = report(PLAN, JobResult(Outcome.SUCCEEDED, ""), [], 0.0, rows, [])
    assert found["final_metrics"] == {"loss": "NaN", "parts": {"a": [1, "NaN"]}, "note": "x"}
    assert listed(found["final_metrics"] | {"acc": 0.51234}) == ["loss NaN", "acc 0.5123"]
    json.dumps(found, allow_nan=False)


def test_what_is_known_of_the_workers_must_be_that_of_the_last_generation():
    last: dict[str, Any] = {"versions": ("2.9.1",), "exchanged": {0: 7, 2: 9}, "isolated": "look"}
    ends = [dataclasses.replace(FAILED, versions=("2.8.0",)), dataclasses.replace(FAILED, **last)]
    data = report(PLAN, JobResult(Outcome.SUCCEEDED, "x"), ends, 0.0, [], [])
    assert (data["torch"], data["exchanged_bytes"]) == (["2.9.1"], [7, None, 9])
    assert text(data).splitlines()[-2:] == [
        "warning: the 3 workers exchanged no data: if they train, each trained its own model",
        "hint: look",
    ]


def test_each_copy_must_be_reported_with_the_files_that_it_leaves_out():
    odd = [f"{number}: odd" for number in range(101)]
    copies = [Copied("checkpoints", "s3://a", 2, "", "", odd[:1]), Copied("output", "s3://b", 0, "away", "look", odd)]
    data = report(PLAN, JobResult(Outcome.SUCCEEDED, ""), [], 0.0, [], [], copies=copies)
    assert [len(copy["skipped"]) for copy in data["copies"]] == [1, 100]
    assert text(data).splitlines()[1:] == [
        "checkpoints copied to s3://a",
        "warning: checkpoints not copied: 0: odd",
        "warning: output not copied completely to s3://b: away",
        "hint: look",
        *(f"warning: output not copied: {number}: odd" for number in range(8)),
    ]


def test_the_keys_of_the_report_must_be_documented():
    text = (ROOT / "docs" / "interface.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \| ", text[text.index("## report.json") :], re.M)
    data = report(PLAN, JobResult(Outcome.FAILED, "x"), [FAILED], 0.0, [], [])
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == data.keys()
    assert all(f"`{key}`" in text for failure in data["failures"] for key in failure)


FAILURE = Cause(rank=1, node="n", exit_code=1, cause=Reason.ERROR, summary="it broke", hint="")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (events.GenerationStarting(0, NODES, 3, 29500), ""),  # the plan has already shown it
        (events.GenerationStarting(2, NODES, 3, 29500), "generation 2: 3 workers"),
        (events.GenerationEnded(generation=1, outcome=Outcome.SUCCEEDED, why="finished"), ""),
        (
            events.GenerationEnded(generation=1, outcome=Outcome.FAILED, why="", cause=FAILURE),
            "generation 1 failed: it broke",
        ),
        (events.RestartDecided(False, "no", 0.0), ""),
        (events.RestartDecided(True, "restart 1 of 3", 0.0), "(restart 1 of 3)"),
        (
            events.RestartDecided(True, "not counted toward max_restarts", 2.0),
            " in 2 s (not counted toward max_restarts)",
        ),
        (events.NodesUp(NODES, {}), ""),
        (events.NodesUp(NODES, dict(zip(NODES, "bab"))), "a: trainer-1; b: master, trainer-2"),
        (events.NodeInTrouble("trainer-1", "paused"), "trainer-1 is paused"),
        (events.NodeInTrouble("trainer-1", "silent"), "trainer-1 does not respond"),
        (events.NodeInTrouble("trainer-1", "partition"), "trainer-1 is cut off"),
        (events.NodeWell("trainer-1"), "trainer-1 has recovered"),
        (events.HangFound({}, 300.0), "for 300 s"),
        (events.EngineLost("no answer"), "no answer; waiting for the engine"),
        (events.EngineBack(), "the engine is back"),
        (events.DiskFull("[Errno 28] full"), "[Errno 28] full"),
        (events.NodesMissing(NODES[:2], 1, "gone"), "with 2 nodes, 1 fewer: gone"),
        (events.NodeBack(), "a missing node is back"),
        (events.WorkersLost((0, 2)), "ranks 0, 2 did not exit within"),
        (events.WarningIssued("look"), "warning: look"),
        (events.GpusUnused((1,)), "warning: rank 1 did not use the GPU"),
        (events.WorkersIsolated(3, "look"), "the 3 workers have exchanged no data in the first minute"),
        (events.CheckpointsFetched("s3://a", 1, 7, "j-1"), "fetched 1 file of checkpoints that j-1 copied to s3://a"),
        (events.WorkerEnded(0, "master", 1, stopping=False), ""),
    ],
)
def test_only_events_that_matter_to_the_user_must_be_shown(event, expected):
    shown = line(event)
    assert expected in shown and bool(shown) is bool(expected)


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (events.NodesStarting(4, "docker"), "starting 4 nodes"),
        (events.NodesUp(NODES, {}), "starting the workers"),
        (events.GenerationStarted(0, ()), "starting the workers"),
        (events.GenerationStarted(0, ("torch", "numpy")), "importing torch, numpy"),
        (events.WorkersAwaited((2,)), "waiting for rank 2 to start"),
        (events.WorkersAwaited((*range(8),)), "waiting for ranks 0, 1, 2, 3, 4, 5, 6, 7 to start"),
        (events.WorkersAwaited((*range(1, 11),)), "waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more to start"),
        (events.WorkersStarted(), "waiting for the workers' first output"),
        (events.GenerationEnded(generation=0, outcome=Outcome.SUCCEEDED, why="finished"), ""),
        (events.NodesStopping(), "cleaning up"),
        (events.NodesDown(), ""),
        (events.NodesLeft("no answer"), ""),
        (events.WorkerEnded(0, "master", 0, stopping=False), None),
    ],
)
def test_the_phase_of_a_job_must_follow_from_its_events(event, shown):
    assert phase(event) == shown


def test_a_list_of_files_that_is_not_complete_must_be_named():
    for complete, named in ((True, []), (False, ["checkpoints", "written"])):
        written = Written(Path("work"), ["a"], complete)
        data = report(PLAN, JobResult(Outcome.SUCCEEDED, "finished"), [], 0.0, [], [], complete, written)
        assert (data["written"], data["truncated"]) == (["a"], named)
    written = Written(Path("work"), ["x" * (1 << 20)] * 5, True)
    data = report(
        PLAN, JobResult(Outcome.SUCCEEDED, ""), [], 0.0, [{f"{n}": n for n in range(NAMES + 1)}], [], True, written
    )
    assert (len(data["written"]), len(data["final_metrics"])) == (3, NAMES)
    assert data["truncated"] == ["written", "final_metrics"]


@pytest.mark.parametrize(("key", "value"), [("outcome", "rescaled"), ("duration_s", 10**400), ("failures", [1])])
def test_a_damaged_report_must_count_as_none(key, value):
    data = report(PLAN, JobResult(Outcome.SUCCEEDED, "finished"), [], 0.0, [], [])
    assert readable(data) and not readable(data | {key: value})
