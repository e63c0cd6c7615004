"""A batch script of Slurm must be shown as the same job in a job file."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrate.spec.from_sbatch import job_file
from orchestrate.spec.layers import resolve

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
    left = ("module load cuda", "--output", "the kind of GPUs of gpu:a100:2")
    assert text.splitlines()[-3:] == [f"# not carried over: {line}" for line in left]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("#SBATCH --nodes=2\nsrun python -m pkg.train a", {"nodes": 2, "command": ["-m", "pkg.train", "a"]}),
        ("#SBATCH --mem=500", {"memory": "500m", "command": ["SCRIPT.py"]}),
        ("#SBATCH --gpus-per-node=4\n#SBATCH -N2", {"gpus": 8}),
        ("#SBATCH --gpus=3", {"gpus": 3}),
        ("#SBATCH -A vision\n#SBATCH -q high", {"slurm": {"account": "vision", "qos": "high"}}),
        ("#SBATCH -J sig -N 2 -c1", {"name": "sig", "nodes": 2, "cpus": 1}),
        (
            "#SBATCH --qos=high --exclusive --constraint 'a b'",
            {"slurm": {"qos": "high", "exclusive": True, "constraint": "a b"}},
        ),
        ("#SBATCH -N2\nsrun python train.py --lr 1 > log 2>&1 &\nwait", {"command": ["train.py", "--lr", "1"]}),
        ("#SBATCH -N2\nsrun torchrun train.py --lr 1 &", {"command": ["train.py", "--lr", "1"]}),
        ("#SBATCH -N2\nexport MASTER_PORT=29500\nexport A=1\ntorchrun train.py", {"env": {"A": "1"}}),
        ("#SBATCH -N2\nexport A=1 B='x y'; export C=\"z\"", {"env": {"A": "1", "B": "x y", "C": "z"}}),
        ("#SBATCH -N2\nN=30\nexport L=0.1\npython a.py --n $N --l=${L}", {"command": ["a.py", "--n", "30", "--l=0.1"]}),
        ("#SBATCH -N2\nsrun accelerate launch --n 4 a.py --bf16\npython b.py", {"command": ["a.py", "--bf16"]}),
        ("#SBATCH -N2\nsrun bash -c 'torchrun a.py --lr 1'\npython b.py", {"command": ["a.py", "--lr", "1"]}),
        ("#SBATCH --mem=0", {"memory": "unlimited"}),
    ],
)
def test_other_forms_of_options_must_be_read(lines, found):
    assert yaml.safe_load(job_file(lines)).items() >= found.items()


@pytest.mark.parametrize(
    ("start", "workers"),
    [
        ("srun torchrun --nproc_per_node=8 train.py", 8),
        ("srun torchrun --nnodes $SLURM_NNODES --nproc-per-node=$SLURM_GPUS_ON_NODE --rdzv-id $RANDOM train.py", 4),
        ("srun python -m torch.distributed.run --nproc-per-node ${SLURM_GPUS_ON_NODE} train.py", 4),
        ("srun torchrun train.py", 1),
        ("srun torchrun --nproc-per-node=$N train.py", 1),
        ("srun torchrun --nproc-per-node=gpu train.py", None),
        (f"srun torchrun --nproc-per-node={'1' * 5000} train.py", 1),
        ("srun --ntasks-per-node=4 python train.py", 1),
    ],
)
def test_the_workers_of_torchrun_must_be_those_of_the_job(start, workers):
    job = yaml.safe_load(job_file(f"#SBATCH -N 2\n#SBATCH --gres=gpu:4\n{start}"))
    assert (job.get("nproc_per_node"), job["gpus"], job["command"]) == (workers, 8, ["train.py"])
    assert "slurm" not in job


def test_the_restarts_of_torchrun_must_be_those_of_the_job():
    assert yaml.safe_load(job_file("#SBATCH -N 2\nsrun torchrun --max-restarts 0 train.py"))["max_restarts"] == 0
    assert "max_restarts" not in job_file("#SBATCH -N 2\nsrun torchrun train.py")


def test_variables_must_be_kept_and_what_is_not_carried_over_be_listed_without_secrets():
    lines = ["#SBATCH --gpus-per-node=2", "#SBATCH --array=1-3", "source venv/bin/activate", "export NCCL_DEBUG=INFO"]
    lines += [
        "export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345",
        "export A=$(date)",
        "srun python prep.py",
        "srun python b.py",
    ]
    text = job_file("\n".join(lines))
    job = yaml.safe_load(text)
    assert (job["env"], job["command"]) == ({"NCCL_DEBUG": "INFO"}, ["b.py"])
    left = ["source venv/bin/activate", "export HF_TOKEN=…", "export A=…", "srun python prep.py", "--array"]
    assert text.splitlines()[-5:] == [f"# not carried over: {line}" for line in left] and "hf_" not in text


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ("#SBATCH -o a -e b -a 1-3", ["--output", "--error", "--array"]),
        ("#SBATCH --gres=gpu:a100:4", ["the kind of GPUs of gpu:a100:4"]),
        ("#SBATCH -N2\n./train.sh", ["./train.sh …", "the training, which was not found: replace SCRIPT.py"]),
        ("python a.py --x ${all[$N]} $JOB_DIR $RANK", ["the value of $N in the command"]),
        ("export A=$(date) B=$C\nB=`x`", ["export A=…", "export B=…", "B=…"]),
    ],
)
def test_what_is_lost_must_be_listed(lines, left):
    shown = job_file(f"#SBATCH -N2\n{lines}" if "SBATCH" in lines else f"#SBATCH -N2\npython a.py\n{lines}")
    assert {f"# not carried over: {line}" for line in left} <= {*shown.splitlines()}


def test_what_looks_like_a_secret_must_not_be_shown():
    lines = ["#SBATCH -N 2", "AWS_SECRET_ACCESS_KEY=abcdSECRET aws s3 cp a b", "cd x && export HF_TOKEN=hf_abcdef"]
    lines += ["MASTER=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)", "wandb login 0123456789abcdef"]
    lines += ["srun torchrun train.py --token=hf_ghijkl --api-key qwertz --lr 0.1"]
    text = job_file("\n".join(lines))
    assert not [secret for secret in ("abcdSECRET", "hf_abcdef", "0123456789abcdef", "hf_ghijkl") if secret in text]
    assert yaml.safe_load(text)["command"][-2:] == ["--lr", "0.1"] and "# not carried over: MASTER=…\n" in text
    assert job_file(f"#SBATCH --gpus-per-node={'9' * 5000}\n#SBATCH --mem={'9' * 5000}")


def test_secrets_must_not_be_shown_where_they_follow_an_option_or_a_program():
    lines = ["#SBATCH -N 2", "#SBATCH --comment=hf_abcdefghijklmnopqrstuvwxyz", "curl -u me:canary1 https://x"]
    lines += ["echo canary2 > ~/.token", "git clone https://bob:canary3@x/y", "srun train --password canary4 a.py"]
    lines += ["module load cuda/12", "srun torchrun train.py --password canary5 --lr 0.1"]
    text = job_file("\n".join(lines))
    assert "canary" not in text and "hf_" not in text
    assert "# not carried over: curl …\n" in text and "# not carried over: module load cuda/12\n" in text


def test_a_script_without_options_must_be_none():
    assert job_file("#!/bin/bash\npython train.py\n") == ""


@given(st.text())
def test_any_text_must_be_read_without_an_error(text):
    job_file(f"#SBATCH {text}\n{text}")


def test_a_command_that_variables_make_long_must_not_be_looked_at():
    lines = f"#SBATCH -N2\nX={'a' * 5000}\npython b.py\npython $X$X a.py"
    assert yaml.safe_load(job_file(lines))["command"] == ["b.py"]
    assert yaml.safe_load(job_file(lines.replace("$X$X", "$X")))["command"] == ["a.py"]
