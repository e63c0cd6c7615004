"""Progress and metrics in the output of workers, as frameworks print them."""

import io

import pytest

from orchestrate.view.progress import Progress, parse


def test_a_bar_of_tqdm_must_be_read():
    tqdm = pytest.importorskip("tqdm")
    output = io.StringIO()
    with tqdm.tqdm(total=40, file=output, ncols=100, mininterval=0, desc="Epoch 1") as bar:
        for step in range(10):
            bar.set_postfix(loss=f"{1 / (step + 1):.3f}")
            bar.update()
    found = parse(output.getvalue().rpartition("\r")[2])
    assert found and (found.step, found.total, found.metrics) == (10, 40, {"loss": 0.1})
    assert found.fraction == 0.25 and found.step_seconds and found.step_seconds < 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Epoch 3:  45%|####5     | 12/27 [00:04<01:02,  2.00s/it, v_num=3, train_loss=0.5]",
            Progress(12, 27, 62.0, 2.0, {"train_loss": 0.5}),
        ),
        (" 10%|#         | 1.50k/15.0k [00:01<?, ?it/s]", Progress(1500, 15000, None, None)),
        ("100%|##########| 8/8 [1:00:00<00:00, 4.00it/s]", Progress(8, 8, 0.0, 0.25)),
        (
            "{'loss': 1.25, 'learning_rate': 5e-05, 'epoch': 0.5}",
            Progress(metrics={"loss": 1.25, "learning_rate": 5e-05, "epoch": 0.5}),
        ),
        ("{'loss': '1.25', 'epoch': '0.5'}", Progress(metrics={"loss": 1.25, "epoch": 0.5})),
        ("epoch 1/3: accuracy 97.05%, loss=0.0910", Progress(metrics={"loss": 0.091})),
        ("step 7, val_loss: 1e-3", Progress(metrics={"val_loss": 0.001})),
        ("listening on port: 8080", None),
        ("{'a': __import__('os')}", None),
        ("{" * 1999, None),
        ("|" * 5000 + " 1/2 [", None),
        ("", None),
    ],
)
def test_lines_must_be_read(line, expected):
    assert parse(line) == expected
