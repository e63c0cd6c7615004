"""Write `docs/performance.md` and its plots from the results of `python -m benchmarks --json FILE`.

    python -m benchmarks.document [FILE]

FILE is by default that of the repository, `docs/performance/results.json`. Benchmarks on GPUs go to
`docs/performance-gpu.md`; a document is written only if FILE has results for it. Benchmarks that miss a target come
first, with the reason if it is known. Those whose code has changed since are marked.
"""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.__main__ import NAMES, ON_DOCKER, ON_GPUS
from benchmarks.starts import ROOT

REASONS = {
    "cold-start": "each way imports torch four times on two cores, which takes most of the time. Besides, orchestrate "
    "copies the code folder, this repository with its 800 files, and puts a packet filter into each node before a "
    "worker starts.",
    "warm-start": "a third of a second of it is the copy of this repository, in which 800 files are created. Without "
    "that, the job takes a quarter of a second (fork, process group, torch's end), and the command's own Python, above "
    "all its imports, about as much.",
    "restart": "workers start again within a tenth of a second; what follows is their process group, DDP's first step "
    "and the step that is counted, in four processes on two cores.",
    "node-loss": "besides the start and the import, the other workers are stopped first, and DDP takes its first "
    "steps: together half a second or more on two busy cores.",
    "steady-state": "a step of 5 ms mostly waits for the other worker's 1 MB, which the kernel takes about 0.4 ms "
    "longer to send through two virtual interfaces and a bridge; `network: host` avoids them. Steps of 60 ms differ "
    "by less than their spread from run to run.",
    "many-nodes": "Compose creates the nodes and takes nearly twice as long as raw API calls; a node counts as up only "
    "once its process responds, what it has mounted is checked, and its network has a packet filter.",
    "slurm": "from the end of a worker to the start of the next takes 0.2 s instead of 0.14 s, since each machine is a "
    "container here, with its own zygote and daemons on the same two cores, and the process group is formed over a "
    "bridge instead of the loopback interface.",
    "image-rebuild": "Compose and BuildKit take most of it, also without a change.",
    "checkpoint": "besides `torch.save` and its fsync, a save syncs two more files and two folders, and removes an old "
    "checkpoint. This training keeps both cores busy: hashing and writing 256 MB occupies one of them for a while, "
    "and every step on the other waits for it; a lower priority of the writer only made that longer.",
}


# What each benchmark measures, besides the nodes and the supervisor; a change there makes its figures out of date.
JOBS = ("orchestrate/node", "orchestrate/supervise", "orchestrate/engines", "orchestrate/cli/commands/run.py")
CODE = {
    "checkpoint": ("app/checkpoint.py",),
    "commands": ("orchestrate/cli", "orchestrate/console.py", "orchestrate/record", "orchestrate/spec"),
    "image-rebuild": ("Dockerfile",),
    "log-lines": ("orchestrate/record/logs.py", "orchestrate/show", "orchestrate/console.py"),
    "slurm": ("orchestrate/engines/slurm", "orchestrate/node", "orchestrate/supervise", "orchestrate/api/submit.py"),
    "speed-up": ("app", "orchestrate/node"),
    "steady-state": ("app", "orchestrate/node", "docker-compose.yml"),
    "time-to-accuracy": ("app", "orchestrate/node"),
}
OLD = "Out of date: what it measures has changed since."
RESULTS = ROOT / "docs" / "performance" / "results.json"


def changed(name: str, commit: str) -> bool:
    """Whether what a benchmark measures has changed since a commit; False if git does not know."""
    command = ["git", "diff", "--quiet", commit.partition(" ")[0], "--", *CODE.get(name, JOBS)]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 1


def met(label: str, value: float) -> bool | None:
    """Whether a ratio meets the target in its label; None if there is no target."""
    match = re.search(r"\((≤|≥) ([\d.]+)\)", label)
    if not match:
        return None
    return value <= float(match[2]) if match[1] == "≤" else value >= float(match[2])


def heading(name: str) -> str:
    """The name of a benchmark as a heading."""
    return (
        name[0].upper() + name[1:].replace("-", " ")
        if not name.startswith("gpu-")
        else f"GPU {name[4:]}".replace("-", " ")
    )


def number(value: float) -> str:
    """A measured value with four digits, and without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 0.0001 else "0"


def section(name: str, result: dict[str, Any], old: bool) -> str:
    """One benchmark: description, whether it is out of date, figures and plot."""
    lines = [f"## {heading(name)}", "", result["about"], "", *[OLD, ""] * old]
    misses = [label for label, value in result["ratios"].items() if met(label, value) is False]
    if misses and name in REASONS:
        lines += [f"Missed: {REASONS[name]}".replace(". ", ".\n"), ""]
    lines += ["| measurement | median | lowest | highest | runs |", f"|{' --- |' * 5}"] if result["values"] else []
    for what, (values, unit) in result["values"].items():
        middle, low, high = map(number, (statistics.median(values), min(values), max(values)))
        lines.append(f"| {what} | {middle} {unit} | {low} | {high} | {len(values)} |")
    lines += ["", "| figure (target) | value | met |", "| --- | --- | --- |"] if result["ratios"] else []
    for label, value in result["ratios"].items():
        lines.append(f"| {label} | {value:.3g} | {({True: 'yes', False: 'no', None: ''})[met(label, value)]} |")
    lines += [f"\n{what} was not measured: {why}" for what, why in result.get("failed", {}).items()]
    picture = ["", f"![{heading(name)}](performance/{name}.svg)"] if result["values"] else []
    return "\n".join([*lines, *picture, ""])


def plot(result: dict[str, Any]) -> str:
    """A bar chart of the medians, each with a line from the lowest to the highest value, in SVG."""
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


def described(machine: dict[str, Any]) -> str:
    """Describe a machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def by_targets(item: tuple[str, Any]) -> tuple[bool, int]:
    """Sort key of a benchmark: those that miss a target come first."""
    return all(met(*ratio) is not False for ratio in item[1]["ratios"].items()), NAMES.index(item[0])


def page(title: str, command: str, results: dict[str, Any]) -> str:
    """Return a document of results, which may come from several machines, commits and days."""
    old = {name for name, result in results.items() if changed(name, result["machine"].get("commit", "unknown"))}
    where = {name: f"Machine: {described(result['machine'])}; {result['date']}." for name, result in results.items()}
    text = [
        title,
        "",
        f"Measured side by side with `{command} --json FILE`; generated by `python -m benchmarks.document FILE`.",
        *(set(where.values()) if len(set(where.values())) == 1 else ()),
        "Ratios carry over to other machines, times do not.",
        "Benchmarks that miss a target come first.",
        "",
        *[OLD, ""] * (old == {*results}),
    ]
    for name, result in sorted(results.items(), key=by_targets):
        text.append(section(name, result, name in old and old != {*results}))
        if len(set(where.values())) > 1:
            text.append(f"{where[name]}\n")
    return "\n".join(text)


def documents(measured: dict[str, Any]) -> dict[str, str]:
    """Return the documents and plots of results, by their path in `docs`."""
    on_gpus = {name: result for name, result in measured.items() if name in ON_GPUS}
    others = {name: result for name, result in measured.items() if name in ON_DOCKER}
    found = {f"performance/{name}.svg": plot(result) for name, result in measured.items() if result["values"]}
    if others:
        found["performance.md"] = page("# Performance", "python -m benchmarks", others)
    if on_gpus:
        found["performance-gpu.md"] = page("# Performance on GPUs", "python -m benchmarks gpu", on_gpus)
    return found


def main(docs: Path = ROOT / "docs") -> None:
    """Write the documents."""
    file = Path(sys.argv[1]) if sys.argv[1:] else RESULTS
    (docs / "performance").mkdir(exist_ok=True)
    for name, text in documents(json.loads(file.read_text())).items():
        (docs / name).write_text(text)


if __name__ == "__main__":
    main()
