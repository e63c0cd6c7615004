"""Virtual environments with the packages of a job."""

import pytest

from orchestrate.engines import venv
from orchestrate.errors import ResourceError


def test_packages_that_cannot_be_installed_must_not_leave_a_complete_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = ["--no-index", "a-package-that-does-not-exist"]
    for _ in range(2):  # nor may the next job use what is there
        with pytest.raises(ResourceError, match="could not install the packages"):
            venv.create(lines)
        folder = venv.python(lines).parents[1]
        assert folder.exists() and not (folder / venv.DONE).exists()
