"""Run a training script whose rank 1 is killed after its first checkpoint: `killed_once.py SCRIPT ARGS`."""

import contextlib
import os
import pathlib
import runpy
import signal
import sys
import threading
import time

import torch  # noqa: F401  (nodes import ahead what the script imports)


def watch() -> None:
    checkpoints = pathlib.Path(os.environ["JOB_DIR"], "checkpoints")
    found = False
    while not found:
        with contextlib.suppress(OSError):  # the script has just removed an old checkpoint
            found = any(checkpoints.glob(os.environ["CHECKPOINT"]))
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


watcher = threading.Thread(target=watch, daemon=True)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    watcher.start()
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
if watcher.ident:  # the script was faster
    watcher.join()
