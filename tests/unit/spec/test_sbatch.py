"""A batch script of Slurm must be shown as the same job in a job file."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrate.spec.layers import resolve
from orchestrate.spec.sbatch import job_file

SCRIPT = """#!/bin/bash
#SBATCH --job-name=train
#SBATCH -N 4
#SBATCH --ntasks-per-node=2   # one for each GPU
#SBATCH -c8
#SBATCH --mem=64G
#SBATCH --gres=gpu:a100:2
#SBATCH -p gpu
#SBATCH --time 02:30:00
#SBATCH --exclusive
#SBATCH --output="logs/%j.out"
module load cuda
# srun python old.py
srun torchrun --nproc-per-node 2 \\
    train.py --lr 0.1
"""


def test_options_must_become_keys_and_the_command_that_of_the_script():
    text = job_file(SCRIPT)
    assert yaml.safe_load(text)["command"] == ["train.py", "--lr", "0.1"]
    spec = resolve(yaml.safe_load(text))
    assert (spec.engine, spec.name, spec.trainers, spec.nproc_per_node) == ("slurm", "train", 3, 2)
    assert (spec.cpus, spec.memory, spec.gpus) == (16, "64g", 8)
    assert spec.slurm == {"partition": "gpu", "time": "02:30:00", "exclusive": ""}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("#SBATCH --nodes=2\nsrun python -m pkg.train a", {"nodes": 2, "command": ["-m", "pkg.train", "a"]}),
        ("#SBATCH --mem=500", {"memory": "500m", "command": ["SCRIPT.py"]}),
        ("#SBATCH --gpus-per-node=4\n#SBATCH -N2", {"gpus": 8}),
        ("#SBATCH --gpus=3", {"gpus": 3}),
        ("#SBATCH -A vision\n#SBATCH -q high", {"slurm": {"account": "vision", "qos": "high"}}),
    ],
)
def test_other_forms_of_options_must_be_read(lines, found):
    assert yaml.safe_load(job_file(lines)).items() >= found.items()


def test_a_script_without_options_must_be_none():
    assert job_file("#!/bin/bash\npython train.py\n") == ""


@given(st.text())
def test_any_text_must_be_read_without_an_error(text):
    job_file(f"#SBATCH {text}\n{text}")
