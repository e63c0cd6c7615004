"""Code shared by the benchmarks on GPUs: commands, clusters, interleaved runs.

All of them use local processes (`--engine process`), so they need no Docker.
"""

import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.starts import ROOT
from orchestrate.host.cores import cores

DEVICE = "cuda"  # of the scripts
ONE, ALL = ("--gpus", "1"), ("--gpus", "all")  # options of `orchestrate run`
LIMIT = 150.0  # time limit of a command in seconds, after which it is stopped and counts as failed
GRACE = 60.0  # seconds between SIGTERM and SIGKILL
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None

Figures = dict[str, float]  # by label: the measurements of one run
Values = dict[str, list[float]]  # by label: the figures of all runs


class Group(NamedTuple):
    """Ranks that train together on the GPUs of this machine."""

    options: tuple[str, ...]  # of `orchestrate run`, with one worker on each node
    backend: str  # of torch.distributed
    ranks: int
    about: str  # for labels


def count() -> int:
    """Number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def group() -> Group:
    """One rank on each GPU with NCCL; on a machine with one GPU, two ranks that share it with gloo."""
    if (gpus := count()) > 1:
        return Group((*ALL, "--trainers", str(gpus - 1)), "nccl", gpus, f"{gpus} GPUs, NCCL")
    return Group((*ALL, "--trainers", "1", "--set", "share_gpus=true"), "gloo", 2, "2 ranks on one GPU, gloo")


def without_nccl(ranks: Group) -> dict[str, str]:
    """An entry for `failed` if the machine has too few GPUs for NCCL between GPUs."""
    return {} if ranks.backend == "nccl" else {"NCCL between GPUs": "needs two GPUs, but this machine has one"}


def environment(workers: int = 1, **more: str) -> dict[str, str]:
    """The environment of every command, with the same threads per worker, GPU order and interface for all launchers."""
    threads = str(max(1, len(cores()) // workers))
    common = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | common | {"OMP_NUM_THREADS": threads} | more


def orchestrate(verb: str, *arguments: str) -> list[str]:
    """A command line of orchestrate for local processes; `down` does not take `--engine`."""
    engine = [] if verb == "down" else ["--engine", "process"]
    return [sys.executable, "-m", "orchestrate", verb, *engine, *arguments]


def start(command: list[str], env: dict[str, str]) -> "subprocess.Popen[str]":
    """Start a command in the project's folder, with stderr redirected to stdout."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=ROOT, env=env
    )


def output(command: list[str], env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; raises RuntimeError if it fails or takes longer than LIMIT seconds."""
    process = start(command, env or environment())
    try:
        text = process.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        stop(process)
        raise RuntimeError(f"stopped after {LIMIT:g} s: {' '.join(command)}") from None
    if process.returncode:
        raise RuntimeError(reason(text) or f"exit code {process.returncode}: {' '.join(command)}")
    return text


def stop(process: "subprocess.Popen[Any]") -> None:
    """Stop a command with SIGTERM, on which `orchestrate run` stops its job, or with SIGKILL after GRACE seconds."""
    process.terminate()
    try:
        process.communicate(timeout=GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def reason(text: str) -> str:
    """The line of a command's output that best explains its failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"[Ee]rror: \S", line)]
    return (errors or lines or [""])[-1][:200]


class Cluster:
    """A cluster: nodes that stay up between jobs."""

    def __init__(self, folder: str, *options: str) -> None:
        """Start the nodes; `options` are those of the runs that use them, `folder` is their `--runs`."""
        self.options = (*options, "--runs", folder)
        self.folder = folder
        text = output(orchestrate("up", *self.options))
        self.name = re.findall(r"^(cluster-\w+)$", text, re.MULTILINE)[-1]

    def command(self, *script: str) -> list[str]:
        """The command line of a job on this cluster."""
        return orchestrate("run", *self.options, "--", *script)

    def check(self, text: str) -> str:
        """Return the output of a job; raises RuntimeError if the job did not run on this cluster."""
        if f", on {self.name}" not in text:
            raise RuntimeError(f"the job did not use the cluster: {text.strip().splitlines()[0][:200]}")
        return text


@contextmanager
def cluster(*options: str) -> Iterator[Cluster]:
    """Start a cluster that stays up until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = Cluster(folder, *options)
        try:
            yield nodes
        finally:
            output(orchestrate("down", nodes.name, "--runs", folder))


def rounds(ways: dict[str, Callable[[int], Figures]], runs: int) -> tuple[Values, dict[str, str]]:
    """Run each of `ways` in turn, `runs` times; each call gets the number of the round, from 1.

    Returns the figures by label, and the reason for each way that has failed; it is not tried again.
    """
    values: Values = {}
    failed: dict[str, str] = {}
    for number in range(1, runs + 1):
        for name, way in ways.items():
            if name in failed:
                continue
            try:
                figures = way(number)
            except (RuntimeError, OSError, ValueError, LookupError) as error:
                failed[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                continue
            for label, figure in figures.items():
                values.setdefault(label, []).append(figure)
    return values, failed


def ratios(values: Values, wanted: dict[str, tuple[str, str]]) -> dict[str, float]:
    """For each label, the median of the first figure divided by that of the second, if both were measured."""
    return {
        label: statistics.median(values[one]) / statistics.median(values[other])
        for label, (one, other) in wanted.items()
        if values.get(one) and values.get(other)
    }


def medians(values: Values, wanted: dict[str, str]) -> dict[str, float]:
    """For each label, the median of a figure, if it was measured."""
    return {label: statistics.median(values[name]) for label, name in wanted.items() if values.get(name)}


def result(values: Values, unit: str, compared: dict[str, float], failed: dict[str, str]) -> dict[str, Any]:
    """The return value of `measure`."""
    return {"values": {name: (found, unit) for name, found in values.items()}, "ratios": compared, "failed": failed}


def metrics(folder: Path, pattern: str) -> str:
    """The text of the newest file below `folder` that matches a pattern; raises LookupError if none does."""
    found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise LookupError(f"training wrote no {pattern.rpartition('/')[2]}")
    return found[-1].read_text()
