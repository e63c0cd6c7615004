"""Exported jobs."""

import subprocess
from typing import Any

import yaml

from orchestrate.export.kubernetes import kubernetes
from orchestrate.spec.layers import resolve


def make_folder(text: str) -> None:
    """Run the command at the top of a Compose file that creates the run directory."""
    (line,) = (line for line in text.splitlines() if line.startswith("#   mkdir -p"))
    subprocess.run(["bash", "-c", line.removeprefix("#")], check=True)


SPEC: dict[str, Any] = {
    "trainers": 2,
    "gpus": "all",
    "nproc_per_node": 2,
    "cpus": 4,
    "memory": "8g",
    "max_run": "1h",
    "env": {"A": "b"},
}
SPEC |= {"volume": "claim", "image": "registry.example/orchestrate-node:1"}


def objects(form: str, spec: dict = SPEC) -> list[dict]:
    return list(yaml.safe_load_all(kubernetes(resolve(spec), "digits", form)))


def pod_of(form: str, spec: dict) -> dict:
    """The pod of a Job or a JobSet."""
    *_, last = objects(form, spec)
    job = last if form == "job" else last["spec"]["replicatedJobs"][0]["template"]
    return job["spec"]["template"]["spec"]
