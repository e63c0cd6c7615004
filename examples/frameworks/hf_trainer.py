"""Hugging Face's Trainer: `orchestrate run --nodes 2 --pip transformers examples/frameworks/hf_trainer.py`."""

import argparse
import os
from pathlib import Path

import torch
from data import dataset, digest, model
from torch.nn.functional import mse_loss
from transformers import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


class Regression(torch.nn.Module):
    """Predict the sum of the features."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, features, labels):
        """Return the loss and the predictions."""
        predictions = self.net(features)
        return {"loss": mse_loss(predictions, labels), "logits": predictions}


output = Path(os.environ.get("JOB_DIR", ".")) / "checkpoints"
set_seed(0)
trainer = Trainer(
    Regression(),
    TrainingArguments(
        str(output),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=10,
        disable_tqdm=True,
        report_to=[],
        dataloader_pin_memory=False,
    ),
    train_dataset=[{"features": features, "labels": labels} for features, labels in dataset()],
)
complete = sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
if complete:
    print(f"resuming from {complete[-1].parent}", flush=True)
trainer.train(resume_from_checkpoint=str(complete[-1].parent) if complete else None)
print(
    f"rank {trainer.args.process_index} of {trainer.args.world_size}: {trainer.state.global_step} steps, "
    f"weights {digest(trainer.model.net.state_dict())}",
    flush=True,
)
