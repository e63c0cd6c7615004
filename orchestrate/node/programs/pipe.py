"""Forward bytes between an orchestrator and a waiting node, in both directions; the engine runs it in the node.

    python -I -S pipe.py      in the node itself
    python -I -S pipe.py ADDRESS PORT SECONDS    in a container on the same network; SECONDS to connect

A separate program with few imports, because a job waits until it has started in every node.
"""

import os
import select
import socket
import sys
import time

LISTEN_TIMEOUT = 60.0  # seconds until the node listens
CONNECT_TIMEOUT = 5.0  # seconds for one try
RETRY_INTERVAL = 0.02  # seconds


def connect(address: list[str]) -> socket.socket:
    """Connect to the node as soon as it listens, over TCP if there is an address; raises OSError on timeout."""
    deadline = time.monotonic() + (float(address[2]) if address else LISTEN_TIMEOUT)
    while True:
        node = socket.socket(socket.AF_INET if address else socket.AF_UNIX)
        try:
            if address:
                node.settimeout(max(0.1, min(CONNECT_TIMEOUT, deadline - time.monotonic())))
                node.connect((address[0], int(address[1])))
                node.settimeout(None)
            else:
                node.connect(os.environ.get("NODE_SOCKET", "/tmp/node.sock"))
            return node
        except OSError:
            node.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_INTERVAL)


def main() -> None:
    """Forward bytes until one side closes its connection."""
    node = connect(sys.argv[1:])
    while True:
        for source in select.select([0, node.fileno()], [], [])[0]:
            try:
                data = os.read(source, 1 << 16)
            except ConnectionResetError:  # the node has ended without reading all of it
                return
            if not data:
                return
            if source == 0:
                node.sendall(data)
            while source and data:
                data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
