"""Slurm's commands on this machine, and the state of a job in its queue."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import time
from typing import NamedTuple

from orchestrate.errors import EngineError, ResourceError

log = logging.getLogger(__name__)
TIMEOUT = 60.0  # seconds for a command; a busy controller takes long
PORT, CONNECT_TIMEOUT = 6818, 2.0  # of slurmd, unless the site has another one, and seconds to connect to it
KEPT = 2.0  # seconds for which a state counts as current: a site may punish those who ask often
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")  # states of a job in the queue
NEVER = ("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints")  # reasons that seldom end
UNKNOWN = "Invalid job id"  # in what commands print about a job that the controller no longer knows


class State(NamedTuple):
    """The state of a job in the queue, in Slurm's words."""

    name: str  # such as PENDING, RUNNING or COMPLETING; empty if it is not in the queue
    reason: str = ""  # why it is pending
    start: str = ""  # when it is expected to start, if the scheduler knows
    hosts: str = ""  # the machines that it has, as Slurm abbreviates them


_states: dict[str, tuple[float, State]] = {}  # by job: when they were asked for, and what they were


def installed() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def call(*words: str, cwd: str | None = None) -> str:
    """Run a command of Slurm, and return what it prints.

    Raises ResourceError if it is not installed, EngineError with its own words if it fails or takes too long.
    """
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        hint = "run this on a login node of the cluster, where Slurm's commands are installed"
        raise ResourceError(f"the command {words[0]} was not found", hint) from None
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{words[0]} has not answered within {TIMEOUT:g} s", "sdiag shows a busy controller"
        ) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        why = " ".join(line.removeprefix(f"{words[0]}: ").removeprefix("error: ").strip() for line in lines).strip()
        raise EngineError(f"{words[0]}: {why or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors="replace")


def state(job: str, fresh: bool = False) -> State:
    """Return the state of a job; that of the last two seconds unless it has to be `fresh`; raises EngineError."""
    asked, found = _states.get(job, (-KEPT, State("")))
    if fresh or time.monotonic() - asked >= KEPT:
        found = _ask(job)
        _states[job] = time.monotonic(), found
    return found


def _ask(job: str) -> State:
    try:
        text = call("squeue", "--noheader", "--jobs", job, "--format", "%T|%r|%S|%N")
    except EngineError as error:
        if UNKNOWN in str(error):
            return State("")
        raise
    fields = text.strip().split("|")
    return State(*fields) if len(fields) == len(State._fields) else State("")


def facts(job: str) -> dict[str, str]:
    """Return what the controller knows of a job, by its names for it; raises EngineError.

    Of a name that is there twice, the first one counts: the others may be in the job's paths, which come later.
    """
    text = call("scontrol", "show", "job", "--oneliner", job)
    return {name: value for name, _, value in (word.partition("=") for word in reversed(text.split()))}


def _machine(host: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in call("scontrol", "show", "node", "-o", host).split())


def has_lost_its_first_machine(job: str) -> bool:
    """Whether the machine with the batch script of a job is down, or came back without it; raises EngineError."""
    known = facts(job)
    host, nodes = known.get("BatchHost", ""), known.get("NodeList", "(null)")
    if not host or nodes == "(null)":
        return False
    return host not in call("scontrol", "show", "hostnames", nodes).split() or "DOWN" in _machine(host).get("State", "")


def answers(host: str) -> bool:
    """Whether the machine of this name accepts connections of Slurm; raises EngineError."""
    known = _machine(host)
    try:
        socket.create_connection(
            (known.get("NodeAddr") or host, int(known.get("Port") or PORT)), CONNECT_TIMEOUT
        ).close()
        return True
    except (OSError, ValueError):
        return False


def is_leaving(known: dict[str, str]) -> bool:
    """Whether Slurm ends the allocation of this process for another job, or has put its job back into the queue."""
    with contextlib.suppress(ValueError):
        if int(known.get("Restarts", "0")) > int(os.environ.get("SLURM_RESTART_COUNT") or 0):
            return True
    return _has_notice(known)


def _has_notice(known: dict[str, str]) -> bool:
    """Whether a job has to make way for another one."""
    return known.get("PreemptTime", "None") != "None"


def requeues_preempted(known: dict[str, str]) -> bool:
    """Whether a job has notice to make way for another one, and Slurm puts it back into the queue once it has ended.

    Slurm does since 24.05 (`GRACE_PREEMPT` in proc_req.c), and would do so again at the end of a job that is requeued
    before. Raises EngineError.
    """
    if not _has_notice(known):
        return False
    version = re.search(r"(\d+)\.(\d+)", call("sbatch", "--version"))
    if not version or (int(version[1]), int(version[2])) < (24, 5):
        return False
    return "PreemptMode=REQUEUE" in call("scontrol", "show", "partition", "--oneliner", known.get("Partition", ""))


def is_inside(job: str) -> bool:
    """Whether this process runs on a machine of the job."""
    return os.environ.get("SLURM_JOB_ID") == job
