#!/usr/bin/env python3
"""Plays OpenPBS's pbsdsh on one machine: `pbsdsh -v -n INDEX -- PROGRAM ARGUMENTS`.

The task starts in the home folder with the variables of qsub, from the file `$PBS_PLAYED`, in a session of its own. As
the real one, it exits with 0 however the task ends, and on SIGTERM passes that on and ends at once with 1.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

assert sys.argv[1:3] == ["-v", "-n"] and sys.argv[4] == "--", sys.argv
index, played = int(sys.argv[3]), pathlib.Path(os.environ["PBS_PLAYED"])
env = json.loads(played.read_text()) | {"PBS_NODENUM": str(index), "OMP_NUM_THREADS": "64"}
if (
    index >= len(pathlib.Path(os.environ["PBS_NODEFILE"]).read_text().split())
    or (played.parent / f"lost-{index}").exists()
):
    print(f"pbsdsh: spawn failed on node {index} err Bad Environment", file=sys.stderr)
    sys.exit(0)
with (played.parent / "output").open("a") as output:
    task = subprocess.Popen(
        sys.argv[5:], cwd=env["HOME"], env=env, stdout=output, stderr=output, start_new_session=True
    )
print(f"pbsdsh: spawned task 0x00000000 on logical node {index} event 2")


def end(*_: object) -> None:
    """As tm_kill, without a wait for the task."""
    task.terminate()
    os._exit(1)


signal.signal(signal.SIGTERM, end)
code = task.wait()
print(f"pbsdsh: task 0x00000000 exit status {code if code >= 0 else 256 - code}", flush=True)
