"""Add files that Compose, Docker and `help` need to the wheel, as `orchestrate/project`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = ("Dockerfile", "docker-compose.yml", "requirements.lock", ".dockerignore", "orchestrate/__init__.py")
FOLDERS = ("app", "orchestrate/node")  # the latter is also in the package; this copy is for building the image


class Project(BuildHookInterface):  # type: ignore[type-arg]
    """Copies the files, since hatchling cannot add a file at two paths."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to the wheel; an editable installation finds them in the project."""
        if version == "editable":
            return
        root, self.copy = Path(self.root), Path(tempfile.mkdtemp())
        for name in FILES:
            (self.copy / name).parent.mkdir(exist_ok=True)
            shutil.copy(root / name, self.copy / name)
        for name in FOLDERS:
            shutil.copytree(root / name, self.copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        (self.copy / "docs").mkdir()
        for page in root.glob("docs/*.md"):  # for `orchestrate help`
            shutil.copy(page, self.copy / "docs")
        build_data["force_include"][str(self.copy)] = "orchestrate/project"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copies."""
        if version != "editable":
            shutil.rmtree(self.copy)
