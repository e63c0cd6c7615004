"""Warm start: the same as `cold-start`, on a cluster; from this repository, and from a folder with only the script."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.starts import BASELINE, NODES, ROOT, SCRIPT, bare, interleaved, orchestrate, plain_image, ratio

OURS, ALONE = "orchestrate on a cluster", "the same, with only the script in its folder"


@contextlib.contextmanager
def cluster(folder: Path, script: str) -> Iterator[Callable[[], None]]:
    """Start nodes for jobs of a folder; yield a function that runs the script on them, which has imported torch."""
    with tempfile.TemporaryDirectory() as runs:
        options = ["--gpus", "none", "--trainers", str(NODES - 1), "--runs", runs]
        name = orchestrate("up", *options, folder=folder).strip()
        try:

            def warm() -> None:
                orchestrate("run", *options, "--", script, folder=folder)

            warm()
            yield warm
        finally:
            orchestrate("down", name, "--runs", runs, folder=folder)


def measure(runs: int) -> dict[str, Any]:
    """Interleave the baseline and orchestrate."""
    plain_image()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copy(ROOT / SCRIPT, folder)
        with cluster(ROOT, SCRIPT) as ours, cluster(Path(folder), Path(SCRIPT).name) as alone:
            seconds, failed = interleaved({BASELINE: bare, OURS: ours, ALONE: alone}, runs)
    ratios = {
        "orchestrate ÷ baseline (≤ 0.06)": ratio(seconds, OURS, [BASELINE]),
        "with only the script ÷ baseline": ratio(seconds, ALONE, [BASELINE]),
    }
    return {"values": {name: (found, "s") for name, found in seconds.items()}, "ratios": ratios, "failed": failed}
