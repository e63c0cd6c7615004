"""Pages of `serve` about a job that is running."""

from support.page import Page
from support.plans import HERE, plan

from orchestrate.job import events
from orchestrate.job.spec import JobSpec
from orchestrate.pages import site
from orchestrate.view.progress import parse
from orchestrate.view.state import View


def live(view: View, *lines: str) -> str:
    return site.live(view, "running", 1.0, {}, "step", [], lines)


def test_of_many_workers_those_that_need_attention_must_be_shown(monkeypatch):
    monkeypatch.setattr(site, "MAX_RANKS", 3)
    view = View(plan(JobSpec(trainers=9), HERE, "digits-4f2a"), 0.0)
    view.event(events.WorkersStarted(), 1.0)
    for rank in view.ranks.values():
        rank.hear(parse("step 7" if rank.number == 5 else "step 8"), 2.0)
    view.event(events.WorkerEnded(8, "trainer-8", 1, False), 3.0)
    page = Page(live(view))
    logs = {reference for reference in page.references() if reference.startswith("logs/")}
    assert logs == {f"logs/rank-{rank}.log" for rank in (0, 5, 8)}
    assert "and 7 more like these" in page.text


def test_control_characters_in_the_output_must_not_be_on_the_page():
    text = live(View(plan(JobSpec(trainers=0), HERE, "digits-4f2a"), 0.0), "a\x00b\x1b[2Jc\u202ed")
    assert "a�b�[2Jc�d" in text
