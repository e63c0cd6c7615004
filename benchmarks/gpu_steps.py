"""Train in small steps on GPUs and log when each step ends; `gpu_steps.py DEVICE BACKEND FOLDER`.

Each rank writes to `FOLDER/rank-RANK.log`, so that every launcher is measured the same way.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

kind, backend, folder = sys.argv[1:]
device = torch.device(kind)
if kind == "cuda":  # ranks may share a GPU, which is then number 0
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(8, 64, device=device)
launch = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
metrics = Path(os.environ["JOB_DIR"], "metrics.jsonl") if "JOB_DIR" in os.environ and dist.get_rank() == 0 else None
with Path(folder, f"rank-{dist.get_rank()}.log").open("a", buffering=1) as log:
    for step in range(1_000_000):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the GPU
        log.write(f"pid {os.getpid()}.{launch} step {step} at {time.time():.6f}\n")
        if metrics:
            with metrics.open("a") as file:  # the time in ms as the step: it keeps increasing, which counts as progress
                file.write(json.dumps({"step": int(1000 * time.time())}) + "\n")
        time.sleep(0.02)
