"""Hosts torch's store on the listening socket that is its standard input, until it is killed; see store.py.

    python -c "$(cat tcpstore.py)" PORT

A separate program, which is run like a worker: forked from the process that has imported torch, if there is one.
"""

import ctypes
import signal
import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the working directory, whose modules would shadow others

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: no worker, which runs as the same user, can trace it

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which Slurm sends to all processes of a step, when workers are to save

from torch.distributed import TCPStore  # noqa: E402

address = {"host_name": "127.0.0.1", "port": int(sys.argv[1]), "master_listen_fd": 0}
try:
    store = TCPStore(**address, is_master=True, wait_for_workers=False)
except NotImplementedError:  # from torch 2.4 to 2.7, only the older implementation takes a socket
    store = TCPStore(**address, is_master=True, wait_for_workers=False, use_libuv=False)
while True:
    signal.pause()
