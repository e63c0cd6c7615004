"""Compare the four strategies on the same training.

    python -m app.compare --workers 1 2 4 --out compare -- --epochs 1

prints a table and writes `table.md`, `results.json` and a plot, `speed.svg`, to the folder. `single` and `dp` run as
one process; `manual` and `ddp` run with each number of workers. Arguments after `--` are passed to `app.train`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from app import data, strategy

COLUMNS = ("strategy", "workers", "seconds", "samples/s", "accuracy", "speed-up")


def run(strategy: str, workers: int, arguments: list[str]) -> dict[str, Any]:
    """Train once, in a temporary folder; return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        spawn = ["--spawn", str(workers)] if workers > 1 else []
        command = [sys.executable, "-m", "app.train", "--strategy", strategy, *spawn, *arguments]
        ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
        env = {key: value for key, value in os.environ.items() if key not in ranks}
        done = subprocess.run(command, env=env | {"JOB_DIR": folder}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: {' '.join(command)}\n{done.stderr}")
        records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    seconds = sum(epoch["seconds"] for epoch in epochs)
    samples = epochs[-1]["samples"] * len(epochs)
    accuracy = epochs[-1]["test_accuracy"]
    row = {"strategy": strategy, "workers": workers, "seconds": seconds, "samples/s": samples / seconds}
    return row | {"accuracy": accuracy, "losses": [r["loss"] for r in records if r["kind"] == "step"]}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    formats = {"seconds": "{:.1f}", "samples/s": "{:.0f}", "accuracy": "{:.2%}", "speed-up": "{:.2f}"}
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [[formats.get(name, "{}").format(row[name]) for name in COLUMNS] for row in rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def plot(rows: list[dict[str, Any]]) -> str:
    """A bar chart of samples per second, in SVG."""
    most = max(row["samples/s"] for row in rows)
    bars = []
    for i, row in enumerate(rows):
        y, width = 30 + 26 * i, 360 * row["samples/s"] / most
        label = f"{row['strategy']} × {row['workers']}"
        bars.append(
            f'<text x="110" y="{y + 14}" text-anchor="end">{label}</text>'
            f'<rect x="120" y="{y}" width="{width:.0f}" height="18" fill="#4477aa"/>'
            f'<text x="{126 + width:.0f}" y="{y + 14}">{row["samples/s"]:.0f}</text>'
        )
    size = f'width="580" height="{40 + 26 * len(rows)}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13"'
    return f'<svg {size} {style}><text x="120" y="18">samples per second</text>{"".join(bars)}</svg>\n'


def main() -> None:
    """Run all strategies, print the table, write the files."""
    parser = argparse.ArgumentParser(prog="python -m app.compare", description="Compare the strategies.")
    numbers = "numbers of workers for manual and ddp (default 1 2 4)"
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help=numbers)
    names = "strategies to compare (default all)"
    parser.add_argument("--strategies", choices=strategy.NAMES, nargs="+", default=strategy.NAMES, help=names)
    parser.add_argument("--out", type=Path, default=Path("compare"), help="output folder (default compare)")
    argv = sys.argv[1:]
    separator = argv.index("--") if "--" in argv else len(argv)
    args, arguments = parser.parse_args(argv[:separator]), argv[separator + 1 :]
    if "--dataset" not in arguments:
        data.load("digits", data.HOME, download=False)  # generated before the first measurement
    counts = {"single": [1], "dp": [1]}
    runs = [(name, count) for name in args.strategies for count in counts.get(name, args.workers)]
    rows: list[dict[str, Any]] = []
    for name, workers in runs:
        row = run(name, workers, arguments)
        rows.append(row | {"speed-up": rows[0]["seconds"] / row["seconds"] if rows else 1.0})
        print(f"{name} × {workers}: {row['seconds']:.1f} s", file=sys.stderr, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(rows) + "\n")
    (args.out / "table.md").write_text(table(rows))
    (args.out / "speed.svg").write_text(plot(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
