"""Functions that untrusted input can slow down, called in a process of their own with limited processor time.

Python's parser and its `re` may take years, and the former cannot be interrupted meanwhile. The kernel ends such a
process when its time is over, also where the one that has started it is gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from orchestrate.paths import PROJECT

WAITS = 60.0  # seconds after which a process that gets no processor is ended
MEMORY = 1 << 30  # bytes of a process
CALL = """
import importlib, json, resource, sys
seconds, memory, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
module, name, arguments = json.load(sys.stdin)
sys.path.append(path)
answer = getattr(importlib.import_module(module), name)(*arguments)
sys.stdout.write(json.dumps(answer))
"""


def call(function: Callable[..., Any], *arguments: Any, seconds: int) -> Any:
    """What a function of a module returns; None where it raises, or takes more processor time than these `seconds`.

    Arguments and result are JSON data. The module is imported anew each time, so it should import little.
    """
    limits = [str(seconds), str(MEMORY), str(PROJECT)]
    given = json.dumps([function.__module__, function.__name__, arguments])
    try:  # in a session of its own, where Ctrl-C does not reach it
        done = subprocess.run(
            [sys.executable, "-I", "-S", f"-Xutf8={sys.flags.utf8_mode}", "-c", CALL, *limits],
            input=given,
            capture_output=True,
            text=True,
            timeout=WAITS,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None
