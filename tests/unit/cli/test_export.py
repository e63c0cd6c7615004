"""`export`: which forms it prints."""

import pytest
import yaml

from orchestrate.cli.main import main
from orchestrate.cli.parser import EXPORTS
from orchestrate.export.kubernetes import kubernetes
from orchestrate.export.slurm import slurm
from orchestrate.spec.layers import resolve

APP = ("--gpus", "none", "--", "-m", "app.train")


# --- exports


@pytest.mark.parametrize("form", ["", *EXPORTS["kubernetes"]])
def test_export_kubernetes_must_print_the_requested_form(capsys, form):
    spec = resolve(
        {"gpus": "none", "trainers": "2", "command": ["-m", "app.train"], "image": "a.example/orchestrate-node:1"}
    )
    arguments = ("--form", form) if form else ()
    assert (
        main(["export", "kubernetes", *arguments, "--trainers", "2", "--image", "a.example/orchestrate-node:1", *APP])
        == 0
    )
    assert capsys.readouterr().out == kubernetes(spec, "app-train", form or "job")


@pytest.mark.parametrize("form", ["", *EXPORTS["slurm"]])
def test_export_slurm_must_print_the_requested_form(capsys, form):
    image = "a.example/orchestrate-node:1"
    spec = resolve({"gpus": "none", "trainers": "2", "name": "mine", "command": ["-m", "app.train"], "image": image})
    arguments = ("--form", form) if form else ()
    assert main(["export", "slurm", *arguments, "--trainers", "2", "--name", "mine", "--image", image, *APP]) == 0
    assert capsys.readouterr().out == slurm(spec, "mine", form or "venv")


def test_export_compose_must_print_a_compose_file(capsys):
    assert main(["export", "compose", *APP]) == 0
    text = capsys.readouterr().out
    assert "master" in yaml.safe_load(text)["services"] and text.endswith("\n") and not text.endswith("\n\n")


def test_an_unknown_form_must_be_answered_with_the_available_forms(capsys):
    assert main(["export", "slurm", "--form", "job", *APP]) == 2
    assert capsys.readouterr().err == "error: unknown form 'job'\nhint: choose from venv, apptainer, pyxis\n"
    assert main(["export", "compose", "--form", "job", *APP]) == 2
    assert capsys.readouterr().err == "error: unknown form 'job'\nhint: compose has no forms: remove --form\n"
