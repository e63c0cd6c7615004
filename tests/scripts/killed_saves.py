"""Kill a process at each line of a save, the first and the last time; the newest committed checkpoint must load.

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


def traced_save(step: int, last: int) -> list[str]:
    """Save in a process that is killed before its n-th line, if `last` is not 0; return the lines up to there."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (-signal.SIGKILL if last else 0)
        with os.fdopen(reader) as pipe:
            return pipe.read().splitlines()
    left = [last]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != checkpoint.__file__ or frame.f_code.co_name.startswith("<"):
            return None
        if event == "line":
            os.write(writer, f"{frame.f_code.co_name} {frame.f_lineno}\n".encode())
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)  # only the writing thread is traced: lines of others interleave at random
    save(step)
    os._exit(0)


def saved_twice(last: int) -> tuple[list[str], int]:
    """Save, and save again until the n-th line; return the lines, and the step of the checkpoint that is found."""
    shutil.rmtree(folder, ignore_errors=True)
    save(1)
    found = traced_save(2, last)
    state, manifest = Checkpoints(folder).newest() or ({}, {})
    assert state["step"] == manifest["step"]
    assert torch.equal(state["weights"], torch.full((1 << 10,), float(state["step"])))
    return found, state["step"]


lines, step = saved_twice(0)
assert step == 2
numbered = [*enumerate(lines, 1)]
ends = [{line: number for number, line in order} for order in (numbered, reversed(numbered))]
for number in sorted({number for one in ends for number in one.values()}):
    found, step = saved_twice(number)
    print(found[-1].split()[0], "1 new" if step == 2 else "0 old", flush=True)
