"""Claims of jobs on the GPUs of a machine, in a folder that all accounts share and anyone may write to."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.methods import raising
from support.optional import not_none
from support.other_user import USER, as_user
from support.repo import ROOT

from orchestrate.host import claims
from orchestrate.host.claims import Ticket, found, users

OTHER = """
import pathlib, sys
from orchestrate.host import claims
claims.TOP = pathlib.Path(sys.argv[1])
ticket = claims.Ticket(sys.argv[2])
uses, among = (tuple(filter(None, word.split(","))) for word in sys.argv[3:5])
if among:
    ticket.enqueue(among, len(among))
print(ticket.take(uses, {}), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(claims, "TOP", tmp_path)
    return tmp_path / f"{claims.PREFIX}{os.geteuid()}"


def started(job: str, uses: str = "", among: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", OTHER, str(claims.TOP), job, uses, among]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def other(job: str, uses: str = "", among: str = "") -> Iterator[subprocess.Popen]:
    """Another process with a claim."""
    with started(job, uses, among) as process:
        assert not_none(process.stdout).readline() == "True\n"
        yield process


def test_a_claim_must_count_while_its_process_lives(folder):
    with other("a-1", "GPU-1,GPU-2") as process:
        assert {gpu: claim.job for gpu, claim in users("b-1").items()} == {"GPU-1": "a-1", "GPU-2": "a-1"}
        assert not users("a-1")  # of its own supervisor
        process.kill()
        process.wait()
        assert not found()
        assert os.listdir(folder) == []  # what the dead one has left is removed


def test_a_lock_of_another_account_must_not_keep_the_claim_of_a_dead_process(folder):
    with other("a-1", "GPU-1") as process:
        assert claims.process("a-1") == process.pid
        (path,) = folder.iterdir()
        with path.open("rb") as file:  # other accounts cannot open it for writing
            process.kill()
            process.wait()
            fcntl.flock(file, fcntl.LOCK_EX)
            assert not found() and not claims.process("a-1")


def test_a_process_that_has_got_the_id_of_a_dead_one_must_not_be_taken_for_it(folder):
    with Ticket("a-1") as ticket:
        ticket.take(("GPU-1",))
        (path,) = folder.iterdir()
        assert claims.process("a-1") == os.getpid() and path.stat().st_mode & 0o777 == 0o644
        known = json.loads(path.read_text())
        path.write_text(json.dumps(known | {"process": [os.getpid(), "1"]}))
        assert [claim.job for claim in found()] == ["a-1"] and not claims.process("a-1")


def test_a_claim_must_end_with_its_ticket(folder):
    with Ticket("a-1") as ticket:
        assert not os.path.lexists(folder)  # nothing is written for a job without GPUs
        assert ticket.take(()) and not os.path.lexists(folder)
        assert ticket.take(("GPU-1",), {}) and [claim.uses for claim in found()] == [("GPU-1",)]
        assert ticket.take(("GPU-2",), {}) and [claim.uses for claim in found()] == [("GPU-2",)]
    assert not found() and os.listdir(folder) == []


def test_a_gpu_must_be_claimed_by_one_of_many_jobs_that_start_at_the_same_moment():
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(f"a-{number}", "GPU-1")) for number in range(6)]
        said = [not_none(process.stdout).readline() for process in processes]
        assert sorted(said) == ["False\n"] * 5 + ["True\n"]
        for process in processes:
            not_none(process.stdin).close()


def test_a_gpu_that_was_in_use_when_it_was_chosen_may_be_shared_but_not_from_the_queue():
    with other("a-1", "GPU-1"), Ticket("b-1") as ticket:
        known = users("b-1")
        assert not ticket.take(("GPU-1",), known, queued=True)
        assert not ticket.take(("GPU-1",), {})
        assert ticket.take(("GPU-1",), known)


def test_the_queue_must_be_in_order_of_arrival_for_each_gpu():
    with other("a-1", "", "GPU-1,GPU-2"), other("b-1", "", "GPU-2"), other("c-1", "", "GPU-3"), Ticket("d-1") as own:
        own.enqueue(("GPU-2", "GPU-5"), 1)
        assert [claim.job for claim in found()] == ["a-1", "b-1", "c-1", "d-1"]
        assert [claim.job for claim in own.ahead(("GPU-2",))] == ["a-1", "b-1"]
        with other("z-1", "", "GPU-4"):
            own.enqueue(("GPU-2",), 1)  # what was free for a moment; it keeps its place
            assert [claim.job for claim in found()][-2:] == ["d-1", "z-1"]
        assert not own.take(("GPU-2",), {}, queued=True)
        with Ticket("e-1") as late:  # which has not waited yet
            assert [claim.job for claim in late.ahead(("GPU-3",))] == ["c-1"]
            assert not late.take(("GPU-3",), {}, queued=True)
            assert late.take(("GPU-3",), {})  # without the queue


def test_a_supervisor_must_take_over_the_claim_of_the_process_that_has_prepared_its_job():
    with Ticket("a-1") as supervisor:
        with other("a-1", "GPU-1"):
            supervisor.inherit()
        assert [(claim.job, claim.uses) for claim in found()] == [("a-1", ("GPU-1",))]


@pytest.mark.parametrize(
    ("among", "count", "text"),
    [
        (("G",), 1, "1 GPU"),
        (("G", "H"), 1, "one of 2 GPUs"),
        (("G", "H", "I"), 2, "2 of 3 GPUs"),
        (("G", "H"), 2, "2 GPUs"),
        ((claims.CORES,), 1, "the cores"),
    ],
)
def test_what_a_job_waits_for_must_be_described(among, count, text):
    assert claims.wanted(among, count) == text


@pytest.mark.parametrize(
    ("engine", "gpus", "pin", "needed"),
    [
        ("docker", ("GPU-1",), True, ("GPU-1",)),
        ("process", (), True, (claims.CORES,)),
        ("process", (), False, ()),
        ("swarm", ("NVIDIA-GPU",), False, ()),  # of other machines
    ],
)
def test_a_job_must_claim_its_gpus_or_the_cores_of_this_machine(engine, gpus, pin, needed):
    assert claims.needs(engine, gpus, pin) == needed


# --- what other accounts can put into the folder


def invalid() -> list[bytes]:
    whole = {"job": "x-1", "uses": ["GPU-1"], "among": [], "count": 0}
    changes: list[dict] = [{"job": "../x"}, {"job": 1}, {"uses": 3}, {"uses": ["\x1b[31m"]}, {"count": -1}]
    changes += [{"uses": [f"G{number}" for number in range(257)]}]
    changes += [{"count": 2}, {"count": True, "among": ["G"]}, {"among": [["G"]]}, {"among": None}]
    texts = [json.dumps(whole | change).encode() for change in changes]
    return [*texts, b"", b"\0", b"[" * 60_000, b"{}", b"[1]", b"\xff", json.dumps(whole).encode() + b" " * (64 << 10)]


@pytest.mark.parametrize("text", invalid(), ids=lambda text: repr(text[:40]))
def test_files_that_are_no_claims_must_be_ignored(folder, text):
    with Ticket("a-1") as ticket:
        ticket.take(("GPU-2",))
        (folder / "x").write_bytes(text)
        with (folder / "x").open("r+b") as locked:
            fcntl.lockf(locked, fcntl.LOCK_EX)
            assert [claim.job for claim in found()] == ["a-1"]


def test_special_files_and_links_must_neither_be_followed_nor_block(folder, tmp_path):
    with other("b-1", "GPU-1") as process:
        (name,) = os.listdir(folder)
        os.rename(folder / name, tmp_path / "elsewhere")
        os.mkfifo(folder / "fifo")
        (folder / "folder").mkdir()
        (folder / "link").symlink_to(tmp_path / "elsewhere")
        (folder / "loop").symlink_to("loop")
        assert not found()
        process.kill()


def test_only_a_limited_number_of_names_must_be_read(folder, monkeypatch):
    folder.mkdir()
    for number in range(9):
        (folder / f"a-{number}").touch()
    read = []

    def entries(folder: int | Path) -> Iterator[os.DirEntry]:
        with real(folder) as found:
            for entry in found:
                read.append(entry.name)
                yield entry

    real = os.scandir
    monkeypatch.setattr(claims, "MAX_CLAIMS", 3)
    monkeypatch.setattr(os, "scandir", lambda folder: contextlib.nullcontext(entries(folder)))
    assert not found() and len({*read} - {folder.name}) == 3


@pytest.mark.parametrize("how", ["file", "link", "writable"])
def test_a_name_that_is_taken_must_not_prevent_a_claim(folder, tmp_path, how):
    if how == "file":
        folder.touch()
    elif how == "link":
        (tmp_path / "other").mkdir()
        folder.symlink_to(tmp_path / "other")
    else:  # others could remove claims
        folder.mkdir()
        folder.chmod(0o777)
    with Ticket("a-1") as ticket, Ticket("b-1") as other:
        assert ticket.take(("GPU-1",)) and other.take(("GPU-2",)) and not ticket.problem
        assert {claim.job for claim in found()} == {"a-1", "b-1"}
        assert len(list(tmp_path.glob(f"{folder.name}-*"))) == 1


def test_a_claim_that_cannot_be_written_must_leave_nothing_and_be_reported(folder, monkeypatch):
    with Ticket("a-1") as ticket:
        ticket.take(("GPU-1",))
    monkeypatch.setattr(os, "pwrite", raising(OSError(28, "No space left on device")))
    with Ticket("b-1") as ticket:
        assert ticket.take(("GPU-1",), {})
        assert ticket.problem == f"{folder}: No space left on device"
    assert os.listdir(folder) == []


def test_a_decision_of_another_account_must_delay_a_job_only_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "DECISION_TIMEOUT", 0.05)
    locked = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with Ticket("a-1") as ticket:
            assert ticket.take(("GPU-1",), {})
    finally:
        os.close(locked)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another account")
def test_claims_of_other_accounts_must_count_and_name_them_and_theirs_alone(monkeypatch):
    top = Path(tempfile.mkdtemp())
    top.chmod(0o1777)
    monkeypatch.setattr(claims, "TOP", top)

    def look() -> None:
        assert [str(claim) for claim in found()] == ["a-1 of root (user 0)"]
        with Ticket("b-1") as ticket:
            assert not ticket.take(("GPU-1",), {}) and ticket.take(("GPU-2",), {})
            assert {claim.job: claim.uid for claim in found()} == {"a-1": 0, "b-1": USER}
            (mine,) = top.glob(f"{claims.PREFIX}{USER}")
            for number in range(claims.MAX_CLAIMS + 9):  # they hide no claims of others
                (mine / f"empty-{number}").touch()
            (top / f"{claims.PREFIX}0-more").mkdir()  # does not count as root's
            assert not ticket.take(("GPU-1",), {})
            for path in top.glob(f"{claims.PREFIX}0/*"):
                with contextlib.suppress(PermissionError):
                    path.unlink()
                    raise AssertionError("accounts can remove each other's claims")

    try:
        with other("a-1", "GPU-1") as process:
            as_user(look)
            assert [claim.job for claim in found()] == ["a-1"]
            process.kill()
    finally:
        shutil.rmtree(top)
