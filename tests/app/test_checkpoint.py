"""A checkpoint must be complete or absent, damage must be detected, and loading one must never run code."""

import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import saved, state
from support.optional import not_none
from support.repo import ROOT, SCRIPTS
from support.training import ok, same

from app import checkpoint, job, publish
from app.checkpoint import Checkpoints, read_manifest
from app.job import Job, append


def test_the_newest_and_the_best_checkpoints_must_be_kept(tmp_path):
    store = saved(tmp_path, 0.1, 0.9, 0.3, 0.4, None)
    assert [manifest["step"] for _, manifest in store.all()] == [2, 4, 5]
    assert checkpoint.load(tmp_path / "best")[0]["step"] == 2
    assert checkpoint.load(tmp_path / "last")[0]["step"] == 5
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_must_hold_the_state_as_of_the_call_to_save(tmp_path):
    store, tensor = Checkpoints(tmp_path), torch.zeros(1 << 20)
    store.save({"x": tensor, "inner": [{"y": tensor}]}, 1)
    tensor += 1  # training goes on while the save runs
    store.wait()
    found = not_none(store.newest())[0]
    assert not found["x"].any() and not found["inner"][0]["y"].any()


def test_only_consecutive_failed_saves_must_end_the_training(tmp_path, monkeypatch):
    store, full = Checkpoints(tmp_path), set()
    commit = store.commit

    def commits(found: dict, step: int, facts: dict) -> None:
        if step in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(found, step, facts)

    monkeypatch.setattr(store, "commit", commits)
    full |= {1, 2, 4, 5, 7, 8, 9}
    for step in range(1, 10):
        assert store.save(state(step), step)
        if step < 9:
            store.wait()
    with pytest.raises(OSError, match="3 checkpoints in a row could not be written"):
        store.wait()


def test_metrics_that_could_not_be_written_must_be_written_later(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    worker = Job()
    worker.record(step=1)
    with monkeypatch.context() as patch:
        patch.setattr(job, "append", full)
        worker.record(step=2)
        worker.record(step=3)
    worker.record(step=4)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_any_flipped_byte_must_be_detected_and_the_previous_checkpoint_loaded(tmp_path, capsys):
    store = saved(tmp_path, 0.5, 0.25)
    manifests = {manifest["step"]: manifest for _, manifest in store.all()}
    for name in ("state.pt", "manifest.json"):
        path = tmp_path / "step-00000002" / name
        good = path.read_bytes()
        for position in range(len(good)):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            found, manifest = not_none(store.newest())
            assert found["step"] == manifest["step"] == 1
            assert manifest == manifests[1]
            assert torch.equal(found["weights"], state(1)["weights"])
        path.write_bytes(good)
    assert "checkpoint step-00000002 is damaged, trying the previous one" in capsys.readouterr().out
    assert not_none(store.newest())[0]["step"] == 2


@pytest.mark.parametrize("next_is", ["resume", "save"])
def test_a_checkpoint_whose_replacement_was_interrupted_must_be_restored(tmp_path, monkeypatch, next_is):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = saved(tmp_path, None)
    # As left by a process that was killed while replacing it.
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")
    if next_is == "save":
        monkeypatch.setattr(checkpoint.torch, "save", full)
        store.save(state(2), 2)
        store.wait()
        assert [manifest["step"] for _, manifest in store.all()] == [1]
    else:
        assert not_none(store.newest())[0]["step"] == 1
    assert not list(tmp_path.glob(".step-*.old"))


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_truncated_checkpoint_must_be_skipped(tmp_path, cut):
    store = saved(tmp_path, None, None)
    path = tmp_path / "step-00000002" / "state.pt"
    path.write_bytes(path.read_bytes()[:cut])
    assert not_none(store.newest())[0]["step"] == 1


def test_saves_must_be_kept_while_damaged_checkpoints_of_later_steps_are_there(tmp_path):
    saved(tmp_path, None, None)
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}").rename(tmp_path / f"step-0000090{step}")
        (tmp_path / f"step-0000090{step}" / "state.pt").write_bytes(b"damaged")
    store = Checkpoints(tmp_path)
    assert store.newest() is None
    for step in (1, 2, 3):
        store.save(state(step), step)
        store.wait()
    assert not_none(Checkpoints(tmp_path).newest())[0]["step"] == 3
    assert (tmp_path / "last").readlink().name == "step-00000003"


def test_a_removal_that_was_interrupted_must_be_completed_by_the_next_save(tmp_path, monkeypatch):
    store = saved(tmp_path, None, None)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", lambda path, **_: (path / "manifest.json").unlink())  # and no more
        store.save(state(3), 3)
        store.wait()
    for step in (4, 5, 6):
        store.save(state(step), step)
        store.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"last", "step-00000005", "step-00000006"}


def test_newest_must_return_none_if_no_checkpoint_is_intact(tmp_path):
    store = saved(tmp_path, None)
    (tmp_path / "step-00000001" / "state.pt").unlink()
    assert store.newest() is None
    assert Checkpoints(tmp_path / "nowhere").newest() is None


def test_a_process_killed_at_any_line_of_a_save_must_leave_an_intact_checkpoint(tmp_path):
    script = [sys.executable, str(SCRIPTS / "killed_saves.py"), str(tmp_path)]
    done = ok(subprocess.run(script, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True))
    found = [line.split(" ", 1) for line in done.stdout.splitlines()]
    states = [state for _, state in found]
    assert states == sorted(states) and set(states) == {"0 old", "1 new"}  # the result changes once, at the rename
    lines = {where for where, _ in found}
    assert {"commit", "write", "digest", "_durable", "_durable_folder", "_tidy"} <= lines


def test_the_files_of_a_checkpoint_must_be_durable_before_it_is_renamed(tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename, rmtree = os.fsync, Path.rename, shutil.rmtree

    def named(path: str | Path) -> str:
        parts = Path(path).relative_to(tmp_path).parts
        return "/".join("work" if part.endswith(f".{os.getpid()}") else part for part in parts) or "checkpoints"

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"fsync {named(os.readlink(f'/proc/self/fd/{descriptor}'))}")

    def note_rename(self: Path, target: Path) -> Path:
        done.append(f"{named(self)} becomes {named(target)}")
        return rename(self, target)

    def note_rmtree(path: Path, **options: Any) -> None:
        done.append(f"remove {named(path)}")
        rmtree(path, **options)

    saved(tmp_path, None, keep=1)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr(shutil, "rmtree", note_rmtree)
    store = Checkpoints(tmp_path, keep=1)
    store.save(state(2), 2)
    store.wait()
    assert done == [
        "fsync work/state.pt",
        "fsync work/manifest.json",
        "fsync work",
        "work becomes step-00000002",
        "fsync checkpoints",
        "fsync checkpoints",  # after the links
        "step-00000001 becomes .step-00000001.gone",
        "remove .step-00000001.gone",
    ]


def test_checkpoints_must_be_ordered_by_step_not_by_name(tmp_path):
    store = Checkpoints(tmp_path, keep=9)
    for step in (99_999_999, 100_000_000, 7):
        store.save(state(step), step)
        store.wait()
    assert [manifest["step"] for _, manifest in store.all()] == [7, 99_999_999, 100_000_000]
    assert not_none(store.newest())[0]["step"] == 100_000_000


def test_a_full_disk_must_not_end_the_training_at_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    store = Checkpoints(tmp_path / "file" / "checkpoints")
    for step in (1, 2, 3):
        store.save(state(step), step)
        not_none(store.thread).join()
    assert capsys.readouterr().out.count("could not be written: ") == 3
    for ends in (store.wait, lambda: store.save(state(4), 4)):
        with pytest.raises(OSError, match="3 checkpoints in a row"):
            ends()


def test_a_save_must_be_skipped_while_the_last_one_is_still_running(tmp_path, capsys, monkeypatch):
    store = Checkpoints(tmp_path)
    free = threading.Event()
    commit = store.commit
    monkeypatch.setattr(store, "commit", lambda *args: free.wait() and commit(*args))
    assert store.save(state(1), 1) is True
    assert store.save(state(2), 2) is False
    free.set()
    store.wait()
    assert "checkpoint at step 2 skipped" in capsys.readouterr().out
    assert [manifest["step"] for _, manifest in store.all()] == [1]


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def plant(folder: Path, bomb: bytes) -> Path:
    """A checkpoint whose state is a hostile pickle, with a manifest that agrees with it."""
    folder.mkdir(parents=True)
    (folder / "state.pt").write_bytes(bomb)
    files = {"state.pt": {"size": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}}
    manifest = {"files": files, "step": 1}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))
    assert read_manifest(folder) == manifest
    return folder


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("way", ["resume auto", "resume", "init-from", "init-from file", "publish", "shard"])
def test_a_hostile_pickle_must_run_nothing(small, tmp_path, monkeypatch, sharded, form, way):
    canary = tmp_path / "canary"
    path = tmp_path / "bomb"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Bomb(canary), protocol=2))
    else:
        torch.save({"model": Bomb(canary)}, path)
    bomb = path.read_bytes()
    if way == "resume auto":  # skipped, since an older checkpoint may be intact
        plant(tmp_path / "job" / "checkpoints" / "step-00000001", bomb)
        small("--resume", "auto")
    elif way == "publish":
        monkeypatch.setattr(sys, "argv", ["publish", str(plant(tmp_path / "bad", bomb)), str(tmp_path / "out")])
        with pytest.raises(SystemExit, match="is not a valid checkpoint"):
            publish.main()
    else:
        if way == "shard":
            (sharded / "train-00000.safetensors").write_bytes(bomb)
            arguments = ("--dataset", f"shards:{sharded}")
        elif way == "init-from file":
            (tmp_path / "bomb.safetensors").write_bytes(bomb)
            arguments = ("--init-from", str(tmp_path / "bomb.safetensors"))
        else:
            arguments = (f"--{way}", str(plant(tmp_path / "bad", bomb)))
        with pytest.raises(SystemExit, match="error: "):
            small(*arguments)
    assert not canary.exists()


def test_transfer_must_list_missing_and_unexpected_tensors(small, tmp_path, capsys):
    good = small() / "checkpoints" / "last"
    tensors = checkpoint.load(good)[0]["model"]
    tensors["fc3.weight"] = tensors.pop("fc2.weight")
    save_file(tensors, tmp_path / "other.safetensors")
    small("--init-from", str(tmp_path / "other.safetensors"))
    out = capsys.readouterr().out
    assert "7 of 8 tensors from" in out
    assert "missing, trained from scratch: fc2.weight\n  unexpected, ignored: fc3.weight" in out


def test_a_published_model_must_consist_of_weights_and_a_model_card(small, tmp_path):
    folder = small() / "checkpoints"
    card: dict[str, Any] = publish.publish(folder / "best", tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), checkpoint.load(folder / "best")[0]["model"])
    assert card == json.loads((tmp_path / "out" / "model.json").read_text())
    assert (card["model"], card["dataset"], card["parameters"]) == ("lenet", "mnist", 80202)
    manifest = read_manifest(folder / "best")
    assert (card["step"], card["test_accuracy"]) == (7, manifest["score"])
    assert card["tensors"]["fc2.weight"] == ["torch.float32", [10, 128]]
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert card["sha256"] == hashlib.sha256(content).hexdigest()
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"step": "7"}


def test_a_checkpoint_of_another_job_must_be_refused_with_the_difference(small):
    small()
    with pytest.raises(SystemExit, match="made with --batch-size 32, not 16\nhint: use --batch-size 32"):
        small("--resume", "auto", "--batch-size", "16")


def test_a_worker_of_an_older_generation_must_not_save(tmp_path, capsys):
    newer = Checkpoints(tmp_path)
    newer.save({"weights": torch.ones(3)}, 7)
    newer.wait()
    older = Checkpoints(tmp_path, over=lambda: True)
    older.save({"weights": torch.zeros(3)}, 7)
    older.wait()
    older.save({"weights": torch.zeros(3)}, 8)
    older.wait()
    assert [manifest["step"] for _, manifest in newer.all()] == [7]
    assert torch.equal(not_none(newer.newest())[0]["weights"], torch.ones(3))
    assert "checkpoint at step 8 skipped: a newer generation saves here" in capsys.readouterr().out


def test_a_worker_that_is_fenced_off_during_a_save_must_not_commit_it(tmp_path):
    older = Checkpoints(tmp_path, over=iter([False, True]).__next__)
    older.save(state(7), 7)
    older.wait()
    assert list(tmp_path.iterdir()) == [] and older.newest() is None


def test_a_worker_must_read_from_the_jobs_file_whether_its_generation_is_over(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.delenv("RANK", raising=False)
    job = Job()
    over = []
    for content in ("2", "2 over", "3", "", "nonsense"):
        (tmp_path / "generation").write_text(content)
        over.append(job.over())
    assert over == [False, False, True, False, False]


def test_lines_that_cannot_be_written_whole_must_not_be_written_at_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, ["one"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # a disk that is full after eight bytes
    try:
        with pytest.raises(OSError):
            append(path, ["two", "three"])
        assert path.read_text() == "one\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    path.write_text("one\nhal")  # left by a killed process
    append(path, ["two"])
    assert path.read_text() == "one\nhal\ntwo\n"


def test_a_loss_that_is_not_finite_must_end_the_training(small):
    with pytest.raises(SystemExit, match="the loss is (nan|inf) at step"):
        small("--lr", "1e30", "--optimizer", "sgd", "--save-every", "1")
