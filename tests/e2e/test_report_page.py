"""The page about a job that has run: what happened, without trust in what the job wrote."""

import json
import os
import re
import shutil

import pytest
from support.page import Page, digest

from orchestrate.pages.page import SCRIPT as SCRIPT_OF_PAGES

SCRIPT = """
import json, os, sys
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("<script>alert(1)</script> token", os.environ.get("API_TOKEN"), flush=True)
if rank == "0":
    with open(os.environ["JOB_DIR"] + "/metrics.jsonl", "a") as file:
        for step in range(1 if generation == "0" else 4, 8):
            values = {"step": step, "loss": 1 / step, "<b>" + os.environ.get("API_TOKEN", ""): step}
            file.write(json.dumps(values) + "\\n")
    sys.exit(3 if generation == "0" or "fail" in sys.argv else 0)
"""


@pytest.fixture
def restarted(cli) -> str:
    """The page of a job that has restarted once."""
    (cli.folder / "writes.py").write_text(SCRIPT)
    cli.env["API_TOKEN"] = "sesame-4711"
    done = cli("run", "--engine", "process", "--trainers", "1", "-e", "API_TOKEN", "--set", "grace=2s", "writes.py")
    assert done.returncode == 0, done.stderr
    return (cli.run_dir() / "report.html").read_text()


def test_the_page_of_a_job_must_show_its_outcome_metrics_time_and_failures(cli, restarted):
    page = Page(restarted)
    name = cli.run_dir().name
    assert page.text.startswith(f"{name}: succeeded {name} succeeded : 2 workers,")
    for text in (
        "loss 0.14286",
        "rank 0 on master exited with code 3 , at step 7",
        "repeating 4 steps after restarts",
        "command writes.py",
        "trainers 1",
    ):
        assert text in page.text, text
    headings = [element for element, _ in page.elements if element in ("h1", "h2")]
    assert headings == ["h1", *["h2"] * 4]
    assert {"header", "main", "footer"} <= {element for element, _ in page.elements}
    figures = [values["aria-label"] for element, values in page.elements if element == "svg"]
    assert figures[0] == "loss, last value 0.1429"


def test_a_page_must_need_no_network_run_only_its_own_script_and_show_what_the_job_wrote_as_text(restarted):
    page = Page(restarted)
    assert [element for element, _ in page.elements].count("script") == 1
    assert "<script>alert(1)</script>" in page.text and "<b>" in page.text
    assert not {reference for reference in page.references() if ":" in reference or reference.startswith("//")}
    assert "url(" not in restarted.replace(SCRIPT_OF_PAGES, "") and "@import" not in restarted
    assert not [name for _, values in page.elements for name in values if name.startswith("on")]
    (policy,) = [values["content"] for _, values in page.elements if values.get("http-equiv")]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src '{digest(restarted)}'"


def test_a_page_must_not_contain_secrets(restarted):
    assert "sesame" not in restarted and "***" in restarted


def test_the_page_of_a_failed_job_must_begin_with_the_root_cause(cli):
    (cli.folder / "writes.py").write_text(SCRIPT)
    options = ["--engine", "process", "--trainers", "0", "--max-restarts", "0"]
    assert cli("run", *options, "writes.py", "fail").returncode == 1
    page = Page((cli.run_dir() / "report.html").read_text())
    assert re.match(r"\S+ failed \S+ failed \(max_restarts is 0\): 1 worker, ", page.text)
    before, _, after = page.text.partition(" Root cause ")
    assert after.startswith("rank 0 on master exited with code 3") and "Metrics" in after
    assert "Earlier failures" not in page.text


def test_the_failures_before_the_root_cause_must_be_shown_apart(cli):
    (cli.folder / "fails.py").write_text(
        "import os, sys\nsys.exit(3 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))\n"
    )
    options = ["--engine", "process", "--trainers", "0", "--max-restarts", "1", "fails.py"]
    assert cli("run", *options).returncode == 1
    page = Page((cli.run_dir() / "report.html").read_text())
    cause, _, earlier = page.text.partition("Earlier failures")
    assert "Root cause rank 0 on master exited with code 4" in cause
    assert "rank 0 on master exited with code 3" in earlier and "with code 4" not in earlier


def test_text_that_no_page_can_hold_must_be_replaced(cli):
    rows = "\n".join(json.dumps({"step": step, "\ud800\x08\u202e": 1.0}) for step in (1, 2))
    (cli.folder / "odd.py").write_text(
        f"import os\nopen(os.environ['JOB_DIR'] + '/metrics.jsonl', 'w').write({rows!r})\n"
    )
    assert cli("run", "--engine", "process", "--trainers", "0", "odd.py").returncode == 0
    text = (cli.run_dir() / "report.html").read_text()
    assert "���" in text and not re.search("[\x00-\x08\u202e]", text)


def test_secrets_in_the_command_and_in_settings_must_be_hidden_however_they_are_quoted(cli):
    (cli.folder / "ok.py").write_text("print('ok')\n")
    cli.env["DB_PASSWORD"] = "it's-my-pass-word1"
    (cli.folder / "job.yaml").write_text("before: ['true', \"it's-my-pass-word1\"]\n")
    options = ["--engine", "process", "--trainers", "0", "-e", "DB_PASSWORD", "job.yaml"]
    done = cli("run", *options, "--", "ok.py", "--pw", "it's-my-pass-word1")
    assert done.returncode == 0, done.stderr
    text = (cli.run_dir() / "report.html").read_text()
    assert "my-pass-word1" not in text and "ok.py --pw &#39;***&#39;" in text


def test_a_comparison_must_mark_what_differs(cli, restarted):
    first = cli.run_dir().name
    assert cli("run", "--engine", "process", "--trainers", "0", "--max-restarts", "2", "writes.py").returncode == 0
    second = next(path.name for path in cli.folder.glob("runs/writes-*") if path.name != first)
    done = cli("report", first, second)
    assert (done.returncode, done.stdout) == (0, "runs/report.html\n"), done.stderr
    text = (cli.folder / "runs" / "report.html").read_text()
    page = Page(text)
    assert page.text.startswith("2 jobs 2 jobs Jobs With the settings and the last values that differ. job outcome")
    (head,) = re.findall(r"<thead>(.*?)</thead>", text, re.S)
    names = re.findall(r"<th[^>]*>(.*?)</th>", head)
    rows = [
        re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><th scope=\"row\".*?</tr>", text, re.S)[:2]
    ]
    cells = {name: [row[place] for row in rows] for place, name in enumerate(names[1:])}
    assert cells["outcome"] == ["succeeded"] * 2 and cells["workers"] == ["2", "1"]
    assert cells["trainers"] == ["1", "0"] and cells["max_restarts"] == ["–", "2"]
    assert "command" not in cells and "loss" not in cells
    assert page.references() == {f"{first}/report.html", f"{second}/report.html"}
    assert f"{first} {second}" in page.text  # the legend of the loss


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["nope"], 2, "error: no such job: nope"),
        (["latest", "nope"], 2, "error: no such job: nope"),
        (["runs/nope"], 2, "error: no such job: nope"),
        (["latest"], 2, "has not ended"),
    ],
)
def test_a_page_of_something_else_must_be_an_error(cli, arguments, code, error):
    (cli.folder / "writes.py").write_text(SCRIPT)
    assert cli("run", "--engine", "process", "--trainers", "0", "writes.py").returncode == 0
    (cli.run_dir() / "report.html").unlink()
    if "nope" not in "".join(arguments):
        (cli.run_dir() / "report.json").unlink()
    done = cli("report", *arguments)
    assert (done.returncode, error in done.stderr, "hint: " in done.stderr) == (code, True, True), done.stderr
    assert not [*cli.folder.glob("runs/**/report.html")]


@pytest.mark.parametrize(
    ("line", "axis"),
    [
        (r"print({'loss': 1 / step, 'epoch': step / 2}, flush=True)", "order in the log"),
        (r"print(f'\r 10%|1  | {step}/9 [00:01<00:02, 7.4it/s, loss={1 / step:.3f}]', end='', flush=True)", "step"),
        (r"print(f'step {step}: loss = {1 / step:.3f}', flush=True)", "order in the log"),
    ],
    ids=["Trainer", "tqdm", "text"],
)
def test_metrics_that_a_script_only_prints_must_be_drawn_too(cli, line, axis):
    (cli.folder / "prints.py").write_text(f"for step in range(1, 8):\n    {line}\n")
    assert cli("run", "--engine", "process", "--trainers", "0", "prints.py").returncode == 0
    page = Page((cli.run_dir() / "report.html").read_text())
    assert axis in page.text
    assert "loss, last value 0.1" in str([values.get("aria-label") for _, values in page.elements])


def test_the_page_must_be_written_again_on_request(cli, restarted):
    (cli.run_dir() / "report.html").unlink()
    done = cli("report")
    assert (done.returncode, done.stdout) == (0, f"runs/{cli.run_dir().name}/report.html\n"), done.stderr
    again = (cli.run_dir() / "report.html").read_text()
    assert [re.sub(r"chart-[0-9a-f-]+", "", text) for text in (again, restarted)] == [  # numbers of charts are random
        re.sub(r"chart-[0-9a-f-]+", "", restarted)
    ] * 2


def test_a_copied_job_must_have_the_same_page_and_events(cli, restarted):
    there = cli.folder / "copied" / cli.run_dir().name
    shutil.copytree(cli.run_dir(), there, ignore=shutil.ignore_patterns("report.html", "sockets"))
    done = cli("report", f"copied/{there.name}")
    assert (done.returncode, done.stdout) == (0, f"copied/{there.name}/report.html\n"), done.stderr
    copy, page = (Page(text).text.partition(" Time ") for text in ((there / "report.html").read_text(), restarted))
    assert copy[2] == page[2] and "How the time was spent" in page[2]
    copied, original = cli("events", f"copied/{there.name}"), cli("events", there.name)
    assert (copied.returncode, copied.stdout) == (0, original.stdout) and "workers_started" in copied.stdout


@pytest.mark.parametrize("damage", ["many", "wrong", "large"])
def test_a_copied_job_must_have_a_page_whatever_its_events_and_its_report_are(cli, restarted, damage):
    there = cli.folder / "copied" / cli.run_dir().name
    shutil.copytree(cli.run_dir(), there, ignore=shutil.ignore_patterns("sockets"))
    events = there / "events.jsonl"
    if damage == "many":  # which once took quadratic time
        events.write_text("".join(f'{{"event": "checkpoint_saved", "seconds": {at}}}\n' for at in range(50_000)))
    elif damage == "wrong":
        events.write_text('{"event": "workers_started", "seconds": NaN}\n')
    else:
        os.truncate(events, 1 << 40)
    report = json.loads((there / "report.json").read_text())
    (there / "report.json").write_text(json.dumps(report | {"torch": ["<b>", 5, "2.9.1"]}))
    done = cli("report", f"copied/{there.name}")
    assert done.returncode == 0, done.stderr
    text = Page((there / "report.html").read_text()).text
    assert "torch 5 and 2.9.1" in text and ("checkpoints saved" in text) == (damage == "many")


def test_a_folder_in_place_of_the_page_must_be_moved_aside(cli):
    (cli.folder / "writes.py").write_text(
        "import os\nos.makedirs(os.path.dirname(os.environ['JOB_DIR']) + '/report.html/full')\n"
    )
    done = cli("run", "--engine", "process", "--trainers", "0", "writes.py")
    assert done.returncode == 0 and cli.report()["outcome"] == "succeeded", done.stderr
    assert (cli.run_dir() / "report.html").is_file() and [*cli.run_dir().glob(".report.html.*/full")]
