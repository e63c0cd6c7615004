"""What workers write as the values of a function must be data, whatever it is, or be refused."""

import json
import os
import struct

import pytest
import torch

from orchestrate.api import function
from orchestrate.api.function import values
from orchestrate.errors import OrchestrateError
from orchestrate.files.folder import Folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job" / "values").mkdir(parents=True)
    return Folder(tmp_path, "job")


def written(folder: Folder, text: str | bytes, data: bytes = b"") -> Folder:
    (folder.path / "values" / "rank-0.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder.path / "values" / "rank-0.bin").write_bytes(data)
    return folder


def tensors(value: object, *head: list[object]) -> str:
    return json.dumps({"value": value, "tensors": head})


def test_the_values_of_ranks_that_have_returned_nothing_must_be_none(folder):
    assert values(written(folder, tensors([1])), 3) == [[1], None, None]


def test_tensors_must_be_put_in_their_places(folder):
    head = [["a", 1], "float32", [2], 0], [["b"], "int64", [], 8], [["c"], "bool", [0, 3], 0]
    text = tensors({"a": [1, None], "b": None, "c": None}, *head)
    (found,) = values(written(folder, text, struct.pack("ffq", 1.5, 2.5, 7)), 1)
    assert found["a"][0] == 1 and found["a"][1].tolist() == [1.5, 2.5]
    assert found["b"].item() == 7 and found["c"].shape == (0, 3) and found["c"].dtype == torch.bool


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        '{"value": [1], "tensors": []}'.encode("utf-16"),  # whose values are not counted
        "",
        "[",
        "[]",
        "{}",
        '{"value": 1}',
        "[" * 100_000,
        tensors(None, [[], "float32", [1 << 40], 0]),
        tensors(None, [[], "float32", [-1], 0]),
        tensors([None, None], [[0], "uint8", [8], 0], [[1], "uint8", [1], 0]),  # in the same bytes
        tensors(None, [[], "float32", [1.0], 0]),
        tensors(None, [[], "float32", [True], 0]),
        tensors(None, [[], "float32", [1], -4]),
        tensors(None, [[], "float32", [1], 1 << 70]),
        tensors(None, [[], "float32", [0, 1 << 62, 1 << 62], 0]),
        tensors(None, [[], "uint8", [1] * 65, 0]),
        tensors(None, [[], "__class__", [1], 0]),
        tensors(None, [[], ["float32"], [1], 0]),
        tensors(None, [[], "float32", [3], 0]),
        tensors(None, [[], "float32", [1], 5]),
        tensors([1], [[0], "float32", [1], 0]),
        tensors([None], [[1], "float32", [1], 0]),
        tensors([None], [[0, 0], "float32", [1], 0]),
        tensors([None], [["x"], "float32", [1], 0]),
        tensors({}, [["x"], "float32", [1], 0]),
        tensors([None], [[0], "float32", [1], 0], [[0], "float32", [1], 0]),
        json.dumps({"value": None, "tensors": 1}),
        tensors(None, [[], "float32"]),
    ],
)
def test_values_that_are_none_must_be_refused(folder, text):
    with pytest.raises(OrchestrateError, match="what rank 0 returned cannot be read: "):
        values(written(folder, text, bytes(8)), 1)


@pytest.mark.parametrize("name", ["rank-0.json", "rank-0.bin"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_files_must_be_read(folder, name, kind, tmp_path):
    path = written(folder, tensors(None, [[], "float32", [1], 0]), bytes(8)).path / "values" / name
    (tmp_path / "secret").write_text('{"value": "secret", "tensors": []}')
    path.unlink()
    makes = {"link": lambda: path.symlink_to(tmp_path / "secret"), "pipe": lambda: os.mkfifo(path)}
    makes.get(kind, path.mkdir)()
    with pytest.raises(OrchestrateError, match="what rank 0 returned cannot be read: "):
        values(folder, 1)


def test_a_tensor_must_not_be_indexed_by_what_a_worker_writes(folder):
    text = tensors(None, [[], "uint8", [1, 8], 0], [[[0] * 9, 0], "uint8", [0], 0])
    with pytest.raises(OrchestrateError, match="a value is inside a tensor"):  # not after copies of any size
        values(written(folder, text, bytes(8)), 1)


def test_a_value_that_is_too_large_must_be_refused(folder):
    with (written(folder, "").path / "values" / "rank-0.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OrchestrateError, match="it has more than 8 MiB"):
        values(folder, 1)


def test_the_tensors_of_all_ranks_must_be_limited(folder, monkeypatch):
    monkeypatch.setattr(function, "MOST_BYTES", 20)
    for rank in range(3):
        (folder.path / "values" / f"rank-{rank}.json").write_text(tensors(None, [[], "uint8", [8], 0]))
        (folder.path / "values" / f"rank-{rank}.bin").write_bytes(bytes(8))
    with pytest.raises(OrchestrateError, match="what rank 2 returned cannot be read: all ranks have more than"):
        values(folder, 3)
    assert len(values(folder, 2)) == 2
