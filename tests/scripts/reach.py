"""Try to reach addresses; `reach.py WAY:HOST:PORT …` prints the result of each as JSON.

The ways: `tcp`; `bind`, from a socket bound to the interface; `near`, from a socket that uses no gateway; `udp`,
a datagram. The host `gateway` is this node's gateway, `subnet` the broadcast address of its network.
With a file `stay` in the working directory, the first generation then waits until it is stopped.
"""

import errno
import ipaddress
import json
import os
import signal
import socket
import sys
from pathlib import Path

OPTIONS = {"near": 5, "bind": 25}  # SO_DONTROUTE, SO_BINDTODEVICE; neither needs a capability


def named(host: str) -> str:
    """The address behind the names `gateway` and `subnet`."""
    lines = [line.split() for line in Path("/proc/net/route").read_text().splitlines()]
    gateway, network, mask = (
        next(number(line[column]) for line in lines if line[0][:3] == "eth" and (line[1] == "00000000") == default)
        for column, default in ((2, True), (1, False), (7, False))
    )
    return str(ipaddress.IPv4Address(gateway if host == "gateway" else network | ~mask & 0xFFFFFFFF))


def number(text: str) -> int:
    return int.from_bytes(bytes.fromhex(text), "little")


def reach(way: str, host: str, port: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if way == "udp" else socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        try:
            if way in OPTIONS:
                sock.setsockopt(socket.SOL_SOCKET, OPTIONS[way], b"eth0" if way == "bind" else b"\1\0\0\0")
            if way == "udp":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sock.sendto(b"reached", (host, int(port)))
            else:
                sock.connect((host, int(port)))
            return "reached"
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return errno.errorcode[error.errno or 0]


found = {}
for place in sys.argv[1:]:
    way, host, port = place.split(":")
    found[place] = reach(way, named(host) if host in ("gateway", "subnet") else host, port)
print(json.dumps(found), flush=True)
if os.path.exists("stay") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pause()
