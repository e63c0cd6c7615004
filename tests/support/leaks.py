"""A secret value, and where it is found."""

from pathlib import Path

CANARY = "canary-0d4f6a3e"
# PHRASE is secret only if a job file names it: it contains no other secret.
ENV = {"HF_TOKEN": f"{CANARY}-1", "DATABASE_URL": f"postgres://me:{CANARY}-2@host/db", "A": "b"}
ENV |= {"PHRASE": f"{CANARY}-3"}


def leaks(folder: Path) -> set[str]:
    """The files below a folder that contain the canary."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)) for path in files if CANARY.encode() in path.read_bytes()}
