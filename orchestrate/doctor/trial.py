"""A job of two nodes and ten steps, as a user would start it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrate.doctor.findings import BAD, GOOD, Finding
from orchestrate.errors import FAILED
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
LIMIT = "5m"  # for the job; its image may have to be built before
TRANSPORT = re.compile(r"NCCL INFO Channel .* via (\S+)")


def trial(spec: JobSpec) -> Iterator[Finding]:
    """Run the job on the engine, image and GPUs of `spec`; report its duration, or why it failed."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as name:
        folder = Path(name)
        (folder / "ten_steps.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "orchestrate", "run", "--json", "--max-run", LIMIT, "--max-restarts", "0"]
        command += ["--nodes", "2", "--set", "share_gpus=true", "-e", "NCCL_DEBUG=INFO", "--progress", "quiet"]
        for key in ("engine", "image", "dockerfile", "gpus", "memory", "cpus", "network"):
            value = getattr(spec, key)
            command += ["--set", f"{key}={value}"] if value != getattr(JobSpec(), key) else []
        done = subprocess.run([*command, "ten_steps.py"], cwd=folder, capture_output=True, text=True)
        try:
            report = json.loads(done.stdout)
        except ValueError:  # it could not start
            why, _, hint = done.stderr.partition("\nhint: ")
            yield Finding(BAD, f"a job of two nodes cannot start: {_last(why)}", hint.strip(), done.returncode)
            return
        if report["outcome"] != "succeeded":
            cause = report["root_cause"] or {"summary": report["reason"], "hint": ""}
            yield Finding(BAD, f"a job of two nodes failed: {cause['summary']}", cause["hint"], FAILED)
            return
        logs = "".join(path.read_text(errors="replace") for path in folder.glob("runs/*/logs/*.log"))
        ways = sorted({*TRANSPORT.findall(logs)})
        by = f", NCCL by {', '.join(ways)}" if ways else ""
        yield Finding(GOOD, f"a job of two nodes ran ten steps in {report['duration_s']:.1f} s{by}")


def _last(text: str) -> str:
    """Return the last line, without the mark of an error."""
    return (text.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
