"""`stacks` on a running job, one rank of which never arrives."""

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
