"""What is shown of a traceback must name the line of the script."""

import pytest

from orchestrate.supervise.diagnosis.tracebacks import excerpt

OURS = ['  File "/job/work/train.py", line 53, in step', "    loss = loss_fn(out, labels)"]
THEIRS = ['  File "/venv/lib/python3.12/site-packages/torch/nn/module.py", line 9, in _call', "    return forward()"]
LAST = ['  File "/usr/lib/python3.12/random.py", line 7, in f', "    raise", "IndexError: Target 10 is out of bounds."]
START = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["x"] * 20, ["x"] * 12),
        (["x", START, *OURS, *LAST], ["x", START, *OURS, *LAST]),
        (["x", START, *OURS, *THEIRS * 9, *LAST], [START, *OURS, "  ...", *LAST]),
        ([START, *THEIRS, *OURS, *THEIRS * 9, *LAST, "y"], [START, "  ...", *OURS, "  ...", *LAST, "y"]),
        ([START, *THEIRS * 5, *OURS * 9, *LAST], [START, *(OURS * 9)[-8:], *LAST]),
        ([START, *THEIRS * 9, *LAST, *["y"] * 13], ["y"] * 12),  # no longer what it ended with
    ],
)
def test_a_long_traceback_must_be_shown_from_its_start_without_frames_of_libraries(lines, shown):
    assert excerpt(lines, 12) == shown
    prefixed = excerpt([f"[rank0]: {line}" for line in lines], 12)
    assert len(prefixed) == len(shown)
