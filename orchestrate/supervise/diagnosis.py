"""Who is to blame for the end of a generation, what it was, and what to do. Pure."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Sequence

from orchestrate.job.outcomes import TERMINATED, Cause, ObservedExit, Reason, WorkerExit
from orchestrate.job.plan import Plan

ABORTED, KILLED = 134, 137  # exit codes: 128 + the number of the signal
BY_SIGNAL = {132, ABORTED, 135, 136, KILLED, 139}  # ILL, ABRT, BUS, FPE, KILL, SEGV: never a complaint about a peer
PEER_FAILURE_WINDOW = 2.0  # seconds in which the peers of a dead worker fail, too

# How gloo, NCCL and the store say that a peer has gone, or does not answer.
TIMEOUT = re.compile(
    r"[Tt]imed out (waiting|after)|collective operation timeout|Wait timeout|DistStoreError.*imed out|wait timeout"
)
COMPLAINT = re.compile(
    r"onnection (closed|reset|refused)|remote process exited|communicator was aborted|Broken pipe|DistNetworkError"
    rf"|{TIMEOUT.pattern}"
)

# How torch says that it finds no GPU, or was built without CUDA.
NO_CUDA = (
    r"not compiled with CUDA|No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver"
    r"|NCCL is only supported with GPUs|requires at least one CUDA device"
)
# How torch and NCCL say that a kernel or the GPU itself has failed.
ASSERTED = r"device-side assert triggered"
GPU_FAILED = (
    r"(CUDA error: |Triton Error \[CUDA\]: |Cuda failure \d+ ')(an illegal (memory access|instruction)"
    r"|misaligned address|unknown error|unspecified launch failure|the launch timed out|uncorrectable ECC"
    r"|hardware stack error|invalid program counter)"
    r"|CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED|GPU is lost|GPU has fallen off the bus"
    r"|Unable to determine the device handle|NVRM: Xid|Xid \(PCI"
)
NO_GPU_MEMORY = (
    r"CUDA out of memory|OutOfMemoryError|(CUDA error: |Cuda failure 2 ')out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
# Options of `run`, which a script does not know.
OURS = "nodes|nnodes|trainers|gpus|engine|image|dry-run|detach|set|runs|json|print-path|nproc[-_]per[-_]node"
RANK = r"(?:\[rank\d+\]: )?"  # how torch begins the lines of a traceback

NOT_FOUND = "the program is not installed in the image: use an image that has it (--image)"
NOT_RUN = "make the file executable (chmod +x), and check its first line: #!/bin/bash, for example"
NO_MODULE = r"\1 is neither in your folder nor in the image: use an image that has it (--image)"
NO_FILE = "nodes see only the folder that you started from, as their working directory: use paths relative to it"
READ_ONLY = "nodes see your folder read-only: write to the folder in $JOB_DIR (in single quotes on a command line)"
MORE_MEMORY = "raise the limit (--memory 8g), or lower the batch size"
FEWER_LOADERS = "raise the limit (--memory 8g), or use fewer DataLoader workers"
HERE = {  # what hints are for local processes, which have no image and no limits
    NOT_FOUND: "the program was not found on this machine's PATH",
    NO_MODULE: rf"\1 is neither in your folder nor installed: {sys.executable} -m pip install \1",
    NO_FILE: "paths count from the folder that you started from",
    READ_ONLY: "the workers run as your user, who cannot write there: write to the folder in $JOB_DIR",
    MORE_MEMORY: "this machine ran out of memory: use a smaller batch or fewer workers",
    FEWER_LOADERS: "this machine ran out of memory: use fewer DataLoader workers",
}

# What the last lines of a failed worker say; the first match counts.
BY_LINE = [
    (r"(?m)^\[node\] rank \d+ did not start: No such file", Reason.NOT_STARTED, NOT_FOUND),
    (r"(?m)^\[node\] rank \d+ did not start: ", Reason.NOT_STARTED, NOT_RUN),
    (
        r"__path__ attribute not found on '(\w+)'",
        Reason.SCRIPT,
        r"your file \1.py hides the package \1: rename one of them",
    ),
    (r"can't open file .*Permission denied", Reason.SCRIPT, "the user that nodes run as cannot read it: chmod a+r"),
    (r"can't open file", Reason.SCRIPT, "the script is not below the folder that you started from"),
    (
        rf"error: unrecognized arguments:.* --({OURS})(?![\w-])",
        Reason.USAGE,
        "options of `run` come before the script: run --gpus none SCRIPT ARGS",
    ),
    (
        r"error: unrecognized arguments|error: argument|the following arguments are required",
        Reason.USAGE,
        "see the script's --help",
    ),
    (r"DataLoader worker .* killed by signal: Bus", Reason.SHARED_MEMORY, "more shared memory: --set shm_size=4g"),
    (r"DataLoader worker .* killed by signal: Killed", Reason.OUT_OF_MEMORY_IN_A_CHILD, FEWER_LOADERS),
    (
        r"terminate called without an active exception",
        Reason.CRASH,
        "torch's threads still ran when the script ended: call torch.distributed.destroy_process_group() last",
    ),
    (
        rf"in _execute_child\n(?:{RANK}\s.*\n)*{RANK}FileNotFoundError: (?![\s\S]*Traceback)",
        Reason.NO_SUCH_FILE,
        NOT_FOUND,
    ),
]
BY_ERROR = [  # in the exception that a traceback ends with, and after it
    (r"No module named '?([\w.]+)", Reason.SCRIPT, NO_MODULE),
    (r"(?m)^\S*:? ?(ImportError|SyntaxError|IndentationError): ", Reason.SCRIPT, "the script does not load: see above"),
    (
        rf"(?m)^{RANK}(bdb\.BdbQuit|EOFError: EOF when reading a line)",
        Reason.SCRIPT,
        "workers cannot read from a terminal: remove breakpoint() or input()",
    ),
    (NO_GPU_MEMORY, Reason.OUT_OF_GPU_MEMORY, "a smaller batch, or GPUs with more memory"),
    (r"No space left on device", Reason.DISK_FULL, "free some disk, or some /dev/shm (--set shm_size=4g)"),
    (r"Read-only file system|Permission denied", Reason.NOT_WRITABLE, READ_ONLY),
    (
        ASSERTED,
        Reason.GPU_ERROR,
        "an index or a label out of range, most often; -e CUDA_LAUNCH_BLOCKING=1 makes the traceback name the line",
    ),
    (
        r"CUDA-capable device\(s\) is/are busy",
        Reason.GPU_ERROR,
        "another process has the GPU in exclusive compute mode: nvidia-smi -c 0 allows several",
    ),
    (
        r"CUDA error: system not yet initialized",
        Reason.GPU_ERROR,
        "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",
    ),
    (
        GPU_FAILED,
        Reason.GPU_ERROR,
        "see Xid in dmesg on the host; -e CUDA_LAUNCH_BLOCKING=1 makes the traceback name the line of a bug",
    ),
    (
        r"Duplicate GPU detected",
        Reason.GPU_SHARED,
        "give each worker its own GPU, or use the gloo backend, which takes CUDA tensors, or NCCL 2.30 or later",
    ),
    (
        r"Detected mismatch between collectives on ranks",
        Reason.MISMATCH,
        "all workers must call the same collectives in the same order, with the same shapes: see the lines above",
    ),
    (NO_CUDA, Reason.NO_GPUS, "this job has no GPUs: use --gpus all, or train on the CPU with the backend gloo"),
    (rf"(?m)^{RANK}(FileNotFound|NotADirectory)Error: ", Reason.NO_SUCH_FILE, NO_FILE),
]
BY_CODE = {
    2: (Reason.USAGE, "the script rejected its arguments: see its --help"),
    64: (Reason.USAGE, "the script rejected its arguments: see its --help"),
    78: (Reason.USAGE, "the script rejected its configuration"),
    126: (Reason.NOT_STARTED, "the program could not be started: the end of its log says why"),
    127: (Reason.NOT_STARTED, "a program or a script was not found: the end of the log names it"),
    132: (Reason.CRASH, "the processor does not know an instruction in it: the image is for another one"),
    ABORTED: (Reason.CRASH, "the lines above say where each thread stood"),
    135: (Reason.SHARED_MEMORY, "/dev/shm was full, most likely: --set shm_size=4g"),
    136: (Reason.CRASH, "the lines above say where each thread stood"),
    KILLED: (Reason.KILLED, "a user killed it, or the kernel for lack of memory: see dmesg on the host"),
    139: (Reason.CRASH, "it crashed in native code; the lines above say where each thread stood"),
    TERMINATED: (Reason.TERMINATED, "it got SIGTERM from outside of the job, as at a preemption"),
}
BY_ENGINE = {
    Reason.OUT_OF_MEMORY: MORE_MEMORY,
    Reason.OUT_OF_MEMORY_IN_A_CHILD: FEWER_LOADERS,
    Reason.NODE_LOST: "see docker events, and dmesg on the host",
    Reason.NODE_STOPPED: "it was ended by docker stop, kill, restart or rm; to end a job: orchestrate stop",
    Reason.PARTITION: "check for docker network disconnect, or a removed network",
    Reason.HOST_LOST: "see docker node ls; other hosts take its nodes, or fewer do with min_trainers in the job file",
    Reason.ENGINE_LOST: "the engine was restarted; with live-restore in its daemon.json, jobs go on while it is away",
    Reason.INTERRUPTED: "nothing: the workers start again",
}
SUMMARY = {
    Reason.OUT_OF_MEMORY: "ran out of memory: the kernel killed it",
    Reason.OUT_OF_MEMORY_IN_A_CHILD: "lost a process that it had started: the kernel killed that for lack of memory",
    Reason.NODE_LOST: "was lost with its node, which ended",
    Reason.NODE_STOPPED: "was ended with its node, which was stopped or removed",
    Reason.PARTITION: "was cut off from the job's network",
    Reason.HOST_LOST: "was lost with its host, which is down or cut off",
    Reason.ENGINE_LOST: "was lost while the engine was away",
    Reason.INTERRUPTED: "was being started when the orchestrator died",
    Reason.TIMEOUT: "did not take part in a collective in time, and its peers gave up",
    Reason.LEFT_EARLY: "exited while the others still worked with it",
}


def complains(words: Sequence[str], about: re.Pattern[str] = COMPLAINT) -> bool:
    """Whether a worker's last words, before a dump of its stacks, are about a peer that has gone or does not answer."""
    return bool(about.search("\n".join([line for line in before_dump(words) if line.strip()][-3:])))


def before_dump(lines: Sequence[str]) -> Sequence[str]:
    """The lines before Python's dump of all stacks, or all lines if there is none."""
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    return lines[: fatal[0] if fatal else None]


def blame(
    ends: Sequence[ObservedExit], words: Callable[[int], list[str]], window: float = PEER_FAILURE_WINDOW
) -> tuple[WorkerExit, Reason | None]:
    """The worker to blame, and the reason where it is one that did not fail itself.

    Peers of a worker that is still dying, or has just left, may be heard before it. A death by signal, or by the
    node's, explains a complaint about a peer that has gone, and so does an error of another kind; never the other way
    round. An abort whose last words are a complaint is NCCL's watchdog, which ends a worker when a peer has gone.

    `ends` are in the engine's order, at least one; `words(rank)` are a worker's last lines; `window` is how many
    seconds after the first failure another one may be its cause.
    """
    failed = [end for end in ends if end.exit.code and not (end.ours and end.exit.code == TERMINATED)]
    failed = failed or [end for end in ends if end.exit.code] or list(ends)
    first = failed[0].at
    near = [end.exit for end in failed if end.at - first < window]
    own = [exit for exit in near if not complains(words(exit.rank))]
    dead = [exit for exit in near if exit.code in BY_SIGNAL and (exit.code != ABORTED or exit in own)]
    if dead or own:
        return (dead or own)[0], None
    left = [end.exit for end in ends if end.exit.code == 0 and end.at - first < window and not end.ours]
    if left:
        return left[0], Reason.LEFT_EARLY
    late = [end.exit for end in ends if end.ours and end.exit not in near and not complains(words(end.exit.rank))]
    if late and any(complains(words(exit.rank), TIMEOUT) for exit in near):
        return late[0], Reason.TIMEOUT
    return near[0], None


def last_error(lines: Sequence[str]) -> Sequence[str]:
    """The exception that the last traceback ends with, and the lines after it; all lines if there is none."""
    frames = [place for place, line in enumerate(lines) if re.match(rf'{RANK}\s+File "', line)]
    if not frames:
        named = [place for place, line in enumerate(lines) if re.match(rf"{RANK}[\w.]+(Error|Exception)\b", line)]
        return lines[named[-1] :] if named else lines
    place = frames[-1] + 1
    while place < len(lines) and re.match(rf"{RANK}\s", lines[place]):  # lines of the source, which are indented
        place += 1
    return lines[place:]


def diagnose(plan: Plan, exit: WorkerExit, known: Reason | None, lines: list[str], log: str, host: str = "") -> Cause:
    """What happened to the worker to blame; `known` is what engine or supervisor know besides its exit code.

    `host` is the machine of its node, where there are several.
    """
    worker, local = plan.workers[exit.rank], plan.engine == "process"
    cause, hint = BY_CODE.get(
        exit.code, (Reason.ERROR, "the lines above are the end of its log; the cause may stand further up")
    )
    if exit.code < 128 or exit.code == ABORTED:
        whole, error = "\n".join(lines), "\n".join(last_error(before_dump(lines) or lines))
        clues = [(whole, *clue) for clue in BY_LINE] + [(error, *clue) for clue in BY_ERROR]
        for text, pattern, kind, advice in clues:
            match = re.search(pattern, text)
            if match and not (kind == Reason.NO_GPUS and plan.gpus):
                cause, hint = kind, match.expand(HERE.get(advice, advice) if local else advice)
                break
    if cause == Reason.ERROR and any("Traceback (most recent call last)" in line for line in lines):
        hint = ""  # it is all there
    if known:
        cause = known
        hint = BY_ENGINE.get(known, hint)
    if local:
        hint = HERE.get(hint, hint)
    if cause in (Reason.TIMEOUT, Reason.LEFT_EARLY):
        hint = "the log of this rank shows what it did until then"
    return Cause(
        rank=exit.rank,
        node=worker.node,
        exit_code=exit.code,
        cause=cause,
        summary=f"rank {exit.rank} on {worker.node}{host and f' ({host})'} {_end(exit.code, SUMMARY.get(cause, ''))}",
        hint=hint,
        last_lines=lines,
        log=log,
    )


def _end(code: int, what: str) -> str:
    if not what and code > 128 and code - 128 in signal.valid_signals():
        what = f"was ended by {signal.Signals(code - 128).name}"
    return f"{what} (exit code {code})" if what else f"exited with code {code}"
