"""Train in small steps and print when each step ends; `steps.py STEPS`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
launch = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
metrics = Path(os.environ["JOB_DIR"], "metrics.jsonl") if "JOB_DIR" in os.environ and dist.get_rank() == 0 else None
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    print(f"pid {os.getpid()}.{launch} step {step} at {time.time():.6f}", flush=True)
    if metrics:
        with metrics.open("a") as file:  # the time in ms as the step: it keeps increasing, which counts as progress
            file.write(json.dumps({"step": int(1000 * time.time())}) + "\n")
    time.sleep(0.02)
dist.destroy_process_group()
