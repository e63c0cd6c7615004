"""Lightning's Trainer: `orchestrate run --nodes 2 --pip lightning examples/frameworks/lightning_trainer.py`."""

import argparse
import json
import os
from pathlib import Path

import lightning as L
import torch
from data import dataset, digest, model
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


class Regression(L.LightningModule):
    """Predict the sum of the features."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        features, target = batch
        loss = mse_loss(self.net(features), target)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Metrics(L.Callback):
    """Writes the logged metrics to $JOB_DIR/metrics.jsonl, where orchestrate reads them."""

    last = 0

    def on_train_batch_end(self, trainer, *_):
        """Write a line every ten steps, and not for each batch of a step."""
        if trainer.global_step % 10 == 0 and trainer.global_step != self.last:
            self.write(trainer)

    def on_train_end(self, trainer, _):
        """Write the last values, also of the validation."""
        self.write(trainer)

    def write(self, trainer):
        """Write a line."""
        self.last = trainer.global_step
        if trainer.is_global_zero and "JOB_DIR" in os.environ:
            row = {"step": trainer.global_step, "total_steps": trainer.estimated_stepping_batches}
            row |= {name: value.item() for name, value in trainer.callback_metrics.items()}
            with open(Path(os.environ["JOB_DIR"]) / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")


checkpoints = Path(os.environ.get("JOB_DIR", ".")) / "checkpoints"
trainer = L.Trainer(
    max_epochs=args.epochs,
    callbacks=[ModelCheckpoint(checkpoints, save_last=True), Metrics()],
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    use_distributed_sampler=True,
)
saved = "JOB_DIR" in os.environ and any(checkpoints.glob("last*.ckpt"))  # alone, each run starts anew
if saved:
    print(f"resuming from the last of {checkpoints}", flush=True)
module = Regression()
trainer.fit(module, DataLoader(dataset(), batch_size=32, shuffle=True), ckpt_path="last" if saved else None)
weights = digest(module.net.state_dict())
print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps, weights {weights}", flush=True)
