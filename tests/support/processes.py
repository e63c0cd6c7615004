"""Processes of this machine, and those that a test has started."""

import contextlib
import ctypes
import signal
from pathlib import Path

MARK = "ORCHESTRATE_TEST"  # variable that marks every process of a test with its folder


def proc(pid: int | str, name: str) -> list[str]:
    """The entries of `cmdline` or `environ` of a process; none if it is gone or access is denied."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    return []


def environ(pid: int | str) -> dict[str, str]:
    """The environment that a process was started with; empty if it cannot be read."""
    return dict(entry.split("=", 1) for entry in proc(pid, "environ") if "=" in entry)


def processes(folder: Path) -> set[int]:
    """The processes that command lines below a folder have started, and their descendants."""
    numbers = [path.name for path in Path("/proc").glob("[0-9]*")]
    return {int(pid) for pid in numbers if f"{environ(pid).get(MARK)}/".startswith(f"{folder}/")}


def die_with_parent() -> None:
    """Make the kernel end this process when the tests end, however they end; runs between fork and exec."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def descendants(*ancestors: int) -> list[int]:
    """The descendants of processes, from a single scan of /proc, since process ids are soon reused."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [*ancestors]
    for pid in found:
        found += children.pop(pid, [])
    return found[len(ancestors) :]
