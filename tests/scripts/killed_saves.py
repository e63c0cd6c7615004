"""Kill a process at each line of a save in turn; at every line, the newest committed checkpoint must load.

Prints, for each kill, the interrupted function and whether the previous checkpoint (`0 old`) or the one that was
being saved (`1 new`) was found.
"""

import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from app import checkpoint
from app.checkpoint import Checkpoints

folder = Path(sys.argv[1])
torch.set_num_threads(1)


def save(step: int) -> None:
    store = Checkpoints(folder)
    store.save({"weights": torch.full((1 << 10,), float(step)), "step": step}, step, score=float(-step))
    store.wait()


def killed_save(step: int, line: int) -> str:
    """Save in a process that is killed before its n-th line; return the function, or "" if it was not killed."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with os.fdopen(reader) as pipe:
            return pipe.read() if killed else ""
    left = [line]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != checkpoint.__file__ or frame.f_code.co_name.startswith("<"):
            return None
        left[0] -= event == "line"
        if not left[0]:
            os.write(writer, frame.f_code.co_name.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)  # only the writing thread is traced: lines of others interleave at random
    save(step)
    os._exit(0)


line = 0
while True:
    shutil.rmtree(folder, ignore_errors=True)
    save(1)
    where = killed_save(2, line := line + 1)
    state, manifest = Checkpoints(folder).newest() or ({}, {})
    assert state["step"] == manifest["step"]
    assert torch.equal(state["weights"], torch.full((1 << 10,), float(state["step"])))
    if not where:
        break
    print(where, "1 new" if state["step"] == 2 else "0 old", flush=True)
assert state["step"] == 2
