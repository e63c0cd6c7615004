"""Virtual environments with the packages of a job."""

import pytest

from orchestrate.engines import venv
from orchestrate.errors import ResourceError


def test_packages_that_cannot_be_installed_must_fail_each_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = ["--no-index", "a-package-that-does-not-exist"]
    for _ in range(2):
        with pytest.raises(ResourceError, match="could not install the packages"):
            venv.create(lines)
    assert capsys.readouterr().err.count("(once)") == 2
