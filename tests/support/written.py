"""What jobs that others run have written, by the names of their folders in `runs`."""

import re
from pathlib import Path


class Written:
    """The jobs of a folder."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"

    def log(self, name: str, rank: int) -> str:
        """The log of a worker; empty if there is none yet."""
        path = self.runs / name / "logs" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def steps(self, rank: int, name: str = "count") -> list[tuple[int, int]]:
        """The steps of a worker of count.py, and their generations."""
        found = re.findall(r"^step (\d+) in (\d+)$", self.log(name, rank), re.M)
        return [(int(step), int(generation)) for step, generation in found]
