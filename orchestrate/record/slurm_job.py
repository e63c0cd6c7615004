"""A job's place in the queue of a scheduler: a job of Slurm, whose batch script is the supervisor."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import sys
import time
from pathlib import Path

from orchestrate.dataclass import dataclass
from orchestrate.errors import EngineError, OrchestrateError
from orchestrate.files.folder import content, replacing_links
from orchestrate.host import records, slurm
from orchestrate.host.records import Record
from orchestrate.record.paths import JobPaths

ATTEMPTS = 5  # to cancel a job, one second apart
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """A job of Slurm that supervises, or will supervise, the job with these files."""

    id: str
    paths: JobPaths

    def __str__(self) -> str:
        """Describe it in messages."""
        return f"job {self.id} of Slurm"

    def waits(self) -> bool:
        """Whether it waits in the queue, as far as that is known."""
        with contextlib.suppress(EngineError):
            return slurm.state(self.id).name in slurm.WAITING
        return False

    def ask_to_stop(self) -> bool:
        """Ask it to stop, or cancel it if it has not started; return False if it is not in the queue anymore."""
        state = slurm.state(self.id, fresh=True)
        if not state.name:
            return False
        records.put(self.paths.stop_asked, "")
        supervised = state.name == "RUNNING" and not slurm.has_lost_its_first_machine(self.id)
        how = ["--batch", "--signal=TERM"] if supervised else []
        for left in reversed(range(ATTEMPTS)):
            try:
                slurm.call("scancel", *how, self.id)
                break
            except EngineError as error:
                if slurm.UNKNOWN in str(error) or "already" in str(error):  # it has just ended
                    break
                if not left:
                    raise
                time.sleep(1.0)
        return True


def early_log(paths: JobPaths) -> Path:
    """Return the file for what a batch script prints before it has its own log: Slurm would follow a link in a run."""
    return records.place(paths.root) / f"{paths.root.name}.slurm"


def take_log(paths: JobPaths) -> None:
    """Let this process, the batch script, write to the log of the supervisor from now on; raises OSError."""
    with open(paths.supervisor_log, "ab", opener=replacing_links) as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    early_log(paths).unlink(missing_ok=True)


def of(paths: JobPaths) -> Batch | None:
    """Return the job of Slurm to which a job was submitted last, on whatever machine; None if it was not."""
    with contextlib.suppress(OSError, ValueError):
        number, _, mac = content(paths.batch).strip().partition(" ")
        record = records.find(paths.root)
        if (
            record
            and re.fullmatch("[0-9]{1,20}", number)
            and hmac.compare_digest(mac.encode(), _mac(record, number).encode())
        ):
            return Batch(number, paths)
    return None


def is_own(paths: JobPaths) -> bool:
    """Whether a job was submitted as the job of Slurm that this process runs in."""
    found = of(paths)
    return found is not None and slurm.is_inside(found.id)


def holder(batch: Batch) -> Batch | None:
    """Return it as long as it is in the queue; also while that is unknown, since the controller does not answer."""
    with contextlib.suppress(EngineError):
        if not slurm.state(batch.id).name:
            return None
    return batch


def is_evicted(found: Batch) -> bool:
    """Whether a signal to its supervisor is that of Slurm, before a time limit or for another job.

    Otherwise a user has asked for it, by our own command or by Slurm's.
    """
    if os.path.lexists(found.paths.stop_asked):
        return False
    try:
        known = slurm.facts(found.id)
    except EngineError as error:
        log.info("%s", error)
        return True
    return known.get("JobState") == "RUNNING" or slurm.is_leaving(known)  # the former before a time limit


def last_state(found: Batch) -> str:
    """Return the state of a job that is not in the queue anymore, such as CANCELLED or TIMEOUT; empty if unknown."""
    with contextlib.suppress(OrchestrateError):  # the controller knows it for some minutes
        return slurm.facts(found.id).get("JobState", "")
    with contextlib.suppress(OrchestrateError):  # and accounting later, if the cluster has it
        text = slurm.call("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", f"--jobs={found.id}")
        return (text.split() or [""])[0]
    return ""


def requeue(found: Batch) -> bool:
    """Put the job of Slurm that this process runs in back into the queue; return False if it has to be submitted again.

    Slurm may have done that already, or do it once this process has ended.
    """
    with contextlib.suppress(EngineError):
        if slurm.requeues_preempted(slurm.facts(found.id)):
            return True
    try:
        slurm.call("scontrol", "requeue", found.id)
    except EngineError as error:
        log.info("%s", error)
        with contextlib.suppress(EngineError):
            return "disabled" not in str(error) and "PREEMPTED" not in slurm.facts(found.id).get("JobState", "")
    return True


def keep(paths: JobPaths, number: str) -> None:
    """Record to which job of Slurm a job was submitted; raises OSError."""
    records.drop(paths.stop_asked)
    records.put(paths.batch, f"{number} {_mac(records.need(paths.root), number)}\n")


def _mac(record: Record, number: str) -> str:
    """Authenticate the number of a job; its digest in the record could be lost, which the supervisor writes, too."""
    return hmac.digest(bytes.fromhex(record.events), f"slurm {number}".encode(), "sha256").hex()


def stay_ended(found: Batch) -> None:
    """Keep Slurm from putting the job that this process runs in, which has ended, back into the queue.

    It would do so after an earlier preemption of which it has not forgotten that it gave notice.
    """
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        with contextlib.suppress(EngineError):
            slurm.call("scontrol", "update", f"JobId={found.id}", "Requeue=0")
