"""Communication between workers of the app, in processes joined by gloo."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gangs import Gang
from torch import Tensor, nn

from app import collectives, replicas, strategy
from app.job import Job


def call_by_name() -> None:
    """Run the function below that `sys.argv[1]` names, on each worker."""
    job = Job(timeout=60)
    result = globals()[sys.argv[1]](job)
    (job.folder / f"result-{job.rank}.json").write_text(json.dumps(result))
    job.close()


def results(folder: Path, workers: int, function: Any) -> list[Any]:
    """The result of a function on each worker."""
    done = Gang(folder, workers, [function.__name__], call_by_name).end()
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(workers)]


def exchanged(job: Job) -> Any:
    like = [(3, torch.uint8), (1, torch.int64), (2, torch.float32)]
    tensors: list[Tensor] | None = None
    if job.rank == 0:
        tensors = [torch.arange(24, dtype=torch.uint8).view(2, 3, 4).transpose(0, 2), torch.tensor([7, 8])]
        tensors += [torch.zeros(0, 5)]
    received = job.broadcast(tensors, like)
    total = job.sum(torch.tensor([1.0 + job.rank, 0.5]))
    gathered = job.gather(torch.tensor([job.rank, 9]))
    parts = [[list(one.shape), str(one.dtype), one.tolist()] for one in received]
    return parts, total.tolist(), [one.tolist() for one in gathered]


def test_broadcast_sum_and_gather_must_give_every_worker_the_same_results(tmp_path):
    images = torch.arange(24).view(2, 3, 4).transpose(0, 2).tolist()
    received = [[[4, 3, 2], "torch.uint8", images], [[2], "torch.int64", [7, 8]], [[0, 5], "torch.float32", []]]
    assert results(tmp_path, 3, exchanged) == [[received, [6.0, 1.5], [[0, 9], [1, 9], [2, 9]]]] * 3


class Net(nn.Module):
    """A used parameter, an unused one, and a buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.tensor([1.0 + rank]))
        self.idle = nn.Parameter(torch.tensor([10.0 + rank]))
        self.register_buffer("seen", torch.tensor([20.0 + rank]))

    def forward(self, x: Tensor) -> Tensor:
        return self.used * x


def manual(job: Job) -> Any:
    net = Net(job.rank)
    way = strategy.Strategy("manual", job, net)
    initial = [float(value) for value in net.state_dict().values()]
    with way.accumulating(False):
        way.model(torch.tensor([1.0 + job.rank])).sum().backward()
    own = float(net.used.grad)
    way.average()
    mean = float(net.used.grad)
    net.seen.fill_(30 + job.rank)
    way.share_buffers()
    net.get_parameter("idle").data += 1e-3
    replicas.check(job, net, 1)
    return initial, own, mean, net.idle.grad is None, float(net.seen)


def test_manually_averaged_gradients_must_be_the_mean_over_all_workers(tmp_path):
    found = results(tmp_path, 2, manual)
    assert found == [[[1.0, 10.0, 20.0], own, 1.5, True, 30.0] for own in (1.0, 2.0)]


def by_ddp(job: Job) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    way = strategy.Strategy("ddp", job, net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    generator = torch.get_rng_state()
    way.settle(torch.ones(1, 2), torch.tensor([0]))
    same = all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    drawn = torch.equal(torch.get_rng_state(), generator)
    empty = all(parameter.grad is None or not parameter.grad.any() for parameter in net.parameters())
    x, grads = torch.full((4, 2), 1.0 + job.rank) * torch.arange(4).view(4, 1), []
    for last in (False, True):
        with way.accumulating(last):
            way.model(x).square().sum().backward()
        grads.append([float(job.gather(net[0].weight.grad)[rank].sum()) for rank in range(2)])
    way.average()
    after = [float(job.gather(net[0].weight.grad)[rank].sum()) for rank in range(2)]
    apart, mean = grads[0][0] != grads[0][1], grads[1][0] == grads[1][1] == after[0] == after[1]
    return same, drawn, empty, net.training, apart, mean


def test_ddp_must_settle_its_buckets_without_side_effects_and_average_only_with_the_last_part(tmp_path):
    assert results(tmp_path, 2, by_ddp) == [[True] * 6] * 2


# --- the demonstration of the collectives


def faulty() -> None:
    """Run three collectives: one that works, one with a wrong result on rank 1, and an unsupported one."""

    def unknown() -> collectives.Result:
        raise NotImplementedError("not here\nnor anywhere")

    class Faulty(collectives.Demo):
        def cases(self) -> dict[str, Callable[[], collectives.Result]]:
            return {"good": self.all_gather, "bad": lambda: (self.rank, 7 + self.rank, 7), "unknown": unknown}

    collectives.Demo = Faulty  # type: ignore[misc]
    collectives.main()


def test_a_collective_with_a_wrong_result_must_be_shown_and_fail(tmp_path):
    done = Gang(tmp_path, 2, [], faulty).end()
    assert done.returncode == 1
    out = (tmp_path / ".output-0").read_text()
    assert "good: yes\n  rank 0: 1 -> [1, 2]\n  rank 1: 2 -> [1, 2]\n" in out
    assert "bad: WRONG: 7; yes\n  rank 0: 0 -> 7\n  rank 1: 1 -> 8\n" in out
    assert "unknown: no: not here\n\n" in out
    assert "| good | yes |\n| bad | WRONG: 7; yes |\n| unknown | no: not here |\n" in out
    assert "gloo on torch" in out and ", 2 workers on cpu" in out
    assert not (tmp_path / ".output-1").read_text()


def timed() -> None:
    """Run the bandwidth benchmark as if each call took a microsecond."""

    def microsecond(call: Callable[[], Any], job: Job, repeat: int) -> float:
        call()
        assert repeat == 2
        return 1e-6

    collectives._timed = microsecond
    collectives.main()


def test_bandwidth_must_be_computed_from_size_time_and_number_of_workers(tmp_path):
    done = Gang(tmp_path, 3, ["--bench", "--bytes", "8192", "--repeat", "2"], timed).end()
    assert done.returncode == 0, done.stderr
    head, names, *lines = (tmp_path / ".output-0").read_text().splitlines()
    assert head.startswith("gloo, 3 workers, float32") and names.split()[0] == "collective"
    sizes = ((1020, 1.02), (8184, 8.184))  # multiples of three elements; GB/s
    factors = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "broadcast": 1}
    expected = [(name, size, 1.0, rate, rate * factors[name]) for name in factors for size, rate in sizes]
    found = [line.split() for line in lines]
    assert [(name, int(size)) for name, size, *_ in found] == [row[:2] for row in expected]
    for (_, _, *figures), row in zip(found, expected):
        assert [float(figure) for figure in figures] == pytest.approx(row[2:], abs=0.001)


@pytest.mark.parametrize("options", [(), ("--bench",)], ids=["show", "bench"])
def test_collectives_must_refuse_a_single_worker(monkeypatch, tmp_path, options):
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["collectives", *options])
    with pytest.raises(SystemExit, match="error: a collective needs two workers\nhint: use --spawn 4"):
        collectives.main()


@pytest.mark.parametrize("options", [(), ("--bench",)], ids=["show", "bench"])
def test_spawn_must_start_the_requested_number_of_workers(monkeypatch, options):
    asked: list[Any] = []
    monkeypatch.setattr(collectives, "spawn", lambda count, function, args: asked.append((count, function, args)))
    monkeypatch.setattr(sys, "argv", ["collectives", "--spawn", "3", *options])
    collectives.main()
    ((count, function, args),) = asked
    assert (count, function.__name__) == (3, "bench" if options else "show")
    assert (args.bytes, args.repeat) == (1 << 25, 10)


class Clock:
    """A clock that advances four seconds per call."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def __call__(self) -> None:
        self.now += 4


def test_the_time_of_a_collective_must_exclude_warm_up_calls(monkeypatch, tmp_path):
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    clock, at = Clock(), []
    monkeypatch.setattr(collectives, "time", clock)
    monkeypatch.setattr(collectives.dist, "barrier", lambda: at.append(clock.now))
    assert collectives._timed(clock, Job(), 5) == 4
    assert at == [12] and clock.now == 32  # three warm-up calls, a barrier, five timed calls
