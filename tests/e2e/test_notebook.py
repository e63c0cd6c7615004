"""The notebook of the examples must run in a real Jupyter kernel, with the outputs that it shows."""

import re
import shutil

import nbformat
import pytest
from nbclient import NotebookClient
from support.repo import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
# What differs between two runs: ids of jobs, durations, and ports.
CHANGES = {r"-[0-9a-f]{6}\b": "-ID", r"\d+\.\d s\b": "N s", r"127\.0\.0\.1:\d+": "127.0.0.1:PORT"}


def outputs(notebook: nbformat.NotebookNode, folder: str) -> list[list[str]]:
    """What each cell prints and returns, without messages about what takes long."""
    found = []
    for cell in notebook.cells:
        texts = [each.get("text") or each.data["text/plain"] for each in cell.get("outputs", ())]
        lines = "\n".join(texts).replace(folder, "FOLDER").splitlines()
        # Equal lines are one if they come together.
        lines = [each for line in lines for each in re.sub(r"^\[0-1\] (.*)", r"[0] \1\n[1] \1", line).split("\n")]
        for change, name in CHANGES.items():
            lines = [re.sub(change, name, line) for line in lines]
        found.append([line for line in lines if line and not line.startswith("importing torch")])
    return found


@pytest.mark.slow
@pytest.mark.any_engine
def test_the_notebook_must_print_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shown = nbformat.read(NOTEBOOK, 4)
    ran = nbformat.read(shutil.copy(NOTEBOOK, tmp_path), 4)
    NotebookClient(ran, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert outputs(ran, str(tmp_path)) == outputs(shown, "/home/user/project")
    assert not [*tmp_path.glob("runs/cluster-*")]
