"""The commands of the command line; each is a module of `commands/` with its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """What is known of a command before its module is imported."""

    summary: str
    plans: bool = False  # it takes a job file and options, and creates or plans a run directory
    script: bool = False  # it takes the job's own command
    job: bool = False  # it takes a job that exists


COMMANDS = {
    "run": Command("run a job until it ends", plans=True, script=True),
    "plan": Command("print the rank assignment without creating anything", plans=True, script=True),
    "up": Command("start a cluster: nodes that stay up for later jobs", plans=True),
    "doctor": Command("report problems that keep jobs from running", script=True),
    "schema": Command("print the JSON Schema of job files, for editors"),
    "export": Command("print the job as a file for Kubernetes, Slurm or Compose", script=True),
    "down": Command("remove a cluster that was started by up"),
    "ps": Command("list running jobs and clusters"),
    "prune": Command("remove jobs that ended long ago, and caches"),
    "serve": Command("show jobs in a web browser on this machine"),
    "logs": Command("print the output of a job's workers", job=True),
    "events": Command("print what happened to a job, and when", job=True),
    "top": Command("show what the workers of a running job use: CPU, memory, GPUs", job=True),
    "report": Command("write a page about jobs that have ended: report.html", job=True),
    "attach": Command("follow a job until it ends; take over if it has no supervisor", job=True),
    "resume": Command("continue a job that was stopped or failed, from its last checkpoint", job=True),
    "wait": Command("wait until a job ends, and exit with its exit code", job=True),
    "stop": Command("stop a job and remove its nodes", job=True),
    "rm": Command("remove a job that has ended, with its files and any leftover nodes", job=True),
}
