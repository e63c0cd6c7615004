"""The command line in a folder of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from support.leftovers import clear, docker
from support.optional import not_none
from support.processes import MARK
from support.repo import ROOT, SCRIPTS
from support.waiting import eventually

# The SDK leaves its socket open when the engine does not answer; no user sees that.
WARNINGS = "error,ignore:unclosed:ResourceWarning"


class Cli:
    """`python -m orchestrate` in its own folder, which holds the test scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)  # nodes of root run as another user, who must be able to read it
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, folder)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("NODE_", "OMP_"))}
        self.env |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": WARNINGS, MARK: str(folder)}
        self.started: list[subprocess.Popen[str]] = []
        self.prefix: list[str] = []  # of each command

    def __call__(self, *arguments: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, sys.executable, "-m", "orchestrate", *arguments],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "orchestrate", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.started.append(process)
        return process

    def ps(self) -> list[list[str]]:
        """The rows of `ps` for jobs in this folder, with relative paths; other jobs may be on the machine."""
        rows = [re.split(r"  +", line) for line in self("ps").stdout.splitlines()]
        assert rows[0] == ["NAME", "ENGINE", "NODES", "STATE", "RUN"]
        prefix = f"{self.folder}/"
        return [[*row[:-1], row[-1].removeprefix(prefix)] for row in rows if row[-1].startswith(prefix)]

    def finish_jobs(self) -> None:
        """Make all jobs from this folder that run `count.py until-asked` finish."""
        for folder in self.folder.glob("runs/*/job"):
            (folder / "finish").touch()

    def run_dir(self) -> Path:
        """The run directory of the only job."""
        (found,) = (path for path in self.folder.glob("runs/*") if not (path / "nodes").exists())
        return found

    def log(self, rank: int) -> str:
        return (self.run_dir() / "logs" / f"rank-{rank}.log").read_text()

    def report(self) -> dict:
        return json.loads((self.run_dir() / "report.json").read_text())

    def wait_for(self, text: str, rank: int) -> None:
        """Wait until a rank's log contains `text`."""
        eventually(lambda: any(text in path.read_text() for path in self.folder.glob(f"runs/*/logs/rank-{rank}.log")))

    def kill_worker(self, rank: int, number: int) -> None:
        """Send a signal to a worker of the script steps.py, in its node's PID namespace."""
        pid = int(not_none(re.search(r"pid (\d+)", self.log(rank)))[1])
        plan = json.loads((self.run_dir() / "plan.json").read_text())
        if plan["inventory"]["engine"] == "process":
            os.kill(pid, number)
        else:
            node = self.container(plan["workers"][rank]["node"])
            docker("exec", node, "python", "-c", f"import os; os.kill({pid}, {number})")

    def container(self, node: str) -> str:
        return docker("ps", "-aq", "--filter", f"name={self.run_dir().name}-{node}").strip()

    def clean(self) -> None:
        """Remove what a failed test has left."""
        clear(self.folder)
        for process in self.started:
            if process.returncode is None:
                process.communicate()
