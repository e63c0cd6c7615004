"""The app, with rank 1 killed once, at its STEP-th batch and after a checkpoint: `killed_training.py STEP ARGS`."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app import train
from app.job import leave
from app.order import GlobalOrder

batches = GlobalOrder.batches


def until_killed(self: GlobalOrder, *arguments: Any, **options: Any) -> Iterator[Any]:
    """The batches; before number `step`, wait for a checkpoint and kill this process."""
    for number, batch in enumerate(batches(self, *arguments, **options), 1):
        if number == step:
            while not [*Path(os.environ["JOB_DIR"], "checkpoints").glob("step-*")]:  # a thread writes it
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


step = int(sys.argv.pop(1))
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    GlobalOrder.batches = until_killed
train.main()
leave()
