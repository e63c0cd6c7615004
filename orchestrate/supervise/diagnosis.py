"""Who is to blame for the end of a generation, what it was, and what to do. Pure."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Sequence

from orchestrate.job.outcomes import TERMINATED, Cause, ObservedExit, WorkerExit
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
    (r"(?m)^\[node\] rank \d+ did not start: No such file", "not started", NOT_FOUND),
    (r"(?m)^\[node\] rank \d+ did not start: ", "not started", NOT_RUN),
    (r"__path__ attribute not found on '(\w+)'", "script", r"your file \1.py hides the package \1: rename one of them"),
    (r"can't open file .*Permission denied", "script", "the user that nodes run as cannot read it: chmod a+r"),
    (r"can't open file", "script", "the script is not below the folder that you started from"),
    (
        rf"error: unrecognized arguments:.* --({OURS})(?![\w-])",
        "usage",
        "options of `run` come before the script: run --gpus none SCRIPT ARGS",
    ),
    (
        r"error: unrecognized arguments|error: argument|the following arguments are required",
        "usage",
        "see the script's --help",
    ),
    (r"DataLoader worker .* killed by signal: Bus", "shared memory", "more shared memory: --set shm_size=4g"),
    (r"DataLoader worker .* killed by signal: Killed", "out of memory in a child", FEWER_LOADERS),
    (
        r"terminate called without an active exception",
        "crash",
        "torch's threads still ran when the script ended: call torch.distributed.destroy_process_group() last",
    ),
    (rf"in _execute_child\n(?:{RANK}\s.*\n)*{RANK}FileNotFoundError: (?![\s\S]*Traceback)", "no such file", NOT_FOUND),
]
BY_ERROR = [  # in the exception that a traceback ends with, and after it
    (r"No module named '?([\w.]+)", "script", NO_MODULE),
    (r"(?m)^\S*:? ?(ImportError|SyntaxError|IndentationError): ", "script", "the script does not load: see above"),
    (
        rf"(?m)^{RANK}(bdb\.BdbQuit|EOFError: EOF when reading a line)",
        "script",
        "workers cannot read from a terminal: remove breakpoint() or input()",
    ),
    (NO_GPU_MEMORY, "out of GPU memory", "a smaller batch, or GPUs with more memory"),
    (r"No space left on device", "disk full", "free some disk, or some /dev/shm (--set shm_size=4g)"),
    (r"Read-only file system|Permission denied", "not writable", READ_ONLY),
    (
        ASSERTED,
        "GPU error",
        "an index or a label out of range, most often; -e CUDA_LAUNCH_BLOCKING=1 makes the traceback name the line",
    ),
    (
        r"CUDA-capable device\(s\) is/are busy",
        "GPU error",
        "another process has the GPU in exclusive compute mode: nvidia-smi -c 0 allows several",
    ),
    (
        r"CUDA error: system not yet initialized",
        "GPU error",
        "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",
    ),
    (
        GPU_FAILED,
        "GPU error",
        "see Xid in dmesg on the host; -e CUDA_LAUNCH_BLOCKING=1 makes the traceback name the line of a bug",
    ),
    (
        r"Duplicate GPU detected",
        "GPU shared",
        "give each worker its own GPU, or use the gloo backend, which takes CUDA tensors, or NCCL 2.30 or later",
    ),
    (
        r"Detected mismatch between collectives on ranks",
        "mismatch",
        "all workers must call the same collectives in the same order, with the same shapes: see the lines above",
    ),
    (NO_CUDA, "no GPUs", "this job has no GPUs: use --gpus all, or train on the CPU with the backend gloo"),
    (rf"(?m)^{RANK}(FileNotFound|NotADirectory)Error: ", "no such file", NO_FILE),
]
BY_CODE = {
    2: ("usage", "the script rejected its arguments: see its --help"),
    64: ("usage", "the script rejected its arguments: see its --help"),
    78: ("usage", "the script rejected its configuration"),
    126: ("not started", "the program could not be started: the end of its log says why"),
    127: ("not started", "a program or a script was not found: the end of the log names it"),
    132: ("crash", "the processor does not know an instruction in it: the image is for another one"),
    ABORTED: ("crash", "the lines above say where each thread stood"),
    135: ("shared memory", "/dev/shm was full, most likely: --set shm_size=4g"),
    136: ("crash", "the lines above say where each thread stood"),
    KILLED: ("killed", "a user killed it, or the kernel for lack of memory: see dmesg on the host"),
    139: ("crash", "it crashed in native code; the lines above say where each thread stood"),
    TERMINATED: ("terminated", "it got SIGTERM from outside of the job, as at a preemption"),
}
BY_ENGINE = {
    "out of memory": MORE_MEMORY,
    "out of memory in a child": FEWER_LOADERS,
    "node lost": "see docker events, and dmesg on the host",
    "node stopped": "it was ended by docker stop, kill, restart or rm; to end a job: orchestrate stop",
    "partition": "check for docker network disconnect, or a removed network",
    "host lost": "see docker node ls; other hosts take its nodes, or fewer do with min_trainers in the job file",
    "engine lost": "the engine was restarted; with live-restore in its daemon.json, jobs go on while it is away",
    "interrupted": "nothing: the workers start again",
}
SUMMARY = {
    "out of memory": "ran out of memory: the kernel killed it",
    "out of memory in a child": "lost a process that it had started: the kernel killed that for lack of memory",
    "node lost": "was lost with its node, which ended",
    "node stopped": "was ended with its node, which was stopped or removed",
    "partition": "was cut off from the job's network",
    "host lost": "was lost with its host, which is down or cut off",
    "engine lost": "was lost while the engine was away",
    "interrupted": "was being started when the orchestrator died",
    "timeout": "did not take part in a collective in time, and its peers gave up",
    "left early": "exited while the others still worked with it",
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
) -> tuple[WorkerExit, str]:
    """The worker to blame, and `timeout` or `left early` where it is one that did not fail itself.

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
        return (dead or own)[0], ""
    left = [end.exit for end in ends if end.exit.code == 0 and end.at - first < window and not end.ours]
    if left:
        return left[0], "left early"
    late = [end.exit for end in ends if end.ours and end.exit not in near and not complains(words(end.exit.rank))]
    if late and any(complains(words(exit.rank), TIMEOUT) for exit in near):
        return late[0], "timeout"
    return near[0], ""


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


def diagnose(plan: Plan, exit: WorkerExit, known: str, lines: list[str], log: str, host: str = "") -> Cause:
    """What happened to the worker to blame; `known` is what engine or supervisor know besides its exit code.

    `host` is the machine of its node, where there are several.
    """
    worker, local = plan.workers[exit.rank], plan.engine == "process"
    cause, hint = BY_CODE.get(
        exit.code, ("error", "the lines above are the end of its log; the cause may stand further up")
    )
    if exit.code < 128 or exit.code == ABORTED:
        whole, error = "\n".join(lines), "\n".join(last_error(before_dump(lines) or lines))
        clues = [(whole, *clue) for clue in BY_LINE] + [(error, *clue) for clue in BY_ERROR]
        for text, pattern, kind, advice in clues:
            match = re.search(pattern, text)
            if match and not (kind == "no GPUs" and plan.gpus):
                cause, hint = kind, match.expand(HERE.get(advice, advice) if local else advice)
                break
    if cause == "error" and any("Traceback (most recent call last)" in line for line in lines):
        hint = ""  # it is all there
    if known:
        cause = known
        hint = BY_ENGINE.get(known, hint)
    if local:
        hint = HERE.get(hint, hint)
    if cause in ("timeout", "left early"):
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
