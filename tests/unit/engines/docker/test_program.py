"""The program of nodes, which they must be able to read even if root has installed it with the umask 077."""

import os
import shutil
import stat

import pytest

from orchestrate.engines.docker import program
from orchestrate.errors import EngineError
from orchestrate.files.paths import PACKAGE
from orchestrate.spec.spec import JobSpec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="must be root for nodes of another user")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A copy of the package as the installed one, and an empty cache."""
    package = tmp_path / "site-packages" / "orchestrate"
    package.mkdir(parents=True)
    shutil.copy(PACKAGE / "__init__.py", package)
    shutil.copytree(PACKAGE / "node", package / "node", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(program, "PACKAGE", package)
    monkeypatch.setattr(program, "NODE", package / "node")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")}


def test_a_program_that_nodes_can_read_must_not_be_copied(installed, tmp_path):
    assert program.folder(JobSpec()) == installed
    installed.chmod(0o700)
    assert program.folder(JobSpec(user="root")) == installed
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("closed", [".", "node", "node/agent.py", "node/programs", "__init__.py"])
def test_nodes_must_get_a_copy_of_a_program_that_they_cannot_read(installed, closed):
    (installed / closed).chmod(0o700)
    copy = program.folder(JobSpec())
    assert copy != installed and content(copy) == content(installed)
    for path in (copy, *copy.rglob("*")):
        needed = 0o755 if path.is_dir() else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == needed
    assert program.folder(JobSpec()) == copy


def test_a_changed_program_must_be_copied_again(installed):
    installed.chmod(0o700)
    first = program.folder(JobSpec())
    (installed / "node" / "agent.py").write_text("changed")
    second = program.folder(JobSpec())
    assert second != first and content(second)["node/agent.py"] == b"changed"


def test_a_copy_that_cannot_be_made_must_be_an_error_with_both_ways_out(installed, tmp_path):
    installed.chmod(0o700)
    (tmp_path / "cache").touch()
    with pytest.raises(EngineError, match="nodes run as user .*, who cannot read .*, and it cannot be copied") as error:
        program.folder(JobSpec())
    assert error.value.hint == f"chmod -R a+rX {installed}; or --set user=root"
