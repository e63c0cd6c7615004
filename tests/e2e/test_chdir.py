"""Scripts that use files above their own folder: the job starts there, and workers in the folder of the script."""

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import os, pathlib, sys
import helper
print("read", pathlib.Path("../data/train.csv").read_text(), helper.NAME, os.path.basename(os.getcwd()), sys.argv[1:])
pathlib.Path("model.pt").write_text("trained")
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


def test_a_script_must_find_what_is_above_its_folder_also_if_it_is_resumed(cli, engine):
    for name, text in {"proj/train.py": SCRIPT, "proj/helper.py": "NAME = 'mine'", "data/train.csv": "1,2"}.items():
        (cli.folder / name).parent.mkdir(exist_ok=True)
        (cli.folder / name).write_text(text)
    options = ("--engine", engine, "--gpus", "none", "--trainers", "1", "--chdir", "proj", "--max-restarts", "0")
    assert cli("run", *options, "train.py", "../data").returncode == 1
    done = cli("resume", cli.run_dir().name)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert cli.log(rank).endswith("[node] generation 1\nread 1,2 mine proj ['../data']\n")
    written = cli.run_dir() / "work" / "proj" if engine == "docker" else cli.folder / "proj"
    assert (written / "model.pt").read_text() == "trained"
