"""A job of two nodes and ten steps, as a user would start it."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrate.api.job import Job, JobFailed, submit
from orchestrate.doctor.findings import BAD, GOOD, Finding
from orchestrate.errors import FAILED, OrchestrateError
from orchestrate.host import records
from orchestrate.spec.spec import JobSpec

SCRIPT = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
device = torch.device("cuda", dist.get_node_local_rank() if gpu else 0) if gpu else torch.device("cpu")
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(4, 8, device=device)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
LIMIT = 300.0  # seconds
KEYS = ("engine", "image", "dockerfile", "gpus", "memory", "cpus", "shm_size", "network")
TRANSPORT = re.compile(r"NCCL INFO Channel .* via (\S+)")


def trial(spec: JobSpec) -> Iterator[Finding]:
    """Run the job on the engine, image and GPUs of `spec`; report its duration, or why it failed.

    However this ends, nothing of the job is left.
    """
    keys = {key: getattr(spec, key) for key in KEYS if getattr(spec, key) != getattr(JobSpec(), key)}
    keys |= {"share_gpus": True, "optional": [*spec.optional, "share_gpus"], "env": {"NCCL_DEBUG": "INFO"}}
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        folder = Path(name)
        (folder / "ten_steps.py").write_text(SCRIPT)
        try:
            job = submit("ten_steps.py", runs=folder / "runs", source=name, nodes=2, max_restarts=0, **keys)
            duration = job.wait(LIMIT).report["duration_s"]
            logs = "".join(job.logs(rank=0))
        except JobFailed as error:
            cause = error.result.report["root_cause"] or {"summary": error.result.report["reason"], "hint": ""}
            yield Finding(BAD, f"a job of two nodes failed: {cause['summary']}", cause["hint"], FAILED)
        except OrchestrateError as error:
            yield Finding(BAD, f"a job of two nodes cannot start: {error}", error.hint, error.exit_code)
        except TimeoutError:
            yield Finding(BAD, f"a job of two nodes did not end within {LIMIT:g} s", "see the lines above", FAILED)
        else:
            ways = sorted({*TRANSPORT.findall(logs)})
            by = f", NCCL by {', '.join(ways)}" if ways else ""
            yield Finding(GOOD, f"a job of two nodes ran ten steps in {duration:.1f} s{by}")
        finally:
            for run in folder.glob("runs/*/"):
                with contextlib.suppress(OrchestrateError):  # it has ended
                    Job(run).stop()
                records.forget(run)
