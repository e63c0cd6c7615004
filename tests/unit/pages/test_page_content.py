"""What a page about a job shows, from its outcome to how it can be run again, and what one about several compares."""

import dataclasses
import re
from typing import Any

import pytest
from support.page import Page, words

from orchestrate import __version__
from orchestrate.pages.curves import progress
from orchestrate.pages.job import Run
from orchestrate.pages.page import page
from orchestrate.pages.spans import Moment, Span

ALONE = "the workers exchanged no data; if they train, each trained its own model"


def failure(number: int) -> dict[str, Any]:
    lines = ["first", "<last>"]
    return {"summary": f"rank {number} <failed>", "step": 10 * number, "last_lines": lines, "hint": "a hint"}


REPORT = {
    **{"outcome": "failed", "reason": "max_restarts is 1", "world_size": 2, "generations": 2, "duration_s": 7.0},
    **{"engine": "docker", "code": "/code", "commit": "0123456789abcdef", "dirty": True, "torch": ["2.9.1", "<b>"]},
    **{"root_cause": failure(2), "failures": [failure(1), failure(2)], "isolated": "use `<DDP>`"},
    **{
        "final_metrics": {"loss": 0.123456, "<i>": ["<u>"], "total_steps": 9},
        "exchanged_bytes": [4096 * 15, 4096 * 15],
    },
    **{"pace": [{"rank": 0, "node": "master", "step_s": 0.5, "step_p95_s": 0.75, "others_s": 0.25}]},
    **{"checkpoints": ["1.pt"], "written": ["out.txt"]},
}
LOST = {"step": 15, "save_seconds": 6.0, "rank_seconds": [1.0, 0.0]}
RUN = Run(
    name="a-1",
    report=REPORT,
    spans=[
        *(Span("starting", 0.0, 10.0, 0), Span("working", 10.0, 50.0, 0, "rank 1 failed")),
        *(Span("restarting", 50.0, 60.0, 1), Span("working", 60.0, 80.0, 1, "stopped by the user")),
        *(Span("stopped", 80.0, 110.0, 1), Span("ending", 110.0, 120.0, 1)),
    ],
    moments=[
        Moment("checkpoint", (30.0, 48.0), "checkpoints saved"),
        Moment("trouble", (60.0,), "rank 1 failed"),
        Moment("other", (102.0,), "restarting"),
    ],
    progress=progress([*({"step": step} for step in (*range(1, 11), *range(6, 16))), LOST], 2),
    curves={"loss <b>": [(1, 2.0), (2, 1.0)]},
    axis="order in the log",
    command="-m app <x>",
    settings={"trainers": "1"},
    machine="8 cores",
    patched=False,
)


def but(**changes: Any) -> Run:
    return dataclasses.replace(RUN, report=REPORT | changes)


def test_the_page_of_a_job_must_show_all_that_is_known_about_it():
    html = page([RUN], [""])
    assert words(html) == (
        "a-1: failed a-1 failed (max_restarts is 1): 2 workers, 2 min 0 s, 2 generations "
        "Root cause rank 2 <failed> , at step 20 first <last> a hint "
        "The workers exchanged no data: if they train, each trained its own model use <DDP> "
        "duration 2 min 0 s goodput 28 % loss 0.12346 "
        'Metrics loss <b> metric last value loss 0.12346 <i> ["<u>"] Time Goodput: the script ran for 28 % of the '
        "time, not counting repeated steps, saving and waiting. ▾ ▾ ▼ from to phase generation ended by "
        "0.0 s 10.0 s starting 0 10.0 s 50.0 s working 0 rank 1 failed 50.0 s 60.0 s restarting 1 "
        "60.0 s 80.0 s working 1 stopped by the user 80.0 s 1 min 50 s stopped 1 1 min 50 s 2 min 0 s ending 1 "
        "What happened at event 30.0 s to 48.0 s ▾ checkpoints saved 60.0 s ▼ rank 1 failed 1 min 42 s restarting "
        "How the time was spent what time share running the script 33.0 s 27.5 % saving checkpoints 4.5 s 3.8 % "
        "waiting for the slowest worker 7.5 s 6.2 % repeating 5 steps after restarts 15.0 s 12.5 % "
        "starting nodes and workers 10.0 s 8.3 % restarting 10.0 s 8.3 % "
        "ending: final copies, removal of the nodes 10.0 s 8.3 % stopped, until it was resumed 30.0 s 25.0 % "
        "Earlier failures rank 1 <failed> , at step 10 first <last> a hint "
        "Workers Each worker sends and receives about 6 KiB per step, like an all-reduce of 3 KiB. "
        "Seconds per step that each rank spent on its own work, without waiting for others: "
        "rank node median 95th percentile others 0 master 0.5 0.75 0.25 How to run it again command -m app <x> "
        "code /code , commit 0123456789abcdef , with changes that are not committed machine docker: 8 cores "
        "torch 2.9.1 trainers 1 job.yaml , plan.json , report.json , events.jsonl , logs , checkpoints , "
        f"files that the workers wrote orchestrate {__version__}"
    )
    assert '<strong class="bad">failed' in html and "<pre>first\n&lt;last&gt;</pre>" in html
    assert '<td class="text">restarting' in html and ">order in the log</text>" in html
    assert (
        ">loss &lt;b&gt;</text>" not in html and 'aria-label="loss &lt;b&gt;, last value 1"' in html
    )  # no legend, a description
    assert re.findall('style="(?:left|flex): ([^"]*)" title="([^"]*)', html) == [
        *(("25.0%", "30.0 s: a checkpoint was saved"), ("40.0%", "48.0 s: a checkpoint was saved")),
        *(("50.0%", "60.0 s: rank 1 failed"), ("10.0 0 0", "starting, 10.0 s"), ("40.0 0 0", "working, 40.0 s")),
        *(("10.0 0 0", "restarting, 10.0 s"), ("20.0 0 0", "working, 20.0 s"), ("30.0 0 0", "stopped, 30.0 s")),
        ("10.0 0 0", "ending, 10.0 s"),
    ]


def test_the_page_of_a_job_must_leave_out_what_there_is_not():
    facts: dict[str, Any] = {"outcome": "succeeded", "root_cause": None, "isolated": "", "world_size": 1}
    facts |= {"generations": 1, "commit": "", "torch": [], "final_metrics": {}, "pace": []}
    run = dataclasses.replace(but(**facts), spans=[], moments=[], curves={})
    html = page([run], [""], "./")
    assert words(html) == (
        "a-1: succeeded Jobs a-1 succeeded : 1 worker, 7.0 s duration 7.0 s Earlier failures "
        "rank 1 <failed> , at step 10 first <last> a hint rank 2 <failed> , at step 20 first <last> a hint "
        "How to run it again command -m app <x> code /code machine docker: 8 cores trainers 1 "
        "job.yaml , plan.json , report.json , events.jsonl , logs "
        f"orchestrate {__version__}"
    )
    none = dataclasses.replace(but(duration_s=0.0), spans=[])
    assert none.goodput == 0 and {percent for percent, *_ in none.marks} == {0.0}
    assert '<strong class="good">' in html and Page(html).references() >= {"./", "logs/"}


def test_changes_that_are_not_committed_must_be_linked_if_they_are_known():
    known, none = page([dataclasses.replace(RUN, patched=True)], [""]), page([but(dirty=False)], [""])
    assert 'with <a href="changes.patch">changes</a> that are not committed' in known
    assert "commit <code>0123456789abcdef</code></td>" in none


def test_what_is_known_must_be_shown_also_if_it_is_not_all():
    assert "Workers Each worker sends" in words(page([but(pace=[])], [""]))
    assert "Workers Seconds per step" in words(page([but(exchanged_bytes=[])], [""]))
    assert "<code>&lt;DDP&gt;</code>" in page([RUN], [""])
    assert "In all jobs goodput 28 %" in words(page([dataclasses.replace(RUN, curves={})] * 2, [""] * 2))


@pytest.mark.parametrize(
    "run",
    [
        but(world_size=1, exchanged_bytes=[4096]),
        but(exchanged_bytes=[4096, None]),
        but(generations=3),
        dataclasses.replace(but(generations=1), progress=progress([{"loss": 1.0}] * 3)),
    ],
    ids=["one worker", "a worker that is not known", "a restart without metrics", "no steps"],
)
def test_what_workers_exchange_in_a_step_must_be_left_out_if_it_is_not_clear(run):
    assert run.exchanged == ""


def test_a_comparison_must_show_each_job_and_first_what_differs():
    facts: dict[str, Any] = {"outcome": "succeeded", "root_cause": None, "world_size": 3, "generations": 1}
    facts |= {
        "commit": "",
        "dirty": False,
        "isolated": "",
        "final_metrics": {"loss": 0.123456, "acc": [1, 2]},
        "engine": "process",
    }
    first = dataclasses.replace(RUN, settings={"image": "x:1", "trainers": "1"})
    other = dataclasses.replace(
        but(**facts), name="b-2", spans=[], axis="step", curves={"loss <b>": [(1, 3.0), (2, 2.0)]}
    )
    other = dataclasses.replace(other, settings={"image": "x:1"})
    html = page([first, other, dataclasses.replace(first, name="c-3", axis="none", curves={})], ["a/", "", "c"], "./")
    assert words(html) == (
        "3 jobs Jobs 3 jobs Jobs With the settings and the last values that differ. "
        "job outcome duration <i> acc goodput workers generations commit machine trainers "
        'a-1 failed 2 min 0 s ["<u>"] – 28 % 2 2 0123456789ab and changes docker: 8 cores 1 '
        "b-2 succeeded 7.0 s – [1, 2] – 3 1 – process: 8 cores – "
        'c-3 failed 2 min 0 s ["<u>"] – 28 % 2 2 0123456789ab and changes docker: 8 cores 1 '
        f"a-1 : rank 2 <failed> c-3 : rank 2 <failed> a-1 : {ALONE} c-3 : {ALONE} Metrics loss <b> "
        f"In all jobs image x:1 command -m app <x> loss 0.12346 orchestrate {__version__}"
    )
    assert Page(html).references() == {"./", "a/", "c"}
    assert (
        'role="img" aria-label="a-1, last value 1 and b-2, last value 2"' in html
        and ">order in the log or step</text>" in html
    )
    assert re.findall('<td class="(good|bad)', html) == ["bad", "good", "bad"]
    assert ">order in the log</text>" in page([first, first], ["", ""])
    assert ">b-2</text>" in html and html.count("<script>") == 1


def test_a_comparison_must_have_a_column_for_each_option_that_differs():
    commands = ["train.py --lr 0.1 --amp --name='a b' data", "train.py --lr 0.01 --name 'a b' data", "train.py data"]
    repeated = [f"x.py --set lr={number} --set wd=2" for number in (1, 9)]
    html = page([dataclasses.replace(RUN, command=command) for command in repeated], ["", ""])
    assert " lr=1, wd=2 " in words(html) and " lr=9, wd=2 " in words(html)
    html = page([dataclasses.replace(RUN, command=command) for command in commands], ["", "", ""])
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', html)
    assert [name for name in heads if name.startswith("--") or name == "command"] == ["--lr", "--amp", "--name"]
    assert "In all jobs" in words(html) and "command train.py data" in words(html)
    assert words(html).count("a b") == 2 and " 0.01 " in words(html) and " set " in words(html)
