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


_running: set[subprocess.Popen[str]] = set()


def call(function: Callable[..., Any], *arguments: Any, seconds: int) -> Any:
    """Return the result of a module's function; None if it raises, or uses more than `seconds` of CPU time.

    Arguments and result are JSON data. Each call imports the module, so it should import little.
    """
    limits = [str(seconds), str(MEMORY), str(PACKAGE.parent)]
    given = json.dumps([function.__module__, function.__name__, arguments])
    command = [sys.executable, "-I", "-S", f"-Xutf8={sys.flags.utf8_mode}", "-c", CALL, *limits]
    try:  # in a new session, so that Ctrl-C does not reach it
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError:
        return None
    _running.add(process)
    with process:
        try:
            answer, _ = process.communicate(given, timeout=KILL_AFTER)
        except (OSError, subprocess.TimeoutExpired):
            return None
        finally:
            process.kill()
            _running.discard(process)
    return json.loads(answer) if process.returncode == 0 else None


def end() -> None:
    """End the calls of other threads, which return None, before this process exits without waiting for threads."""
    for process in [*_running]:
        process.kill()
        process.wait()
