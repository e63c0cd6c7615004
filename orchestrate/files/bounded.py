"""Calls of functions with untrusted input, in a separate process with limited CPU time.

Python's parser and `re` can take years, and the parser cannot be interrupted. The kernel ends the process at its limit,
even if its parent is gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from orchestrate.files.paths import PACKAGE

KILL_AFTER = 60.0  # seconds until the process is killed in any case
MEMORY = 1 << 30  # bytes
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
    """Return the result of a module's function; None if it raises, or uses more than `seconds` of CPU time.

    Arguments and result are JSON data. Each call imports the module, so it should import little.
    """
    limits = [str(seconds), str(MEMORY), str(PACKAGE.parent)]
    given = json.dumps([function.__module__, function.__name__, arguments])
    try:  # in a new session, so that Ctrl-C does not reach it
        done = subprocess.run(
            [sys.executable, "-I", "-S", f"-Xutf8={sys.flags.utf8_mode}", "-c", CALL, *limits],
            input=given,
            capture_output=True,
            text=True,
            timeout=KILL_AFTER,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return json.loads(done.stdout) if done.returncode == 0 else None
