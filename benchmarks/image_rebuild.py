"""Rebuilding the image after a change in `app/` only."""

import os
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.starts import ROOT, timed

NAME = "orchestrate-benchmark:rebuilt"


def measure(runs: int) -> dict[str, Any]:
    """Change one file and build, once per run."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        copy.mkdir()
        for name in ("Dockerfile", "docker-compose.yml", "requirements.lock"):
            shutil.copy(ROOT / name, copy)
        for name in ("app", "orchestrate"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))

        def build() -> None:
            command = ["docker", "compose", "--profile", "gpu", "build", "master"]
            subprocess.run(command, check=True, capture_output=True, cwd=copy, env=os.environ | {"NODE_IMAGE": NAME})

        build()
        for number in range(runs):
            (copy / "app" / "change.py").write_text(f'"""Change {number}."""\n')
            seconds.append(timed(build))
    subprocess.run(["docker", "image", "rm", NAME], check=True, capture_output=True)
    values = {"docker compose build": (seconds, "s")}
    return {"values": values, "ratios": {"in seconds (≤ 0.5)": statistics.median(seconds)}}
