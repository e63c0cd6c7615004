"""TensorBoard events, read back with TensorBoard."""

import pytest

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def curves(folder) -> dict[str, list[tuple[int, float]]]:
    """The curves that TensorBoard finds in a run directory."""
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
