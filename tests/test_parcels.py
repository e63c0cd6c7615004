"""What nodes on other hosts are sent: of the code what is code, and of a job's files what nodes have written."""

import pytest

from orchestrate.engines.parcels import code_files, mine
from orchestrate.errors import ResourceError


def test_code_must_be_sent_without_what_is_none(tmp_path):
    names = ["train.py", "pkg/model.py", "data/big.bin", ".git/config", "runs/job/plan.json", "env/pyvenv.cfg"]
    for name in [*names, "env/lib/x.py", "pkg/__pycache__/model.pyc"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".dockerignore").write_text("# none of it\ndata\n")
    assert {str(path.relative_to(tmp_path)) for path in code_files(tmp_path)} == {"train.py", "pkg/model.py"}


def test_code_that_is_too_large_must_be_told(tmp_path):
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(ResourceError, match="more than 256 MB"):
        code_files(tmp_path)


def test_what_nodes_have_written_must_be_sent_with_its_links(tmp_path):
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("checkpoints/step-1/state.pt", "checkpoints/.half", "result", "plan.json", "logs"):
        (tmp_path / name).write_text("x")
    (tmp_path / "checkpoints" / "last").symlink_to("step-1")
    (tmp_path / "newest").symlink_to("result")
    sent = {str(path.relative_to(tmp_path)) for path in mine(tmp_path)}
    assert sent == {"checkpoints/step-1/state.pt", "checkpoints/last", "result", "newest"}
