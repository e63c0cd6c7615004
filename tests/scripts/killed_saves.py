"""Kill a process at many points of a save; whatever the point, the newest committed checkpoint must load.

Prints the steps of the checkpoints that were found, a line for each kill.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from app.checkpoint import Checkpoints

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)


def state(step: int) -> dict:
    return {"weights": torch.full((1 << 16,), float(step)), "step": step}


started = time.monotonic()
first = Checkpoints(folder)
first.save(state(1), 1)
first.wait()
duration = time.monotonic() - started
step = 1
for _ in range(kills):
    child = os.fork()
    if child == 0:
        store = Checkpoints(folder)
        while True:
            step += 1
            store.save(state(step), step, score=random.random())
            store.wait()
    time.sleep(random.random() * duration * 2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = Checkpoints(folder).newest()
    assert found is not None
    assert found[1]["step"] == found[0]["step"] >= step, "a committed checkpoint was lost"
    assert torch.equal(found[0]["weights"], state(found[0]["step"])["weights"])
    step = found[1]["step"]
    print(step)
