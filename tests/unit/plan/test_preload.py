"""Nodes must preload what the script will import, as far as its source shows."""

import os

import pytest

from orchestrate.files import sandbox
from orchestrate.plan import imports
from orchestrate.plan.preload import preload, start
from orchestrate.spec.spec import JobSpec

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
        ("import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel", ALL),
        ("import torch\nfrom torch.distributed.fsdp import fully_shard", ALL),
        ("import torch\nmodel = DDP(model)", ALL),
        ("import torch\noptimal = torchscompile = LADDPT = 1", TORCH),
        ("import torch.nn as nn", TORCH),
        ("from accelerate import Accelerator", ALL),
        ("import lightning as L", ALL),
        ("from torch import *", TORCH),
        ("from . import torch", ()),
        ("optim = DDP = 1", ()),
        ("import torch (", ()),
        ("import torch\0", ()),
        ("", ()),
    ],
)
def test_a_script_must_be_parsed_and_not_run(tmp_path, text, expected):
    (tmp_path / "train.py").write_text(text)
    assert preload(JobSpec(command=("train.py", "--lr", "1")), tmp_path) == expected


def test_a_script_that_is_nested_too_deeply_must_be_skipped(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nx = " + "-" * 100_000 + "1")
    assert preload(JobSpec(command=("train.py",)), tmp_path) == ()
    (tmp_path / "train.py").write_text("import torch\nx = 1" + "+1" * 10_000)
    assert preload(JobSpec(command=("train.py",)), tmp_path) in ((), TORCH)  # depends on the Python version


def test_a_script_that_takes_too_long_to_parse_must_be_skipped(tmp_path):
    """Python's parser takes more than a minute for it, and cannot be interrupted."""
    (tmp_path / "train.py").write_text("import torch\nf'" + "{x:{y}}" * 150_000 + "'")
    assert preload(JobSpec(command=("train.py",), preload=["numpy"]), tmp_path) in (("numpy",), (*TORCH, "numpy"))


def test_files_imported_by_the_script_must_also_be_read(tmp_path):
    (tmp_path / "train.py").write_text("from lib import model\nimport train")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "model.py").write_text("from . import layers\nimport lib.deep.er")
    (tmp_path / "lib" / "deep").mkdir()
    (tmp_path / "lib" / "deep" / "er.py").write_text("import torch")
    assert preload(JobSpec(command=("train.py",)), tmp_path) == TORCH
    assert preload(JobSpec(command=("-m", "lib.model")), tmp_path) == TORCH


def test_files_next_to_a_script_in_another_folder_must_also_be_read(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text("import helper")
    (tmp_path / "scripts" / "helper.py").write_text("import torch")
    assert preload(JobSpec(command=("scripts/train.py",)), tmp_path) == TORCH
    (tmp_path / "scripts" / "train.py").write_text("from helper import help")
    assert preload(JobSpec(command=("scripts/train.py",)), tmp_path) == TORCH


def test_a_package_run_as_a_script_must_be_read(tmp_path):
    for folder, text in (("main", "import torch"), ("init", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__main__.py").write_text(text)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("import torch")
    (tmp_path / "lib" / "__main__.py").touch()
    (tmp_path / "train.py").write_text("import lib")
    assert preload(JobSpec(command=("-m", "main", "x.py")), tmp_path) == TORCH
    assert preload(JobSpec(command=("-m", "init")), tmp_path) == ()
    assert preload(JobSpec(command=("train.py",)), tmp_path) == TORCH


def test_a_file_that_cannot_be_read_must_not_hide_the_others(tmp_path):
    (tmp_path / "train.py").write_text("import a, z, broken")
    (tmp_path / "z.py").write_bytes(b"\xff\xfe")
    (tmp_path / "broken.py").write_text("import (")
    (tmp_path / "a.py").write_text("import torch")
    assert preload(JobSpec(command=("train.py",)), tmp_path) == TORCH


def test_frameworks_must_be_found_by_their_names(tmp_path):
    (tmp_path / "train.py").write_text("import deepspeed, pytorch_lightning.cli\nfrom transformers import Trainer")
    assert imports.uses(["train.py"], str(tmp_path)) == ["deepspeed", "pytorch_lightning", "transformers"]


def test_what_a_script_does_with_torch_must_be_found_with_its_place(tmp_path):
    (tmp_path / "train.py").write_text(
        "import lib.net\n# torch.multiprocessing.spawn(main)\nmp.spawn(main)\nmp.spawn(x)"
    )
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "net.py").write_text(
        "dist.init_process_group('gloo', init_method='file:///tmp/x')\nif os.environ['MASTER_ADDR'] == 'x': pass\n"
    )
    place = {"group": "lib/net.py:1", "file": "lib/net.py:1", "spawn": "train.py:3"}
    assert imports.traits(["train.py"], str(tmp_path)) == place
    assert imports.traits(["none.py"], str(tmp_path)) == {}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("address", "os.environ['MASTER_ADDR'] = 'localhost'"),
        ("address", 'environ[ "MASTER_PORT" ]="1"'),
        ("address", "group(init_method='tcp://127.0.0.1:23456')"),
        ("spawn", "torch.multiprocessing.spawn(main, nprocs=2)"),
        ("file", "store = dist.FileStore(path, 2)"),
        ("parallel", "model = DDP(model)"),
        ("parallel", "fully_shard(model)"),
    ],
)
def test_each_way_to_write_it_must_be_found(tmp_path, name, line):
    (tmp_path / "train.py").write_text(f"import os\n{line}\n")
    assert imports.traits(["train.py"], str(tmp_path)) == {name: "train.py:2"}


def test_ray_on_several_nodes_must_be_warned_about(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import ray")
    assert preload(JobSpec(command=("train.py",), trainers=0), tmp_path) == ()
    assert capsys.readouterr().err == ""
    assert preload(JobSpec(command=("train.py",), trainers=1), tmp_path) == ()
    assert "starts a cluster in each worker" in capsys.readouterr().err


TUTORIAL = """
import os, torch.multiprocessing as mp
def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
"""


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (f"{TUTORIAL}mp.spawn(train, nprocs=2)", "starts workers with mp.spawn()"),
        (TUTORIAL, "sets MASTER_ADDR or MASTER_PORT"),
        (f"{TUTORIAL}if 'RANK' not in os.environ: mp.spawn(train, nprocs=2)", ""),
        ("# mp.spawn(train)", ""),
    ],
)
def test_a_script_that_is_a_launcher_itself_must_be_warned_about(tmp_path, capsys, text, warning):
    (tmp_path / "train.py").write_text(text)
    for trainers in (0, 1):
        preload(JobSpec(command=("train.py",), trainers=trainers), tmp_path)
        told = capsys.readouterr().err
        alone = trainers == 0 and "spawn" not in warning  # a single worker connects to no other
        assert warning in told if warning and not alone else not told


def test_the_number_of_files_read_must_be_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "MAX_FILES", 3)
    for number, text in enumerate(("import f1", "import f2", "import f3", "import torch")):
        (tmp_path / f"f{number}.py").write_text(text)
    assert imports.uses(["f0.py"], str(tmp_path)) == []
    assert imports.uses(["f1.py"], str(tmp_path)) == ["torch"]


def test_the_job_file_must_override_detection(tmp_path):
    (tmp_path / "train.py").write_text("import torch")
    assert preload(JobSpec(command=("train.py",), preload=["numpy", "torch"]), tmp_path) == (*TORCH, "numpy")
    assert preload(JobSpec(command=("train.py",), preload=["numpy"], warm=False), tmp_path) == ()
    (tmp_path / "train.py").write_text("import something_that_imports_torch")
    assert preload(JobSpec(command=("train.py",), preload=["numpy"]), tmp_path) == ("numpy",)


@pytest.mark.parametrize("chdir", ["", "src"])
def test_nodes_that_no_job_has_asked_for_must_be_warm_for_any(tmp_path, chdir):
    assert preload(JobSpec(chdir=chdir), tmp_path) == ("torch", "torch.distributed", "torch._dynamo")


def test_modules_that_workers_import_from_a_copy_must_not_be_imported_ahead_from_the_original(tmp_path):
    (tmp_path / "own.py").touch()
    (tmp_path / "package").mkdir()
    spec = JobSpec(command=("train.py",), preload=["own", "wave", "package.module"])
    assert preload(spec, tmp_path) == ("own", "wave", "package.module")
    assert preload(spec, tmp_path, copied=True) == ("wave",)


@pytest.mark.parametrize("command", [("nonesuch.py",), ("-m", "nonesuch"), ("-m", "torch.distributed.run")])
def test_a_missing_script_must_preload_nothing(tmp_path, command):
    assert preload(JobSpec(command=command), tmp_path) == ()


def test_a_script_that_is_not_text_must_preload_nothing(tmp_path):
    (tmp_path / "train.py").write_bytes(b"\xff\xfeimport torch\0")
    assert preload(JobSpec(command=("train.py",)), tmp_path) == ()


@pytest.mark.parametrize("target", ["/dev/zero", "pipe", "train.py", "."])
def test_a_script_that_is_not_a_regular_file_must_be_skipped_without_blocking(tmp_path, target):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train.py").symlink_to(target)
    assert preload(JobSpec(command=("train.py",)), tmp_path) == ()
    assert preload(JobSpec(command=("pipe",)), tmp_path) == ()


def test_a_link_to_a_script_must_be_read(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "train.py").write_text("import torch\n")
    (tmp_path / "train.py").symlink_to("lib/train.py")
    assert preload(JobSpec(command=("train.py",)), tmp_path) == TORCH


def test_the_size_of_scripts_read_must_be_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "MAX_FILE", 100)
    monkeypatch.setattr(imports, "MAX_BYTES", 150)
    (tmp_path / "train.py").write_text("import torch".ljust(100))
    (tmp_path / "large.py").write_text("import torch".ljust(101))
    (tmp_path / "first.py").write_text("import train".ljust(100))
    (tmp_path / "endless.py").touch()
    os.truncate(tmp_path / "endless.py", 1 << 40)
    assert imports.uses(["train.py"], str(tmp_path)) == ["torch"]
    for name in ("large.py", "first.py", "endless.py"):
        assert imports.uses([name], str(tmp_path)) == []


def test_a_script_read_in_the_background_must_be_read_once(tmp_path, monkeypatch):
    calls, call = [], sandbox.call
    monkeypatch.setattr(
        sandbox, "call", lambda *arguments, **limits: (calls.append(arguments), call(*arguments, **limits))[1]
    )
    (tmp_path / "train.py").write_text("import torch")
    spec = JobSpec(command=("train.py",))
    start(spec, tmp_path)
    assert preload(spec, tmp_path) == TORCH and len(calls) == 1
    (tmp_path / "train.py").write_text("")
    assert preload(spec, tmp_path) == () and len(calls) == 2  # a result is used once
    start(JobSpec(command=("train.py",), warm=False), tmp_path)
    assert len(calls) == 2
