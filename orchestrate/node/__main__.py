"""Process 1 of a node: gets workers to run, runs them, tags their output, ends with them.

It takes work in one of three ways (`NODE_MODE`; without it, `given` where `RANK` is set, else `join`):

    wait    An orchestrator is in charge, over a Unix socket (`NODE_SOCKET`), which `pipe.py` reaches from outside of a
            container; and over one with the host's name in the folder `NODE_SOCKETS`, which needs no help where that
            folder is mounted. The node imports `NODE_PRELOAD` ahead, and forks workers from that.
    join    Plain `docker compose up`. Trainers register with the master; the master ranks them in Compose's order,
            gives each node its own GPUs, and ends the whole gang when one worker fails.
    given   Somebody else (Swarm, Kubernetes, Slurm) has set `RANK` and `WORLD_SIZE`: one worker starts at once.

A worker's output goes, untouched, to `$JOB_DIR/logs/rank-N.log` and, line by line behind `[rank N] `, to stdout.
SIGTERM and SIGINT stop the workers (SIGTERM, `NODE_GRACE` seconds, SIGKILL) and end the node; a second one kills at
once. `$JOB_DIR/generation` holds the generation whose workers may start, with `over` once they may not any more; so
that a stop reaches a worker on its way, too.
"""

from __future__ import annotations

import os
import pathlib
import socket
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])  # the folder that holds `orchestrate`

from orchestrate.node.join import join  # noqa: E402  (the path comes first)
from orchestrate.node.loop import Loop  # noqa: E402
from orchestrate.node.wait import wait  # noqa: E402


def given(command: list[str]) -> int:
    """Run one worker in this process's environment; return its exit code."""
    codes: list[int] = []
    loop = Loop()
    loop.start(command, dict(os.environ), None, codes.append)
    loop.ending = True
    loop.run()
    return codes[0]


def main(arguments: list[str]) -> int:
    """Run the node and return its exit code."""
    mode = os.environ.get("NODE_MODE") or ("given" if "RANK" in os.environ else "join")
    if mode == "wait":
        folder = os.environ.get("NODE_SOCKETS")
        shared = f"{folder}/{socket.gethostname()}" if folder else ""
        return wait(os.environ.get("NODE_SOCKET", "/tmp/node.sock"), shared)
    command = arguments or ["-m", "app.train"]
    return given(command) if mode == "given" else join(command)


os._exit(main(sys.argv[1:]))  # at once: whoever waits for our end sees that nobody listens any more
