"""A project and an installation that only root can read, as on hosts with the umask 077."""

import os
import shutil

import pytest
from support.repo import ROOT

SCRIPT = """
import os, stat
print(open("config/settings.json").read(), oct(stat.S_IMODE(os.stat("config").st_mode)))
open("written", "w").close()
"""


@pytest.fixture
def private(cli, tmp_path_factory):
    """The command line in a folder that only its user can read, from an installation of the same kind."""
    installed = tmp_path_factory.mktemp("private")
    shutil.copytree(ROOT / "orchestrate", installed / "orchestrate", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "docker-compose.yml", installed)
    (cli.folder / "config").mkdir()
    (cli.folder / "config" / "settings.json").write_text("{}")
    (cli.folder / "train.py").write_text(SCRIPT)
    for path in (installed, *installed.rglob("*"), cli.folder, *cli.folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    cli.env |= {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(installed / "cache")}
    before = os.umask(0o077)
    yield cli
    os.umask(before)


@pytest.mark.docker
@pytest.mark.slow
def test_a_private_project_must_train_and_restart(private, docker_engine):
    """The second generation reads a file of the host's: the number that fences off the first one."""
    (private.folder / "train.py").write_text(
        f"{SCRIPT}\nraise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    options = ("--engine", "docker", "--gpus", "none", "--trainers", "1", "--max-restarts", "1")
    done = private("run", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert private.log(1).splitlines()[-1].startswith("{} 0o7")
    assert "cannot read" not in done.stderr
