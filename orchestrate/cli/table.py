"""The commands of the command line; each is a module of `commands/` with its name."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """What is known of a command before its module is imported."""

    summary: str
    group: str = ""
    plans: bool = False  # it takes a job file and options, and creates or plans a run directory
    script: bool = False  # it takes the job's own command
    inside: bool = False  # it takes a command after `--`
    job: bool = False  # it takes a job that exists
    removes: bool = False  # it removes run directories
    page: bool = False  # it writes next to them

    @property
    def writes(self) -> bool:
        """Whether it creates or removes something in the folder of run directories."""
        return self.plans or self.removes or self.page


START, LOOK, DIRECT, MACHINE, HELP = "start jobs", "look at jobs", "direct jobs", "this machine", "help"
USUAL = ("run", "ps", "logs", "stop", "resume")  # which the help lists first
COMMANDS = {
    "run": Command("run a job until it ends", START, plans=True, script=True),
    "plan": Command("print the rank assignment without creating anything", START, plans=True, script=True),
    "resume": Command("continue a job that was stopped or failed, from its last checkpoint", START, job=True),
    "export": Command("print the job as a file for Kubernetes, Slurm or Compose", START, script=True),
    "ps": Command("list running jobs and clusters", LOOK),
    "logs": Command("print the output of a job's workers", LOOK, job=True),
    "top": Command("show what the workers of a running job use: CPU, memory, GPUs", LOOK, job=True),
    "stacks": Command("show where each worker of a running job is in its code", LOOK, job=True),
    "events": Command("print what happened to a job, and when", LOOK, job=True),
    "report": Command("write a page about jobs that have ended: report.html", LOOK, job=True, page=True),
    "serve": Command("show jobs in a web browser on this machine", LOOK),
    "exec": Command("run a command beside a worker of a running job", DIRECT, inside=True, job=True),
    "shell": Command("start a shell beside a worker of a running job", DIRECT, job=True),
    "debug": Command("debug a worker of a running job with pdb, where it is", DIRECT, job=True),
    "attach": Command("follow a job until it ends; take over if it has no supervisor", DIRECT, job=True),
    "wait": Command("wait until a job ends, and exit with its exit code", DIRECT, job=True),
    "stop": Command("stop a job and remove its nodes", DIRECT, job=True),
    "rm": Command(
        "remove jobs that have ended, with their files and any leftover nodes", DIRECT, job=True, removes=True
    ),
    "up": Command("start a cluster: nodes that stay up for later jobs", MACHINE, plans=True),
    "down": Command("remove a cluster that was started by up", MACHINE, removes=True),
    "doctor": Command("report problems that keep jobs from running", MACHINE, script=True),
    "prune": Command("remove jobs that ended long ago, and caches", MACHINE, removes=True),
    "help": Command("print the documentation of a command, a key or a page", HELP),
    "completion": Command("complete commands, options and jobs in bash, zsh and fish", HELP, inside=True),
    "schema": Command("print the JSON Schema of job files, for editors", HELP),
}
