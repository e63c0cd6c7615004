"""Which node each copied file of a job comes from: the first of those that have it."""

from __future__ import annotations

import threading

MAX_FILES, MAX_NAMES = 500_000, 64 << 20  # files of all nodes together, and characters of their paths


class Owners:
    """The owner of each file, as the number of a node; hold `lock` while changing a file that depends on it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_path: dict[str, int] = {}
        self.size = 0  # characters of the paths

    def claim(self, path: str, number: int) -> int | None:
        """Claim a file for a node, which succeeds unless an earlier one has it; return the owner before, if any.

        Returns None if there are too many files.
        """
        with self.lock:
            before = self.by_path.get(path)
            if before is None:
                if len(self.by_path) >= MAX_FILES or self.size + len(path) > MAX_NAMES:
                    return None
                self.size += len(path)
            if before is None or number < before:
                self.by_path[path] = number
            return number if before is None else before

    def owns(self, path: str, number: int) -> bool:
        """Whether a file still comes from a node, and no earlier one has claimed it."""
        return self.by_path.get(path) == number

    def below(self, path: str) -> dict[str, int]:
        """Return what is below a path, with its owners."""
        with self.lock:
            return {each: number for each, number in self.by_path.items() if each.startswith(f"{path}/")}

    def of(self, number: int) -> list[str]:
        """Return the files of a node."""
        with self.lock:
            return [path for path, owner in self.by_path.items() if owner == number]

    def forget(self, path: str) -> None:
        """Forget the owner of a file."""
        with self.lock:
            del self.by_path[path]
            self.size -= len(path)
