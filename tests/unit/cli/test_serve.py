"""The local web page: what it answers and to whom."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import shutil
import socket
import threading
import urllib.parse
from types import SimpleNamespace

import pytest
from support.commanded import Whole, create, end, noted, runs_elsewhere, supervise, supervised
from support.methods import raising
from support.plans import HERE, plan
from support.scripted import Clock

from orchestrate.cli.commands.serve import MAX_EVENTS, MAX_LINES, MAX_STRANGERS, Handler, Server, Site
from orchestrate.errors import EngineError
from orchestrate.host import claims
from orchestrate.record import run_dir, usage
from orchestrate.record.events import GenerationStarting, NodesStarting, RestartDecided, WorkersStarted
from orchestrate.record.outcomes import Activity, WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec


@pytest.fixture
def site(tmp_path):
    """A server, and a function that requests a page of it."""
    server = Server(Site(tmp_path, tmp_path), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = server.server_address[1]

    def get(path: str, token: str = server.token, host: str = "", method: str = "GET") -> SimpleNamespace:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, f"/{token}{path}", headers={"Host": host} if host else {})
            answer = connection.getresponse()
            return SimpleNamespace(status=answer.status, headers=answer.headers, text=answer.read().decode())

    yield SimpleNamespace(get=get, server=server, port=port)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def running(tmp_path):
    """A job that another process supervises."""
    env = {"API_TOKEN": "hunter2000"}
    spec = JobSpec(trainers=2, command=("-m", "app.train"), env=env, on_event="https://127.0.0.1:1/hunter2000")
    paths = create(JobPaths(tmp_path / "a-1"), spec)
    nodes = ("master", "trainer-1", "trainer-2")
    noted(paths, NodesStarting(3, "docker"), GenerationStarting(0, nodes, 3, 29500), WorkersStarted())
    with supervised(paths.root):
        yield paths


def test_jobs_must_be_listed_with_links(site, running, tmp_path):
    other = create(JobPaths(tmp_path / "b-2"))
    end(other, "failed")
    page = site.get("/")
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    kept = {name: page.headers[name] for name in ("Cache-Control", "Referrer-Policy", "Server")}
    assert kept == {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "Server": "orchestrate "}
    assert page.headers["Content-Security-Policy"] == "frame-ancestors 'none'; base-uri 'none'"
    assert '<a href="jobs/a-1/">a-1</a>' in page.text and '<td class="">running</td>' in page.text
    assert 'value="b-2"' in page.text and '<td class="bad">failed</td>' in page.text
    assert 'value="a-1"' not in page.text  # a running job cannot be compared


def test_a_job_that_waits_in_the_queue_must_be_listed_without_a_link(site, running):
    with claims.Ticket("q-1") as waiting:
        waiting.enqueue(("cores",), 1)
        text = site.get("/").text
    assert '<th scope="row">q-1</th>\n<td class="">waits for the cores</td>' in text
    assert "q-1" not in site.get("/").text


def test_a_running_job_must_be_shown_as_it_is_now(site, running):
    running.log(0).write_text("<b>loss</b> hunter2000\n")
    running.log(1).write_text("step 7 loss 0.5\n")
    (running.shared / "metrics.jsonl").write_text('{"step": 9, "loss": 0.25}\n{"step": 10, "loss": 0.125}\n')
    page = site.get("/jobs/a-1/").text
    assert "[0] &lt;b&gt;loss&lt;/b&gt; ***\n[1] step 7 loss 0.5</pre>" in page and "hunter" not in page
    assert "step 10, loss 0.125" in page and page.count("<svg") == 1 and ">7</td>" in page
    running.log(1).write_text("step 7 loss 0.5\nstep 8 loss 0.4\n")
    noted(running, RestartDecided(True, "restart 1 of 3", 0.0))
    page = site.get("/jobs/a-1/").text
    assert "[1] step 7 loss 0.5\n[1] step 8 loss 0.4</pre>" in page
    assert "restarting all workers (restart 1 of 3)" in page


def test_long_lines_of_a_running_job_must_be_shortened(site, running):
    site.get("/jobs/a-1/")
    running.log(0).write_text(f"{'x' * 20_000}\n")
    assert "x" * 1000 in (page := site.get("/jobs/a-1/").text) and "x" * 2001 not in page


def test_curves_of_a_running_job_must_go_on_from_the_step_that_it_repeats(site, running):
    metrics = running.shared / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}, "loss": {step}}}\n' for step in range(1, 100)))
    assert 'aria-label="loss, last value 99' in site.get("/jobs/a-1/").text
    spec, plan = run_dir.load(running)
    run_dir.keep(running, dataclasses.replace(plan, generation=1), spec)
    noted(running, GenerationStarting(1, ("master", "trainer-1", "trainer-2"), 3, 29501), WorkersStarted())
    site.server.site.watches.clear()  # as another server, which reads the curves at once
    with metrics.open("a") as file:
        file.write('{"step": 50, "loss": 500}\n{"step": 51, "loss": 510}\n')
    assert 'aria-label="loss, last value 510' in site.get("/jobs/a-1/").text


def test_the_time_and_the_curves_of_a_running_job_must_be_those_of_now(running):
    now, metrics = Clock(), running.shared / "metrics.jsonl"
    os.utime(running.spec, (now.now - 3600, now.now - 3600))
    site = Site(running.root.parent, running.root.parent, now)
    for step in range(2, 5):
        metrics.write_text("".join(f'{{"step": {at}, "loss": {at}}}\n' for at in range(step + 1)))
        now.sleep(60)
        page = site.answer("jobs/a-1/", {})[0]
        assert f"3 workers, 1 h {step - 1} min" in page and f'aria-label="loss, last value {step}"' in page


def test_logs_must_be_shown_as_text_without_secrets_and_links(site, running, tmp_path):
    running.log(0).write_text("<b>token</b> hun\x1b[0mter2000 é\x1b[2J\n")
    log = site.get("/jobs/a-1/logs/rank-0.log")
    assert (log.status, log.text) == (200, "<b>token</b> *** é\n")
    assert log.headers["Content-Type"].startswith("text/plain") and log.headers["X-Content-Type-Options"] == "nosniff"
    assert site.get("/jobs/a-1/logs/rank-1.log").status == 404
    running.log(2).write_text("x" * ((1 << 20) - 4) + "hunter2000" + "y" * 100 + "\n")
    assert "hunter" not in (long := site.get("/jobs/a-1/logs/rank-2.log").text) and "x***y" in long
    running.log(1).symlink_to(running.spec)
    assert site.get("/jobs/a-1/logs/rank-1.log").status == 404


@pytest.mark.parametrize(
    "path",
    ["", "/x", "/jobs/", "/jobs/none-1/", "/jobs/../", "/jobs/%2e%2e/", "/jobs/a-1", "/jobs/a-1/orchestrate.log"]
    + ["/compare", "/compare?job=none-1", "/compare?job=..%2Fa-1", "/compare?job=a-1", "/jobs/a-1/logs/rank-x.log"],
)
def test_anything_else_must_not_be_found(site, running, path):
    assert site.get(path).status == 404


def test_what_a_report_links_to_must_be_there(site, running):
    assert "command:" in (text := site.get("/jobs/a-1/job.yaml").text) and "hunter" not in text
    assert site.get("/jobs/a-1/plan.json").headers["Content-Type"].startswith("text/plain")
    assert '<a href="rank-2.log">rank 2</a>' in site.get("/jobs/a-1/logs/").text
    assert site.get("/jobs/a-1/report.json").status == 404  # it has not ended


def test_the_use_of_workers_must_be_asked_for_and_shown(site, running):
    usage.write(running, {1: Activity("R", 1.0, 5 << 20)})
    assert "5 MiB" in site.get("/jobs/a-1/").text and usage.asked(running)


def test_selected_jobs_must_be_compared_once_each(site, tmp_path):
    for name in ("a-1", "b-2"):
        supervise(create(JobPaths(tmp_path / name)), Whole([[WorkerExit(rank, 0) for rank in range(3)]]))
    page = site.get("/compare?job=a-1&job=b-2&job=a-1").text
    assert page.count('href="jobs/a-1/"') == page.count('href="jobs/b-2/"') > 0 and 'href="./"' in page
    assert 'href="../../"' in site.get("/jobs/a-1/").text  # the list of jobs


def test_only_jobs_in_the_folder_must_be_listed(do, site, running, tmp_path):
    far, cluster = create(JobPaths(tmp_path / "far" / "b-2")), create(JobPaths(tmp_path / "c-3"), cluster="c-3")
    do.engine.states = [runs_elsewhere(far.root, "b-2"), runs_elsewhere(cluster.root, "c-3", sees="nodes")]
    page = site.get("/").text
    assert "a-1" in page and "b-2" not in page and "c-3" not in page


def test_an_engine_that_does_not_respond_must_be_named(do, site):
    do.engine.jobs = raising(EngineError("docker is away"))
    page = site.get("/")
    assert (page.status, page.text) == (503, "docker is away\n")


def test_secrets_in_names_of_metrics_must_not_be_shown(site, running):
    (running.shared / "metrics.jsonl").write_text('{"step": 1, "hunter2000": 1.5}\n{"step": 2, "hunter2000": 2.5}\n')
    page = site.get("/jobs/a-1/").text
    assert "hunter" not in page and "***" in page


def test_a_page_that_cannot_be_made_must_be_answered_and_others_still_work(site, running, monkeypatch):
    monkeypatch.setattr("orchestrate.cli.commands.serve.LiveJobPage.page", lambda self: 1 / 0)
    assert site.get("/jobs/a-1/").status == 500 and site.get("/").status == 200
    with socket.create_connection(("127.0.0.1", site.port)) as sock:
        sock.sendall(b"GET http://[ HTTP/1.1\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.0 404 ")


def test_much_output_must_be_skipped(site, running):
    running.log(0).write_text("".join(f"line {number}\n" for number in range(200_000)))
    assert "[0] line 199999</pre>" in site.get("/jobs/a-1/").text
    with running.log(0).open("a") as file:
        file.writelines(f"line {number}\n" for number in range(200_000, 400_000))
    assert "[0] line 399999</pre>" in site.get("/jobs/a-1/").text
    assert site.get("/jobs/a-1/logs/rank-0.log").text.count("\n") < 20_000


def test_the_last_lines_and_events_of_a_running_job_must_be_shown(site, running):
    running.log(0).write_text("".join(f"line {number}\n" for number in range(MAX_LINES + 50)))
    noted(running, *(RestartDecided(True, f"restart {number}", 0.0) for number in range(MAX_EVENTS + 5)))
    page = site.get("/jobs/a-1/").text
    assert re.findall(r"\[0\] line ([0-9]+)", page) == [str(number) for number in range(50, MAX_LINES + 50)]
    assert re.findall(r"\(restart ([0-9]+)\)", page) == [str(number) for number in range(5, MAX_EVENTS + 5)]


def test_a_job_that_is_resumed_must_be_shown_as_running_again(site, tmp_path):
    spec = JobSpec(trainers=2, grace=0.01, max_restarts=0, command=("-m", "app.train"))
    paths = create(JobPaths(tmp_path / "a-1"), spec)
    noted(paths, GenerationStarting(0, ("master", "trainer-1", "trainer-2"), 3, 29500), WorkersStarted())
    with supervised(paths.root):
        assert "<strong>running</strong>: 3 workers" in site.get("/jobs/a-1/").text
    supervise(paths, Whole([[WorkerExit(0, 1)]]))
    page = site.get("/jobs/a-1/").text
    assert "Root cause" in page and "<strong>running" not in page
    run_dir.keep(paths, plan(dataclasses.replace(spec, trainers=0), HERE, "a-1", 29500, generation=1), spec)
    paths.report.unlink()  # as `resume` does
    with supervised(paths.root):
        page = site.get("/jobs/a-1/").text
        assert "<strong>running</strong>: 1 worker," in page and "generation 1" in page and "Root cause" not in page


def test_nothing_must_be_kept_of_jobs_that_have_ended_or_were_removed(site, running, tmp_path):
    other = create(JobPaths(tmp_path / "b-2"))
    assert "<strong>no supervisor</strong>" in site.get("/jobs/b-2/").text
    watched = site.server.site.watches
    assert site.get("/jobs/a-1/").status == site.get("/jobs/b-2/").status == 200 and {*watched} == {"a-1", "b-2"}
    end(running)
    site.get("/jobs/a-1/")
    assert {*watched} == {"b-2"}
    run_dir.remove(other)
    assert site.get("/jobs/b-2/").status == 404 and not watched


def test_a_page_without_the_token_or_for_another_host_must_be_refused(site, running):
    assert [site.get("/", token=token).status for token in ("", "x", site.server.token + "x", "%C3%BC")] == [404] * 4
    assert site.get("/", host=f"example.com:{site.port}").status == 403
    assert site.get("/", host=f"localhost:{site.port}").status == 200
    assert site.get("/", method="POST").status == 501
    assert site.server.server_address[0] == "127.0.0.1" and len(site.server.token) >= 22


def test_a_connection_that_sends_nothing_must_not_be_kept_forever():
    assert 0 < Handler.timeout <= 60


def test_runs_of_other_accounts_must_not_be_shown(site, running, tmp_path):
    shutil.copytree(running.root, tmp_path / "c-3", symlinks=True)  # without a record
    assert "c-3" not in site.get("/").text and site.get("/jobs/c-3/").status == 404
    running.root.chmod(0o777)
    assert "a-1" not in site.get("/").text and site.get("/jobs/a-1/job.yaml").status == 404


def test_addresses_must_be_relative_so_that_the_token_stays_in_them(site, running):
    links = [part.partition('"')[0] for part in site.get("/jobs/a-1/").text.split('href="')[1:]]
    assert links and not any(urllib.parse.urlsplit(link).scheme or link.startswith("/") for link in links)
    assert json.dumps(links).count("logs/rank-") == 3


def test_connections_that_ask_for_nothing_must_not_keep_others_out(site, running):
    with contextlib.ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection(("127.0.0.1", site.port))) for _ in range(MAX_STRANGERS + 2)
        ]
        silent[0].settimeout(60)
        assert silent[0].recv(1) == b""  # the oldest is closed
        assert site.get("/").status == 200
        silent[-1].sendall(f"GET /{site.server.token}/ HTTP/1.0\r\nHost: localhost:{site.port}\r\n\r\n".encode())
        silent[-1].settimeout(60)
        assert silent[-1].recv(1) == b"H"


@pytest.mark.parametrize(("token", "answer"), [("x" * 22, b"HTTP/1.0 404"), ("", b"HTTP/1.0 431")])
def test_long_headers_must_not_be_parsed(site, running, token, answer):
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        connection.settimeout(60)
        connection.sendall(f"GET /{token or site.server.token}/ HTTP/1.0\r\n".encode())
        with contextlib.suppress(OSError):  # answered before that
            connection.sendall((b"x:1\r" + b"a\r" * 30_000 + b"\n") * 20)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            found = connection.recv(len(answer))
        assert found in (answer, b"")
    assert site.get("/").status == 200
