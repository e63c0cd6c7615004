"""A worker that creates one tensor, all-reduces it and prints the seconds of each part as JSON; `gpu_start.py cuda`.

On warm nodes torch is already imported, so `import torch` takes no time.
"""

import json
import os
import sys
import time

started = time.perf_counter()
import torch  # noqa: E402 - the import is measured
import torch.distributed as dist  # noqa: E402

imported = time.perf_counter()
device = torch.device(sys.argv[1])
if cuda := device.type == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
x = torch.ones(1, device=device)
number = x.item()  # waits for the GPU
computed = time.perf_counter()
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
dist.all_reduce(x)
if x.item() != number * dist.get_world_size():
    raise SystemExit(f"error: the all-reduce gave {x.item()}")
ready = time.perf_counter()
dist.destroy_process_group()
parts = {"import torch": imported - started, "CUDA context": computed - imported, "NCCL init": ready - computed}
sys.stdout.write(json.dumps(parts) + "\n")  # in a single write: workers may share a pipe
