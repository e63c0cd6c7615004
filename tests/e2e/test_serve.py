"""The local web page in a real browser."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from support.waiting import eventually

TIMEOUT = 180_000  # milliseconds for each step of the browser, on a busy machine
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SCRIPT = """
import json, os, pathlib, time
folder, step = pathlib.Path(os.environ["JOB_DIR"]), 0
print("rank", os.environ["RANK"], "begins", flush=True)
while not (folder / "finish").exists():
    step += 1
    if os.environ["RANK"] == "0":
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
    time.sleep(0.05)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
def test_a_browser_must_follow_a_job_to_its_report_and_compare_it(cli, nothing_left):
    sync = pytest.importorskip("playwright.sync_api")
    (cli.folder / "steps.py").write_text(SCRIPT)
    run = ("run", "--engine", "process", "--trainers", "1")
    earlier = cli(*run, "sh", "-c", "echo loss 1; echo loss 0.5")
    assert earlier.returncode == 0, earlier.stderr
    command = [sys.executable, "-m", "orchestrate", "serve", "--port", "0"]
    job = cli.start(*run, "steps.py")
    with contextlib.ExitStack() as stack:
        serving = stack.enter_context(
            subprocess.Popen(command, cwd=cli.folder, env=cli.env, text=True, stdout=subprocess.PIPE)
        )
        stack.callback(serving.terminate)
        assert serving.stdout
        address = serving.stdout.readline().strip()
        player = stack.enter_context(sync.sync_playwright())
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = player.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=TIMEOUT)
        stack.callback(browser.close)
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.set_default_timeout(TIMEOUT)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        page.wait_for_selector("text=steps-")  # the list updates itself
        page.click("text=steps-")
        page.wait_for_selector("svg")
        seen = "Number(document.querySelector('tbody td:nth-child(4)').textContent)"
        before = page.evaluate(seen)
        eventually(lambda: page.evaluate(seen) > before)  # without being loaded again
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cli.finish_jobs()
        page.wait_for_selector("text=succeeded")  # the report
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("h2").all_inner_texts()[0] == "Metrics"
        landmarks = [line.strip("- :") for line in page.locator("body").aria_snapshot().splitlines() if line[0] == "-"]
        assert landmarks == ["banner", "main", "contentinfo"]
        assert page.get_by_role("region").count() == page.locator("h2").count()
        assert all(name for name in page.eval_on_selector_all("svg", "all => all.map(one => one.ariaLabel)"))
        for link in page.eval_on_selector_all("a", "all => all.map(one => one.href)"):
            assert page.request.get(link).ok, link
        page.click("text=Jobs")
        for box in page.locator("input[type=checkbox]").all():
            box.check()
        page.click("text=Compare selected jobs")
        page.wait_for_selector("text=In all jobs")
        names = "table.sorts tbody th"
        for column in ("job", "job"):  # ascending, then descending
            before = page.locator(names).all_inner_texts()
            page.get_by_role("columnheader", name=column).click()
        assert page.locator(names).all_inner_texts() == sorted(before, reverse=True)
        figure = page.locator("figure[data-curves]").first
        figure.locator("svg").hover()
        assert re.fullmatch(r"[\w ]+ [\d,]+: .* [\d.]+, .* [\d.]+", figure.locator("output").inner_text())
        figure.locator(".legend text").first.click()
        figure.locator("svg").hover()
        assert figure.locator("output").inner_text().count(", ") == 0
        page.locator("th a").first.click()
        page.wait_for_selector("text=How to run it again")
        assert problems == []
    job.communicate(timeout=60)
    assert job.returncode == 0


def test_a_port_that_is_in_use_must_be_reported(cli):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cli("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 4 and "error: cannot listen on port" in done.stderr and "leave --port out" in done.stderr


def test_without_a_port_several_must_be_served_at_once(cli):
    serving = [cli.start("serve") for _ in range(2)]
    addresses = [process.stdout.readline().strip() for process in serving]
    texts = [urllib.request.urlopen(address).read() for address in addresses]
    for process in serving:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert [process.returncode for process in serving] == [130, 130]
    assert len({*addresses}) == 2 and all(b"No jobs yet." in text for text in texts)
