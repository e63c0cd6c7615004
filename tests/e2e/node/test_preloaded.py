"""What nodes import before they fork workers must not be what others left there, nor keep them from forking."""

import os
import subprocess
import sys

import pytest
from support.agents import IS_FORKED, PRELOAD, Waiting
from support.repo import ROOT
from support.waiting import eventually

# A stand-in for torch on a machine with GPUs, where asking for them starts a thread that does not survive a fork.
TORCH = """
import threading, types
def is_available():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return True
def device_count():
    is_available()
    raise RuntimeError
cuda = types.SimpleNamespace(is_available=is_available, device_count=device_count, _is_in_bad_fork=lambda: False)
set_num_threads = int
"""
ASK = "from torch import cuda\nfound, kept = (cuda.is_available(), cuda.device_count()), cuda.is_available\n"
SHOW = """
import sys
print('asks' in sys.modules)
import asks
print(asks.found, asks.kept(), asks.cuda.is_available.__module__)
"""


def test_a_preloaded_module_that_asks_torch_for_gpus_must_not_prevent_forking(tmp_path):
    installed, job = tmp_path / "installed", tmp_path / "job"
    installed.mkdir()
    job.mkdir()
    (installed / "torch.py").write_text(TORCH)
    (job / "asks.py").write_text(ASK)
    node = Waiting(job, "torch asks", PYTHONPATH=str(installed))
    assert node.run(0, SHOW) == 0
    assert node.log(0) == "True\n(True, 0) True torch\n"
    node.end()


USE_CUDA = """
import os, sys
from orchestrate.node.programs import zygote
import torch
zygote.DEVICES = (sys.argv[1],)
if sys.argv[2] == "opens":
    os.makedirs("dev")
    held = open("dev/nvidia-uvm", "w")
if sys.argv[2] == "uses":
    try:
        torch.cuda.device_count()
        torch.cuda.init()
    except Exception:
        pass
if not os.fork():
    os._exit(zygote.used_cuda())
print(os.wait()[1] >> 8)
"""


@pytest.mark.parametrize(
    ("device", "does", "found"),
    [
        ("/", "uses", 1),
        pytest.param("/none", "uses", 0, marks=pytest.mark.exhaustive),
        ("/", "nothing", 0),
        pytest.param("/", "opens", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_cuda_that_was_used_before_a_fork_must_be_detected_if_there_are_gpus(tmp_path, device, does, found):
    command = [sys.executable, "-c", USE_CUDA, device, does]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{found}\n"


LEAVE_FILE = "import os, sys\nopen(f'{__name__}-{os.getpid()}', 'w').close()\n"


@pytest.mark.parametrize("filtered", ["", "1"])
def test_the_jobs_own_modules_must_be_imported_only_after_the_packet_filter_is_set_up(tmp_path, filtered):
    installed, tmp_path = tmp_path / "installed", tmp_path / "job"
    for path in (tmp_path / "ours.py", tmp_path / "theirs.py", installed / "theirs.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(LEAVE_FILE)
    node = Waiting(tmp_path, "theirs ours", PYTHONPATH=str(installed), NODE_FILTERED=filtered)
    zygote = eventually(lambda: [path.name for path in tmp_path.glob("theirs-*")])[0].partition("-")[2]
    node.status()
    if filtered:  # it waits for the filter, which is never set up here
        assert not [*tmp_path.glob("ours-*")]
    assert node.run(0, "import ours, theirs\nprint(theirs.__file__)") == 0
    assert (tmp_path / f"ours-{zygote}").exists() and not (tmp_path / f"theirs-{zygote}").read_text()
    assert node.log(0) == f"{tmp_path / 'theirs.py'}\n"  # as in a fresh interpreter, in which the worker runs
    node.end()


EMPTY = ["{1}{0}", "{0}{1}", "{0}{1}{1}{0}", "{1}"]  # PYTHONPATH with empty entries, which mean the working directory


@pytest.mark.parametrize("path", EMPTY)
def test_an_empty_entry_of_pythonpath_must_not_make_the_node_import_the_jobs_modules(tmp_path, path):
    installed, folder = tmp_path / "installed", tmp_path / "job"
    for path_ in (installed / "theirs.py", folder / "ready.py"):
        path_.parent.mkdir()
        path_.write_text(LEAVE_FILE)
    for name in ("theirs", "sitecustomize", "json", "random"):
        (folder / f"{name}.py").write_text("open('own', 'w').close()\n")
    preload = "theirs ready" if "{0}" in path else "ready"
    node = Waiting(folder, preload, PYTHONPATH=path.format(installed, os.pathsep))
    assert eventually(lambda: [*folder.glob("ready-*")])
    assert not (folder / "own").exists() and len([*folder.glob("theirs-*")]) == preload.count("theirs")
    node.status()  # the client has connected
    node.end()


@pytest.mark.parametrize("path", EMPTY)
def test_an_empty_entry_of_pythonpath_must_not_prevent_forking(tmp_path, path):
    (tmp_path / "below").mkdir()
    (tmp_path / "beside.py").touch()
    (tmp_path / "below" / "1.py").write_text(f"import beside\n{IS_FORKED}")
    node = Waiting(tmp_path, PRELOAD, PYTHONPATH=path.format(tmp_path / "none", os.pathsep))
    assert node.run(0, f"import beside, os\n{IS_FORKED}\nprint(os.environ['PYTHONPATH'])") == 0
    node.command(1, "below/1.py")
    assert node.code(1) == 0
    assert node.log(0) == f"True\n{node.env['PYTHONPATH']}\n" and node.log(1) == "False\n"
    node.end()
