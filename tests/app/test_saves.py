"""The app's checkpoints: at the end of each epoch, within it if requested, and before it stops."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.optional import not_none
from support.training import same, weights

from app import checkpoint, replicas, strategy, train
from app.checkpoint import Checkpoints
from app.job import STOPPED, Job


def steps(folder: Path) -> list[int]:
    """The steps of the existing checkpoints."""
    return [manifest["step"] for _, manifest in Checkpoints(folder / "checkpoints").all()]


@pytest.fixture
def held(monkeypatch) -> Iterator[None]:
    """Saves that finish only when the training waits for them."""
    released = threading.Event()
    wait, commit = Checkpoints.wait, Checkpoints.commit

    def wait_released(self: Checkpoints) -> None:
        if self.thread is not None and self.thread.is_alive():
            released.set()
        wait(self)

    def commit_when_released(self: Checkpoints, *arguments: Any) -> None:
        released.wait()
        released.clear()
        commit(self, *arguments)

    monkeypatch.setattr(Checkpoints, "wait", wait_released)
    monkeypatch.setattr(Checkpoints, "commit", commit_when_released)
    yield
    released.set()


@pytest.fixture
def sigterm_at(monkeypatch) -> Callable[[int], None]:
    """A function that sends SIGTERM during a step."""

    def send(step: int) -> None:
        numbers = iter(range(1, 100))
        monkeypatch.setattr(
            strategy.Strategy, "average", lambda self: next(numbers) == step and signal.raise_signal(signal.SIGTERM)
        )

    return send


@pytest.fixture
def stopped(small, monkeypatch) -> Callable[..., int]:
    """Train until a worker stops on request; the function returns the step of the checkpoint `last` at that moment."""

    def train_until_stopped(*arguments: str) -> int:
        found: list[int] = []

        def leave(code: int = 0) -> None:
            found.append(checkpoint.load(Job().folder / "checkpoints" / "last")[1]["step"])
            raise SystemExit(code)

        with monkeypatch.context() as patch:
            patch.setattr(train, "leave", leave)
            with pytest.raises(SystemExit) as ended:
                small(*arguments)
        assert ended.value.code == STOPPED
        return found[0]

    return train_until_stopped


def test_only_a_save_within_an_epoch_must_be_skipped_while_another_runs(small, held, capsys):
    folder = small("--save-every", "2", "--keep", "9")
    assert steps(folder) == [2, 7]
    assert checkpoint.load(folder / "checkpoints" / "best")[1]["step"] == 7
    out = capsys.readouterr().out
    assert [step for step in range(1, 8) if f"checkpoint at step {step} skipped" in out] == [4, 6]


def test_a_worker_that_is_stopped_must_exit_only_after_its_checkpoint_is_written(stopped, held, sigterm_at):
    sigterm_at(2)
    assert stopped("--epochs", "3") == 7


def test_a_worker_that_is_stopped_must_save_even_if_another_save_is_running(stopped, held, sigterm_at):
    sigterm_at(10)
    assert stopped("--epochs", "3", "--save-every", "9") == 10


def test_rank_0_must_save_if_other_ranks_are_stopped_during_a_save(stopped, held, monkeypatch):
    total, done = Job.sum, []

    def with_others(self: Job, values: torch.Tensor) -> torch.Tensor:
        """The sums of rank 0; at step 10, two other ranks have been asked to stop."""
        result = total(self, values)
        if len(done) == 10:
            result[-2] += 2
        return result

    monkeypatch.setattr(strategy.Strategy, "average", lambda self: done.append(1))
    monkeypatch.setattr(Job, "sum", with_others)
    assert stopped("--epochs", "3", "--save-every", "9") == len(done) == 10


def test_a_request_to_stop_during_a_save_must_take_effect_at_the_next_report(stopped, monkeypatch):
    total, reports = Job.sum, []

    def sum_then_sigterm(self: Job, values: torch.Tensor) -> torch.Tensor:
        result = total(self, values)
        reports.append(len(values))
        if len(reports) == 1:  # all workers have agreed to continue, at step 3
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(Job, "sum", sum_then_sigterm)
    assert stopped("--epochs", "3", "--save-every", "3") == 6


def test_a_run_that_was_stopped_and_resumed_must_equal_an_uninterrupted_one(small, stopped, sigterm_at, tmp_path):
    arguments = ("--model", "mnist", "--epochs", "2", "--schedule", "cosine")
    expected = weights(small(*arguments))
    folder = (tmp_path / "job").rename(tmp_path / "whole")
    sigterm_at(8)
    assert stopped(*arguments) == 10
    sigterm_at(0)
    assert same(weights(small(*arguments, "--resume", "auto")), expected)
    resumed, whole = ([one for one in records(job) if one["kind"] == "step"] for job in (tmp_path / "job", folder))
    assert resumed == whole and [one["step"] for one in whole] == list(range(1, 15))


@pytest.fixture
def saves(monkeypatch) -> list[tuple[Any, ...]]:
    """The saves: step, epoch and step within it at which to resume, and the fields of the manifest."""
    recorded: list[tuple[Any, ...]] = []

    def save(self: Checkpoints, state: dict[str, Any], step: int, **facts: Any) -> bool:
        recorded.append((step, state["epoch"], state["epoch_step"], facts))
        return True

    monkeypatch.setattr(Checkpoints, "save", save)
    return recorded


def test_saves_must_come_after_the_given_steps_and_at_the_end_of_each_epoch(small, saves):
    small("--epochs", "2", "--save-every", "2")
    positions = [(1, 2), (1, 4), (1, 6), (2, 0), (2, 1), (2, 3), (2, 5), (3, 0)]
    assert [save[:3] for save in saves] == list(zip([2, 4, 6, 7, 8, 10, 12, 14], *zip(*positions)))
    assert [step for step, _, _, facts in saves if facts["score"] is not None] == [7, 14]


def test_saves_must_come_only_at_the_end_of_each_epoch_by_default(small, saves):
    small("--epochs", "2")
    assert [save[:3] for save in saves] == [(7, 2, 0), (14, 3, 0)]


def test_a_manifest_must_record_score_world_size_and_generation(small, saves, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    folder = small("--ledger")
    (epoch,) = [record for record in records(folder) if record["kind"] == "epoch"]
    assert saves[0][3] == {"score": epoch["test_accuracy"], "world_size": 1, "generation": 3}
    entry = json.loads((folder / "ledger-0.jsonl").read_text().splitlines()[-1])
    assert (entry["generation"], entry["step"], len(entry["samples"])) == (3, 7, 11)


def test_a_fenced_worker_must_save_nothing(small, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "generation").write_text("1\n")
    assert steps(small("--save-every", "2")) == []


def test_the_requested_number_of_checkpoints_must_be_kept(small):
    assert len(steps(small("--epochs", "5", "--keep", "4"))) in (4, 5)  # and the best


def test_diverged_weights_must_not_be_saved(small, tmp_path):
    with pytest.raises(SystemExit, match="at step"):
        small("--lr", "1e30", "--optimizer", "sgd", "--save-every", "1", "--keep", "9")
    recorded = {record["step"] for record in records(tmp_path / "job") if record["kind"] == "step"}
    assert set(steps(tmp_path / "job")) <= recorded


# --- metrics


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Clock:
    """A clock that advances by a second with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now

    def monotonic(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize(("parts", "seconds"), [(1, 1.0), (3, 3.0)])
def test_the_pace_must_be_the_mean_of_the_steps_since_the_last_record(small, monkeypatch, parts, seconds):
    monkeypatch.setattr(train, "time", Clock())
    folder = small("--epochs", "2", "--save-every", "5", "--accumulate", str(parts))
    paces = [record for record in records(folder) if record["kind"] == "pace"]
    assert [(record["step"], record["total_steps"]) for record in paces] == [(step, 14) for step in (5, 7, 10, 14)]
    assert [record["rank_seconds"] for record in paces] == [[seconds]] * 4


def test_an_epoch_record_must_contain_its_step_samples_and_time(small, monkeypatch, capsys):
    monkeypatch.setattr(train, "time", Clock())
    found = records(small("--epochs", "2"))
    epochs = [record for record in found if record["kind"] == "epoch"]
    assert [(record["epoch"], record["step"], record["samples"]) for record in epochs] == [(1, 7, 203), (2, 14, 203)]
    seconds, again = (record["seconds"] for record in epochs)
    assert seconds == again > 7  # for seven steps
    steps = [(record["epoch"], record["step"]) for record in found if record["kind"] == "step"]
    assert steps == [(1 + (step > 7), step) for step in range(1, 15)]
    accuracy, loss = epochs[1]["test_accuracy"], epochs[1]["test_loss"]
    out = capsys.readouterr().out
    assert f"epoch 2/2: accuracy {accuracy:.2%}, loss {loss:.4f}, {seconds:.1f} s\n" in out
    assert out.startswith("rank 0 of 1 on ")


def test_replicas_must_be_compared_after_the_given_steps_and_at_the_end(small, monkeypatch):
    at: list[int] = []
    monkeypatch.setattr(replicas, "check", lambda job, net, step: at.append(step))
    small("--epochs", "2", "--check-replicas", "4")
    assert at == [4, 8, 12, 14]
    small()
    assert len(at) == 4


# --- starting points


def test_training_must_resume_from_the_given_checkpoint(small, tmp_path, capsys):
    first = small("--epochs", "2", "--keep", "9") / "checkpoints" / "step-00000007"
    (tmp_path / "job" / "metrics.jsonl").unlink()
    folder = small("--epochs", "2", "--resume", str(first))
    assert "resumed after step 7, in epoch 2\n" in capsys.readouterr().out
    assert [record["step"] for record in records(folder) if record["kind"] == "step"] == list(range(8, 15))


@pytest.mark.parametrize("option", ["--resume", "--init-from"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "incomplete"])
def test_an_unreadable_checkpoint_must_be_refused_by_name(small, tmp_path, option, damage):
    path = tmp_path / "one"
    store = Checkpoints(path)
    store.save({"model": {}}, 1)
    store.wait()
    path = store.path(1)
    if damage == "missing":
        (path / "state.pt").unlink()
    elif damage == "truncated":
        (path / "state.pt").write_bytes(b"")
    else:
        manifest = {"step": 1, "files": {}}
        (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": checkpoint._digest(manifest)}))
    with pytest.raises(SystemExit, match=f"error: {path} is not a valid checkpoint: "):
        small(option, str(path))


def test_resume_must_take_precedence_over_init_from(small, tmp_path, capsys):
    other = small("--seed", "5").rename(tmp_path / "other") / "checkpoints" / "last"
    init = ("--init-from", str(other))
    whole = small(*init, "--epochs", "2").rename(tmp_path / "whole")
    assert "8 of 8 tensors from" in capsys.readouterr().out
    small(*init)
    assert same(weights(small(*init, "--epochs", "2", "--resume", "auto")), weights(whole))


def test_matching_weights_must_be_loaded_and_all_others_listed(tmp_path):
    net, other = (torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, width)) for width in (2, 5))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    store = Checkpoints(tmp_path)
    store.save({"model": {**other.state_dict(), "more": torch.zeros(1)}}, 1)
    store.wait()
    messages: list[str] = []
    train.transfer(net, store.path(1), messages.append)
    found = net.state_dict()
    assert all(torch.equal(found[f"0.{name}"], other.state_dict()[f"0.{name}"]) for name in ("weight", "bias"))
    assert all(torch.equal(found[f"1.{name}"], before[f"1.{name}"]) for name in ("weight", "bias"))
    assert messages[0].startswith("loaded 2 of 4 tensors")
    assert messages[1].endswith(": 1.bias, 1.weight") and messages[2].endswith(": 1.bias, 1.weight, more")


def test_all_workers_must_resume_from_the_checkpoint_that_rank_0_found(monkeypatch, tmp_path):
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    job, store = Job(), Checkpoints(tmp_path)
    assert train.newest(job, store) is None
    for step in (1, 2):
        store.save({"at": step}, step)
        store.wait()
    assert not_none(train.newest(job, store))[0]["at"] == 2
    job.rank = 1
    for step, expected in ((1, {"at": 1}), (2, {"at": 2})):
        monkeypatch.setattr(job, "broadcast", lambda tensors, like, step=step: [torch.tensor([step])])
        assert not_none(train.newest(job, store))[0] == expected
    monkeypatch.setattr(job, "broadcast", lambda tensors, like: [torch.tensor([-1])])
    assert train.newest(job, store) is None
    monkeypatch.setattr(job, "broadcast", lambda tensors, like: [torch.tensor([3])])
    with pytest.raises(SystemExit, match="step-00000003 is not a valid checkpoint"):
        train.newest(job, store)


@pytest.mark.parametrize(("workers", "restored"), [(2, 1), (3, None), (1, None)])
def test_random_state_must_be_restored_by_rank_if_the_world_size_is_the_same(monkeypatch, workers, restored):
    names = ("batch_size", "seed", "dataset", "model", "optimizer")
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (10, 11)]
    state: dict[str, Any] = {"arguments": dict.fromkeys(names, 1), "epoch": 2, "epoch_step": 3, "random": states}
    job = Job()
    job.rank, job.world_size = 1, workers
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert train.restore(state, job, train.argparse.Namespace(**state["arguments"]), {}) == (2, 3)
    assert torch.equal(torch.get_rng_state(), before if restored is None else states[restored])
