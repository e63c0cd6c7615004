"""The app, whose rank 1 is killed once, at its STEP-th batch after a checkpoint: `killed_training.py STEP ARGS`."""

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


def until_killed(self: GlobalOrder, *arguments: Any) -> Iterator[Any]:
    """The batches; rank 1 gets no more than so many in its first generation."""
    for number, batch in enumerate(batches(self, *arguments), 1):
        if number == step:
            while not [*Path(os.environ["JOB_DIR"], "checkpoints").glob("step-*")]:  # it is written by a thread
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


step = int(sys.argv.pop(1))
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    GlobalOrder.batches = until_killed
train.main()
leave()
