"""This worker's part in the job: rank, device, process group, output, and communication with the other ranks."""

import argparse
import datetime
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor


class Job:
    """Reads torchrun's variables and joins the process group; without them, the job has one worker."""

    def __init__(self, timeout: float = 1800) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # grows with each restart
        self.folder = Path(os.environ.get("JOB_DIR", "runs/app"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.unwritten: list[str] = []  # metrics
        self.asked = False  # whether SIGTERM has asked this worker to stop
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= count:
                hint = "use fewer workers, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
                raise SystemExit(f"error: no GPU for local rank {local}: torch sees {count}\nhint: {hint}")
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        elif os.environ.get("CUDA_VISIBLE_DEVICES"):
            self.say("warning: torch cannot use the GPU in CUDA_VISIBLE_DEVICES; training on the CPU")
        if self.world_size > 1:
            backend = self._backend()
            device = self.device if backend == "nccl" else None  # with its device, NCCL connects eagerly
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), device_id=device)

    def _backend(self) -> str:
        """The backend of the process group; gloo also takes tensors on a GPU, through the CPU."""
        if self.device.type == "cpu":
            return "gloo"
        version = torch.cuda.nccl.version()[:2]
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and version < (2, 30):
            self.say(f"workers share a GPU, which NCCL {version[0]}.{version[1]} does not support: using gloo")
            return "gloo"
        return "nccl"

    def _on_sigterm(self, *_: object) -> None:
        self.asked = True

    def over(self) -> bool:
        """Whether a newer generation has fenced off this worker's and may save now."""
        try:
            return int((self.folder / "generation").read_text().split()[0]) > self.generation
        except (OSError, ValueError, IndexError):
            return False

    def close(self) -> None:
        """Leave the process group, all workers at once: leaving while others still communicate may crash them."""
        if self.world_size > 1:
            dist.barrier()
            dist.destroy_process_group()

    def say(self, text: str) -> None:
        """Print from rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def record(self, **metrics: Any) -> None:
        """Append a line to metrics.jsonl from rank 0."""
        if self.rank == 0:
            self.unwritten.append(json.dumps(metrics))
            try:
                append(self.folder / "metrics.jsonl", self.unwritten)
                self.unwritten = []
            except OSError as error:  # a full disk must not end training; these lines are written with the next ones
                self.say(f"could not write metrics: {error}")

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all workers; float64, on the CPU."""
        total = values.detach().to(self.device, torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.cpu()

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every worker's tensor, ordered by rank, on the CPU; all must have the same shape and type."""
        mine = mine.to(self.device)
        if self.world_size == 1:
            return [mine.cpu()]
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return [part.cpu() for part in parts]

    def broadcast(self, tensors: list[Tensor] | None, like: list[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Rank 0's tensors on the device of every worker; `like` has the number of dimensions and the type of each.

        Shapes are sent as numbers, so nothing is unpickled, unlike with `broadcast_object_list`.
        """
        if self.world_size == 1:
            assert tensors is not None
            return [tensor.to(self.device) for tensor in tensors]
        sizes = [size for tensor in tensors for size in tensor.shape] if tensors else [0] * sum(n for n, _ in like)
        shapes = torch.tensor(sizes, device=self.device)
        dist.broadcast(shapes, src=0)
        received, left = [], shapes.tolist()
        for i, (dimensions, dtype) in enumerate(like):
            shape, left = left[:dimensions], left[dimensions:]
            tensor = (tensors[i] if tensors else torch.empty(shape, dtype=dtype)).to(self.device).contiguous()
            dist.broadcast(tensor, src=0)
            received.append(tensor)
        return received


def append(path: Path, lines: list[str]) -> None:
    """Append all lines to a file, or none; start on a new line if a killed process left an incomplete one."""
    with path.open("ab", buffering=0) as file:  # after a failed write, a buffer would be written again on close
        size = file.seek(0, os.SEEK_END)
        try:
            with path.open("rb") as before:
                before.seek(max(0, size - 1))
                fresh = before.read(1) in (b"", b"\n")
            text = b"\n" * (not fresh) + "".join(f"{line}\n" for line in lines).encode()
            while text:
                text = text[file.write(text) :]
        except OSError:
            os.truncate(path, size)
            raise


STOPPED = 128 + signal.SIGTERM  # the exit code of a worker that has saved and stopped on SIGTERM


def leave(code: int = 0) -> None:
    """Exit immediately, without finalizing the interpreter.

    With torch 2.15 and gloo, about one in seventy runs aborts after leaving the process group, while the interpreter
    shuts down torch's threads (`terminate called without an active exception`), so that a complete job counts as
    failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def spawn(workers: int, function: Any, args: argparse.Namespace) -> None:
    """Run `function(args)` in `workers` processes on this machine, each with torchrun's variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_spawned, (workers, port, function, args), nprocs=workers)


def _spawned(rank: int, workers: int, port: int, function: Any, args: argparse.Namespace) -> None:
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
    os.environ.update({key: str(value) for key, value in {**ranks, **address}.items()})
    function(args)
    leave()
