"""A script that is written for SageMaker must run unchanged."""

import json

SCRIPT = """
import argparse
import json
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--hosts", type=json.loads, default=os.environ["SM_HOSTS"])
parser.add_argument("--current-host", default=os.environ["SM_CURRENT_HOST"])
parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--data-dir", default=os.environ["SM_CHANNEL_TRAINING"])
parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
args = parser.parse_args()
rank = args.hosts.index(args.current_host)
os.environ["WORLD_SIZE"], os.environ["RANK"] = str(len(args.hosts)), str(rank)
dist.init_process_group("gloo", rank=rank, world_size=len(args.hosts))
found = torch.tensor(float(open(f"{args.data_dir}/value").read()) * args.epochs)
dist.all_reduce(found)
if rank == 0:
    with open(f"{args.model_dir}/model.json", "w") as file:
        json.dump(found.item(), file)
    open(f"{os.environ['SM_OUTPUT_DATA_DIR']}/done", "w").close()
"""


def test_a_script_of_sagemaker_must_find_its_data_and_folders(ready):
    (ready.folder / "theirs.py").write_text(SCRIPT)
    (ready.folder / "training").mkdir()
    (ready.folder / "training" / "value").write_text("2.5")
    settings = ["--set", "sagemaker=true", "--set", "hyperparameters.epochs=3", "--data", "training=training"]
    done = ready("run", "--engine", ready.engine, "--gpus", "none", "--nodes", "3", *settings, "theirs.py")
    assert done.returncode == 0, done.stderr
    job = ready.run_dir() / "job"
    assert json.loads((job / "model" / "model.json").read_text()) == 22.5
    assert (job / "output" / "data" / "done").exists()
