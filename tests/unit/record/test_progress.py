"""Progress and metrics in the output of workers, as frameworks print them."""

import io
import re

import pytest

from orchestrate.errors import UsageError
from orchestrate.record.progress import MAX_LINE, Epochs, Progress, Reader, parse
from orchestrate.spec.layers import read_set, resolve


def test_a_bar_of_tqdm_must_be_read():
    tqdm = pytest.importorskip("tqdm")
    output = io.StringIO()
    with tqdm.tqdm(total=40, file=output, ncols=100, mininterval=0, desc="Epoch 1") as bar:
        for step in range(10):
            bar.set_postfix(loss=f"{1 / (step + 1):.3f}")
            bar.update()
    found = parse(output.getvalue().rpartition("\r")[2])
    assert found and (found.step, found.total, found.metrics) == (10, 40, {"loss": 0.1})
    assert found.fraction == 0.25 and Progress(12, 10).fraction == 1.0 and found.step_seconds and found.step_seconds < 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "Epoch 3:  45%|####5     | 12/27 [00:04<01:02,  2.00s/it, v_num=3, train_loss=0.5]",
            Progress(12, 27, 62.0, 2.0, {"train_loss": 0.5}, bar=True, epoch=3),
        ),
        (  # several bars in a line; the epoch of the last one counts
            "Epoch 3: 100%|##| 27/27 [00:04<00:00, 2.00s/it]Epoch 4:  50%|#  | 5/27 [00:01<00:02, 2.00s/it]",
            Progress(5, 27, 2.0, 2.0, bar=True, epoch=4),
        ),
        (  # rich, in Lightning
            "Epoch 2/9 ━━━━━━━━━━ 12/27 0:00:04 • 0:01:02 0.50it/s v_num: 0.000 train_loss: 0.5",
            Progress(12, 27, 62.0, 2.0, {"train_loss": 0.5}, bar=True, epoch=2),
        ),
        ("Epoch 0/9 ━━━━━━━━━━ 0/27 0:00:00 • -:--:-- 0.00it/s", Progress(0, 27, bar=True, epoch=0)),
        (
            "Epoch 12, global step 520: 'val_loss' reached 0.55000 (best 0.55000), saving model to '/job/a.ckpt'",
            Progress(520, metrics={"epoch": 12.0, "val_loss": 0.55}),
        ),
        ("/opt/lightning/pytorch/loops/training_epoch_loop.py:224: You're resuming", None),
        ("Validation DataLoader 0:  40%|##   | 2/5 [00:00<00:00, 180.22it/s]", Progress(bar=True)),
        ("Sanity Checking DataLoader 0: 100%|#| 2/2 [00:00<00:00, 9.00it/s]", Progress(bar=True)),
        (" 10%|#         | 1.50k/15.0k [00:01<?, ?it/s]", Progress(1500, 15000, None, None, bar=True)),
        ("100%|##########| 8/8 [1:00:00<00:00, 4.00it/s]", Progress(8, 8, 0.0, 0.25, bar=True)),
        (
            "{'loss': 1.25, 'learning_rate': 5e-05, 'epoch': 0.5}",
            Progress(metrics={"loss": 1.25, "learning_rate": 5e-05, "epoch": 0.5}),
        ),
        ('{"step": 7, "max_steps": 10, "loss": 1.25}', Progress(7, 10, metrics={"loss": 1.25})),
        ("{'global_step': 1e300, 'loss': 1.25}", Progress(metrics={"loss": 1.25})),
        ("| 0/27 [00:00<?, ?it/s] | 1.50M/2.0G [00:01<00:02]", Progress(1_500_000, 2_000_000_000, 2.0, bar=True)),
        (" 0%| | 0/1.5k [00:00<?, ?it/s]", Progress(0, 1500, bar=True)),
        ("{'step': -1, 'current_step': 7, 'loss': None}", None),
        ("{'step': -1, 'current_step': 7, 'loss': 2}", Progress(metrics={"loss": 2.0})),
        ("{'current_step': 7, 'max_steps': -1}", Progress(7)),
        (f"{{'{'n' * 50}': 1}}", Progress(metrics={"n" * 40: 1.0})),
        (f"{{'a': 1{'0' * 400}}}", None),
        ("{1, 2}", None),
        ("{'loss': '1.25', 'epoch': '0.5'}", Progress(metrics={"loss": 1.25, "epoch": 0.5})),
        (
            "epoch 1/3: accuracy 97.05%, loss=0.0910",
            Progress(metrics={"epoch": 1.0, "accuracy": 97.05, "loss": 0.091}, epoch=1, epochs=3),
        ),
        ("[GPU0] Epoch [3/ 10]", Progress(metrics={}, epoch=3, epochs=10)),
        ("Epoch 3 of 10", Progress(metrics={"epoch": 3.0}, epoch=3, epochs=10)),
        ("epoch 3/10%", Progress(metrics={"epoch": 3.0})),
        ("accuracy 1E-3 ppl: -0.5 perplexity=3", Progress(metrics={"accuracy": 0.001, "ppl": -0.5, "perplexity": 3.0})),
        ("step 2.9, loss 1", Progress(metrics={"loss": 1.0})),
        ("step 7, val_loss: 1e-3", Progress(7, metrics={"val_loss": 0.001}, bar=True)),
        ("iter 250: loss 2.4310, time 41.2ms", Progress(250, metrics={"loss": 2.431}, bar=True)),
        ("[step 3/90] train loss 0.5", Progress(3, 90, metrics={"train_loss": 0.5}, bar=True)),
        ("Iteration 7 of 90 begins", Progress(7, 90, bar=True)),
        ("in step 2026-11-24", None),
        ("misstep 7", None),
        ("already 5 files, account: 3, access 7", None),
        ("train/acc1: 0.5", Progress(metrics={"train/acc1": 0.5})),
        ("| 1e999/1 [00:01<00:02, 1it/s]", None),
        ("| 1e99/1 [00:01<00:02, 1it/s]", Progress(None, 1, 2.0, 1.0, bar=True)),
        (f"| 1/2 [00:01<{'9' * 400}:00:02, 1it/s]", None),
        ("RuntimeError: bad batch at step 12", None),
        ("the loss of 2 files", None),
        ("listening on port: 8080", None),
        ("{'a': __import__('os')}", None),
        ("{" * 1999, None),
        ("|" * 5000 + " 1/2 [", None),
        ("", None),
    ],
)
def test_lines_must_be_read(line, expected):
    assert parse(line) == expected


# As the examples of Accelerate, Lightning, Fabric, timm, Megatron, nanoGPT, minGPT, DGL and PyTorch print them.
@pytest.mark.parametrize(
    ("line", "metrics"),
    [
        ("epoch 0: {'accuracy': 0.68, 'f1': 0.81}", {"epoch": 0, "accuracy": 0.68, "f1": 0.81}),
        ("{'accuracy': np.float64(0.68), 'Loss': tensor(0.3, device='cuda:0')}", {"accuracy": 0.68, "loss": 0.3}),
        ("step 7: {'loss': 0.5}", {"loss": 0.5}),
        ("│         test_acc          │    0.9124000072479248     │", {"test_acc": 0.9124000072479248}),
        ("        test_loss           0.31230002641677856", {"test_loss": 0.31230002641677856}),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.298", {"epoch": 1, "loss": 2.298}),
        ("Train Epoch: \t1, Loss: \t0.2312", {"epoch": 1, "loss": 0.2312}),
        ("Test set: Average loss: 0.05, Accuracy: 9838/10000 (98%)", {"loss": 0.05, "accuracy": 0.9838}),
        ("Accuracy: 454/512 (89%)", {"accuracy": 0.88671875}),
        ("Accuracy: 0/0 (0%)", {"accuracy": 0}),
        (" Accuracy: 47.5%, Avg loss: 1.914", {"accuracy": 47.5, "loss": 1.914}),
        ("Epoch: [0][ 10/99]\tTime 0.5 ( 0.7)\tLoss 6.9e+00 (7.0)\tAcc@1   0.01 ( 0.1)", {"loss": 6.9, "acc@1": 0.01}),
        (" *   Acc@1 69.758 Acc@5 89.078", {"acc@1": 69.758, "acc@5": 89.078}),
        ("step 250: train loss 2.4326, val loss 2.4512", {"train_loss": 2.4326, "val_loss": 2.4512}),
        ("Epoch 2/10, Validation Loss: 0.5, Val Acc: 88.2%", {"epoch": 2, "val_loss": 0.5, "val_acc": 88.2}),
        ("Epoch 00003 | Time 0.52 | Loss 0.90 | Train Acc 0.91", {"epoch": 3, "loss": 0.9, "train_acc": 0.91}),
        ("[GPU0] Epoch 3 | Batchsize: 32 | Steps: 64", {"epoch": 3}),
        ("  train_loss               =     0.6012", {"train_loss": 0.6012}),
        ("Train: 0 [   0/1251 (  0%)]  Loss: 6.95 (6.95)  LR: 1.000e-05", {"loss": 6.95, "lr": 1e-05}),
        ("learning rate: 1.5E-04 | lm loss: 6.1E+00 | loss scale: 1.0", {"learning_rate": 1.5e-4, "loss": 6.1}),
        ("Rank 1 training batch 50 loss 0.31", {"loss": 0.31}),
        ("loss: 2.301585  [   64/60000]", {"loss": 2.301585}),
        ("[1,  2000] loss: 2.171", {"loss": 2.171}),
        ("INFO:root:epoch=4 train_loss=0.1 lr=1e-3", {"epoch": 4, "train_loss": 0.1, "lr": 0.001}),
        (" 45%|####5     | 12/27 [00:04<01:02,  2.00s/it, Loss=0.5]", {"loss": 0.5}),
        ("  train_runtime            = 0:00:12.10", None),
        ("val_loss improved from 0.50 to 0.45", None),
        ("min_lr = 6e-05", None),
        ("│ 1 │ loss │ CrossEntropyLoss │      0 │ train │     0 │", None),
        ("1 | train_acc | 4 | 0 | train", None),
        ("20 | train loss 0.5 | val loss 0.6", {"train_loss": 0.5, "val_loss": 0.6}),
        ("resuming from epoch 3", None),
        ("best logs/version_0/epoch=3-val_loss=0.550.ckpt", None),
        ("saved job/checkpoints/epoch=3-step=40.ckpt", None),
        ("Train Epoch 3 begins", {"epoch": 3}),
        ("lr_decay_iters=600000", None),
        ("coca_caption_loss_weight: 2.0", None),
        ("warmup_lr 1e-6, epochs 90", None),
        ("{'learning_rate': 0.1, 'model': 'resnet50'}", None),
    ],
)
def test_metrics_must_be_found_in_what_public_scripts_print(line, metrics):
    found = parse(line)
    assert (found.metrics if found else None) == metrics


PATTERNS = {"loss": r"Loss: ([0-9,.]+)", "step": r"iteration (\d+)", "total_steps": r"iteration \d+ of (\d+)"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("iteration 7 of 90  Loss: 1,024.5  lr: 0.1", Progress(7, 90, metrics={"loss": 1024.5})),
        ("Loss: ,.,", None),
        ("loss = 0.5", Progress()),  # it has no metric that was asked for
        ("nothing", None),
        (" 10%|# | 3/30 [00:01<00:09, 3.00it/s, loss=2.5]", Progress(3, 30, 9.0, 1 / 3, bar=True)),
        (" 10%|# | 3/30 [00:01<00:09, 3.00it/s, iteration 43]", Progress(43, None, 9.0, 1 / 3)),
    ],
)
def test_patterns_of_the_job_must_replace_those_of_frameworks(line, expected):
    assert Reader(PATTERNS).parse(line) == expected


@pytest.mark.parametrize("patterns", [{}, {"loss": "loss ([0-9.]+)"}], ids=["of frameworks", "of the job"])
def test_only_the_end_of_a_long_line_must_be_searched(patterns):
    parse = Reader(patterns).parse
    assert parse("loss 0.5 " + "x" * MAX_LINE) is None
    assert parse("x" * MAX_LINE + " loss 0.5") == Progress(metrics={"loss": 0.5})


@pytest.mark.parametrize("line", ["loss inf", "loss nan", "loss", "loss x"])
def test_a_match_that_is_no_number_must_be_ignored(line):
    assert Reader({"loss": r"loss(?: (\S+))?"}).parse(line) is None


def test_patterns_that_no_line_matches_must_be_known():
    reader = Reader(PATTERNS)
    assert reader.unmatched == {*PATTERNS}
    reader.parse("iteration 7 of 90")
    assert reader.unmatched == {"loss"}
    assert reader.problems() == ["no line of rank 0 matches the pattern of the metric loss"]


def test_a_pattern_that_takes_too_long_must_be_ignored_from_then_on():
    reader = Reader({"slow": r"((?:a|aa)+)cb", "loss": r"loss (\d+)"})
    line = f"loss 3 {'a' * 60} cb"
    assert [reader.parse(line), reader.parse(line)] == [Progress(metrics={"loss": 3.0})] * 2
    assert [*reader.patterns] == ["loss"]
    assert reader.problems() == ["the pattern of the metric slow was ignored: searches took too long"]


def test_a_pattern_that_is_slow_in_each_line_must_be_ignored_after_a_while():
    reader = Reader({"slow": r"((?:a|aa)+)cb", "loss": r"loss (\d+)"})
    line, count = f"loss 3 {'a' * 20} cb", 0  # a search takes milliseconds, far less than its limit
    while "slow" in reader.patterns:
        assert reader.parse(line) == Progress(metrics={"loss": 3.0})
        count += 1
    assert count > 1 and reader.slow == {"slow"}


def test_a_usual_pattern_must_be_searched_for_in_any_number_of_lines():
    reader = Reader(PATTERNS)
    for _ in range(20_000):
        reader.parse("iteration 7 of 90, loss 3.0 and more text that is in a line")
    assert {*reader.patterns} == {*PATTERNS}


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"loss": "loss"}, "loss has no group"),
        ({"loss": "("}, "missing )"),
        ({"": "(a)"}, "a mapping of metrics"),
        ({"loss": 3}, "a mapping of metrics"),
        ({"loss": f"({'a' * 999})"}, "a mapping of metrics"),
        ({f"loss{number}": "(a)" for number in range(21)}, "at most 20"),
        ("loss", "a mapping of metrics"),
    ],
)
def test_invalid_patterns_must_be_refused(metrics, why):
    with pytest.raises(UsageError, match=re.escape(why)):
        resolve({"metrics": metrics})


def test_once_a_pattern_is_ignored_others_must_not_appear():
    reader = Reader({"slow": r"((?:a|aa)+)cb"})
    reader.parse(f"{'a' * 60} cb")
    assert (reader.slow, reader.unmatched) == ({"slow"}, set())
    assert reader.parse("loss 3") == Progress()


@pytest.mark.filterwarnings("error")
def test_odd_text_must_not_be_warned_about():
    assert parse("{'loss': 1if 1else 2}") is None


MANY = {f"name-{number}": "(x)" for number in range(21)}
LONG = f"({'x' * 998})"


@pytest.mark.parametrize("patterns", [{"a": r"{e}(\d+)"}, {"a": "x"}, {"a": f"{LONG}x"}, MANY, {"1a": "(x)"}, ["(x)"]])
def test_patterns_that_the_search_cannot_use_must_be_refused(patterns):
    with pytest.raises(UsageError, match="metrics must be a mapping"):
        resolve({"metrics": patterns})
    most = dict(list(MANY.items())[1:]) | {"name-1": LONG}
    assert resolve({"metrics": most}).metrics == most


def test_a_pattern_on_the_command_line_must_be_text_whatever_it_contains():
    found = resolve(read_set(["metrics.loss=Loss: ([0-9.]+)", "metrics.step=Schritt #(\\d+)"]))
    assert found.metrics == {"loss": "Loss: ([0-9.]+)", "step": "Schritt #(\\d+)"}


@pytest.mark.parametrize(
    ("bars", "steps"),
    [
        ([(1, 3, None), (3, 3, None), (3, 3, None), (1, 3, None), (1, 2, None), (2, 3, None)], [1, 3, 3, 4, 1, 5]),
        ([(3, 3, 5), (1, 3, 6), (2, 3, 5)], [18, 19, 17]),  # the job continues with its sixth epoch
        ([(1, None, None), (None, 3, None), (1, 1 << 60, 1 << 60)], [None, None, None]),
    ],
)
def test_steps_of_bars_must_be_counted_over_epochs(bars, steps):
    epochs = Epochs()
    assert [epochs.step(Progress(step, total, bar=True, epoch=epoch)) for step, total, epoch in bars] == steps


def test_a_full_bar_in_a_line_of_its_own_must_end_an_epoch():
    epochs, full = Epochs(), Progress(3, 3, bar=True)
    assert [epochs.step(full, line=True) for _ in range(3)] == [3, 6, 9]
    assert epochs.step(Progress(1, 2, bar=True)) == 1
    assert [epochs.step(Progress(1, total, bar=True)) for total in range(10, 20)] == [1] * 10
    assert len(epochs.bars) < 10


def test_names_of_dicts_must_not_be_kept_by_pythons_parser(monkeypatch):
    """In Python 3.12 and 3.13 it never forgets a name, and a worker can print ever new ones."""
    compiled, original = [], compile
    with monkeypatch.context() as patch:
        patch.setattr("builtins.compile", lambda *given, **names: compiled.append(given) or original(*given, **names))
        found = parse("{'loss': 0.5, 'flag': True, 'x': '2'}")
        others = [parse(line) for line in ("{x0, x1}", "{'a': x0}", "{'a': [1]}", "{'loss': '0.5\"}")]
    assert not compiled and others == [None] * 4
    assert found == Progress(metrics={"loss": 0.5, "flag": 1.0, "x": 2.0})
