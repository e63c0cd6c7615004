"""What nodes import ahead must be what the script will import, as far as its source tells."""

import pytest

from orchestrate.preload import preload
from orchestrate.spec import JobSpec

TORCH = ("torch", "torch.distributed")
ALL = (*TORCH, "torch._dynamo")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("print(1)", ()),
        ("# import torch", ()),
        ("import torchless", ()),
        ("import torch", TORCH),
        ("from torch import nn", TORCH),
        ("def main():\n    import torch.distributed as dist", TORCH),
        ("import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP", ALL),
        ("import torch\ntorch.optim.SGD", ALL),
        ("import torch\nimport re\nre.compile('')", TORCH),
        ("import torch\ntorch.compile(model)", ALL),
        ("import torch (", ()),
        ("", ()),
    ],
)
def test_a_script_must_be_read_and_not_run(tmp_path, text, expected):
    (tmp_path / "train.py").write_text(text)
    assert preload(JobSpec(command=("train.py", "--lr", "1")), tmp_path) == expected


def test_files_that_the_script_imports_must_be_read_too(tmp_path):
    (tmp_path / "train.py").write_text("from lib import model\nimport train")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "model.py").write_text("from . import layers\nimport lib.deep.er")
    (tmp_path / "lib" / "deep").mkdir()
    (tmp_path / "lib" / "deep" / "er.py").write_text("import torch")
    assert preload(JobSpec(command=("train.py",)), tmp_path) == TORCH
    assert preload(JobSpec(command=("-m", "lib.model")), tmp_path) == TORCH


def test_files_beside_a_script_in_another_folder_must_be_read_too(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import helper")
    (tmp_path / "scripts" / "helper.py").write_text("import torch")
    assert preload(JobSpec(command=("scripts/train.py",)), tmp_path) == TORCH


def test_the_job_file_must_have_the_last_word(tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    assert preload(JobSpec(command=("train.py",), preload=["numpy", "torch"]), tmp_path) == (*TORCH, "numpy")
    assert preload(JobSpec(command=("train.py",), preload=["numpy"], warm=False), tmp_path) == ()
    (tmp_path / "train.py").write_text("import something_that_imports_torch")
    assert preload(JobSpec(command=("train.py",), preload=["numpy"]), tmp_path) == ("numpy",)


@pytest.mark.parametrize("command", [("nonesuch.py",), ("-m", "nonesuch"), ("-m", "torch.distributed.run")])
def test_what_is_not_there_must_be_nothing(tmp_path, command):
    assert preload(JobSpec(command=command), tmp_path) == ()


def test_bytes_that_are_no_text_must_be_nothing(tmp_path):
    (tmp_path / "train.py").write_bytes(b"\xff\xfeimport torch\0")
    assert preload(JobSpec(command=("train.py",)), tmp_path) == ()
