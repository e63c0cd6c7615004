"""Find the root cause of a failed generation: the worker, the cause, and a hint. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from orchestrate.job.outcomes import TERMINATED_EXIT_CODE, Cause, ObservedExit, Reason, WorkerExit
from orchestrate.job.plan import Plan

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

# Messages of torch if there is no GPU, or if it was built without CUDA.
NO_CUDA = (
    r"not compiled with CUDA|No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver"
    r"|NCCL is only supported with GPUs|requires at least one CUDA device"
)
# Messages of torch and NCCL about a failed kernel or GPU.
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
# Options of `run`, which scripts do not have.
RUN_OPTIONS = "nodes|nnodes|trainers|gpus|engine|image|dry-run|detach|set|runs|json|print-path|nproc[-_]per[-_]node"
RANK = r"(?:\[rank\d+\]: )?"  # torch's prefix of traceback lines

PACKAGES = {  # packages whose names differ from those of their modules
    **{"cv2": "opencv-python-headless", "PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"},
    **{"bs4": "beautifulsoup4", "dateutil": "python-dateutil", "dotenv": "python-dotenv", "yaml": "pyyaml"},
}
NOT_FOUND = "the program is not installed in the image: use an image that contains it (--image)"
PORT_TAKEN = r"another process listens on \1, where workers expect torch's store; a restart uses another port"
NOT_RUN = "make the file executable (chmod +x), and check its first line: #!/bin/bash, for example"
NO_PACKAGE = r"\1 is neither in your folder nor in the image: install it with --pip PACKAGE"
NO_MODULE = r"\1 is neither in your folder nor in the image: install it with --pip or --requirements"
NO_FILE = "nodes see only the folder in which you started the job: use paths relative to it"
READ_ONLY = "workers can write to $JOB_DIR, /tmp and the current folder, but not to its files over 64 MiB"
MORE_MEMORY = "raise the limit (--memory 8g), or lower the batch size"
FEWER_LOADERS = "raise the limit (--memory 8g), or use fewer DataLoader workers"
LOCAL_HINTS = {  # hints replaced for local processes, which have no image and no limits
    NOT_FOUND: "the program was not found on this machine's PATH",
    NO_PACKAGE: r"\1 is neither in your folder nor installed: install it with --pip PACKAGE",
    NO_MODULE: r"\1 is neither in your folder nor installed: install it with --pip or --requirements",
    NO_FILE: "paths are relative to the folder in which you started the job",
    READ_ONLY: "workers run as your user, which cannot write there: write to $JOB_DIR",
    MORE_MEMORY: "this machine ran out of memory: use a smaller batch or fewer workers",
    FEWER_LOADERS: "this machine ran out of memory: use fewer DataLoader workers",
}

# Patterns in the last lines of a failed worker; the first match is used.
BY_LINE = [
    (r"(?m)^\[node\] rank \d+ did not start: No such file", Reason.NOT_STARTED, NOT_FOUND),
    (r"(?m)^\[node\] rank \d+ did not start: Address already in use: (port \d+)", Reason.ERROR, PORT_TAKEN),
    (r"(?m)^\[node\] rank \d+ did not start: ", Reason.NOT_STARTED, NOT_RUN),
    (
        r"__path__ attribute not found on '(\w+)'",
        Reason.SCRIPT,
        r"your file \1.py shadows the package \1: rename the file",
    ),
    (r"can't open file .*Permission denied", Reason.SCRIPT, "the user that nodes run as cannot read it: chmod a+r"),
    (r"can't open file", Reason.SCRIPT, "the script is not in the folder in which you started the job"),
    (
        rf"error: unrecognized arguments:.* --({RUN_OPTIONS})(?![\w-])",
        Reason.USAGE,
        "options of run come before the script: run --gpus none SCRIPT ARGS",
    ),
    (
        r"error: unrecognized arguments|error: argument|the following arguments are required",
        Reason.USAGE,
        "see the script's --help; if an argument has a variable, quote it: '$JOB_DIR'",
    ),
    (r"DataLoader worker .* killed by signal: Bus", Reason.SHARED_MEMORY, "increase shared memory: --set shm_size=4g"),
    (r"DataLoader worker .* killed by signal: Killed", Reason.OUT_OF_MEMORY_IN_A_CHILD, FEWER_LOADERS),
    (
        r"terminate called without an active exception",
        Reason.CRASH,
        "torch's threads were still running at exit: call torch.distributed.destroy_process_group() at the end",
    ),
    (
        rf"in _execute_child\n(?:{RANK}\s.*\n)*{RANK}FileNotFoundError: (?![\s\S]*Traceback)",
        Reason.NO_SUCH_FILE,
        NOT_FOUND,
    ),
]
BY_ERROR = [  # patterns in the last exception and the lines after it
    (r"No module named '?(\w+)(?![\w.])", Reason.SCRIPT, NO_PACKAGE),
    (r"Requirement '([\w-]+)[^']*' not met", Reason.SCRIPT, NO_PACKAGE),
    (
        r"you must call `\.launch\(\)`",
        Reason.SCRIPT,
        "call fabric.launch() before fabric.setup(), or set -e LT_CLI_USED=1, as `fabric run` does",
    ),
    (r"No module named '?([\w.]+)", Reason.SCRIPT, NO_MODULE),
    (
        r"(?m)^\S*:? ?(ImportError|SyntaxError|IndentationError): ",
        Reason.SCRIPT,
        "the script cannot be imported: see above",
    ),
    (
        rf"(?m)^{RANK}(bdb\.BdbQuit|EOFError: EOF when reading a line)",
        Reason.SCRIPT,
        "workers cannot read from a terminal: remove breakpoint() or input()",
    ),
    (NO_GPU_MEMORY, Reason.OUT_OF_GPU_MEMORY, "use a smaller batch, or GPUs with more memory"),
    (r"No space left on device", Reason.DISK_FULL, "free disk space, or increase /dev/shm (--set shm_size=4g)"),
    (r"Read-only file system|Permission denied", Reason.NOT_WRITABLE, READ_ONLY),
    (
        ASSERTED,
        Reason.GPU_ERROR,
        "usually an index or label out of range; -e CUDA_LAUNCH_BLOCKING=1 makes the traceback show the line",
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
        "check dmesg on the host for Xid; for a bug, -e CUDA_LAUNCH_BLOCKING=1 makes the traceback show the line",
    ),
    (
        r"Duplicate GPU detected",
        Reason.GPU_SHARED,
        "give each worker its own GPU, or use the gloo backend, which supports CUDA tensors, or NCCL 2.30 or later",
    ),
    (
        r"Detected mismatch between collectives on ranks",
        Reason.MISMATCH,
        "all workers must call the same collectives in the same order, with the same shapes: see the lines above",
    ),
    (NO_CUDA, Reason.NO_GPUS, "this job has no GPUs: use --gpus all, or train on the CPU with the gloo backend"),
    (rf"(?m)^{RANK}(FileNotFound|NotADirectory)Error: ", Reason.NO_SUCH_FILE, NO_FILE),
]
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
    Reason.NODE_LOST: "see docker events, and dmesg on the host",
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


def before_dump(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines before Python's dump of all stacks, or all lines if there is none."""
    fatal = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    return lines[: fatal[0] if fatal else None]


def find_root_cause(
    ends: Sequence[ObservedExit], last_lines: Callable[[int], list[str]], window: float = PEER_FAILURE_WINDOW
) -> tuple[WorkerExit, Reason | None]:
    """Return the worker that is the root cause, and the reason if it did not fail itself.

    Peers of a dying worker may be reported before it. A death by signal or with the node explains complaints about a
    lost peer, and so does any other error; never the reverse. An abort whose last lines are a complaint comes from
    NCCL's watchdog, which aborts a worker when a peer is gone.

    `ends`, at least one, are in the engine's order; `last_lines(rank)` are a worker's last lines; `window` is the time
    in seconds after the first failure in which another exit can be its cause.
    """
    failed = [end for end in ends if end.exit.code and not (end.ours and end.exit.code == TERMINATED_EXIT_CODE)]
    failed = failed or [end for end in ends if end.exit.code] or list(ends)
    first = failed[0].at
    near = [end.exit for end in failed if end.at - first < window]
    own_errors = [exit for exit in near if not is_peer_failure(last_lines(exit.rank))]
    signaled = [exit for exit in near if exit.code in BY_SIGNAL and (exit.code != ABORTED or exit in own_errors)]
    if signaled or own_errors:
        return (signaled or own_errors)[0], None
    left = [end.exit for end in ends if end.exit.code == 0 and end.at - first < window and not end.ours]
    if left:
        return left[0], Reason.LEFT_EARLY
    late = [
        end.exit for end in ends if end.ours and end.exit not in near and not is_peer_failure(last_lines(end.exit.rank))
    ]
    if late and any(is_peer_failure(last_lines(exit.rank), TIMEOUT) for exit in near):
        return late[0], Reason.TIMEOUT
    return near[0], None


def last_error(lines: Sequence[str]) -> Sequence[str]:
    """Return the exception of the last traceback and the lines after it, or all lines if there is none."""
    frames = [place for place, line in enumerate(lines) if re.match(rf'{RANK}\s+File "', line)]
    if not frames:
        named = [place for place, line in enumerate(lines) if re.match(rf"{RANK}[\w.]+(Error|Exception)\b", line)]
        return lines[named[-1] :] if named else lines
    place = frames[-1] + 1
    while place < len(lines) and re.match(rf"{RANK}\s", lines[place]):  # source lines are indented
        place += 1
    return lines[place:]


def diagnose(plan: Plan, exit: WorkerExit, known: Reason | None, lines: list[str], log: str, host: str = "") -> Cause:
    """Return the cause of a worker's failure; `known` is what the engine or supervisor knows besides its exit code.

    `host` is the host of its node, if the engine has several.
    """
    worker, local = plan.workers[exit.rank], plan.engine == "process"
    cause, hint = BY_CODE.get(
        exit.code, (Reason.ERROR, "the lines above are the end of its log; the cause may be further up")
    )
    if exit.code < 128 or exit.code == ABORTED:
        whole, error = "\n".join(lines), "\n".join(last_error(before_dump(lines) or lines))
        clues = [(whole, *clue) for clue in BY_LINE] + [(error, *clue) for clue in BY_ERROR]
        for text, pattern, kind, advice in clues:
            match = re.search(pattern, text)
            if match and not (kind == Reason.NO_GPUS and plan.gpus):
                cause, hint = kind, match.expand(LOCAL_HINTS.get(advice, advice) if local else advice)
                if advice == NO_PACKAGE:
                    hint = hint.replace("PACKAGE", PACKAGES.get(match[1], match[1]))
                break
    if cause == Reason.ERROR and any("Traceback (most recent call last)" in line for line in lines):
        hint = ""  # the traceback is complete
    if known:
        cause = known
        hint = BY_ENGINE.get(known, hint)
    if local:
        hint = LOCAL_HINTS.get(hint, hint)
    if cause in (Reason.TIMEOUT, Reason.LEFT_EARLY):
        hint = "see the log of this rank for what it did before"
    return Cause(
        rank=exit.rank,
        node=worker.node,
        exit_code=exit.code,
        cause=cause,
        summary=f"{_subject(exit.rank, lines)} on {worker.node}{host and f' ({host})'} "
        f"{_end(exit.code, SUMMARY.get(cause, ''))}",
        hint=hint,
        last_lines=lines,
        log=log,
    )


def _subject(rank: int, lines: list[str]) -> str:
    """What has failed: the worker, or the command that it was waiting for."""
    return "`before`" if lines and f"[node] rank {rank} was not started: " in lines[-1] else f"rank {rank}"


def _end(code: int, what: str) -> str:
    if not what and code > 128 and code - 128 in signal.valid_signals():
        what = f"was killed by {signal.Signals(code - 128).name}"
    return f"{what} (exit code {code})" if what else f"exited with code {code}"
