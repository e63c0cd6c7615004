"""Process 1 of a node: starts workers, tags their output, and ends with them.

It runs in one of these modes (`NODE_MODE`; by default `static` if `RANK` is set, otherwise `rendezvous`):

    agent       An orchestrator is in charge. It connects to a Unix socket (`NODE_SOCKET`), which `pipe.py` reaches from
            outside a container; or to one with the host's name in the folder `NODE_SOCKETS`, directly if that
            folder is mounted; or to TCP port `NODE_PORT` (`N`, or the sum `N+M`), or any port, which the node writes
            into the folder `NODE_ADDRESSES`. Both sides know `NODE_KEY`, 32 bytes
            in hexadecimal digits, which no worker gets. The node imports `NODE_PRELOAD` and forks workers from there.
            It ends after `NODE_KEEP` seconds without a job, if set.
    relay       Runs next to the orchestrator of nodes on other machines, and renews their leases; see `lease.py`.
    rendezvous  Plain `docker compose up`: trainers register with the master; the master ranks them in Compose's order,
            gives each node its own GPUs, and ends the whole gang when one worker fails.
    static      Kubernetes, Slurm or a user has set `RANK` and `WORLD_SIZE`: one worker starts. Or they have set the
            rank of the node and the number of nodes: all its workers start; see `static.py`.

A worker's output goes unchanged to `$JOB_DIR/logs/rank-N.log`, and to stdout with `[rank N] ` before each line.
SIGTERM and SIGINT stop the workers (SIGTERM, `NODE_GRACE` seconds, SIGKILL) and end the node; a second signal kills
them immediately, unless `NODE_PATIENT` is set, for schedulers that repeat the signal. `$JOB_DIR/generation` holds the
generation whose workers may start, followed by `over` once they may no longer start; so a stop also reaches a worker
that is being started.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys

for number in (signal.SIGTERM, signal.SIGINT):  # process 1 ignores signals that it does not handle
    signal.signal(number, lambda number, _: os._exit(128 + number))
sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])  # the folder that holds `orchestrate`

import orchestrate.node  # noqa: E402, F401  (the path comes first)

del sys.path[0]  # the package finds its modules without it, and nothing else is imported from there

from orchestrate.node.agent import serve  # noqa: E402
from orchestrate.node.lease import bound, relay  # noqa: E402
from orchestrate.node.messages.checks import Refused, key  # noqa: E402
from orchestrate.node.output import print_message  # noqa: E402
from orchestrate.node.rendezvous import join  # noqa: E402
from orchestrate.node.static import static  # noqa: E402
from orchestrate.node.warm import protect  # noqa: E402


def main(arguments: list[str]) -> int:
    """Run the node and return its exit code."""
    protect()
    hex_key = os.environ.pop("NODE_KEY", "")  # workers inherit the node's environment
    try:
        return run(arguments, hex_key)
    except Refused as error:
        print_message(f"error: {error}")
        return 2


def run(arguments: list[str], hex_key: str) -> int:
    """Run in the mode of `NODE_MODE`; `hex_key` is the key of the job, in hexadecimal digits.

    Raises Refused for an invalid environment variable.
    """
    mode = os.environ.get("NODE_MODE") or ("static" if "RANK" in os.environ else "rendezvous")
    if mode == "agent":
        folder = os.environ.get("NODE_SOCKETS")
        shared = f"{folder}/{socket.gethostname()}" if folder else ""
        port = os.environ.get("NODE_PORT")
        return serve(
            os.environ.get("NODE_SOCKET", "/tmp/node.sock"),
            shared,
            sum(map(int, port.split("+"))) if port else 0,
            key(hex_key),
            float(os.environ.get("NODE_KEEP") or 0),
        )
    if mode == "relay":
        relay(key(hex_key), bound(int(os.environ["NODE_PORT"])))
    command = arguments or ["-m", "app.train"]
    return static(command) if mode == "static" else join(command)


os._exit(main(sys.argv[1:]))  # immediately: clients treat a closed socket as the end of the node
