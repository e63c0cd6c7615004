"""Virtual environments with the packages of a job."""

import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from orchestrate.engines import venv
from orchestrate.errors import ResourceError


def wheel(path: Path) -> None:
    """Write a package with a single module."""
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    about = {"METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n", "WHEEL": kind, "RECORD": ""}
    with zipfile.ZipFile(path, "w") as file:
        for name, text in {"tiny.py": "", **{f"tiny-1.dist-info/{name}": text for name, text in about.items()}}.items():
            file.writestr(name, text)


def test_a_cache_that_cannot_be_written_must_be_reported_with_a_hint(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match=f"cannot create {tmp_path}/file/.*: Not a directory") as error:
        venv.create(["a"])
    assert error.value.hint == "set XDG_CACHE_HOME to another folder"


def test_a_variable_of_a_url_must_not_be_shown_when_it_cannot_be_installed(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_TOKEN", "canary-7c1")
    with pytest.raises(ResourceError, match="could not install the packages"):
        venv.create(["--no-index", "a @ http://${PIP_TOKEN}@127.0.0.1:9/a-1.0.tar.gz"])
    out, err = capfd.readouterr()
    assert "***@127.0.0.1:9/a-1.0.tar.gz" in err and "canary" not in out + err


@pytest.mark.parametrize("pip", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_packages_that_cannot_be_installed_must_be_installed_by_the_next_job_and_then_used(tmp_path, monkeypatch, pip):
    if not pip:  # this interpreter has none, as those of uv
        monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    lines = ["--no-index", str(tmp_path / "tiny-1-py3-none-any.whl")]
    folder = venv.python(lines).parents[1]
    with pytest.raises(ResourceError, match="could not install the packages"):
        venv.create(lines)
    assert folder.exists() and not (folder / venv.DONE).exists()
    (folder / "left").touch()
    wheel(Path(lines[1]))
    venv.create(lines)
    assert not (folder / "left").exists()  # it starts afresh
    Path(lines[1]).unlink()
    venv.create(lines)  # installs nothing, since it is complete
    (module,) = tmp_path.rglob("tiny.py")
    assert module.is_relative_to(folder)
    parents = (module.parent / venv.PARENT).read_text()  # torch is not installed again
    assert f"site.addsitedir({sysconfig.get_path('purelib')!r})" in parents
    assert len({venv.python([*reversed(lines)]), venv.python(lines), venv.python(lines[1:])}) == 3
