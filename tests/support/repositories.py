"""A Git repository on this machine."""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    there = tmp_path / "there"
    there.mkdir()
    (there / "train.py").touch()
    subprocess.run(["git", "init", "--quiet"], cwd=there, check=True)
    commit(there)
    return there


def commit(repository: Path) -> None:
    """Commit all files."""
    who = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for arguments in ("add .", "commit --quiet --message x"):
        subprocess.run(["git", *arguments.split()], cwd=repository, env=os.environ | who, check=True)
