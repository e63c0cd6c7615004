"""Demonstrate and measure every collective.

    python -m orchestrate run -- -m app.collectives            values on every rank, before and after
    python -m app.collectives --spawn 4                        the same on this machine, without orchestrate
    python -m app.collectives --spawn 4 --bench                bandwidth by message size

Each result is checked against the collective's definition, computed from the known values of all ranks. Support in the
backend is found by trying; a collective that fails leaves its group unusable, so each gets a separate group.
"""

import argparse
import datetime
import functools
import json
import operator
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.job import Job, leave, spawn

REDUCTIONS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "SUM": (dist.ReduceOp.SUM, operator.add),
    "PRODUCT": (dist.ReduceOp.PRODUCT, operator.mul),
    "MIN": (dist.ReduceOp.MIN, min),
    "MAX": (dist.ReduceOp.MAX, max),
    "BAND": (dist.ReduceOp.BAND, operator.and_),
    "BOR": (dist.ReduceOp.BOR, operator.or_),
    "BXOR": (dist.ReduceOp.BXOR, operator.xor),
}
Result = tuple[Any, Any, Any]  # the values of this rank: before, after, expected after


class Demo:
    """One worker's side of every collective; rank r holds r + 1, or a row of numbers (see `row`)."""

    def __init__(self, job: Job) -> None:
        self.rank, self.n = job.rank, job.world_size
        self.device = job.device if dist.get_backend() == "nccl" else torch.device("cpu")  # gloo sends only from there
        self.group: Any = None
        self.all = [rank + 1 for rank in range(self.n)]

    def one(self, value: int) -> Tensor:
        """A tensor with one number."""
        return torch.tensor([value], device=self.device)

    def row(self, rank: int) -> list[int]:
        """One number of `rank` for each peer: 11, 12, … on rank 0, 21, 22, … on rank 1."""
        return [10 * (rank + 1) + peer + 1 for peer in range(self.n)]

    def send_recv(self) -> Result:
        """Each rank sends to the next, around a ring."""
        mine, got = self.one(self.rank + 1), self.one(0)
        after, before = (self.rank + 1) % self.n, (self.rank - 1) % self.n
        jobs = [dist.isend(mine, after, group=self.group), dist.irecv(got, before, group=self.group)]
        for job in jobs:
            assert job is not None
            job.wait()
        return self.rank + 1, got.item(), before + 1

    def broadcast(self) -> Result:
        """All ranks get rank 0's number."""
        x = self.one(self.rank + 1)
        dist.broadcast(x, 0, group=self.group)
        return self.rank + 1, x.item(), 1

    def broadcast_object_list(self) -> Result:
        """The same for any Python object, through pickle: only among workers that trust each other."""
        before: list[Any] = [{"rank": self.rank}]
        x = list(before)
        dist.broadcast_object_list(x, 0, group=self.group, device=self.device)
        return before, x, [{"rank": 0}]

    def scatter(self) -> Result:
        """Each rank gets one of rank 0's numbers."""
        x = self.one(0)
        parts = [self.one(value) for value in self.row(0)] if self.rank == 0 else None
        dist.scatter(x, parts, 0, group=self.group)
        return self.row(0) if self.rank == 0 else None, x.item(), self.row(0)[self.rank]

    def gather(self) -> Result:
        """Rank 0 gets every rank's number."""
        parts = [self.one(0) for _ in self.all] if self.rank == 0 else None
        dist.gather(self.one(self.rank + 1), parts, 0, group=self.group)
        after = [part.item() for part in parts] if parts else None
        return self.rank + 1, after, self.all if self.rank == 0 else None

    def reduce(self) -> Result:
        """Rank 0 gets the sum; the values of the others are undefined afterwards."""
        x = self.one(self.rank + 1)
        dist.reduce(x, 0, group=self.group)
        return self.rank + 1, x.item() if self.rank == 0 else None, sum(self.all) if self.rank == 0 else None

    def all_reduce(self, name: str) -> Result:
        """All ranks get the reduction of all numbers."""
        x = self.one(self.rank + 1)
        dist.all_reduce(x, REDUCTIONS[name][0], group=self.group)
        return self.rank + 1, x.item(), functools.reduce(REDUCTIONS[name][1], self.all)

    def reduce_scatter(self) -> Result:
        """Rank r gets the sum of all ranks' number r."""
        x = self.one(0)
        dist.reduce_scatter(x, [self.one(value) for value in self.row(self.rank)], group=self.group)
        return self.row(self.rank), x.item(), sum(self.row(rank)[self.rank] for rank in range(self.n))

    def all_gather(self) -> Result:
        """All ranks get every rank's number."""
        parts = [self.one(0) for _ in self.all]
        dist.all_gather(parts, self.one(self.rank + 1), group=self.group)
        return self.rank + 1, [part.item() for part in parts], self.all

    def all_gather_object(self) -> Result:
        """The same for any Python object, through pickle."""
        parts: list[Any] = [None] * self.n
        dist.all_gather_object(parts, {"rank": self.rank}, group=self.group)
        return {"rank": self.rank}, parts, [{"rank": rank} for rank in range(self.n)]

    def all_to_all(self) -> Result:
        """Rank r gets number r of every rank: a transposed table."""
        parts = [self.one(0) for _ in self.all]
        dist.all_to_all(parts, [self.one(value) for value in self.row(self.rank)], group=self.group)
        after = [part.item() for part in parts]
        return self.row(self.rank), after, [self.row(rank)[self.rank] for rank in range(self.n)]

    def barrier(self) -> Result:
        """No rank continues before all have arrived: each records its arrival, and none may leave before the last."""
        arrived = time.monotonic()
        dist.barrier(group=self.group)
        left = time.monotonic()
        times = [torch.zeros(1, dtype=torch.float64, device=self.device) for _ in self.all]
        dist.all_gather(times, torch.tensor([arrived], dtype=torch.float64, device=self.device), group=self.group)
        same_clock = max(float(t) for t in times) - arrived < 3600  # the monotonic clocks of two machines differ
        return "here", not same_clock or left >= max(float(t) for t in times), True

    def cases(self) -> dict[str, Callable[[], Result]]:
        """All collectives by name."""
        reductions = {f"all_reduce {name}": functools.partial(self.all_reduce, name) for name in REDUCTIONS}
        first = ("send_recv", "broadcast", "broadcast_object_list", "scatter", "gather", "reduce")
        last = ("reduce_scatter", "all_gather", "all_gather_object", "all_to_all", "barrier")
        named = [{name: getattr(self, name) for name in names} for names in (first, last)]
        return named[0] | reductions | named[1]


def show(args: argparse.Namespace) -> None:
    """Try every collective; print the values of each rank, and what this backend supports, from rank 0."""
    job = Job(timeout=60)
    if job.world_size == 1:
        raise SystemExit("error: a collective needs two workers\nhint: use --spawn 4, or python -m orchestrate run")
    demo = Demo(job)
    table = []
    for name, case in demo.cases().items():
        demo.group = dist.new_group(timeout=datetime.timedelta(seconds=20))
        try:
            before, after, expected = case()
            row = {"before": before, "after": after, "status": "yes" if after == expected else f"WRONG: {expected}"}
        except (RuntimeError, ValueError, NotImplementedError) as error:
            row = {"before": None, "after": None, "status": f"no: {str(error).splitlines()[0][:60]}"}
        # Through the store, not the group: a failed collective may have broken the group.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{name}/{job.rank}", json.dumps(row))
        table.append((name, [json.loads(store.get(f"{name}/{rank}")) for rank in range(job.world_size)]))
    backend = dist.get_backend()
    job.say(f"{backend} on torch {torch.__version__}, {job.world_size} workers on {demo.device.type}")
    for name, rows in table:
        statuses = sorted({row["status"] for row in rows})
        job.say(f"\n{name}: {'; '.join(statuses)}")
        for rank, row in enumerate(rows):
            if row["status"].startswith(("yes", "WRONG")):
                job.say(f"  rank {rank}: {row['before']} -> {row['after']}")
    job.say(f"\n| collective | {backend} |\n| --- | --- |")
    for name, rows in table:
        job.say(f"| {name} | {'; '.join(sorted({row['status'] for row in rows}))} |")
    job.close()
    if any("WRONG" in row["status"] for _, rows in table for row in rows):
        raise SystemExit(1)


def bench(args: argparse.Namespace) -> None:
    """Print time, algorithm bandwidth and bus bandwidth by message size.

    As defined by nccl-tests (its doc/PERFORMANCE.md): algorithm bandwidth is size ÷ time; bus bandwidth is that times
    2(n-1)/n for all_reduce, (n-1)/n for all_gather and reduce_scatter (whose size is the total of all ranks), and 1 for
    broadcast, so that it is comparable with the hardware's bandwidth for any n.
    """
    job = Job(timeout=300)
    n = job.world_size
    if n == 1:
        raise SystemExit("error: a collective needs two workers\nhint: use --spawn 4, or python -m orchestrate run")
    job.say(f"{dist.get_backend()}, {n} workers, float32; size in bytes, time in µs, bandwidth in GB/s")
    job.say(f"{'collective':<16}{'size':>12}{'time':>12}{'algbw':>9}{'busbw':>9}")
    for name, factor in (("all_reduce", 2 * (n - 1) / n), ("all_gather", (n - 1) / n), ("broadcast", 1.0)):
        size = 1 << 10
        while size <= args.bytes:
            whole = torch.ones(size // 4 // n * n, device=job.device)
            part = torch.ones(len(whole) // n, device=job.device)
            call: Callable[[], Any] = {
                "all_reduce": functools.partial(dist.all_reduce, whole),
                "all_gather": functools.partial(dist.all_gather, list(whole.chunk(n)), part),
                "broadcast": functools.partial(dist.broadcast, whole, 0),
            }[name]
            seconds = _timed(call, job, args.repeat)
            algorithm = len(whole) * 4 / seconds / 1e9
            figures = f"{len(whole) * 4:>12}{seconds * 1e6:>12.1f}{algorithm:>9.3f}{algorithm * factor:>9.3f}"
            job.say(f"{name:<16}{figures}")
            size *= 8
    job.close()


def _timed(call: Callable[[], Any], job: Job, repeat: int) -> float:
    """Seconds per call on the slowest rank, after three warm-up calls."""

    def run(times: int) -> None:
        for _ in range(times):
            call()
        if job.device.type == "cuda":
            torch.cuda.synchronize()

    run(3)
    dist.barrier()
    started = time.perf_counter()
    run(repeat)
    seconds = torch.tensor([(time.perf_counter() - started) / repeat], device=job.device, dtype=torch.float64)
    return max(float(part) for part in job.gather(seconds))


def main() -> None:
    """Demonstrate or measure, in this process or in spawned workers."""
    parser = argparse.ArgumentParser(
        prog="python -m app.collectives", description="Demonstrate and measure every collective."
    )
    parser.add_argument("--spawn", type=int, metavar="N", help="start N workers on this machine")
    parser.add_argument("--bench", action="store_true", help="measure bandwidth instead")
    parser.add_argument("--bytes", type=int, default=1 << 25, help="size of the largest message (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=10, help="calls per measurement (default %(default)s)")
    args = parser.parse_args()
    function = bench if args.bench else show
    spawn(args.spawn, function, args) if args.spawn else function(args)


if __name__ == "__main__":
    main()
    leave()
