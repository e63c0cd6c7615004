"""events.jsonl: what happened to a job, a line each, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Emit = Callable[..., None]  # emit(event, **data)


class Recorder:
    """Keeps the events of a job, in memory and as lines of a file."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self._file = path.open("a", buffering=1)
        self._started = time.monotonic()

    def __call__(self, event: str, **data: Any) -> None:
        """Note `event`, with the wall clock's time and the seconds since the job's start."""
        seconds = round(time.monotonic() - self._started, 3)
        line = {"event": event, "time": round(time.time(), 3), "seconds": seconds, **data}
        self.events.append(line)
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
