"""Real workers that wait for each other with gloo: `sums.py STEPS [what rank 1 does at step 5 [TIMEOUT]]`."""

import datetime
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

steps, does = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
timeout = float(sys.argv[3]) if len(sys.argv) > 3 else 1800
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
rank = int(os.environ["RANK"])
print("pid", os.getpid(), flush=True)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))


def odd_one_out() -> None:
    if does == "raises":
        raise ValueError("the label of sample 17 is missing")
    if does == "exits":
        os._exit(7)
    if does == "leaves":
        print("enough", flush=True)
        os._exit(0)
    if does == "sleeps":
        time.sleep(1000)
    if does == "spawns":
        subprocess.run([sys.executable, "-c", "x = [b'x' * 10_000_000 for _ in range(10_000)]"], check=True)
    if does == "eats":
        print(len([b"x" * 1_000_000 for _ in range(100_000)]))
    if does == "fills":
        with open("/dev/shm/fill", "wb") as file:
            file.write(b"x" * (1 << 31))
    if does == "segfaults":
        import ctypes

        ctypes.string_at(0)
    if does.isdigit():
        os.kill(os.getpid(), int(does))
        time.sleep(1000)


for step in range(1, steps + 1):
    if step == 5 and rank == 1 and first:
        odd_one_out()
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert total[0] == dist.get_world_size()
    print("step", step, flush=True)
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
