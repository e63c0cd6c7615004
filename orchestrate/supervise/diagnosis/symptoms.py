"""What failed workers print, and what it means: the table of causes and hints, which docs/failures.md shows.

A hint says only what was looked at: the text in which it was found and, in `missing`, the folder of the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from orchestrate.plan.plan import Plan
from orchestrate.spec.causes import Reason
from orchestrate.supervise.diagnosis import missing, traits
from orchestrate.supervise.diagnosis.tracebacks import RANK

# Options of `run`, which scripts do not have.
RUN_OPTIONS = "nodes|nnodes|trainers|gpus|engine|image|dry-run|detach|set|runs|json|print-path|nproc[-_]per[-_]node"

SHM, OWN_SHM = "increase shared memory: --set shm_size=4g", "free space in /dev/shm of this machine"
FEWER_LOADERS = "raise the limit (--memory 8g), or use fewer DataLoader workers"
NOT_INSTALLED = "the program is not installed in the image: use an image that contains it (--image)"
NOT_FOUND = "the program was not found on this machine's PATH"
SHOW_LINE = "-e CUDA_LAUNCH_BLOCKING=1 makes the traceback show the line"
SAME_CALLS = "all workers must call the same collectives in the same order, with the same shapes"
GPU_FAILED = (
    r"(CUDA error: |Triton Error \[CUDA\]: |Cuda failure \d+ ')(an illegal (memory access|instruction)"
    r"|misaligned address|unknown error|unspecified launch failure|the launch timed out|uncorrectable ECC"
    r"|hardware stack error|invalid program counter)"
    r"|CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED|GPU is lost|GPU has fallen off the bus"
    r"|Unable to determine the device handle|NVRM: Xid|Xid \(PCI"
)
NO_CUDA = (
    r"not compiled with CUDA|No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver"
    r"|NCCL is only supported with GPUs|requires at least one CUDA device"
)
NO_GPU_MEMORY = (
    r"CUDA out of memory|OutOfMemoryError|(CUDA error: |Cuda failure 2 ')out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)


class Symptom(NamedTuple):
    """A text that shows why a worker failed."""

    text: str  # a regular expression
    cause: Reason
    hint: str  # with the groups of the expression as \1
    example: str  # a text in which it is found, as the newest version prints it
    local: str = ""  # the hint for local processes, if it differs
    torch: str = ""  # the part of the example that is in torch's code
    exact: Callable[[re.Match[str], Plan], str] = lambda match, plan: ""  # a hint for this job, or nothing
    sure: Reason | None = None  # the cause if there is such a hint, if it differs


# Found anywhere in the last lines.
IN_LINES = [
    Symptom(
        r"(?m)^\[node\] rank \d+ did not start: No such file",
        Reason.NOT_STARTED,
        NOT_INSTALLED,
        "[node] rank 0 did not start: No such file or directory: x",
        local=NOT_FOUND,
    ),
    Symptom(
        r"(?m)^\[node\] rank \d+ did not start: Address already in use: (port \d+)",
        Reason.ERROR,
        r"another process listens on \1, where workers expect torch's store; a restart uses another port",
        "[node] rank 0 did not start: Address already in use: port 29500",
    ),
    Symptom(
        r"(?m)^\[node\] rank \d+ did not start: ",
        Reason.NOT_STARTED,
        "make the file executable (chmod +x), and check its first line: #!/bin/bash, for example",
        "[node] rank 0 did not start: Permission denied: ./x",
    ),
    Symptom(
        r"__path__ attribute not found on '(\w+)'",
        Reason.SCRIPT,
        r"your file \1.py shadows the package \1: rename the file",
        "(ModuleNotFoundError: __path__ attribute not found on 'app' while trying to find 'app.train')",
    ),
    Symptom(
        r"can't open file .*Permission denied",
        Reason.SCRIPT,
        "the user that nodes run as cannot read it: chmod a+r",
        "python: can't open file '/job/work/x.py': [Errno 13] Permission denied",
    ),
    Symptom(
        r"can't open file",
        Reason.SCRIPT,
        "the script is not in the folder in which you started the job",
        "python: can't open file '/job/work/x.py': [Errno 2] No such file or directory",
    ),
    Symptom(
        rf"error: unrecognized arguments:.* --({RUN_OPTIONS})(?![\w-])",
        Reason.USAGE,
        r"options of run come before the script: run --\1 … SCRIPT ARGS",
        "train.py: error: unrecognized arguments: --gpus none",
    ),
    Symptom(
        r"error: unrecognized arguments|error: argument|the following arguments are required",
        Reason.USAGE,
        "see the script's --help; if an argument has a variable, quote it: '$JOB_DIR'",
        "train.py: error: argument --lr: invalid float value: 'x'",
    ),
    Symptom(
        r"terminate called without an active exception",
        Reason.CRASH,
        "torch's threads were still running at exit: call torch.distributed.destroy_process_group() at the end",
        "terminate called without an active exception",
    ),
    Symptom(
        rf"in _execute_child\n(?:{RANK}\s.*\n)*{RANK}FileNotFoundError: (?![\s\S]*Traceback)",
        Reason.NO_SUCH_FILE,
        NOT_INSTALLED,
        '  File "subprocess.py", line 1, in _execute_child\n'
        "FileNotFoundError: [Errno 2] No such file or directory: 'nvcc'",
        local=NOT_FOUND,
    ),
]
# Found in the exceptions that ended the worker, the last one first.
IN_ERRORS = [
    Symptom(
        r"No module named '?([\w.]+)",
        Reason.SCRIPT,
        r"\1 is neither in your folder nor in the image",
        "ModuleNotFoundError: No module named 'nonesuch'",
        local=r"\1 is neither in your folder nor installed",
        exact=lambda match, plan: missing.module(match[1], plan),
    ),
    Symptom(
        r"attempted relative import with no known parent package",
        Reason.SCRIPT,
        "the script is a module of a package: start it with -m PACKAGE.MODULE",
        "ImportError: attempted relative import with no known parent package",
        exact=lambda match, plan: (way := missing.as_module(plan)) and f"start the script with {way}",
    ),
    Symptom(
        r"Requirement '([\w.,<>=!~*\[\] -]{1,100})[^'\n]{0,100}' not met",
        Reason.SCRIPT,
        r"install it with --pip '\1'",
        "ModuleNotFoundError: Requirement 'requests>=2' not met. HINT: Try running `pip install -U 'requests>=2'`",
    ),
    Symptom(
        r"You set `devices=(\d{1,4})` and `num_nodes=(\d{1,4})` in Lightning",
        Reason.SCRIPT,
        r"leave out `devices` and `num_nodes` of the Trainer, or start as many workers: --nodes \2 --nproc-per-node \1",
        "ValueError: You set `devices=2` and `num_nodes=3` in Lightning, but the product (2 * 3) does not match",
    ),
    Symptom(
        r"Default process group has not been initialized",
        Reason.SCRIPT,
        "call torch.distributed.init_process_group() before this line",
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        torch="Default process group has not been initialized",
    ),
    Symptom(
        r"ArgumentError: argument (.+): conflicting option string",
        Reason.SCRIPT,
        r"the script defines \1 twice, or one of its options is that of another library",
        "argparse.ArgumentError: argument -l/--layers: conflicting option string: -l",
    ),
    Symptom(
        r"Parent directory (\S+) does not exist",
        Reason.NO_SUCH_FILE,
        r"create it before torch.save: os.makedirs('\1', exist_ok=True)",
        "RuntimeError: Parent directory out does not exist.",
        torch="Parent directory ",
    ),
    Symptom(
        r"you must call `\.launch\(\)`",
        Reason.SCRIPT,
        "call fabric.launch() before fabric.setup(), or set -e LT_CLI_USED=1, as `fabric run` does",
        "RuntimeError: To use Fabric with more than one device, you must call `.launch()` or use the CLI",
    ),
    Symptom(
        r"DataLoader worker .* is killed by signal: Bus",
        Reason.SHARED_MEMORY,
        SHM,
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory.",
        local=OWN_SHM,
        torch="is killed by signal: ",
    ),
    Symptom(
        r"DataLoader worker .* is killed by signal: Killed",
        Reason.OUT_OF_MEMORY_IN_A_CHILD,
        FEWER_LOADERS,
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed.",
        local="use fewer DataLoader workers",
        torch="is killed by signal: ",
    ),
    Symptom(
        r"unable to (?:allocate shared memory\(shm\) for|write to|resize) file <(?:/torch_|filename not)",
        Reason.SHARED_MEMORY,
        SHM,
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_9_1_0>: No space left on device (28)",
        local=OWN_SHM,
        torch="unable to allocate shared memory(shm) for file <",
    ),
    Symptom(
        r"inline_container\.cc:\d+\] \. (?:unexpected pos|PytorchStreamWriter failed writing)",
        Reason.DISK_FULL,
        "torch.save could not write all of its file: free disk space; if it is in /dev/shm, --set shm_size=4g",
        "RuntimeError: [enforce fail at inline_container.cc:671] . unexpected pos 704 vs 598",
        local="torch.save could not write all of its file: free disk space",
        torch="unexpected pos ",
    ),
    Symptom(
        r"\. (\d+) vs (\d+)\. Received data size doesn't match expected size",
        Reason.MISMATCH,
        rf"this rank received \1 bytes where it expected \2: {SAME_CALLS}; TORCH_DISTRIBUTED_DEBUG=DETAIL names them",
        "what():  [enforce fail at gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 8 vs 4. Received "
        "data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
        torch="Received data size doesn't match expected size",
    ),
    Symptom(
        r"Detected mismatch between collectives on ranks",
        Reason.MISMATCH,
        f"{SAME_CALLS}: see the lines above",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: x",
        torch="Detected mismatch between collectives on ranks",
    ),
    Symptom(
        r"The server socket has failed to listen on any local network address\. port: (\d+),.* EADDRINUSE",
        Reason.ERROR,
        r"another process listens on port \1",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        torch="The server socket has failed to listen on any local network address",
        exact=lambda match, plan: traits.own_world(plan),
        sure=Reason.SCRIPT,
    ),
    Symptom(
        r"client socket has (?:timed out after \d+ms while trying|failed) to connect to .*(?:localhost|127\.0\.0\.1)",
        Reason.ERROR,
        "nothing answered at that address",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to "
        "(localhost, 29500).",
        torch="while trying to connect to ",
        exact=lambda match, plan: traits.own_world(plan),
        sure=Reason.SCRIPT,
    ),
    Symptom(
        r"DistributedDataParallel device_ids and output_device arguments only work with .*device\(type='cpu'\)",
        Reason.NO_GPUS,
        "leave device_ids out of DistributedDataParallel() on the CPU",
        "ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device/"
        "multiple-device GPU modules or CPU modules, but got device_ids [0], output_device 0, and module parameters "
        "{device(type='cpu')}.",
        torch="only work with single-device/multiple-device GPU modules or CPU modules, ",
    ),
    Symptom(
        rf"(?m)^{RANK}(?:ImportError|SyntaxError|IndentationError|TabError): ",
        Reason.SCRIPT,
        "fix the import or the line that the traceback shows",
        "ImportError: cannot import name 'x' from 'y'",
    ),
    Symptom(
        rf"(?m)^{RANK}(?:AttributeError|TypeError|NameError|UnboundLocalError|NotImplementedError): ",
        Reason.SCRIPT,
        "fix the line that the traceback shows",
        "AttributeError: module 'torch' has no attribute 'nonesuch'",
    ),
    Symptom(
        rf"(?m)^{RANK}(?:bdb\.BdbQuit|EOFError: EOF when reading a line)",
        Reason.SCRIPT,
        "workers have no terminal: --stdin passes input to rank 0, and orchestrate debug is at a breakpoint()",
        "EOFError: EOF when reading a line",
    ),
    Symptom(
        NO_GPU_MEMORY,
        Reason.OUT_OF_GPU_MEMORY,
        "use a smaller batch, or GPUs with more memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        torch="CUDA out of memory. ",
    ),
    Symptom(
        r"No space left on device",
        Reason.DISK_FULL,
        "free disk space; if the file is in /dev/shm, --set shm_size=4g",
        "OSError: [Errno 28] No space left on device",
        local="free disk space",
    ),
    Symptom(
        r"Read-only file system",
        Reason.NOT_WRITABLE,
        "workers can write to $JOB_DIR, /tmp and the current folder, but not to its files over 64 MiB",
        "OSError: [Errno 30] Read-only file system: 'x'",
        local="workers run as your user, which cannot write there: write to $JOB_DIR",
    ),
    Symptom(
        r"Permission denied",
        Reason.NOT_WRITABLE,
        "the user that nodes run as has no right to it: to read it, chmod a+rX, also in a Dockerfile; to write, use "
        "$JOB_DIR, /tmp or the current folder",
        "PermissionError: [Errno 13] Permission denied: '/x'",
        local="your user, as whom workers run, has no right to it",
    ),
    Symptom(
        r"device-side assert triggered",
        Reason.GPU_ERROR,
        f"usually an index or label out of range; {SHOW_LINE}",
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
    ),
    Symptom(
        r"CUDA-capable device\(s\) is/are busy",
        Reason.GPU_ERROR,
        "another process has the GPU in exclusive compute mode: nvidia-smi -c 0 allows several",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    ),
    Symptom(
        r"CUDA error: system not yet initialized",
        Reason.GPU_ERROR,
        "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",
        "RuntimeError: CUDA error: system not yet initialized",
    ),
    Symptom(
        GPU_FAILED,
        Reason.GPU_ERROR,
        f"check dmesg on the host for Xid; for a bug, {SHOW_LINE}",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ),
    Symptom(
        r"Duplicate GPU detected",
        Reason.GPU_SHARED,
        "give each worker its own GPU, or use the gloo backend, which supports CUDA tensors, or NCCL 2.30 or later",
        "[rank0]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 7000",
    ),
    Symptom(
        NO_CUDA,
        Reason.NO_GPUS,
        "this job has no GPUs: train on the CPU, with the gloo backend, or use --gpus all on a machine that has some",
        "RuntimeError: Found no NVIDIA driver on your system.",
        torch="Found no NVIDIA driver on your system",
    ),
    Symptom(
        rf"(?m)^{RANK}(?:FileNotFound|NotADirectory)Error: (?:.*: '([^'\n]{{1,300}})'$)?",
        Reason.NO_SUCH_FILE,
        "nodes see only the folder in which you started the job, without runs, .git and what .dockerignore lists: use "
        "paths relative to it, or --data NAME=DIR",
        "FileNotFoundError: [Errno 2] No such file or directory: 'a.csv'",
        local="paths are relative to the folder in which you started the job",
        exact=lambda match, plan: missing.file(match[1], plan) if match[1] else "",
    ),
]
