"""Find the root cause of a failed generation: the worker, the cause, and a hint. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from orchestrate.plan.plan import Plan
from orchestrate.record.events import WorkerEnded
from orchestrate.record.outcomes import TERMINATED_EXIT_CODE, Cause, WorkerExit
from orchestrate.spec.causes import Reason
from orchestrate.supervise.diagnosis.symptoms import FEWER_LOADERS, IN_ERRORS, IN_LINES
from orchestrate.supervise.diagnosis.tracebacks import before_dump, final_errors

ABORTED, KILLED = 134, 137  # exit codes: 128 + the number of the signal
BY_SIGNAL = {132, ABORTED, 135, 136, KILLED, 139}  # ILL, ABRT, BUS, FPE, KILL, SEGV: not caused by a lost peer
PEER_FAILURE_WINDOW = 2.0  # seconds in which the peers of a dead worker also fail

# Messages of gloo, NCCL and the store about a peer that is gone or does not respond.
TIMEOUT = re.compile(
    r"[Tt]imed out (waiting|after)|collective operation timeout|Wait timeout|DistStoreError.*imed out|wait timeout"
)
COMPLAINT = re.compile(
    r"onnection (closed|reset|refused)|remote process exited|communicator was aborted|Broken pipe|DistNetworkError"
    rf"|{TIMEOUT.pattern}"
)

ENGINES_EVENTS = "see docker events, and dmesg on the host"
MORE_MEMORY = "raise the limit (--memory 8g), or lower the batch size"
LOCAL_HINTS = {  # hints replaced for local processes, which have no limits and no engine
    ENGINES_EVENTS: "killed by a user or its worker, or when its machine stopped or ran out of memory: see dmesg there",
    MORE_MEMORY: "use a smaller batch or fewer workers; with Slurm, or raise the limit (--memory 8g)",
    FEWER_LOADERS: "this machine ran out of memory: use fewer DataLoader workers",
}
BY_CODE = {
    2: (Reason.USAGE, "the script rejected its arguments: see its --help"),
    64: (Reason.USAGE, "the script rejected its arguments: see its --help"),
    78: (Reason.USAGE, "the script rejected its configuration"),
    126: (Reason.NOT_STARTED, "the program could not be started: see the end of its log"),
    127: (Reason.NOT_STARTED, "a program or script was not found: see the end of the log"),
    132: (Reason.CRASH, "the program uses an instruction that this CPU does not support: it was built for another CPU"),
    ABORTED: (Reason.CRASH, "the lines above show the stack of each thread"),
    135: (Reason.SHARED_MEMORY, "/dev/shm was probably full: --set shm_size=4g"),
    136: (Reason.CRASH, "the lines above show the stack of each thread"),
    KILLED: (Reason.KILLED, "killed by a user, or by the kernel when out of memory: see dmesg on the host"),
    139: (Reason.CRASH, "it crashed in native code; the lines above show the stack of each thread"),
    TERMINATED_EXIT_CODE: (Reason.TERMINATED, "it received SIGTERM from outside the job, for example on preemption"),
}
BY_ENGINE = {
    Reason.OUT_OF_MEMORY: MORE_MEMORY,
    Reason.OUT_OF_MEMORY_IN_A_CHILD: FEWER_LOADERS,
    Reason.NODE_LOST: ENGINES_EVENTS,
    Reason.NODE_STOPPED: "stopped by docker stop, kill, restart or rm; use orchestrate stop to end a job",
    Reason.PARTITION: "check whether the network was removed or the node disconnected (docker network disconnect)",
    Reason.HOST_LOST: "see docker node ls; other hosts take over its nodes, or set min_trainers to continue with fewer",
    Reason.ENGINE_LOST: "the engine restarted; with live-restore in its daemon.json, jobs continue while it is down",
    Reason.INTERRUPTED: "no action needed: the workers restart",
}
SUMMARY = {
    Reason.OUT_OF_MEMORY: "was killed by the kernel's OOM killer",
    Reason.OUT_OF_MEMORY_IN_A_CHILD: "lost a child process to the kernel's OOM killer",
    Reason.NODE_LOST: "was lost with its node, which exited",
    Reason.NODE_STOPPED: "was terminated with its node, which was stopped or removed",
    Reason.PARTITION: "was cut off from the job's network",
    Reason.HOST_LOST: "was lost with its host, which is down or unreachable",
    Reason.ENGINE_LOST: "was lost while the engine was unavailable",
    Reason.INTERRUPTED: "was starting when the orchestrator died",
    Reason.TIMEOUT: "did not join a collective in time, and its peers timed out",
    Reason.LEFT_EARLY: "exited while the others were still communicating with it",
}


def is_peer_failure(lines: Sequence[str], about: re.Pattern[str] = COMPLAINT) -> bool:
    """Whether a worker's last lines before a dump of its stacks are about a peer that is gone or does not respond."""
    return bool(about.search("\n".join([line for line in before_dump(lines) if line.strip()][-3:])))


def find_root_cause(
    ends: Sequence[WorkerEnded], last_lines: Callable[[int], list[str]], window: float = PEER_FAILURE_WINDOW
) -> tuple[WorkerExit, Reason | None]:
    """Return the worker that is the root cause, and the reason if it did not fail itself.

    Peers of a dying worker may be reported before it. A death by signal or with the node explains complaints about a
    lost peer, and so does any other error; never the reverse. An abort whose last lines are a complaint comes from
    NCCL's watchdog, which aborts a worker when a peer is gone.

    `ends`, at least one, are in the engine's order; `last_lines(rank)` are a worker's last lines; `window` is the time
    in seconds after the first failure in which another exit can be its cause.
    """
    failed = [end for end in ends if end.exit_code and not (end.stopping and end.exit_code == TERMINATED_EXIT_CODE)]
    failed = failed or [end for end in ends if end.exit_code] or list(ends)
    first = failed[0].seconds
    near = [end.exit for end in failed if end.seconds - first < window]
    own_errors = [exit for exit in near if not is_peer_failure(last_lines(exit.rank))]
    signaled = [exit for exit in near if exit.code in BY_SIGNAL and (exit.code != ABORTED or exit in own_errors)]
    if signaled or own_errors:
        return (signaled or own_errors)[0], None
    left = [end.exit for end in ends if end.exit_code == 0 and end.seconds - first < window and not end.stopping]
    if left:
        return left[0], Reason.LEFT_EARLY
    late = [exit for exit in (end.exit for end in ends if end.stopping) if exit not in near]
    late = [exit for exit in late if not is_peer_failure(last_lines(exit.rank))]
    if late and any(is_peer_failure(last_lines(exit.rank), TIMEOUT) for exit in near):
        return late[0], Reason.TIMEOUT
    return near[0], None


def diagnose(
    plan: Plan,
    exit: WorkerExit,
    known: Reason | None,
    lines: list[str],
    log: str,
    host: str = "",
    context: Sequence[str] = (),
    what: str = "",
) -> Cause:
    """Return the cause of a worker's failure; `known` is what the engine or supervisor knows besides its exit code.

    `lines` are its last lines for the report, and `context` more of them, in which its error is searched. `host` is the
    host of its node, if the engine has several. `what` is how it has ended, if that was not with its exit code.
    """
    worker, local = plan.workers[exit.rank], not plan.contained
    cause, hint = BY_CODE.get(
        exit.code, (Reason.ERROR, "the lines above are the end of its log; the cause may be further up")
    )
    if (exit.code < 128 or exit.code == ABORTED) and (found := _symptom(plan, lines, context or lines)):
        cause, hint = found
    if cause == Reason.ERROR and any("Traceback (most recent call last)" in line for line in lines):
        hint = ""  # the traceback is complete
    if cause == Reason.ERROR and not lines:
        hint = "it printed nothing: its script may have called sys.exit()"
    if known:
        cause = known
        hint = BY_ENGINE.get(known, hint)
    if local:
        hint = LOCAL_HINTS.get(hint, hint)
    if cause in (Reason.TIMEOUT, Reason.LEFT_EARLY):
        hint = "see the log of this rank for what it did before"
    if cause == Reason.LEFT_EARLY and not exit.code:
        hint += "; all ranks need the same number of batches, and the same calls, also in `if rank == 0`"
    return Cause(
        rank=exit.rank,
        node=worker.node,
        exit_code=exit.code,
        cause=cause,
        summary=f"{_subject(exit.rank, lines)} on {worker.node}{host and f' ({host})'} "
        f"{what or _end(exit.code, SUMMARY.get(cause, ''), stopping=cause == Reason.TIMEOUT)}",
        hint=hint,
        last_lines=lines,
        log=log,
    )


def _symptom(plan: Plan, lines: Sequence[str], context: Sequence[str]) -> tuple[Reason, str] | None:
    """Return cause and hint for the first symptom in a worker's last lines, or in the errors with which it ended."""
    texts = [("\n".join(lines), IN_LINES)]
    texts += [(error, IN_ERRORS) for error in final_errors(before_dump(context) or context)]
    for text, symptoms in texts:
        for symptom in symptoms:
            match = re.search(symptom.text, text)
            if match and not (symptom.cause == Reason.NO_GPUS and plan.gpus):
                advice = symptom.local if not plan.contained and symptom.local else symptom.hint
                exact = symptom.exact(match, plan)
                return exact and symptom.sure or symptom.cause, exact or match.expand(advice)
    return None


def _subject(rank: int, lines: list[str]) -> str:
    """What has failed: the worker, or the command that it was waiting for."""
    return "`before`" if lines and f"[node] rank {rank} was not started: " in lines[-1] else f"rank {rank}"


def _end(code: int, what: str, stopping: bool) -> str:
    """How a worker has ended; without the exit code if that is of our own SIGTERM."""
    if what and stopping and code == TERMINATED_EXIT_CODE:
        return what
    if not what and code > 128 and code - 128 in signal.valid_signals():
        what = f"was killed by {signal.Signals(code - 128).name}"
    return f"{what} (exit code {code})" if what else f"exited with code {code}"
