"""Folders that no job may access."""

from pathlib import Path

import pytest


@pytest.fixture
def victim(tmp_path) -> Path:
    """Folders of the user that no job may access."""
    for name in ("nodes", "sockets"):
        (tmp_path / "victim" / name).mkdir(parents=True, mode=0o700)
        (tmp_path / "victim" / name / "file").write_text("mine")
    return tmp_path / "victim"


def facts(folder: Path) -> dict[str, tuple[int, int, int]]:
    """The owner and mode of everything in a folder."""
    found = {str(path): path.lstat() for path in sorted(folder.rglob("*"))}
    return {name: (status.st_uid, status.st_gid, status.st_mode) for name, status in found.items()}
