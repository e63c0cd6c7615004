"""Write `docs/performance.md` and its plots out of what `python -m benchmarks --json FILE` has measured.

    python -m benchmarks.document FILE

What misses its target stands first, with the reason as far as it is known.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.starts import ROOT

REASONS = {
    "T4": "beside the start and the import, the others are stopped first, and DDP takes its first steps: together half "
    "a second or more on two busy cores.",
    "T5": "a step of 5 ms is mostly waiting for the other worker's 1 MB, and the kernel takes some 0.4 ms longer to "
    "bring that through two virtual interfaces and a bridge; `network: host` spares them.",
    "T7": "Compose brings nodes up, and takes nearly twice as long as raw calls; what we add to it is small.",
    "T9": "besides `torch.save` and its sync there are two more file syncs, two folder syncs and the removal of the "
    "checkpoint before the last. This training keeps both cores busy: hashing and writing 256 MB takes one of them "
    "away for a while, on which each step of the other waits; a lower priority of the writer only made that longer.",
}


def met(label: str, value: float) -> bool | None:
    """Whether a ratio meets the target that its label names; None where it names none."""
    match = re.search(r"\((≤|≥) ([\d.]+)\)", label)
    if not match:
        return None
    return value <= float(match[2]) if match[1] == "≤" else value >= float(match[2])


def section(name: str, result: dict[str, Any]) -> str:
    """One benchmark: what it is, its figures, its plot."""
    lines = [f"## {name}", "", result["about"], ""]
    misses = [label for label, value in result["ratios"].items() if met(label, value) is False]
    if misses and name in REASONS:
        lines += [f"Missed: {REASONS[name]}".replace(". ", ".\n"), ""]
    lines += ["| what | median | lowest | highest |", "| --- | --- | --- | --- |"]
    for what, (values, unit) in result["values"].items():
        middle, low, high = statistics.median(values), min(values), max(values)
        lines.append(f"| {what} | {middle:.4g} {unit} | {low:.4g} | {high:.4g} |")
    lines += ["", "| figure (target) | value | met |", "| --- | --- | --- |"]
    for label, value in result["ratios"].items():
        lines.append(f"| {label} | {value:.3g} | {({True: 'yes', False: 'no', None: ''})[met(label, value)]} |")
    lines += [f"\n{what} was not measured: {why}" for what, why in result.get("failed", {}).items()]
    return "\n".join([*lines, "", f"![{name}](performance/{name}.svg)", ""])


def plot(result: dict[str, Any]) -> str:
    """The medians as bars, with a line from the lowest to the highest value, in SVG."""
    rows = list(result["values"].items())
    most = max(max(values) for _, (values, _) in rows) or 1.0
    bars = []
    for i, (what, (values, unit)) in enumerate(rows):
        y, scale = 10 + 26 * i, 360 / most
        width, low, high = (scale * value for value in (statistics.median(values), min(values), max(values)))
        bars.append(
            f'<text x="310" y="{y + 14}" text-anchor="end">{what}</text>'
            f'<rect x="320" y="{y}" width="{width:.0f}" height="18" fill="#4477aa"/>'
            f'<line x1="{320 + low:.0f}" x2="{320 + high:.0f}" y1="{y + 9}" y2="{y + 9}" stroke="black"/>'
            f'<text x="{328 + high:.0f}" y="{y + 14}">{statistics.median(values):.3g} {unit}</text>'
        )
    size = f'width="780" height="{20 + 26 * len(rows)}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13"'
    return f"<svg {size} {style}>{''.join(bars)}</svg>\n"


def main() -> None:
    """Write the document."""
    measured = json.loads(Path(sys.argv[1]).read_text())
    machine = ", ".join(f"{key} {value}" for key, value in measured.pop("machine").items())
    folder = ROOT / "docs" / "performance"
    folder.mkdir(exist_ok=True)

    def missed(item: tuple[str, Any]) -> tuple[bool, int]:
        return all(met(*ratio) is not False for ratio in item[1]["ratios"].items()), int(item[0][1:])

    text = [
        "# Performance",
        "",
        "Measured on one machine, side by side, by `python -m benchmarks --json FILE`; "
        "written from that by `python -m benchmarks.document FILE`.",
        f"The machine: {machine}.",
        "Ratios carry to other machines, times do not.",
        "What misses its target stands first.",
        "",
    ]
    for name, result in sorted(measured.items(), key=missed):
        text.append(section(name, result))
        (folder / f"{name}.svg").write_text(plot(result))
    (ROOT / "docs" / "performance.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
