"""Process 1 of a node: gets workers to run, runs them, tags their output, ends with them.

It takes work in one of these ways (`NODE_MODE`; without it, `given` where `RANK` is set, else `join`):

    wait    An orchestrator is in charge, over a Unix socket (`NODE_SOCKET`), which `pipe.py` reaches from outside of a
            container; and over one with the host's name in the folder `NODE_SOCKETS`, which needs no help where that
            folder is mounted; and over TCP at `NODE_PORT` (`N` or `N+M`). Both know `NODE_KEY`, 32 bytes in hexadecimal
            digits, which no worker gets. The node imports `NODE_PRELOAD` ahead, and forks workers from that.
    relay   Next to the orchestrator of nodes on other machines: answers for the lease of those, see `lease.py`.
    join    Plain `docker compose up`. Trainers register with the master; the master ranks them in Compose's order,
            gives each node its own GPUs, and ends the whole gang when one worker fails.
    given   Somebody else (Kubernetes, Slurm) has set `RANK` and `WORLD_SIZE`: one worker starts at once. Or they
            say which node this is, and of how many: its workers start at once, see `given.py`.

A worker's output goes, untouched, to `$JOB_DIR/logs/rank-N.log` and, line by line behind `[rank N] `, to stdout.
SIGTERM and SIGINT stop the workers (SIGTERM, `NODE_GRACE` seconds, SIGKILL) and end the node; a second one kills at
once, but not with `NODE_PATIENT` in the environment, for schedulers that repeat themselves. `$JOB_DIR/generation`
holds the generation whose workers may start, with `over` once they may not any more; so that a stop reaches a worker
on its way, too.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys

for number in (signal.SIGTERM, signal.SIGINT):  # process 1 ignores those that it does not handle
    signal.signal(number, lambda number, _: os._exit(128 + number))
sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])  # the folder that holds `orchestrate`

import orchestrate.node  # noqa: E402, F401  (the path comes first)

del sys.path[0]  # the package finds its modules without it, and nothing else is imported from there

from orchestrate.node.given import given  # noqa: E402
from orchestrate.node.join import join  # noqa: E402
from orchestrate.node.lease import relay  # noqa: E402
from orchestrate.node.output import say  # noqa: E402
from orchestrate.node.protocol import Refused, key  # noqa: E402
from orchestrate.node.wait import wait  # noqa: E402
from orchestrate.node.warm import protect  # noqa: E402


def main(arguments: list[str]) -> int:
    """Run the node and return its exit code."""
    protect()
    word = os.environ.pop("NODE_KEY", "")  # workers get what is in our environment
    try:
        return run(arguments, word)
    except Refused as error:
        say(f"error: {error}")
        return 2


def run(arguments: list[str], word: str) -> int:
    """Take work in the way that `NODE_MODE` says; `word` is the key of those who may ask.

    Raises Refused for a setting in the environment that is none.
    """
    mode = os.environ.get("NODE_MODE") or ("given" if "RANK" in os.environ else "join")
    if mode == "wait":
        folder = os.environ.get("NODE_SOCKETS")
        shared = f"{folder}/{socket.gethostname()}" if folder else ""
        port = os.environ.get("NODE_PORT")
        return wait(
            os.environ.get("NODE_SOCKET", "/tmp/node.sock"),
            shared,
            sum(map(int, port.split("+"))) if port else 0,
            key(word),
        )
    if mode == "relay":
        relay(key(word), int(os.environ["NODE_PORT"]))
    command = arguments or ["-m", "app.train"]
    return given(command) if mode == "given" else join(command)


os._exit(main(sys.argv[1:]))  # at once: whoever waits for our end sees that nobody listens any more
