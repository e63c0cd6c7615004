"""The Docker Engine that the user's `docker` command uses."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from orchestrate.engines.base import JobState, Local
from orchestrate.engines.docker import compose_override, image, labels, mounts, objects
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.session import DockerSession
from orchestrate.errors import UsageError
from orchestrate.plan.plan import Inventory, Placement, Plan, WorkerPlan
from orchestrate.spec import secret_files
from orchestrate.spec.spec import JobSpec

# Variables that lead the docker command to programs, libraries or settings.
OF_CLI = re.compile("LD_|DOCKER_|GCONV_|SSH_|SSL_|XDG_|[A-Za-z]+_proxy|[A-Z]+_PROXY|(PATH|HOME|TMPDIR|LOCPATH)$")
# Gives variables of these names their own again in the container: arguments can be read by all users of a machine.
RENAMED = "ORCHESTRATE_EXEC_"
RENAME = f"""
import os, sys
count = int(sys.argv[1])
names, words = sys.argv[2 : 2 + count], sys.argv[2 + count :]
for number, name in enumerate(names):
    os.environ[name] = os.environ.pop(f"{RENAMED}{{number}}")
try:
    os.execvp(words[0], words)
except OSError as error:
    sys.stderr.write(f"{{words[0]}}: {{error.strerror}}\\n")
    sys.exit(127)
"""
MAX_VALUE = 1 << 15  # bytes of a variable in a file for --env-file, of whose lines Docker reads 64 KiB


class DockerEngine:
    """One Docker Engine."""

    name = "docker"

    def __init__(self) -> None:
        """Connect; raises EngineError if no engine is available."""
        self.daemon = Daemon()

    def prepare(self, spec: JobSpec, run: Path) -> None:
        """Build or pull the job's image, unless the job cannot run here anyway."""
        image.prepare(self.daemon, spec, run)

    def inventory(self, spec: JobSpec, run: Path, run_image: bool) -> tuple[Inventory, Placement]:
        """Check the image and list the GPUs; raises ResourceError if something is missing."""
        return image.inventory(self.daemon, spec, run, run_image)

    def hidden(self, plan: Plan, run: Path) -> Collection[str]:
        """Return the paths in the code folder that are masked in nodes."""
        return mounts.hidden(Path(plan.placement.code), run.parent.parent, plan.placement.chdir)

    def open(self, spec: JobSpec, plan: Plan, run: Path, warn: Callable[[str], None]) -> DockerSession:
        """Open the session of a job; raises EngineError if its folder cannot be mounted."""
        return DockerSession(self.daemon, spec, plan, run, warn)

    def inside(self, spec: JobSpec, plan: Plan, run: Path, worker: WorkerPlan, terminal: bool) -> Local:
        """Return `docker exec` in the worker's container.

        The docker command does not use a job's variables itself: they could lead it to files that the job has written.
        Raises UsageError if the container does not run.
        """
        found = [node for node in objects.nodes_of(self.daemon, plan.project) if labels.node(node) == worker.node]
        if not found or found[0].status != "running":
            raise UsageError(f"{worker.node} is {found[0].status if found else 'missing'}", "docker ps --all")
        env = {**secret_files.variables(spec, compose_override.SECRETS), **worker.env, "NODE_KEY": ""}
        lines, arguments, renamed, ours = "", list[str](), list[str](), dict(os.environ)
        for name, value in env.items():
            if _fits(value):
                lines += f"{name}={value}\n"
            else:  # a private key, for example, that no other user may see
                own = name
                if OF_CLI.match(name):
                    own = f"{RENAMED}{len(renamed)}"
                    renamed.append(name)
                arguments.append(f"--env={own}")
                ours[own] = value
        file = tempfile.TemporaryFile()  # noqa: SIM115 (`Local` keeps it open)
        file.write(os.fsencode(lines))
        file.flush()
        words = [shutil.which("docker") or "docker", "--host", self.daemon.host, "exec", "--interactive"]
        words += [*["--tty"] * terminal, "--workdir", plan.placement.cwd(mounts.CODE)]
        words += [f"--env-file=/dev/fd/{file.fileno()}", *arguments, str(found[0].id)]
        if renamed:
            words += [plan.placement.python, "-I", "-c", RENAME, str(len(renamed)), *renamed]
        return Local(words, ours, files=(file,))

    def jobs(self) -> list[JobState]:
        """List the jobs that have nodes, by label."""
        return objects.jobs(self.daemon)

    def resources(self, job_id: str) -> list[str]:
        """Describe the containers and networks with the job's label."""
        return objects.resources(self.daemon, job_id)

    def remove(self, job_id: str, grace: float) -> None:
        """Stop and remove the containers and networks with the job's label, and nothing else."""
        objects.remove_services(self.daemon, job_id)
        objects.remove(self.daemon, job_id, grace)


def _fits(value: str) -> bool:
    """Return whether a file for --env-file can have a value: one line of UTF-8."""
    try:
        return not {"\n", "\r"} & {*value} and len(value.encode()) <= MAX_VALUE
    except UnicodeEncodeError:
        return False
