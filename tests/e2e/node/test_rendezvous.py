"""Under plain Compose, the master must collect its trainers, assign their ranks, and run the gang to its end."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from support.joining import NINE, TEN, WAITS

from orchestrate.node import rendezvous


def test_ranks_must_follow_the_numbers_of_trainers_whichever_joins_first(project):
    project.start("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])", NODE_NPROC="2")
    nine, ten = project.both()
    first, second = nine.hears()["envs"], ten.hears()["envs"]
    assert [env["RANK"] for env in [*first, *second]] == ["2", "3", "4", "5"]
    expected = {"WORLD_SIZE": "6", "NODE_RANK": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "master"}
    expected |= {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "compose", "GLOO_SOCKET_IFNAME": "eth0"}
    assert expected.items() <= second[1].items()
    for trainer, ranks in ((nine, (2, 3)), (ten, (4, 5))):
        for rank in ranks:
            trainer.say(say="exited", rank=rank, code=0)
    code, out = project.ends()
    assert code == 0
    assert "[node] 3 nodes, world size 6, rank 0 on the master\n" in out
    assert "[rank 0] 0 6\n" in out and "[rank 1] 1 6\n" in out


def test_a_gang_must_last_until_its_last_worker_has_ended(project):
    project.start("print('ready')")
    nine, ten = project.both()
    assert (nine.ranks(), ten.ranks()) == (["1"], ["2"])
    project.ready()
    nine.say(say="exited", rank=1, code=0)
    nine.close()  # a trainer whose workers have ended leaves
    assert project.trainer("127.0.0.4", hello=False).hears() is None  # the master has read the message by now
    ten.say(say="exited", rank=2, code=5)
    assert project.ends()[0] == 5


def test_the_first_failure_must_end_the_gang_and_set_the_masters_exit_code(project):
    project.start(WAITS)
    nine, ten = project.both()
    assert (nine.ranks(), ten.ranks()) == (["1"], ["2"])
    project.ready()
    ten.say(say="exited", rank=2, code=3)
    assert nine.hears() == {"ask": "end"} and ten.hears() == {"ask": "end"}
    nine.say(say="exited", rank=1, code=143)
    code, out = project.ends()
    assert code == 3
    assert "rank 2 on trainer-10 failed with exit code 3; stopping the others" in out and out.count("failed") == 1


def test_a_trainer_that_disconnects_must_end_the_gang_as_if_it_had_been_killed(project):
    project.start(WAITS, NODE_NPROC="2")
    nine, ten = project.both()
    assert (nine.ranks(), ten.ranks()) == (["2", "3"], ["4", "5"])
    nine.close()
    assert ten.hears() == {"ask": "end"}
    code, out = project.ends()
    assert code == 137
    assert "rank 2 on trainer-9 failed with exit code 137" in out


def test_a_trainer_that_disconnects_before_it_has_joined_must_be_named(project):
    project.start(WAITS)
    ten = project.trainer(TEN)
    project.trainer(NINE, hello=False).close()
    assert ten.hears() == {"ask": "end"}
    code, out = project.ends()
    assert code == 1
    assert "error: trainer-9 disconnected before the job started" in out and "[rank 0]" not in out


def test_trainers_that_do_not_join_in_time_must_be_named(project):
    project.start(WAITS, NODE_JOIN_TIMEOUT="0.5")
    nine = project.trainer(NINE)
    assert nine.hears() == {"ask": "end"}
    code, out = project.ends()
    assert code == 1
    assert "error: trainer-10 did not join in time" in out and "trainer-9" not in out


def test_a_gang_that_has_joined_in_time_must_not_be_ended_by_the_time_limit(project):
    project.start("import time\ntime.sleep(0.5)", NODE_JOIN_TIMEOUT="0.4")  # the script takes longer
    nine, ten = project.both()
    assert (nine.ranks(), ten.ranks()) == (["1"], ["2"])
    nine.say(say="exited", rank=1, code=0)
    ten.say(say="exited", rank=2, code=0)
    assert project.ends()[0] == 0


def test_a_trainer_that_disconnects_before_others_have_joined_must_end_the_job_at_once(project):
    project.start(WAITS)
    project.trainer(NINE).close()
    code, out = project.ends()
    assert (code, out.count("disconnected before the job started")) == (1, 1)
    assert "error: trainer-9 disconnected" in out


def test_unknown_and_duplicate_trainers_must_be_rejected(project):
    project.start(WAITS)
    nine = project.trainer(NINE)
    assert project.trainer("127.0.0.4", hello=False).hears() is None
    assert project.trainer(NINE, hello=False).hears() is None
    ten = project.trainer(TEN)
    assert (nine.ranks(), ten.ranks()) == (["1"], ["2"])


def test_more_workers_than_gpus_must_end_the_gang_before_it_starts_with_a_hint(project):
    project.gpus = ["GPU-a", "GPU-b"]
    project.start("print('ran')")
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # all on one machine
    nine, ten = (project.trainer(address, host=host, gpus=project.gpus) for address in (NINE, TEN))
    assert nine.hears() == {"ask": "end"} and ten.hears() == {"ask": "end"}
    code, out = project.ends()
    assert code == 1
    assert "error: 3 workers on one machine need as many GPUs; it has 2" in out
    assert "hint: use fewer nodes (--scale trainer=N)" in out and "[rank 0]" not in out


def test_nodes_of_one_machine_must_get_different_gpus_and_other_nodes_those_of_their_machine(project):
    project.gpus = ["GPU-a", "GPU-b"]
    project.start("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])", JOB_ID="mine")
    host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    nine, ten = project.trainer(NINE, host=host, gpus=project.gpus), project.trainer(TEN, gpus=["GPU-c"])
    (first,), (second,) = nine.hears()["envs"], ten.hears()["envs"]
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("GPU-b", "GPU-c")
    assert first["TORCHELASTIC_RUN_ID"] == "mine"
    nine.say(say="exited", rank=1, code=0)
    ten.say(say="exited", rank=2, code=0)
    code, out = project.ends()
    assert code == 0 and "[rank 0] GPU-a\n" in out


def test_a_master_that_gets_sigterm_must_stop_its_trainers_too(project):
    project.start(WAITS)
    nine, ten = project.both()
    assert (nine.ranks(), ten.ranks()) == (["1"], ["2"])
    project.ready()
    project.node.send_signal(signal.SIGTERM)
    assert nine.hears() == {"ask": "end"} and ten.hears() == {"ask": "end"}
    assert project.ends()[0] == 143


def test_a_master_without_trainers_must_train_alone(project):
    project.names = {}
    project.start("import os\nprint(os.environ['WORLD_SIZE'])\nraise SystemExit(4)")
    code, out = project.ends()
    assert code == 4 and "[rank 0] 1\n" in out


# --- a trainer


def test_a_trainer_must_report_its_machine_run_its_workers_and_report_their_exits(project, master):
    project.gpus = ["GPU-a"]
    joined = master("import os, sys\nprint(os.environ['GIVEN'])\nsys.exit(int(os.environ['CODE']))")
    assert joined.hello["cpus"] == os.cpu_count() and joined.hello["gpus"] == ["GPU-a"]
    assert joined.hello["host"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    joined.side.say(ask="run", envs=[{"RANK": "2", "CODE": "0"}, {"RANK": "3", "CODE": "5", "GIVEN": "2"}])
    ends = [joined.side.hears() for _ in range(2)]
    assert sorted((end["rank"], end["code"]) for end in ends) == [(2, 0), (3, 5)]
    code, out = project.ends()
    assert code == 5
    assert "[rank 2] 1\n" in out and "[rank 3] 2\n" in out


@pytest.mark.parametrize("gone", [False, True], ids=["stopped", "master gone"])
def test_a_trainer_must_stop_its_workers_when_the_gang_ends(project, master, gone):
    joined = master(
        "import os, signal, sys\nif os.environ['RANK'] == '2': sys.exit(4)\n"
        "signal.signal(15, lambda *_: sys.exit(7))\nprint('ready')\nsignal.pause()"
    )
    joined.side.say(ask="run", envs=[{"RANK": "1"}, {"RANK": "2"}])
    assert joined.side.hears() == {"say": "exited", "rank": 2, "code": 4}
    project.ready()
    if gone:
        joined.side.close()
    else:
        joined.side.say(ask="end")
        assert joined.side.hears() == {"say": "exited", "rank": 1, "code": 7}
    assert project.ends()[0] == 4


def test_a_trainer_that_is_stopped_before_it_starts_workers_must_exit(project, master):
    joined = master("print('ran')")
    joined.side.say(ask="end")  # before any request to start workers
    code, out = project.ends()
    assert (code, out) == (0, "")


def test_a_trainer_without_a_master_must_report_it_after_the_time_limit(project):
    project.start("print('ran')", NODE_ROLE="trainer", NODE_JOIN_TIMEOUT="0.2")
    code, out = project.ends()
    assert code == 1
    assert "error: cannot connect to the master: " in out and "refused" in out and "ran" not in out


def test_a_trainer_must_wait_for_a_master_that_is_not_listening_yet(monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX) as master:
        master.bind(str(tmp_path / "master"))
        monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: master.listen())
        rendezvous.connect(socket.AF_UNIX, str(tmp_path / "master"), 60).close()


# --- name resolution


def test_a_temporary_failure_in_name_resolution_must_be_retried(monkeypatch):
    answers: list[Any] = [socket.gaierror(socket.EAI_AGAIN, "later"), ("trainer", [], ["10.0.0.2"])]

    def resolve(name: str) -> tuple[str, list[str], list[str]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(socket, "gethostbyname_ex", resolve)
    monkeypatch.setattr(socket, "gethostbyaddr", lambda address: ("no-number", [], [address]))
    assert rendezvous.trainers() == {"10.0.0.2": "trainer-0"}
    answers[:] = [socket.gaierror(socket.EAI_AGAIN, "later")] * 3
    assert rendezvous.trainers() == {} and not answers
    answers[:] = [socket.gaierror(socket.EAI_NONAME, "none")]  # a permanent error, which is not retried
    assert rendezvous.trainers() == {} and not answers


def test_a_trainer_whose_name_cannot_be_looked_up_must_still_be_expected(monkeypatch):
    def unknown(address: str) -> tuple[str, list[str], list[str]]:
        raise socket.herror(1, "Unknown host")

    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: ("trainer", [], ["10.0.0.2"]))
    monkeypatch.setattr(socket, "gethostbyaddr", unknown)
    assert rendezvous.trainers() == {"10.0.0.2": "trainer-0"}  # it does not join in time, and is named
