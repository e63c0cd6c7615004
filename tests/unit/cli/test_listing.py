"""Jobs that have ended, in `ps --all` and `prune`; events in `events`; plans and lists as JSON."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from support.commanded import SPEC, Meanwhile, create, noted, runs_elsewhere, supervised
from support.other_user import as_user, folder_of_user
from support.scripted import ALL_WELL

from orchestrate import console
from orchestrate.cli import listing
from orchestrate.host import private, records
from orchestrate.record.events import OutcomeDecided, WorkersStarted
from orchestrate.record.outcomes import Outcome
from orchestrate.record.paths import JobPaths
from orchestrate.spec.folders import cached_data

DAY = 86400


def end(paths: JobPaths, age: float = 0.0, **facts: object) -> JobPaths:
    """Write the report of a job that ended `age` seconds ago."""
    data: dict[str, object] = {"outcome": "failed", "reason": "x", "root_cause": None, "failures": [], "pace": []}
    data |= {"written": [], "copies": [], "isolated": "", "truncated": []}
    data |= {"left_behind": "", "generations": 1, "job_id": paths.root.name, "world_size": 3, "duration_s": 90.0}
    records.write(paths.report, json.dumps({**data, "engine": "docker", "final_metrics": {}, **facts}))
    for path in (paths.report, paths.spec):
        os.utime(path, (time.time() - age,) * 2)
    return paths


@pytest.fixture
def jobs(do, tmp_path) -> Path:
    """Three jobs that have ended and one that is running."""
    for name in ("old-1", "new-1", "dirty-1", "running-1"):
        create(JobPaths(tmp_path / name))
    measured = {"step": 9, "loss": 0.12345, "lr": float("inf"), "seen": 7}
    end(JobPaths(tmp_path / "old-1"), 40 * DAY, outcome="succeeded", final_metrics=measured)
    end(JobPaths(tmp_path / "new-1"), 7200)
    end(JobPaths(tmp_path / "dirty-1"), 40 * DAY, left_behind="container x")
    return tmp_path


def test_ps_must_list_jobs_that_have_ended_on_request(do, jobs):
    shutil.copytree(jobs / "old-1", jobs / "old-1 (copy)", symlinks=True)
    with supervised(jobs / "running-1"):
        code, lines, _ = do("ps", "--all")
        assert [line.split()[0] for line in do("ps")[1]] == ["NAME", "running-1"]
    assert code == 0 and lines[0].split() == [
        "NAME",
        "ENGINE",
        "NODES",
        "STATE",
        "STARTED",
        "DURATION",
        "METRICS",
    ]
    rows = {line.split()[0]: re.split("  +", line) for line in lines[1:]}
    assert [*rows] == ["running-1", "new-1", "dirty-1", "old-1"]
    assert rows["new-1"] == ["new-1", "docker", "failed", "2 h ago", "90 s"]
    old = ["old-1", "docker", "succeeded", "40 d ago", "90 s", "loss 0.1235, step 9, lr Infinity"]
    assert rows["old-1"] == old
    do.engine.states = [runs_elsewhere(jobs / "dirty-1", "dirty-1")]
    assert sum(line.startswith("dirty-1 ") for line in do("ps", "--all")[1]) == 1  # with its nodes
    do.engine.states = [runs_elsewhere(jobs.parent / "other" / "far-1", "far-1")]
    head, *lines = do("ps", "--all")[1]
    assert head.split()[-2:] == ["RUN", "METRICS"]  # only if a job is elsewhere
    assert {line.split()[0] for line in lines if str(jobs) in line} >= {"new-1", "old-1"} and "/other/far-1" in lines[0]


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to close a folder to another account")
def test_a_cluster_in_a_folder_that_this_account_cannot_enter_must_be_listed(do, tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    state = runs_elsewhere(tmp_path / "cluster-1", "cluster-1", owner=12345)
    do.engine.states = [dataclasses.replace(state, run=state.run.parent / "nodes")]
    with folder_of_user() as home:
        monkeypatch.setenv("XDG_STATE_HOME", str(home))

        def check() -> None:
            (row,) = listing.current(home)
            assert row.name == "cluster-1" and row.state.startswith("of user 12345, holds ")

        state_for_root = next(listing.current(home)).state
        assert state_for_root.startswith("idle, ") and state_for_root.endswith(", of user 12345")
        as_user(check)


def test_ps_must_print_json(do, jobs):
    found = {job["name"]: job for job in json.loads("\n".join(do("ps", "-a", "--json")[1]))}
    assert found["old-1"]["metrics"] == {"step": 9, "loss": 0.12345, "lr": "Infinity", "seen": 7}
    assert (found["old-1"]["state"], found["old-1"]["engine"], found["old-1"]["nodes"]) == ("succeeded", "docker", 0)
    assert found["new-1"]["duration_s"] == 90.0 and found["new-1"]["run_directory"] == str(jobs / "new-1")
    assert found["new-1"]["started"] == JobPaths(jobs / "new-1").spec.stat().st_mtime
    (job,) = json.loads("\n".join(do("ps", "--json")[1]))
    assert (job["name"], job["state"]) == ("running-1", "no supervisor")  # and no nodes, as after a reboot


def test_ps_must_show_the_last_metrics_of_a_running_job(do, jobs):
    rows = [{"step": step, "loss": 1 / step, "rank_seconds": [0.1]} for step in range(1, 5)]
    paths = JobPaths(jobs / "running-1")
    (paths.shared / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with supervised(jobs / "running-1"):
        for states in ([], [runs_elsewhere(jobs / "running-1", "running-1")]):  # before and after its nodes start
            do.engine.states = states
            (found,) = json.loads("\n".join(do("ps", "--json")[1]))
            assert found["metrics"] == {"step": 4, "loss": 0.25}
            assert found["started"] == paths.spec.stat().st_mtime


def test_ps_must_show_no_secret_among_the_metrics_of_a_running_job(do, jobs):
    paths = create(JobPaths(jobs / "secret-1"), dataclasses.replace(SPEC, env={"API_KEY": "canary-7c1"}))
    (paths.shared / "metrics.jsonl").write_text('{"loss": 1, "config": "canary-7c1", "canary-7c1": 2}\n')
    with supervised(jobs / "secret-1"):
        for states in ([], [runs_elsewhere(paths.root, "secret-1")]):  # before and after its nodes start
            do.engine.states = states
            for form in ("--json", "--all"):
                _, out, err = do("ps", form)
                assert "canary" not in f"{out} {err}" and "loss" in str(out)


def test_prune_must_remove_only_jobs_that_ended_before_and_left_nothing(do, jobs):
    os.utime(end(JobPaths(jobs / "new-1"), 29 * DAY).spec, (0, 0))  # it ran for a long time
    (jobs / "old-1" / "job" / "link").symlink_to("nowhere")
    foreign = jobs / "cloned-1"
    foreign.mkdir()
    for name in ("plan.json", "job.yaml", "report.json"):
        (foreign / name).write_bytes((jobs / "old-1" / name).read_bytes())
    with supervised(jobs / "running-1"):
        code, lines, messages = do("prune", "--dry-run")
        assert (code, lines) == (0, [str(jobs / "old-1")]) and messages[0].startswith("1 folder would be removed: ")
        assert (jobs / "old-1").exists()
        code, lines, messages = do("prune")
        assert (code, lines) == (0, [str(jobs / "old-1")]) and re.fullmatch("1 folder removed: .* KiB", messages[0])
        assert not (jobs / "old-1").exists() and not records.find(jobs / "old-1")
        assert do("prune", "--older-than", "1h")[1] == [str(jobs / "new-1")]
    assert {path.name for path in jobs.iterdir() if path.is_dir()} >= {"dirty-1", "running-1", "cloned-1"}


def test_prune_must_keep_a_job_that_is_resumed_meanwhile(do, jobs):
    with supervised(jobs / "old-1"):
        assert do("prune") == (0, [], ["0 folders removed: 0 KiB"])
    assert (jobs / "old-1").exists()


def test_prune_must_remove_caches_only_on_request(do, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caches = [private.cache(kind) for kind in ("data", "environments", "sources")]
    for cache in caches:
        (cache / "x").mkdir(parents=True)
    (caches[1] / "x.lock").touch()
    found = [f"{cache}/x" for cache in caches]
    assert do("prune")[1] == []
    with (caches[1] / "x.lock").open() as one, (caches[2] / "x" / "lock").open("w") as two:
        for file in (one, two):
            fcntl.flock(file, fcntl.LOCK_EX)
        code, lines, messages = do("prune", "--caches")
    assert (code, lines) == (0, found[:1])
    assert messages[:2] == [f"{path} is kept: a job is filling it" for path in found[1:]]
    (caches[0] / "x").mkdir()
    assert do("prune", "--caches", "--dry-run")[1] == found and (caches[0] / "x").exists()
    assert do("prune", "--caches")[1] == found
    assert not any(os.listdir(cache) for cache in caches)


def test_prune_must_keep_what_a_job_uses_that_has_not_ended(do, jobs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    used, other = cached_data("s3://bucket/used").parent, cached_data("s3://bucket/other").parent
    for folder in (used, other):
        folder.mkdir(parents=True)
    job = create(JobPaths(jobs / "reads-1"), dataclasses.replace(SPEC, data={"d": "s3://bucket/used"}))
    code, lines, messages = do("prune", "--caches")
    assert (code, lines[-1]) == (0, str(other)) and used.exists() and not other.exists()
    assert f"{used} is kept: job reads-1 has not ended" in messages
    end(job, 0)
    assert do("prune", "--caches")[1] == [str(used)] and not used.exists()


def test_events_must_be_printed_with_their_time_and_what_they_are_about(do):
    do.engine.generations = [[ALL_WELL]]
    assert do("run", "--trainers", "2", "--", "-m", "app.train")[0] == 0
    code, lines, _ = do("events")
    assert code == 0 and all(re.match(r"\d\d:\d\d:\d\d +\d+\.\d{3} s  [a-z_]+", line) for line in lines)
    about = {line.split()[3]: " ".join(line.split()[4:]) for line in lines}
    assert about["nodes_starting"] == "nodes 3, engine docker"
    assert about["worker_ended"].startswith("rank 2, node trainer-2, exit code 0")
    assert about["job_ended"] == "outcome succeeded, reason finished"
    assert do("events", "--follow")[1] == lines


def test_each_event_must_be_printed_once_and_only_its_first_part_if_it_is_long(do, paths):
    noted(paths, OutcomeDecided(Outcome.FAILED, "w" * 500))

    def more() -> None:
        noted(paths, WorkersStarted())
        end(paths)

    do.clock = Meanwhile(more)
    with supervised(paths.root):
        code, lines, err = do("events", "a-1", "-f")
    assert (code, err, len(lines)) == (0, [], 2)
    assert lines[0].endswith(f"outcome failed, reason {'w' * 99}…") and lines[1].endswith("workers_started")
    records.forget(paths.root)
    assert do("events", "a-1")[2] == [f"warning: {paths.root} is a copy, whose events may have been changed"]


def test_damaged_events_must_be_refused(do):
    do.engine.generations = [[ALL_WELL]]
    do("run", "--trainers", "2", "--", "-m", "app.train")
    (path,) = do.runs.glob("*/events.jsonl")
    path.write_text(path.read_text().replace("finished", "perished"))
    code, _, messages = do("events")
    assert code == 2 and "events.jsonl is damaged" in messages[0]


def test_a_plan_must_be_printed_as_json(do):
    plan = json.loads("\n".join(do("plan", "--json", "--trainers", "2", "--", "-m", "app.train")[1]))
    assert [worker["rank"] for worker in plan["workers"]] == [0, 1, 2] and plan["command"] == ["-m", "app.train"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (2 * DAY - 1, "48 h"), (2 * DAY, "2 d")],
)
def test_durations_must_have_one_unit(seconds, text):
    assert listing.duration(seconds) == text


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--tail", "1"], ["[0] last", "[1] end"]),
        (["--ranks", "1"], ["[1] loss 2", "[1] end"]),
        (["--ranks", "0-1", "--grep", "loss [12]"], ["[0] loss 1", "[1] loss 2"]),
        (["--rank", "0", "--grep", "^l", "--tail", "2"], ["loss 1", "last"]),
        (["--tail", "0"], []),
    ],
)
def test_logs_must_print_what_is_selected(do, paths, options, lines):
    paths.log(0).write_text("first\nloss 1\nlast\n")
    paths.log(1).write_text("loss 2\nend\n")
    end(paths)
    assert do("logs", "a-1", *options)[:2] == (0, lines)


def test_a_pattern_must_be_found_in_a_line_whatever_its_colors(do, paths, monkeypatch):
    monkeypatch.setattr(console, "colors", lambda stream: True)  # stdout is a terminal
    paths.log(0).write_text("\x1b[32mloss\x1b[0m 1\nother\n")
    end(paths)
    (line,) = do("logs", "a-1", "--rank", "0", "--grep", "^loss 1$")[1]
    assert line.startswith("\x1b[32mloss\x1b[0m 1")


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--merge"], ["[0] first", "[1] loss 2", "[0] loss 1", "[0] last", "[1] end"]),
        (["--merge", "--tail", "1"], ["[0] last", "[1] end"]),
        (["--since", "1h"], ["[0] last", "[1] end"]),
        (["--since", "4h"], ["[0] first", "[0] loss 1", "[0] last", "[1] loss 2", "[1] end"]),
        (["--since", "3h", "--merge", "--grep", "loss"], ["[1] loss 2", "[0] loss 1"]),
    ],
)
def test_lines_must_be_sorted_and_selected_by_time(do, paths, options, lines):
    paths.log(0).write_text("first\nloss 1\nlast\n")
    paths.log(1).write_text("loss 2\nend\n")
    hour, now = 3600, time.time()
    notes = [(now - 3 * hour, {0: 6}), (now - 2 * hour, {1: 7}), (now - 1.5 * hour, {0: 13})]
    paths.times.write_text("".join(json.dumps({"time": when, "read": read}) + "\n" for when, read in notes))
    end(paths)
    assert do("logs", "a-1", *options)[:2] == (0, lines)


@pytest.mark.parametrize(
    "options",
    [["--ranks", "9"], ["--ranks", "x"], *([flag, "--progress", "json"] for flag in ("--json", "--print-path"))],
)
def test_options_of_the_output_must_be_checked_before_there_is_a_job(do, options):
    for detach in ([], ["--detach"]):
        code, _, messages = do("run", *options, *detach, "--trainers", "2", "--", "-m", "app.train")
        assert code == 2 and messages[-2].startswith("error: "), messages
    assert not [*do.runs.glob("*/plan.json")]


def test_times_must_be_printed(do, paths):
    paths.log(0).write_text("first\n")
    paths.times.write_text(json.dumps({"time": 0.5, "read": {"0": 6}}) + "\n")
    end(paths)
    (line,) = do("logs", "a-1", "--rank", "0", "-t")[1]
    assert re.fullmatch(r"\d\d:\d\d:00.5 first", line)


def test_a_job_without_output_must_need_no_times(do, paths):
    end(paths)
    assert do("logs", "a-1", "-t") == do("logs", "a-1")


def test_a_job_without_times_must_not_be_sorted_by_them(do, paths):
    paths.log(0).write_text("first\n")
    end(paths)
    code, _, messages = do("logs", "a-1", "--merge")
    assert code == 2 and messages[0] == "error: --merge: a-1 has no record of when its lines were written"
    assert do("logs", "a-1", "--merge", "-f") == (0, ["[0] first"], [])  # it may get one


@pytest.mark.parametrize(
    "options", [["--ranks", "x"], ["--ranks", "2-1"], ["--ranks", "3"], ["--grep", "("], ["--tail", "-1"]]
)
def test_a_selection_that_makes_no_sense_must_be_refused(do, paths, options):
    code, _, messages = do("logs", "a-1", *options)
    assert code == 2 and messages[0].startswith("error: ")
