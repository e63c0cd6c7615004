"""`stacks` on a running job, one rank of which never arrives."""

import re

from support.faults import Background
from support.waiting import eventually

LOADER = "import time\n\ndef load_batch():\n    while True:\n        time.sleep(0.1)\n"
TRAIN = """import torch
import torch.distributed as dist
from loader import load_batch

dist.init_process_group("gloo")
dist.barrier()
print("step 1 in 0", flush=True)
if dist.get_rank() == 1:
    load_batch()
dist.all_reduce(torch.ones(1))
"""


def test_the_rank_that_the_others_wait_for_must_be_shown_first_and_the_job_go_on(ready):
    (ready.folder / "loader.py").write_text(LOADER)
    (ready.folder / "late.py").write_text(TRAIN)
    job = Background(ready, ready.engine, "--", "late.py")
    for rank in range(3):
        job.until_step(1, rank)
    run = ready.run_dir()
    shown: list[str] = []

    def waits() -> bool:
        done = ready("stacks", run.name)
        assert done.returncode == 0, done.stderr
        shown[:] = [line for line in done.stdout.splitlines() if line.startswith("rank")]
        return "ranks 0, 2: waiting at late.py:10 in <module>" in shown

    eventually(waits)
    assert shown[0] in ("rank 1: running at loader.py:5 in load_batch", "rank 1: running at loader.py:4 in load_batch")
    assert not job.events("worker_ended") and not [*run.glob("stacks.*")]
    assert ready("stop", run.name).returncode == 0
    assert job.end() == 130


IMAGES = """import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        while os.environ["RANK"] == "1" and index == 3:
            time.sleep(0.1)
        return torch.ones(1)


dist.init_process_group("gloo")
for step, batch in enumerate(DataLoader(Images(), num_workers=2, multiprocessing_context="fork")):
    dist.all_reduce(batch)
    print(f"step {step} in 0", flush=True)
"""


def test_a_child_process_that_does_not_load_its_data_must_be_named_by_stacks_and_in_the_report(ready):
    (ready.folder / "images.py").write_text(IMAGES)
    job = Background(ready, ready.engine, "--max-restarts", "0", "--set", "hang_after=12s", "--", "images.py")
    for rank in range(3):
        job.until_step(2, rank)
    shown: list[str] = []

    def waits() -> bool:
        shown[:] = ready("stacks", ready.run_dir().name).stdout.splitlines()
        return sum(line.startswith("  a child process: ") for line in shown) == 1 and shown[0].startswith("rank 1: ")

    eventually(waits)  # those that have loaded their data are not shown
    at = next(number for number, line in enumerate(shown) if line.startswith("  a child process: "))
    assert re.fullmatch(r"  a child process: running at images\.py:1[56] in __getitem__", shown[at])
    assert re.fullmatch(r'    File "images\.py", line 1[56] in __getitem__', shown[at + 1])
    assert not any("in <module>" in line for line in shown[at:] if line.startswith("    "))  # but that of its parent
    assert job.end() == 1
    summary = ready.report()["failures"][0]["summary"]
    assert re.search(r"rank 1 on trainer-1 never arrived: it is at \S*images.py:\d+ in <module>; ", summary)
    assert re.search(r"; a child process of it: at \S*images.py:1[56] in __getitem__", summary)
