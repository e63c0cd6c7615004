"""What the engine runs in a waiting node: passes on, both ways, what an orchestrator and the node say to each other.

    python -I -S pipe.py

A program of its own that imports next to nothing: a job starts no sooner than the last node's.
"""

import os
import select
import socket
import time

PATIENCE = 60.0  # seconds until the node listens
RETRY = 0.02  # seconds


def connect(path: str) -> socket.socket:
    """Connect to the node's Unix socket, as soon as it listens; raises OSError after a minute."""
    deadline = time.monotonic() + PATIENCE
    while True:
        node = socket.socket(socket.AF_UNIX)
        try:
            node.connect(path)
            return node
        except OSError:
            node.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY)


def main() -> None:
    """Pass on until one side has ended."""
    node = connect(os.environ.get("NODE_SOCKET", "/tmp/node.sock"))
    while True:
        for source in select.select([0, node.fileno()], [], [])[0]:
            data = os.read(source, 1 << 16)
            if not data:
                return
            if source == 0:
                node.sendall(data)
            while source and data:
                data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
