"""Pages of `serve` about a job that is running."""

import re

from support.page import Page, digest, words
from support.plans import HERE, plan
from support.said import said

from orchestrate import __version__
from orchestrate.pages import site
from orchestrate.record import events
from orchestrate.record.outcomes import Activity
from orchestrate.show.state import View
from orchestrate.spec.spec import JobSpec


def live(view: View, *lines: str) -> str:
    return site.live(view, "running", 1.0, {}, "step", [], lines)


def test_of_many_workers_those_that_need_attention_must_be_shown(monkeypatch):
    monkeypatch.setattr(site, "MAX_RANKS", 3)
    view = View(plan(JobSpec(trainers=9), HERE, "digits-4f2a"), 0.0)
    view.event(events.WorkersStarted(), 1.0)
    for rank in view.ranks.values():
        rank.hear(said("step 7" if rank.number == 5 else "step 8"), 2.0)
    view.event(events.WorkerEnded(8, "trainer-8", 1, False), 3.0)
    page = Page(live(view))
    logs = {reference for reference in page.references() if reference.startswith("logs/")}
    assert logs == {f"logs/rank-{rank}.log" for rank in (0, 5, 8)}
    assert "and 7 more like these" in page.text


def test_control_characters_in_the_output_must_not_be_on_the_page():
    text = live(View(plan(JobSpec(trainers=0), HERE, "digits-4f2a"), 0.0), "a\x00b\x1b[2Jc\u202ed")
    assert "a�b�[2Jc�d" in text


def test_the_page_of_a_running_job_must_show_its_progress_workers_events_and_output():
    view = View(plan(JobSpec(trainers=1), HERE, "digits-4f2a", generation=1), 0.0)
    view.event(events.WorkersStarted(), 1.0)
    view.measure({"step": 0, "total_steps": 20, "loss": 0.5, "acc": 0.25, "first": 1, "second": 2}, 1.0)
    for seconds in (1.0, 3.0):
        view.activity({0: Activity("R", seconds, 3 << 20)}, seconds)
    view.event(events.WorkerEnded(1, "trainer-1", 1, False), 3.0)
    html = site.live(view, "no supervisor", 125.0, {"loss": [(1, 2.0)]}, "order", [(61.0, "<first>")], ["[0] a", "<b>"])
    assert words(html) == (
        "digits-4f2a: running Jobs digits-4f2a no supervisor : 2 workers, 2 min 5 s, generation 1, "
        "step 0 of 20 (0%), loss 0.5, acc 0.25, first 1 Metrics loss "
        "Workers rank node state step cores memory metrics log "
        "0 master running 0 1.0 3 MiB loss 0.5, acc 0.25, first 1 log 1 trainer-1 failed log "
        f"Events 61.0 s <first> Output [0] a <b> orchestrate {__version__}"
    )
    assert '<td class="bad">failed' in html and ">order</text>" in html and "[0] a\n&lt;b&gt;</pre>" in html
    assert Page(html).references() == {"../../", "logs/rank-0.log", "logs/rank-1.log"}


def test_the_page_of_a_job_that_begins_must_leave_out_what_is_not_known():
    text = words(live(View(plan(JobSpec(trainers=0), HERE, "digits-4f2a"), 0.0)))
    assert ": 1 worker, 1.0 s Workers" in text and "0 master waiting log Output No output yet." in text


def test_only_the_script_of_a_page_may_run_on_it():
    pages = [live(View(plan(JobSpec(trainers=0), HERE, "a-1"), 0.0)), site.jobs([], "runs")]
    for html, form in zip(pages, ["", "; form-action 'self'"]):
        assert html.count("<script") == 1 and '<main id="live">' in html
        assert re.findall('Policy" content="(.*)">', html) == [
            f"default-src 'none'; style-src 'unsafe-inline'{form}; connect-src 'self'; script-src '{digest(html)}'"
        ]


def test_the_list_of_jobs_must_show_the_state_of_each_and_compare_those_that_have_ended():
    times = [("running", None), ("lost", 100.0), ("failed", 5.0), ("succeeded", 1.0)]
    rows = [site.Row(f"{state}-1", state, f"{state} ago", seconds, f"loss <{state}>") for state, seconds in times]
    html = site.jobs(rows, "my <runs>")
    assert words(html) == (
        "Jobs in my <runs> Jobs my <runs> compare job state started duration last metrics "
        "running-1 running running ago loss <running> lost-1 lost lost ago 1 min 40 s loss <lost> "
        "failed-1 failed failed ago 5.0 s loss <failed> succeeded-1 succeeded succeeded ago 1.0 s loss <succeeded> "
        f"Compare selected jobs orchestrate {__version__}"
    )
    assert re.findall('<td class="(good|bad|)">', html) == ["", "bad", "bad", "good"]
    assert re.findall('name="job" value="(.*?)-1"', html) == ["lost", "failed", "succeeded"]
    assert Page(html).references() == {"compare", *(f"jobs/{state}-1/" for state, _ in times)}
    assert "No jobs yet." in words(site.jobs([], "runs"))
    assert site.metrics({"total_steps": 9, "acc": 0.5, "name": "x", "loss": float("nan")}) == "loss NaN, acc 0.5"


def test_the_list_of_logs_must_lead_to_the_log_of_each_worker_and_back():
    html = site.logs("a-1", 2)
    assert words(html) == f"Logs of a-1 a-1 Logs rank 0 rank 1 orchestrate {__version__}"
    assert Page(html).references() == {"../", "rank-0.log", "rank-1.log"}
