"""A code folder, and the job folder that it is copied to."""

import os

import pytest

from orchestrate.files.folder import Folder
from orchestrate.files.work import Copy, tidy


class Tree:
    """A code folder, and the job folder that it is copied to."""

    def __init__(self, folder) -> None:
        self.code, self.work = folder / "code", folder / "job" / "work"
        self.code.mkdir()
        self.work.mkdir(parents=True)

    def write(self, name: str, text: str = "old", mode: int = 0o644) -> None:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def copy(self, hidden=(), owner=None, stopped=lambda: False) -> Copy:
        copy = Copy(self.code, hidden, Folder(self.work.parents[1], "job"), "work", "/workspace", owner, stopped)
        copy.run()
        return copy

    def tidy(self, most: int = 100, copied=()) -> tuple[list[str], bool]:
        return tidy(self.code, Folder(self.work.parents[1], "job"), "work", "/workspace", most, dict(copied))

    def found(self) -> dict[str, str]:
        """The content of each file in the working directory, and the target of each link."""
        found = {}
        for path in sorted(self.work.rglob("*")):
            name = str(path.relative_to(self.work))
            if path.is_symlink():
                found[name] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[name] = path.read_text()
        return found


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)
