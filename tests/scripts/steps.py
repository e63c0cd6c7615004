"""A worker without torch that runs until it is stopped; `RANK=CODE` arguments make ranks fail once all run."""

import os
import pathlib
import sys
import time

rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
codes = dict(argument.split("=") for argument in sys.argv[1:])
here = pathlib.Path(os.environ["JOB_DIR"], "checkpoints")
print("pid", os.getpid(), flush=True)
here.joinpath(f"rank-{rank}").touch()
while len(list(here.iterdir())) < world_size:
    time.sleep(0.01)
if rank in codes:
    print("last words", flush=True)
    sys.exit(int(codes[rank]))
print("stepping", flush=True)
while True:
    time.sleep(0.05)
