"""Names and paths of all files of a job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
NODE = PACKAGE / "node"


SHIPPED = PACKAGE / "project"  # only in a wheel
PROJECT = SHIPPED if SHIPPED.is_dir() else PACKAGE.parent  # with docker-compose.yml, Dockerfile and app/


def hidden() -> bool:
    """Whether an `app` in the current folder hides the project's."""
    return Path.cwd() != PROJECT and any(Path(name).exists() for name in ("app", "app.py"))


def code_folder(command: tuple[str, ...]) -> Path:
    """Return the code folder of a command: the current folder, or the project for its app unless hidden."""
    ours = command[0] == "-m" and command[1].split(".")[0] == "app"
    return PROJECT if ours and not any(Path(name).exists() for name in ("app", "app.py")) else Path.cwd()


def is_text(value: str) -> bool:
    """Whether a path or argument, which may be any bytes, is text that a UTF-8 file can contain."""
    return "\0" not in value and value.encode(errors="replace").decode() == value


SYSTEM = ("/proc", "/sys", "/dev", "/run", "/var/run", "/boot")  # with sockets, devices and kernel interfaces


def as_name(text: str) -> str:
    """Return a text with the characters of names that Docker, DNS and file systems accept."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())


NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,60}")  # of a job or cluster, as created by `run_dir.new_paths`
RUNS = "runs"  # folder of the run directories, unless `--runs` names another
JOB, NODES = "job", "nodes"  # folders that are mounted in nodes: of a job, and of a cluster
LOGS, CHECKPOINTS, METRICS = "logs", "checkpoints", "metrics.jsonl"  # in a job folder
STDIN = "stdin"  # in a job folder: what rank 0 reads
PAGE = "report.html"
WORK = "work"  # in a job folder: the workers' copy of the code folder, with the files that they write


OF_ALL, OF_ONE = {"job.yaml", "plan.json"}, {"events.jsonl", NODES}  # in all run directories, and of a job or cluster


def log(rank: int) -> str:
    """Return the path of a worker's log in the job folder."""
    return f"{LOGS}/rank-{rank}.log"


def is_run(names: Iterable[str]) -> bool:
    """Whether a folder with these names is a run directory, possibly of another project or user."""
    found = {*names}
    return found >= OF_ALL and not found.isdisjoint(OF_ONE)


def runs_around(folders: Iterable[Path]) -> set[Path]:
    """Return the run directories that some folders are in, wherever they are; those of exported jobs are in `runs`."""
    above = {parent for folder in folders for parent in folder.parents}
    exported = {folder.parent for folder in above if folder.name == JOB and folder.parent.parent.name == RUNS}
    ours = {each for each in above if is_run(name for name in OF_ALL | OF_ONE if os.path.lexists(each / name))}
    return ours | exported
