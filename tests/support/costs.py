"""Run a command, and write to FILE what it costs, in counts that do not depend on the machine or on other programs.

python costs.py FILE ARGUMENT…
"""

import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

COUNTED = {
    **{"call": "calls", "c_call": "calls", "open": "opened files", "subprocess.Popen": "programs"},
    "http.client.send": "requests",  # without their content, which is sent after the head
}


def main(file: str, *arguments: str) -> None:
    """Count calls of all threads, files that are opened, programs that are started, and imported modules."""
    counts = dict.fromkeys(COUNTED.values(), 0)

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event in COUNTED:
            counts["calls"] += 1

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        # What `/sys` has, such as a file for each processor and device, depends on the machine.
        content = event == "http.client.send" and arguments[1][:1] == b"{"
        if event in COUNTED and not content and not str(arguments[0]).startswith("/sys/"):
            counts[COUNTED[event]] += 1

    sys.addaudithook(audited)
    threading.setprofile(called)
    sys.setprofile(called)
    from orchestrate.cli.main import main

    code = main([*arguments])
    sys.setprofile(None)
    counts["modules"] = len(sys.modules)
    Path(file).write_text(json.dumps(counts))
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
