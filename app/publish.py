"""Publish a model: its weights, in a format that cannot contain code, and a model card.

    python -m app.publish runs/digits-4f2a91/checkpoints/best OUT

writes `OUT/model.safetensors` and `OUT/model.json`.
"""

import argparse
import hashlib
import json
import pickle
from pathlib import Path

from safetensors.torch import save_file

from app.checkpoint import load


def publish(checkpoint: Path, out: Path) -> dict[str, object]:
    """Write weights and card; return the card. Raises ValueError or OSError if the checkpoint is damaged."""
    state, manifest = load(checkpoint)
    weights = {name: tensor.contiguous() for name, tensor in state["model"].items()}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "model.safetensors"
    save_file(weights, path, metadata={"step": str(manifest["step"])})
    card = {
        "model": state["arguments"]["model"],
        "dataset": state["arguments"]["dataset"],
        "test_accuracy": manifest.get("score"),
        "step": manifest["step"],
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "tensors": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in weights.items()},
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    (out / "model.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def main() -> None:
    """Publish one checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m app.publish", description="Publish the weights of a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", type=Path, help="output folder")
    args = parser.parse_args()
    try:
        card = publish(args.checkpoint, args.out)
    except (OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise SystemExit(f"error: {args.checkpoint} is not a valid checkpoint: {error}") from None
    print(f"{card['parameters']} parameters of step {card['step']} in {args.out}")


if __name__ == "__main__":
    main()
