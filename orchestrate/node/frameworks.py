"""Variables that frameworks read besides torchrun's, so that their workers train one model together.

docs/frameworks.md lists them with the releases that the tests use.
"""

from __future__ import annotations


def variables(nodes: int, nproc: int, on_gpus: bool) -> dict[str, str]:
    """Return variables for a job of `nodes` nodes with `nproc` workers each, on GPUs or on the CPU.

    Without them, Lightning and Fabric take a worker for a job of its own, and Accelerate and Hugging Face's Trainer
    do so on the CPU.
    """
    if nodes * nproc == 1:  # nothing to find together, and other accelerators than NVIDIA's stay possible
        return {}
    found = {
        "PL_TRAINER_NUM_NODES": str(nodes),  # defaults of Lightning's Trainer
        "PL_TRAINER_DEVICES": str(nproc),
        "LT_NUM_NODES": str(nodes),  # arguments of Lightning Fabric
        "LT_DEVICES": str(nproc),
        "LOCAL_SIZE": str(nproc),  # how DeepSpeed counts devices on the CPU
    }
    return found if on_gpus else found | {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}


NAMES = frozenset(variables(2, 1, on_gpus=False))
