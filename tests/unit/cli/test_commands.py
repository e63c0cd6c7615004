"""Output and exit codes of commands on existing jobs; on a scripted engine."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from support.commanded import Meanwhile, create, end, runs_elsewhere, supervised
from support.optional import not_none
from support.repo import ROOT
from support.scripted import ALL_WELL

from orchestrate.engines import registry
from orchestrate.engines.base import JobState
from orchestrate.host import records
from orchestrate.record import lock
from orchestrate.record.paths import JobPaths
from orchestrate.show import feed
from orchestrate.supervise.context import BY_MAX_RUN, BY_USER

# --- finding a job


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("a-1", "a-1"),  # not a-12, of which it is a prefix
        ("a-12", "a-12"),
        ("b", "b-1"),
        ("c-1", "c-1"),
        ("C_1", "c-1"),  # as it was given to --name
        ("c", "c-2"),  # the running one
        ("a", "a matches 2 jobs"),
        ("d", "no such job: d"),
        ("y", "no such job: y"),
    ],
)
def test_a_job_must_be_found_by_its_name_or_a_unique_prefix(do, engine, tmp_path, asked, found):
    for name in ("a-1", "a-12", "b-1", "c-1", "c-2", "z-1"):
        create(JobPaths(tmp_path / name), cluster="z-1" if name == "z-1" else "")
    records.forget(create(JobPaths(tmp_path / "b")).root)  # as if it came with the project
    cluster = create(JobPaths(tmp_path / "elsewhere" / "y-1"), cluster="y-1").root
    engine.states = [runs_elsewhere(tmp_path / "c-2", "c-2"), runs_elsewhere(cluster, "y-1", sees="nodes")]
    code, out, err = do("rm", asked, "--dry-run")
    assert do("stop", "z-1")[2] == [
        "error: z-1 is a cluster, not a job",
        "hint: python -m orchestrate down z-1 removes it",
    ]
    if " " in found:
        assert (code, out, err[0]) == (2, [], f"error: {found}")
        known = "a-12, a-1" if asked == "a" else "b, c-2, c-1, b-1, a-12, a-1"  # the newest first
        assert err[1] == f"hint: jobs in {tmp_path}: {known}"
    else:
        assert (code, out) == (0, [f"folder {tmp_path / found}"])


def test_of_many_matching_jobs_only_the_newest_must_be_listed(do, tmp_path):
    for number in range(12, 20):
        create(JobPaths(tmp_path / f"a-{number}"))
    names = "a-19, a-18, a-17, a-16, a-15, a-14, a-13, a-12"
    assert do("rm", "a")[2] == ["error: a matches 8 jobs", f"hint: jobs in {tmp_path}: {names}"]
    os.utime(create(JobPaths(tmp_path / "a-1")).spec, (0, 0))
    assert do("rm", "a")[2] == ["error: a matches 9 jobs", f"hint: jobs in {tmp_path}: {names} and 1 more"]


def test_a_running_job_must_be_found_from_any_folder(do, engine, tmp_path):
    far = create(JobPaths(tmp_path / "far" / "a-1"))
    far.log(0).write_text("hello\n")
    engine.states = [runs_elsewhere(far.root)]
    assert do("logs", "a-1") == (0, ["[0] hello"], [])
    create(JobPaths(tmp_path / "a-1"))  # for example a copy of its files
    assert do("rm", "a-1", "--dry-run") == (0, [f"folder {far.root}"], [])
    records.forget(tmp_path / "a-1")
    assert do("logs", "a-1") == (0, ["[0] hello"], [])


def test_a_job_that_has_ended_must_be_found_from_any_folder_by_its_whole_name(do, tmp_path):
    far = create(JobPaths(tmp_path / "far" / "a-1"))
    far.log(0).write_text("hello\n")
    create(JobPaths(tmp_path / "far" / "y-1"), cluster="y-1")
    assert do("logs", "a-1") == (0, ["[0] hello"], [])
    for name in ("a", "y-1"):
        assert do("logs", name)[2][0] == f"error: no such job: {name}"
    create(JobPaths(tmp_path / "further" / "a-1"))
    assert do("logs", "a-1")[2][0] == "error: no such job: a-1"


def test_nodes_that_name_another_run_directory_must_not_lead_to_it(do, engine, tmp_path):
    other = create(JobPaths(tmp_path / "far" / "b-1"))
    engine.states = [runs_elsewhere(other.root, "a-1")]
    for command in ("stop", "rm"):
        assert do(command, "a-1")[2][0] == "error: no such job: a-1"
    assert other.spec.exists() and engine.calls == []


def test_an_empty_runs_folder_must_be_named(do, engine, tmp_path):
    hint = f"hint: no jobs in {tmp_path}; use --runs to select another folder, or the whole name"
    assert do("logs", "a") == (2, [], ["error: no such job: a", hint])
    hint = "hint: name a job of another folder, or select that with --runs"
    assert do("logs") == (2, [], [f"error: no jobs in {tmp_path}", hint])


def test_results_that_were_copied_here_must_be_named(do, engine, tmp_path):
    records.forget(create(JobPaths(tmp_path / "a-1")).root)
    hint = f"hint: name one: {tmp_path}/a-1"
    assert do("logs") == (2, [], [f"error: the jobs in {tmp_path} were created elsewhere", hint])


def test_a_hint_must_list_only_jobs_in_the_folder(do, engine, tmp_path):
    create(JobPaths(tmp_path / "a-1"))
    engine.states = [runs_elsewhere(create(JobPaths(tmp_path / "far" / "b-1")).root, "b-1")]
    assert do("logs", "c")[2][1] == f"hint: jobs in {tmp_path}: a-1"


def test_a_job_must_be_found_by_its_run_directory(do, tmp_path, monkeypatch):
    far = create(JobPaths(tmp_path / "far" / "a-1"))
    far.log(0).write_text("hello\n")
    monkeypatch.chdir(tmp_path)
    for name in ("far/a-1", "far/a-1/", "./far/a", f"{far.root}", f"../{tmp_path.name}/far/a-1"):
        assert do("logs", name) == (0, ["[0] hello"], [])
    assert do("rm", "far/a-1", "--dry-run") == (0, [f"folder {far.root}"], [])


def test_latest_must_mean_the_job_that_was_created_last(do, tmp_path):
    for place, name in enumerate(("b-1", "c-1", "a-1", "z-1", "y-1")):
        paths = create(JobPaths(tmp_path / name), cluster=name if name == "y-1" else "")
        paths.log(0).write_text(f"{name}\n") if name != "y-1" else None
        os.utime(paths.spec, ns=(0, place))
    records.forget(tmp_path / "z-1")  # as if it came with the project
    for arguments in (["logs"], ["logs", "latest"]):
        assert do(*arguments) == (0, ["[0] a-1"], [])
    assert do("rm", "latest", "--dry-run") == (0, [f"folder {tmp_path / 'a-1'}"], [])


def test_several_jobs_must_be_removed_up_to_the_first_that_cannot_be(do, tmp_path, monkeypatch):
    runs = {name: create(JobPaths(tmp_path / name)).root for name in ("a-1", "far/b-1", "c-1", "d-1")}
    monkeypatch.chdir(tmp_path)
    with supervised(runs["c-1"]):
        code, _, lines = do("rm", "a-1", "far/b-1", "c-1", "d-1")
    assert code == 2 and lines[:2] == ["a-1 removed", "b-1 removed"]
    assert lines[2].startswith("error: c-1 is running, supervised by process ")
    assert [name for name, run in runs.items() if run.exists()] == ["c-1", "d-1"]


def test_rm_must_require_a_job(do, tmp_path):
    create(JobPaths(tmp_path / "a-1"))
    code, out, err = do("rm")
    assert (code, out, err[0]) == (2, [], "error: the following arguments are required: JOB")


# --- following


@pytest.mark.parametrize(
    ("outcome", "reason", "code"),
    [
        ("succeeded", "finished", 0),
        ("failed", "max_restarts is 1", 1),
        ("stopped", BY_USER, 130),
        ("stopped", BY_MAX_RUN, 124),
        ("lost", "no answer", 5),
    ],
)
def test_wait_and_attach_must_exit_as_an_ended_job_did_without_an_engine(do, paths, monkeypatch, outcome, reason, code):
    monkeypatch.setattr(registry, "available_engines", lambda: 1 / 0)  # no engine is asked
    end(paths, outcome, reason)
    paths.log(0).write_text("shown before\n")
    assert do("wait", "a-1") == (code, [], [])
    ended, out, err = do("attach", "a-1")
    assert (ended, out, err[-1]) == (code, [], str(paths.root))
    assert err[0].startswith(f"{outcome}: 3 workers")


def test_wait_must_not_miss_an_end_between_two_checks(do, paths, monkeypatch):
    monkeypatch.setattr(lock, "holder", lambda _: end(paths))  # it ends just before its supervisor is checked
    assert do("wait", "a-1") == (0, [], [])


def test_wait_must_wait_for_the_end(do, paths):
    do.clock = Meanwhile(lambda: end(paths, "failed"))
    with supervised(paths.root):
        assert do("wait", "a-1") == (1, [], [])


def test_logs_must_show_what_was_written_just_before_the_end(do, paths, monkeypatch):
    paths.log(0).write_text("first\n")

    def holder(_) -> int:
        with paths.log(0).open("a") as file:
            file.write("last, without a newline")
        return 0

    monkeypatch.setattr(lock, "holder", holder)
    expected = ["error: a-1 has no supervisor, so no result will be reported", "hint: python -m orchestrate attach a-1"]
    assert do("logs", "a-1", "-f", "--rank", "0") == (5, ["first", "last, without a newline"], expected)
    assert do("logs", "a-1", "--rank", "0")[0] == 0


def test_logs_of_a_rank_without_output_must_say_so(do, paths):
    end(paths)
    assert do("logs", "a-1", "--rank", "0") == (0, [], ["no output of rank 0"])
    assert do("logs", "a-1", "--ranks", "0-1") == (0, [], ["no output of rank 0-1"])
    assert do("logs", "a-1") == (0, [], ["no output of any rank"])
    paths.log(0).write_text("of a single line without a newline")
    assert do("logs", "a-1", "--rank", "0") == (0, ["of a single line without a newline"], [])


def test_logs_must_follow_only_on_request_and_only_until_the_job_ends(do, paths):
    paths.log(0).write_text("one\ntw")
    with supervised(paths.root):
        assert do("logs", "a-1", "--rank", "0")[1] == ["one", "tw"]

        def more() -> None:
            with paths.log(0).open("a") as file:
                file.write("o\nthree\n")
            end(paths)

        do.clock = Meanwhile(more)
        assert do("logs", "a-1", "--rank", "0", "-f")[1] == ["one", "two", "three"]


def test_a_tail_must_be_followed_by_all_that_is_printed_later(do, paths):
    paths.log(0).write_text("one\ntwo\n")

    def more() -> None:
        with paths.log(0).open("a") as file:
            file.write("three\nfour\n")
        end(paths)

    do.clock = Meanwhile(more)
    with supervised(paths.root):
        assert do("logs", "a-1", "--rank", "0", "-f", "--tail", "1")[1] == ["two", "three", "four"]


def test_followed_logs_must_be_printed_immediately(paths, tmp_path):
    paths.log(0).write_text("one\n")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
    follow = [sys.executable, "-m", "orchestrate", "logs", "a-1", "-f", "--rank", "0", "--runs", str(tmp_path)]
    with supervised(paths.root), subprocess.Popen(follow, env=env, stdout=subprocess.PIPE) as process:
        try:
            assert select.select([not_none(process.stdout)], [], [], 60)[0]
            assert not_none(process.stdout).readline() == b"one\n"
            end(paths)
            assert (process.wait(timeout=60), not_none(process.stdout).read()) == (0, b"")
        finally:
            process.kill()


def test_attach_must_follow_a_job_from_its_last_lines_to_its_end(do, paths):
    paths.log(0).write_text("".join(f"line {number}\n" for number in range(1000)))
    ticks = iter(
        [lambda: paths.log(1).write_text("one\ntw"), lambda: (paths.log(1).write_text("one\ntwo"), end(paths))]
    )
    do.clock = Meanwhile(lambda: next(ticks)())
    with supervised(paths.root) as other:
        code, out, err = do("attach", "a-1")
    missing = f"warning: report.html could not be written: see {paths.supervisor_log}"
    assert code == 0 and err[0].startswith(f"following a-1, supervised by process {other.pid} ")
    assert err[1:] == [missing, "succeeded: 3 workers, 1.0 s", str(paths.root)]
    assert out[-3:] == ["[0] line 999", "[1] one", "[1] two"]
    assert len(out) < 1000


def test_attach_must_show_all_that_was_printed_before_the_end(do, paths, monkeypatch):
    monkeypatch.setattr(feed, "MIN_READ", 1000)
    monkeypatch.setattr(feed, "MAX_READ", 1000)

    def finish() -> None:
        paths.log(1).write_text("".join(f"line {number}\n" for number in range(3000)))
        end(paths)

    do.clock = Meanwhile(finish)
    with supervised(paths.root):
        code, out, _ = do("attach", "a-1")
    assert code == 0 and out == [f"[1] line {number}" for number in range(3000)]


def test_attach_must_supervise_a_job_that_has_no_supervisor(do, paths, engine):
    engine.generations = [[ALL_WELL]]
    paths.log(0).write_text("".join(f"line {number}\n" for number in range(1000)))
    code, out, err = do("attach", "a-1")
    assert code == 0 and out[-1] == "[0] line 999" and len(out) < 1000  # from the last lines
    assert err[0] == "supervising a-1, which has no supervisor: Ctrl-C stops it"
    assert err[-2].startswith("succeeded: 3 workers")
    assert engine.calls == ["up", "start", "down"]


def test_attach_must_follow_if_another_supervisor_was_faster_and_ctrl_c_must_only_detach(
    do, paths, engine, monkeypatch
):
    holder, calls = lock.holder, []
    monkeypatch.setattr(lock, "holder", lambda of: holder(of) if calls else calls.append(of))
    do.clock = Meanwhile(lambda: end(paths))
    with supervised(paths.root):
        code, _, err = do("attach", "a-1")
    assert code == 0 and engine.calls == []
    assert any("following a-1, supervised by process " in line for line in err)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_a_running_job_of_another_folder_must_be_found_only_by_its_whole_name(do, engine, paths, tmp_path):
    far = create(JobPaths(tmp_path / "far" / "a-12"))
    end(far)
    far.log(0).write_text("far\n")
    end(paths)
    paths.log(0).write_text("here\n")
    engine.states = [runs_elsewhere(far.root, "a-12")]
    assert [do("logs", name)[1] for name in ("a", "a-1", "a-12")] == [["[0] here"], ["[0] here"], ["[0] far"]]
    assert do("stop", "a-12x")[0] == 2


def test_ps_must_show_running_idle_and_unsupervised_jobs(do, engine, tmp_path):
    for name in ("alone", "cluster", "damaged", "ended", "lost", "new", "runs", "used"):
        create(JobPaths(tmp_path / name), cluster=name if name in ("cluster", "used") else "")
    end(JobPaths(tmp_path / "ended"))
    for name in ("on-used", "left-on-used"):
        create(JobPaths(tmp_path / name), cluster="used")
    engine.states = [runs_elsewhere(tmp_path / name, name) for name in ("alone", "runs")]
    engine.states += [runs_elsewhere(tmp_path / name, name, sees="nodes") for name in ("cluster", "used")]
    (tmp_path / "damaged" / "plan.json").write_text("[" * 100_000)  # which must not hide the others
    with contextlib.ExitStack() as stack:
        for name in ("new", "damaged", "runs", "used", "on-used"):
            stack.enter_context(supervised(tmp_path / name))
        code, out, _ = do("ps")
    assert code == 0
    rows = [line.split(maxsplit=3) for line in out]
    assert [row[:3] for row in rows] == [
        ["NAME", "ENGINE", "NODES"],
        ["alone", "docker", "3"],
        ["runs", "docker", "3"],
        ["cluster", "docker", "3"],
        ["used", "docker", "3"],
        ["left-on-used", "docker", "3"],
        ["on-used", "docker", "3"],
        ["lost", "docker", "0"],
        ["new", "docker", "0"],
    ]
    states = ["no supervisor", "running", "idle, holds 3 MiB", "in use", "no supervisor, on used", "running on used"]
    for row, state in zip(rows[1:], [*states, "no supervisor", "running"]):
        assert row[3].startswith(f"{state} ") and row[3].endswith(str(tmp_path / row[0]))


def test_columns_must_be_aligned_and_without_jobs_only_the_header_shown(do, engine, tmp_path):
    assert do("ps") == (0, ["NAME  ENGINE  NODES  STATE  RUN"], [])
    engine.states = [runs_elsewhere(tmp_path / "a-long-name", "a-long-name")]
    head, row = do("ps")[1]
    assert all(row[head.index(word) - 2 : head.index(word)] == "  " for word in ("ENGINE", "NODES", "STATE", "RUN"))


# --- nodes without files


@pytest.fixture
def lost(do, tmp_path) -> JobState:
    """Nodes of a cluster whose files are gone."""
    do.engine.states = [JobState("c-1", "docker", 2, tmp_path / "c-1" / "nodes", os.getuid())]
    do.engine.things = ["container c-1-master-1", "network c-1_job"]
    return do.engine.states[0]


def test_down_must_remove_the_nodes_of_a_cluster_whose_files_are_gone(do, lost):
    assert do("down", "c-1", "--dry-run") == (0, ["container c-1-master-1", "network c-1_job"], [])
    assert do("down", "c-1") == (0, [], ["c-1 removed; its files were already gone or replaced"])
    assert do.engine.calls == ["remove c-1"]


def test_down_must_keep_nodes_that_are_not_those_of_a_lost_cluster(do, lost, tmp_path):
    theirs = replace(lost, owner=os.getuid() + 1)
    others = [replace(lost, run=tmp_path / run) for run in ("c-1/job", "d-1/nodes")]
    for state, why in ((theirs, "belongs to user"), *((other, "no such cluster: c-1") for other in others)):
        do.engine.states = [state]
        code, _, err = do("down", "c-1")
        assert (code, why in err[0]) == (2, True), err
    lost.paths.root.mkdir()
    do.engine.states = [lost]
    assert do("down", "c-1")[2][0] == "error: no such cluster: c-1"
    assert do.engine.calls == []


# --- Ctrl-C


@pytest.mark.parametrize(
    "arguments", [["attach", "a-1"], ["logs", "a-1", "-f"], ["wait", "a-1"], ["events", "a-1", "-f"]], ids=" ".join
)
def test_ctrl_c_must_detach_from_a_job_and_say_that_it_continues(do, paths, arguments):
    def interrupt() -> None:
        raise KeyboardInterrupt

    do.clock = Meanwhile(interrupt)
    with supervised(paths.root):
        code, _, err = do(*arguments)
    assert (code, err[-1]) == (130, "detached; a-1 continues")
