"""Files that saves leave on disk, whatever was there before and whatever interrupts them."""

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import threading

import pytest
import torch
from support.checkpoints import saved, state
from support.optional import not_none

from app import checkpoint, publish
from app.checkpoint import Checkpoints


def test_of_equally_good_checkpoints_the_newest_must_be_the_best(tmp_path):
    store = saved(tmp_path, 0.5, 0.7, 0.7, 0.1, 0.2)
    assert checkpoint.load(tmp_path / "best")[0]["step"] == 3
    assert [manifest["step"] for _, manifest in store.all()] == [3, 4, 5]
    saved(tmp_path / "poor", 0.0, None)
    assert checkpoint.load(tmp_path / "poor" / "best")[0]["step"] == 1


def test_a_save_must_replace_an_earlier_checkpoint_of_the_same_step(tmp_path):
    store = saved(tmp_path, None, None)
    store.save({"weights": torch.zeros(2), "again": True}, 2)
    store.wait()
    assert store.misses == 0 and not_none(store.newest())[0]["again"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step-00000001", "step-00000002"]
    shutil.copytree(store.path(1), tmp_path / ".step-00000002.old")  # of a process that was killed after replacing it
    assert not_none(store.newest())[0]["again"]


def test_a_save_must_remove_the_remains_of_a_killed_one_before_it_writes(tmp_path, monkeypatch):
    half, write, existed = tmp_path / ".step-00000007.4711", torch.save, []
    half.mkdir()
    (half / "state.pt").write_bytes(b"half")
    (tmp_path / ".step-last").symlink_to(half.name)

    def note(*arguments: object) -> None:
        existed.append(half.exists())
        write(*arguments)

    monkeypatch.setattr(checkpoint.torch, "save", note)
    saved(tmp_path, None)
    assert existed == [False]  # on a full disk, it would take the space
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step-00000001"]


def test_saves_must_leave_no_open_file_and_no_thread_behind(tmp_path):
    store = saved(tmp_path, None)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for step in range(2, 7):
        store.save(state(step), step)
        store.wait()
        assert store.newest()
    assert len(os.listdir("/proc/self/fd")) <= before[0] and threading.active_count() <= before[1]


def test_tensors_of_the_same_name_must_be_kept_apart_even_if_shape_or_type_change(tmp_path):
    store = Checkpoints(tmp_path)
    for step, (size, dtype) in enumerate([(4, torch.float32), (6, torch.float32), (6, torch.float64)], 1):
        one, two = (torch.rand(size, dtype=dtype, requires_grad=True) for _ in range(2))
        store.save({"a": {"w": one}, "b": {"w": two}, "c": [{"w": one}, {"w": two}], "d": (two, one)}, step)
        store.wait()
        found = not_none(store.newest())[0]
        assert [type(found[name]) for name in "abcd"] == [dict, dict, list, tuple]
        for tensor in (found["a"]["w"], found["c"][0]["w"], found["d"][1]):
            assert torch.equal(tensor, one) and tensor.dtype == dtype
        for tensor in (found["b"]["w"], found["c"][1]["w"], found["d"][0]):
            assert torch.equal(tensor, two) and tensor.dtype == dtype


def signed(**manifest) -> str:
    """A manifest with the right SHA-256, which anyone can compute."""
    text = json.dumps(manifest, sort_keys=True)
    return json.dumps({**manifest, "sha256": hashlib.sha256(text.encode()).hexdigest()})


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "3", "", "{", '{"step": 2}', '{"step": 2, "sha256": null}', "[" * 200_000),
        *(signed(step="x"), signed(score=1.0), signed(step=True), signed(step=2, score="z")),
        *(signed(step=2, score=float("nan")), signed(step=2, score=1 << 5000)),
    ],
)
def test_an_invalid_manifest_must_be_skipped_and_left_in_place(tmp_path, content):
    store = saved(tmp_path, None, None, None)
    path = tmp_path / "step-00000002" / "manifest.json"
    path.write_text(content)
    assert [manifest["step"] for _, manifest in store.all()] == [3]
    store.save(state(4), 4)
    store.wait()
    assert [manifest["step"] for _, manifest in store.all()] == [3, 4] and store.misses == 0
    assert path.read_text() == content


def test_only_folders_named_after_a_step_must_count_as_checkpoints(tmp_path):
    store = saved(tmp_path, None)
    (tmp_path / "step-00000009").symlink_to("step-00000001")
    for name in ("step-x", "step-", "step-²", f"step-{'9' * 5000}"[:200], "other"):
        shutil.copytree(store.path(1), tmp_path / name)
    assert [path.name for path, _ in store.all()] == ["step-00000001"]


@pytest.mark.parametrize("size", [8, 1 << 18])  # one fits in a buffer; the other fails in torch itself
def test_a_disk_that_fills_up_during_a_save_must_cost_only_that_save(tmp_path, capsys, size):
    store = saved(tmp_path, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        store.save({"weights": torch.ones(size)}, 2)
        store.wait()
        assert (store.misses, not_none(store.newest())[0]["step"]) == (1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    store.save(state(3), 3)
    store.wait()
    assert (store.misses, not_none(store.newest())[0]["step"]) == (0, 3)
    assert "checkpoint at step 2 could not be written: " in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


def test_publish_must_report_what_it_wrote_and_refuse_a_damaged_checkpoint(tmp_path, monkeypatch, capsys):
    store = Checkpoints(tmp_path / "checkpoints")
    arguments = {"model": "lenet", "dataset": "mnist"}
    store.save({"model": {"w": torch.zeros(3, 4)}, "arguments": arguments}, 5)
    store.wait()
    monkeypatch.setattr(sys, "argv", ["publish", str(store.path(5)), str(tmp_path / "not" / "there")])
    publish.main()
    publish.main()  # again, over the existing files
    assert capsys.readouterr().out.startswith("12 parameters of step 5 in ")
    (store.path(5) / "state.pt").write_bytes(b"")
    with pytest.raises(SystemExit, match=f"error: {store.path(5)} is not a valid checkpoint: "):
        publish.main()
