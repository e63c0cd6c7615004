"""Copy a folder to a store, and print by how many bytes the memory has grown: `mirror.py URL FOLDER [N]`.

With N, the process is killed at its N-th change of the store: just before it if N is odd, else just after it.
With `fetch` for N, the folder is fetched from the store instead.
"""

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

from orchestrate.files.folder import Folder
from orchestrate.storage.fetch import never, restore
from orchestrate.storage.mirror import Mirror
from orchestrate.storage.store import open_store

url, path, action = sys.argv[1], Path(sys.argv[2]), [*sys.argv[3:], "0"][0]
folder = Folder(path.parent.parent, path.parent.name)
limit = int(action) if action.isdecimal() else 0
steps = itertools.count(1)


def peak() -> int:
    """The most memory that was used so far, in bytes; getrusage also counts the process that started this one."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def step() -> None:
    if next(steps) == limit:
        os.kill(os.getpid(), signal.SIGKILL)


def killed(method):
    def run(*arguments):
        step()
        method(*arguments)
        step()

    return run


store = open_store(url)
kind: Any = type(store)
for name in ("put", "put_stream", "create"):
    setattr(kind, name, killed(getattr(kind, name)))
delete = killed(kind.delete)
kind.delete = lambda self, keys: [delete(self, [key]) for key in keys]
restore(open_store(f"{url}/nothing"), folder, path.name)  # the library allocates what it needs in any case
before = peak()
if action == "fetch":
    restore(store, folder, path.name)
else:
    assert Mirror(store, folder, path.name, "first-1").sync(never, final=True)
print(peak() - before)
