"""Checks of a job's image in a container: Python for the nodes, and whether torch can use the GPUs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from orchestrate.console import during
from orchestrate.engines import check_cache
from orchestrate.engines.docker import helper_containers, toolkit
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.packages import image_id
from orchestrate.errors import ResourceError
from orchestrate.host.gpus import Gpu
from orchestrate.spec.spec import IMAGE

PYTHONS = (  # usual places; those of conda and venvs are often not on PATH
    *("python", "python3", "/opt/conda/bin/python", "/opt/venv/bin/python", "/usr/local/bin/python3"),
    *("/usr/bin/python3", "/venv/bin/python", "/app/.venv/bin/python"),
)
OLDEST = (3, 9)  # oldest Python that runs a node
MEMORY = 4 << 30  # bytes; torch with CUDA takes up to two
PYTHON_TIMEOUT = 30  # seconds for Python to print its version
VERSION = "import sys; sys.stdout.write('%d %d' % sys.version_info[:2])"


@during("looking for Python in the image")
def python(daemon: Daemon, image: str, run: Path) -> str:
    """Return the Python interpreter for nodes of an image; raises ResourceError if there is none.

    `run` is for the container's label.
    """
    if image == IMAGE:
        return PYTHONS[0]
    key = ["python", image_id(daemon, image)]
    if name := check_cache.cached(key):
        return name
    old, why = "", ""
    for name in PYTHONS:
        output, failure = _run(daemon, image, run, [name, "-I", "-S", "-c", VERSION], PYTHON_TIMEOUT)
        why = why or ("" if "exec: " in failure or "no such file" in failure else failure)  # no such program
        if "timed out" in failure:
            break
        if not re.fullmatch(r"\d{1,3} \d{1,3}", output):
            continue
        if tuple(map(int, output.split())) >= OLDEST:
            check_cache.store(key, name)
            return name
        old = old or f"{name} is Python {output.replace(' ', '.')}"
    needs = ".".join(map(str, OLDEST))
    raise ResourceError(
        f"the image {image} has no Python {needs} or later: {old or why or 'none found'}",
        f"install it in the image as python or python3 (tried {', '.join(PYTHONS)})",
    )


@during("testing the GPUs with torch")
def gpu_problem(daemon: Daemon, image: str, run: Path, python: str, gpus: Collection[Gpu]) -> str:
    """Return why torch in the image cannot use the GPUs; empty if it can, or if torch is not installed."""
    if (known := known_problem(daemon, image, gpus)) is not None:
        return known
    gpu_mode, ids = toolkit.gpu_mode(daemon.info), [gpu.id for gpu in gpus]
    visible = [*toolkit.environment(gpu_mode, ids), "HOME=/tmp"]
    host = toolkit.host_config(gpu_mode, ids)
    command = [python, "-c", check_cache.CUDA]
    output, failure = _run(daemon, image, run, command, check_cache.COMPUTE_TIMEOUT, host, visible)
    return check_cache.cuda(_key(daemon, image, gpus), output, failure)


def known_problem(daemon: Daemon, image: str, gpus: Collection[Gpu]) -> str | None:
    """Return the answer of `gpu_problem` if it is known from an earlier test, otherwise None."""
    return check_cache.known(_key(daemon, image, gpus))


def _key(daemon: Daemon, image: str, gpus: Collection[Gpu]) -> list[str]:
    return check_cache.cuda_key([image_id(daemon, image)], gpus)


def _run(
    daemon: Daemon,
    image: str,
    run: Path,
    command: list[str],
    patience: int,
    host: dict[str, Any] | None = None,
    env: Sequence[str] = (),
) -> tuple[str, str]:
    """Run a command in a container of the image; return its last line of output, and the error if it could not run.

    The limit is `patience` seconds.
    """
    host = {"Tmpfs": {"/tmp": "size=1g"}, **(host or {})}
    config = {"User": "65534:65534", "Env": [*env]}
    text, failure = helper_containers.output(
        daemon, run, command, patience, host, image=image, memory=MEMORY, config=config
    )
    return next((line.strip()[:300] for line in reversed(text.split("\n")) if line.strip()), ""), failure
