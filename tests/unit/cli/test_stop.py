"""What `stop` and `rm` must remove, and what they must keep, with a scripted engine."""

import os
import signal
import subprocess
import sys

import pytest
from support.commanded import Meanwhile, Whole, create, end, noted, runs_elsewhere, supervised
from support.methods import raising
from support.optional import not_none
from support.plans import HERE, plan
from support.scripted import ALL_WELL, KILLED

from orchestrate.engines import registry
from orchestrate.errors import EngineError, OrchestrateError
from orchestrate.host import claims, records
from orchestrate.host.processes import myself
from orchestrate.record import lock, run_dir
from orchestrate.record.events import GenerationStarting
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise import launch
from orchestrate.supervise.context import BY_USER

WAITS = """
import signal, sys, time
from pathlib import Path
from orchestrate.host import claims
signal.signal(signal.SIGINT, signal.SIG_IGN)
ticket = claims.Ticket("w-1", Path(sys.argv[1]))
ticket.enqueue(("cores",), 1)
print(flush=True)
time.sleep(600)
"""


def test_stop_with_dry_run_must_only_show_what_it_would_remove(do, paths, engine):
    engine.things = ["container one", "network two"]
    assert do("stop", "a-1", "--dry-run") == (0, ["container one", "network two"], [])
    assert engine.calls == [] and engine.things and not paths.report.exists()


def test_stop_must_do_nothing_for_a_job_that_has_ended_and_left_nothing(do, paths, engine):
    end(paths)
    assert do("stop", "a-1") == (0, [], ["a-1 has already ended"])
    assert engine.calls == []


def test_stop_must_end_all_jobs_of_a_folder_and_no_other(do, runs, paths, engine):
    other, ended = create(JobPaths(runs / "b-1")), create(JobPaths(runs / "e-1"))
    far = create(JobPaths(runs.parent / "elsewhere" / "f-1"))
    create(JobPaths(runs / "c-1"), cluster="c-1")
    end(ended)
    engine.states = [runs_elsewhere(far.root, "f-1"), runs_elsewhere(runs / "c-1", "c-1", sees="nodes")]
    code, out, err = do("stop", "--all")
    assert (code, out) == (0, [])
    assert [line for line in err if line.endswith("-1 stopped")] == ["a-1 stopped", "b-1 stopped"]
    assert paths.report.exists() and other.report.exists() and not far.report.exists()
    assert do("stop", "--all") == (0, [], [])
    for words in (["stop"], ["stop", "a-1", "--all"]):
        assert do(*words) == (
            2,
            [],
            [
                "error: name one job, or use --all",
                "hint: python -m orchestrate ps; latest is the newest",
            ],
        )


def test_stop_must_end_jobs_of_the_folder_that_wait_of_which_one_may_be_the_latest(do, runs, paths):
    with claims.Ticket("q-1", runs) as waiting, claims.Ticket("f-1", runs.parent) as far:
        waiting.enqueue(("cores",), 1)
        far.enqueue(("cores",), 1)
        assert do("stop", "latest", "--dry-run") == (0, [f"process {os.getpid()}"], [])
        assert do("stop", "--all", "--dry-run")[1].count(f"process {os.getpid()}") == 1
        assert do("events", "latest")[0] == 0  # of a-1, which has files
    assert do("stop", "latest", "--dry-run") == (0, [], [])


def test_a_job_that_waits_in_the_background_of_a_shell_must_be_stoppable(do, runs):
    """Such a process ignores SIGINT."""
    with subprocess.Popen([sys.executable, "-c", WAITS, runs], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read(1)
        assert do("stop", "w-1") == (0, [], ["w-1 stopped"])


def test_stop_must_remove_clusters_whose_program_was_killed(do, runs, engine):
    for name, program in (("dead-1", f"{os.getpid()} 1"), ("used-1", myself())):
        run_dir.create(JobSpec(), plan(JobSpec(), HERE.but(cluster=name, keep=60.0), name, 0), JobPaths(runs / name))
        JobPaths(runs / name).private.write_text(program)
    assert do("stop", "--all", "--dry-run") == (0, [f"folder {runs}/dead-1"], [])
    code, out, err = do("stop", "--all")
    assert (code, out, err) == (0, [], ["dead-1 removed, which a killed program had left"])
    assert engine.calls == ["remove dead-1"] and not (runs / "dead-1").exists() and (runs / "used-1").exists()


def test_stop_must_remove_what_an_ended_job_has_left(do, paths, engine):
    engine.generations = [[ALL_WELL]]
    do("attach", "a-1")
    engine.things, engine.calls = ["container one"], []
    code, out, err = do("stop", "a-1")
    assert (code, out, err[-1]) == (0, [], "a-1 stopped")
    assert engine.things == [] and engine.calls
    assert not_none(run_dir.ended(paths))["outcome"] == "succeeded"  # its outcome is unchanged


def test_a_job_whose_report_could_not_be_written_must_get_it_later_and_be_resumable(do, runs, engine, monkeypatch):
    monkeypatch.chdir(runs)  # `resume` changes the current folder
    paths = create(JobPaths(runs / "a-1"), JobSpec(trainers=2, max_restarts=0, grace=0.01, command=("-m", "app.train")))
    engine.generations = [[KILLED]]
    do("attach", "a-1")
    before = not_none(run_dir.ended(paths))
    paths.report.unlink()  # after its nodes were removed, and their key
    engine.calls, adopt, down = [], engine.adopt, engine.down
    engine.adopt = engine.down = raising(EngineError("cannot connect to the nodes: a-1 has ended"))
    code, _, err = do("attach", "a-1")
    after = not_none(run_dir.ended(paths))
    assert (after["outcome"], after["reason"], after["left_behind"]) == (before["outcome"], before["reason"], "")
    assert not [line for line in err if "not all nodes" in line]
    engine.adopt, engine.down, engine.generations = adopt, down, [[ALL_WELL]]
    assert do("resume", "a-1")[0] == 0


def test_files_that_stay_on_nodes_of_a_cluster_must_be_copied_by_another_stop(do, runs, engine):
    create(JobPaths(runs / "c-1"), cluster="c-1")
    paths = create(JobPaths(runs / "a-1"), cluster="c-1")
    engine.generations, down = [[ALL_WELL]], engine.down
    engine.down = raising(EngineError("1 file could not be copied"))
    assert "warning: not all nodes were removed: 1 file could not be copied" in do("attach", "a-1")[2]
    assert paths.cluster == "c-1"
    engine.down, engine.calls = down, []
    code, _, err = do("stop", "a-1")
    assert (code, err[-1]) == (0, "a-1 stopped") and "down" in engine.calls
    assert not paths.cluster and paths.shared.is_dir()
    assert do("stop", "a-1")[2] == ["a-1 has already ended"]


def test_stop_must_write_the_report_of_a_job_whose_supervisor_has_died(do, paths, engine):
    code, _, err = do("stop", "a-1")
    assert (code, err[0], err[-1]) == (0, "a-1 has no supervisor: removing its nodes", "a-1 stopped")
    assert (not_none(run_dir.ended(paths))["outcome"], not_none(run_dir.ended(paths))["reason"]) == ("stopped", BY_USER)
    assert "up" not in engine.calls and "start" not in engine.calls


def test_stop_must_ask_the_supervisor_and_wait_for_its_end(do, paths, engine):
    engine.things = ["container one"]
    with supervised(paths.root) as other:
        code, _, err = do("stop", "a-1")
        assert other.wait(timeout=60) == -signal.SIGTERM  # before `supervised` ends it
    assert code == 0
    assert err.count("asking the supervisor of a-1 to stop") == 1
    assert engine.things == [] and not_none(run_dir.ended(paths))["outcome"] == "stopped"


def test_stop_must_ask_each_supervisor_that_takes_the_job_over_once(do, paths, engine, monkeypatch):
    one, other = lock.Supervisor(7, "1"), lock.Supervisor(8, "2")
    holders, signalled = iter([one, one, one, one, other, other, other]), []

    def ask(supervisor: lock.Supervisor) -> bool:
        signalled.append(supervisor.pid)
        if supervisor is other:  # it takes the nodes down and writes the report
            engine.things.clear()
            end(paths)
        return True

    engine.things = ["container one"]
    monkeypatch.setattr(lock, "holder", lambda _: next(holders, None))
    monkeypatch.setattr(lock.Supervisor, "ask_to_stop", ask)
    assert do("stop", "a-1")[0] == 0
    assert signalled == [7, 8] and engine.calls == []


def test_stop_must_wait_for_a_supervisor_that_is_cleaning_up(do, paths, engine):
    end(paths)
    with supervised(paths.root) as other:
        assert do("stop", "a-1")[2][-1] == "a-1 stopped"
        assert other.wait(timeout=60) == -signal.SIGTERM


def test_workers_whose_supervisor_has_died_must_be_stopped_gracefully(do, paths, engine):
    noted(paths, GenerationStarting(0, ("master",), 1, 29500))
    engine.generations = [[]]
    assert do("stop", "a-1")[0] == 0
    assert (engine.calls, engine.graces) == (["adopt", "stop", "down"], [0.01])  # from the job file


def test_a_supervisor_that_ends_before_it_is_asked_must_not_fail_the_stop(do, paths, engine, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    holders = iter([lock.Supervisor(gone.pid, "1")] * 2)
    monkeypatch.setattr(lock, "holder", lambda _: next(holders, None))
    assert do("stop", "a-1")[0] == 0


def test_stop_must_not_signal_a_process_that_may_not_be_a_supervisor_and_must_report_it(do, paths, monkeypatch):
    do.clock = Meanwhile(lambda: None)
    monkeypatch.setattr(lock, "holder", lambda _: lock.Supervisor(0, ""))
    code, _, err = do("stop", "a-1")
    assert code == 1
    assert err[-2] == f"error: {paths.lock} is locked by a process that cannot be verified as its supervisor"


def test_stop_must_name_the_process_whose_lock_was_replaced(do, paths):
    do.clock = Meanwhile(lambda: None)
    with supervised(paths.root) as other:
        paths.lock.unlink()
        paths.lock.symlink_to("/dev/null")
        code, _, err = do("stop", "a-1")
    assert code == 1 and err[-1].endswith(f"; or end process {other.pid}, which has locked it")


def test_stop_must_let_another_command_remove_the_job(do, paths, engine):
    with supervised(paths.root, "rm") as other:

        def removed() -> None:
            run_dir.remove(paths)
            not_none(other.stdin).close()
            other.wait()

        do.clock = Meanwhile(removed)
        assert do("stop", "a-1") == (0, [], ["a-1 stopped"])
        assert other.returncode == 0
    assert engine.calls == [] and not paths.root.exists()


def test_rm_must_say_that_another_command_uses_the_job(do, paths):
    with supervised(paths.root, "prune"):
        code, _, err = do("rm", "a-1")
    assert (code, err[0]) == (2, "error: a-1 is in use by another process")
    assert paths.plan.exists()


def test_stop_must_report_what_it_cannot_remove(do, paths, engine, monkeypatch):
    engine.things = ["container one", "network two"]
    monkeypatch.setattr(engine, "remove", lambda *_: None)
    code, _, err = do("stop", "a-1")
    assert code == 1
    assert err[-2:] == [
        "error: could not remove container one, network two of a-1",
        "hint: python -m orchestrate stop a-1",
    ]


def test_stop_must_keep_nodes_whose_files_cannot_be_copied(do, paths, engine, monkeypatch):
    def full(*_) -> None:
        raise OrchestrateError("no space left")

    engine.things = ["container one"]
    monkeypatch.setattr(engine, "remove", full)
    code, _, err = do("stop", "a-1")
    assert (code, err[-2]) == (1, "error: could not remove all nodes of a-1: no space left")
    assert err[-1].endswith("python -m orchestrate rm a-1")


@pytest.mark.parametrize("file", ["plan.json", "job.yaml"])
@pytest.mark.parametrize("command", ["stop", "rm"])
def test_a_job_whose_files_are_damaged_must_still_be_removed(do, paths, engine, command, file):
    engine.things = ["container one", "network two"]
    (paths.root / file).write_text("[")
    assert do(command, "a-1")[0] == 0
    assert (engine.calls, engine.graces, engine.things) == (["remove a-1"], [30], [])
    assert paths.root.exists() is (command == "stop")
    assert command == "rm" or not_none(records.find(paths.root)).key == ""


@pytest.mark.parametrize("file", ["events.jsonl", "supervisor.lock"])
def test_a_job_whose_files_were_replaced_must_still_be_stopped(do, paths, engine, file):
    engine.things = ["container one"]
    (paths.root / file).unlink(missing_ok=True)
    (paths.root / file).symlink_to("/dev/null")
    assert do("stop", "a-1")[0] == 0
    assert (engine.calls, engine.things) == (["remove a-1"], [])


@pytest.mark.parametrize("command", ["stop", "rm"])
def test_a_job_whose_own_engine_does_not_answer_must_be_kept(do, paths, monkeypatch, command):
    other = Whole()
    other.name = "process"

    def unreachable(spec: JobSpec) -> None:
        assert spec.engine == "docker"  # the engine of its plan
        raise EngineError("docker is away", "start it")

    monkeypatch.setattr(registry, "available_engines", lambda: [other])
    monkeypatch.setattr(registry, "select_engine", unreachable)
    assert do(command, "a-1") == (3, [], ["error: docker is away", "hint: start it"])
    assert paths.root.exists() and other.calls == []


def test_rm_must_refuse_a_running_job_and_name_its_supervisor(do, paths, engine):
    engine.things = ["container one"]
    with supervised(paths.root) as other:
        code, _, err = do("rm", "a-1")
        assert other.poll() is None
    assert (code, err[1]) == (2, "hint: python -m orchestrate stop a-1")
    assert str(other.pid) in err[0]
    assert paths.root.exists() and engine.calls == []
    records.forget(paths.root)
    with supervised(paths.root):
        assert do("rm", str(paths.root))[0] == 2 and paths.root.exists()


def test_rm_with_dry_run_must_only_show_what_it_would_remove(do, paths, engine):
    engine.things = ["container one"]
    assert do("rm", "a-1", "--dry-run") == (0, ["container one", f"folder {paths.root}"], [])
    assert paths.root.exists() and engine.calls == []
    assert do("rm", "a-1") == (0, [], ["a-1 removed"])
    assert engine.calls == ["remove a-1"] and not paths.root.exists()


@pytest.mark.parametrize("command", ["stop", "rm"])
def test_nothing_of_another_users_job_must_be_removed(do, paths, engine, command):
    engine.things = ["container one"]
    engine.states = [runs_elsewhere(paths.root, owner=os.getuid() + 1)]
    assert do(command, "a-1")[0] == 2
    assert engine.calls == [] and paths.root.exists()
    engine.states = [runs_elsewhere(paths.root.with_name("b-1"), "b-1", os.getuid() + 1)]
    assert do(command, "a-1")[0] == 0  # the owner of b-1 does not matter


# --- clusters


def test_a_job_that_has_a_supervisor_again_must_be_asked_to_stop(do, paths, engine, monkeypatch):
    supervise, calls = launch.supervise, []

    def taken_over(*args, **options):
        calls.append(1)
        if len(calls) == 1:
            raise BlockingIOError
        return supervise(*args, **options)

    monkeypatch.setattr(launch, "supervise", taken_over)
    assert do("stop", "a-1")[0] == 0 and len(calls) == 2
    assert not_none(run_dir.ended(paths))["outcome"] == "stopped"


def test_a_job_whose_outcome_could_not_be_recorded_must_be_attachable(do, paths, engine, monkeypatch):
    engine.generations, down = [[ALL_WELL]], engine.down

    def lose_the_disk(*args, **options):
        paths.events.write_text("")
        monkeypatch.setattr(records, "write", raising(OSError(5, "Input/output error")))
        return down(*args, **options)

    engine.down = lose_the_disk
    do("attach", "a-1")
    assert not paths.report.exists() and not_none(records.find(paths.root)).key
