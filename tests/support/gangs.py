"""The app in processes forked from one that has imported torch, so that many tests share the cost."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.optional import not_none
from support.ports import free_port

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["app.train", "torch._dynamo", "pytest"])  # including what optimizers and DDP import


class Gang:
    """Workers in a folder, with torchrun's environment; without workers, a single process without it.

    They train, or call `main`, which is a function of a module.
    """

    def __init__(
        self, folder: Path, workers: int, arguments: Sequence[str], main: Callable[[], None] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        place = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place["CUDA_VISIBLE_DEVICES"] = ""  # more workers than a machine may have GPUs
        envs = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **place} for rank in range(workers)]
        self.outputs = [folder / f".output-{rank}" for rank in range(max(1, workers))]
        self.processes: list[BaseProcess] = [
            _forks.Process(target=_work, args=(folder, env, output, [*arguments], main))
            for env, output in zip(envs or [{}], self.outputs)
        ]
        for process in self.processes:
            process.start()

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if process.is_alive():
                    os.kill(not_none(process.pid), signal.SIGKILL)
        for process in self.processes:
            process.join()

    def end(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait until all have succeeded or one has failed; return their output and the exit code."""
        running: dict[object, BaseProcess] = {process.sentinel: process for process in self.processes}
        code = 0
        while running and not code:
            ended = wait([process.sentinel for process in running.values()], timeout)
            code = max((abs(not_none(running.pop(sentinel).exitcode)) for sentinel in ended), default=124)
        self.kill()
        text = "".join(output.read_text() for output in self.outputs)
        return subprocess.CompletedProcess(["train"], code, text, text)


def _work(
    folder: Path, env: dict[str, str], output: Path, arguments: list[str], main: Callable[[], None] | None
) -> None:
    """Run one worker process."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ |= {**env, "JOB_DIR": str(folder)}
    sys.argv = ["train", *arguments]
    import torch

    from app import train
    from app.job import leave

    torch.set_num_threads(1)
    (main or train.main)()
    leave()
