"""Steps that all ranks take together on GPUs: `cuda_steps.py STEPS [FAULT [TIMEOUT]]`; FAULT hits rank 1 at step 5.

Like count.py, it saves every ten steps, resumes from there, and with `until-asked` instead of STEPS ends at the
next multiple of ten after a file `finish` is in the working directory. TIMEOUT is for a collective, in seconds.
"""

import ctypes
import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from cuda_place import device, join

# Writes to an invalid address. The driver compiles it, so this needs no compiler.
STRAY = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry stray() {
    .reg .u64 %where;
    mov.u64 %where, 64;
    st.global.u32 [%where], 1;
    ret;
}
"""
# What NCCL's watchdog prints before it aborts a worker whose GPU fails.
FAILED = """CUDA error: unspecified launch failure
Search for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for \
more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:44 (most recent call first):
""" + "".join(f"frame #{number}: c10::Error::Error() + 0x96 (0x7f10 in libc10.so)\n" for number in range(11))
PREFIX = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
WATCHDOG = f"""[rank1]:[E1101 10:00:00.000000000 ProcessGroupNCCL.cpp:2068] {PREFIX}{FAILED}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {PREFIX}{FAILED}
Exception raised from run at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2074 (most recent call first):
frame #0: c10::Error::Error() + 0x96 (0x7f10 in libc10.so)
frame #1: clone + 0x44 (0x7f20 in libc.so.6)
"""
open_ended = sys.argv[1] == "until-asked"
fault = sys.argv[2] if len(sys.argv) > 2 else ""
timeout = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
rank, generation = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
saved = Path(os.environ["JOB_DIR"], "checkpoints", f"rank-{rank}")
# As in a script that saves on SIGTERM; a worker that waits in NCCL never reaches the handler.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
print("pid", os.getpid(), "of", os.environ["WORLD_SIZE"], flush=True)
where = device()
ballast = torch.zeros(1 << 29, dtype=torch.uint8, device=where)  # 512 MiB, visible in the memory in use
if fault == "mismatch":
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # compares the collectives of all ranks before they start
join(where)


def save() -> None:
    half = saved.with_name(f".{saved.name}.{os.getpid()}")
    half.write_text(str(done))
    half.replace(saved)


def out_of_memory() -> None:
    torch.empty(2 * torch.cuda.get_device_properties(where).total_memory, dtype=torch.uint8, device=where)


def out_of_range() -> None:
    torch.zeros(10, device=where)[torch.tensor([1 << 20], device=where)]
    torch.cuda.synchronize()


def illegal_address() -> None:
    cuda, module, kernel = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuModuleLoadData(ctypes.byref(module), STRAY) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"stray") == 0
    assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
    torch.cuda.synchronize()


def ecc_error() -> None:
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


def lost_device() -> None:
    print(WATCHDOG, file=sys.stderr, flush=True)
    os.abort()


def mismatch() -> None:
    dist.broadcast(torch.zeros(7, device=where), src=0)


def never_arrives() -> None:
    signal.pause()


FAULTS: dict[str, Callable[[], None]] = {
    kind.__name__: kind
    for kind in (out_of_memory, out_of_range, illegal_address, ecc_error, lost_device, mismatch, never_arrives)
}
start = torch.tensor([float(saved.read_text()) if saved.exists() else 0.0], device=where)
dist.all_reduce(start, op=dist.ReduceOp.MIN)  # a rank may have been killed before its save
done, steps = int(start), sys.maxsize if open_ended else int(sys.argv[1])
# From here on, the ranks are close enough together for a short timeout.
group = dist.new_group(timeout=datetime.timedelta(seconds=timeout)) if timeout else None
while done < steps:
    time.sleep(0.01)
    if done == 4 and rank == 1 and fault and generation == "0":
        FAULTS[fault]()
    votes = torch.tensor([1.0, float(open_ended and os.path.exists(f"{os.environ['JOB_DIR']}/finish"))], device=where)
    dist.all_reduce(votes, group=group)
    workers, finish = votes.tolist()
    assert workers == dist.get_world_size()
    done += 1
    print(f"step {done} in {generation}", flush=True)
    if done % 10 == 0:
        save()
        steps = done if finish else steps
dist.barrier()
dist.destroy_process_group()
