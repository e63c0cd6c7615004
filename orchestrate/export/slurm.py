"""A job on Slurm: a script for sbatch, which starts a node on each machine, and all of them again when one fails."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path

from orchestrate.errors import UsageError
from orchestrate.export import carries_node, check_folders, quoted, shape
from orchestrate.files.paths import NODE, PACKAGE, code_folder, is_text
from orchestrate.job import container
from orchestrate.job.limits import in_bytes
from orchestrate.job.plan import counted
from orchestrate.job.spec import JobSpec

NOTICE_SECONDS = 30  # seconds, besides the grace period, in which workers hear of the end of the allocation
NEVER = "2|64|78|126|127"  # exit codes that another start does not change; see docs/restarts.md
MOUNTABLE = re.compile(r"[\w./@%+=~-]+")  # what Apptainer and Pyxis take in the path of a mount, in every version
HEAD = {
    "venv": "The interpreter is that of this environment, which every machine must see at the same path.",
    "apptainer": "Each node runs in the image {image}, by Apptainer.",
    "pyxis": "Each node runs in the image {image}, by Enroot and Pyxis.",
}
SCRIPT = """\
#!/bin/bash
# {name}: {shape}, for sbatch. Submit it from a folder that every machine sees.
# {head}
{options}

set -u
{secrets}cd {folder} || exit 2
export JOB_DIR="$SLURM_SUBMIT_DIR/runs/{name}"
export NODE_FAILED="$JOB_DIR/.failed" NODE_PATIENT=1
own() {{  # what came with the code, or a job has left, could lead elsewhere
    mkdir -p -m 700 "$1" && [ -d "$1" ] && [ -O "$1" ] && [ ! -L "$1" ] && return
    echo "error: $1 is not a folder of yours: remove it, or export the job under another --name" >&2
    exit 2
}}
first_failure() {{  # the exit code of the worker that failed first, from a file that workers can write
    [ -f "$NODE_FAILED" ] && [ ! -L "$NODE_FAILED" ] && set -- "$(head -c 4 "$NODE_FAILED")" &&
        [[ $1 =~ ^[1-9][0-9]{{0,2}}$ ]] && (($1 < 256)) && echo "$1"
}}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

stop=
trap 'stop=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM  # which reaches the nodes; srun would have them killed
for attempt in $(seq 0 {max_restarts}); do
    # A generation has a number, and a port, of its own; Slurm itself may have started this script again.
    export TORCHELASTIC_RESTART_COUNT=$((${{SLURM_RESTART_COUNT:-0}} * ({max_restarts} + 1) + attempt))
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 97 + TORCHELASTIC_RESTART_COUNT) % 20000))
    own "$SLURM_SUBMIT_DIR/runs"
    own "$JOB_DIR"
    rm -f "$NODE_FAILED"
    env {env}"$(command -v srun)" \\
        --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --wait={wait} \\
        {launch} &
    step=$!
    wait "$step"
    code=$?
    while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a signal ends the first wait
    [ "$code" = 0 ] || code=$(first_failure || echo "$code")
    case $code in 0) exit 0 ;; {never}) exit "$code" ;; esac
    [ -z "$stop" ] || exit "$code"
    echo "generation $TORCHELASTIC_RESTART_COUNT ended with exit code $code" >&2
done
exit "$code"
"""


def slurm(spec: JobSpec, name: str, form: str) -> str:
    """The sbatch script of a job; `form`: venv, apptainer or pyxis. Raises UsageError for what it cannot say."""
    job = shape(spec, name)
    runs = Path.cwd() / "runs"
    check_folders(runs, runs / name)
    if spec.user != "auto":
        raise UsageError(f"user is {spec.user}, and Slurm runs a job as the user who submits it", "leave it out")
    options = {
        "job-name": name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "output": f"slurm-{name}-%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{math.ceil(spec.grace) + NOTICE_SECONDS}",
    }
    if spec.cpus:
        options["cpus-per-task"] = math.ceil(spec.cpus)
    if job.memory:
        whole = job.memory[-1:].lower() in ("k", "m", "g")  # Slurm has these units, and no bytes
        options["mem"] = job.memory.upper() if whole else f"{math.ceil(in_bytes(job.memory) / 1024)}K"
    if job.gpus:
        options["gpus-per-node"] = job.gpus
    if spec.max_run:
        options["time"] = max(1, math.ceil(spec.max_run / 60))
    heads = [HEAD[form].format(image=spec.image)]
    if job.secrets:
        heads.append(f"Secrets come from the environment of sbatch: {', '.join(job.secrets)}.")
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items()] + ["#SBATCH --requeue"]
    return SCRIPT.format(
        name=name,
        nodes=job.nodes,
        shape=f"{counted(job.nodes, 'node')} × {counted(job.nproc, 'worker')}",
        head="\n# ".join(heads),
        options="\n".join(lines),
        secrets="".join(f': "${{{key}:?set {key} in the environment of sbatch}}"\n' for key in job.secrets),
        folder=quoted(_checked(code_folder(spec.command), form)),
        env="".join(f"{key}={quoted(value)} \\\n        " for key, value in job.env.items()),
        max_restarts=spec.max_restarts,
        wait=container.stop_seconds(spec.grace),
        launch=_launch(spec, form),
        never=NEVER,
    )


def _checked(folder: Path, form: str) -> str:
    """The path of a folder that nodes must see; raises UsageError for one that the form cannot take."""
    path = str(folder)
    if not is_text(path):
        raise UsageError(f"the path {path!a} is not UTF-8", "use another folder")
    if form != "venv" and not MOUNTABLE.fullmatch(path):
        raise UsageError(f"{path!a} cannot be mounted by {form}", "use a path of letters, digits and ._-+=@%~/ alone")
    return path


def _launch(spec: JobSpec, form: str) -> str:
    command = " ".join(map(quoted, spec.command))
    if form == "venv":
        return f"{quoted(sys.executable)} {quoted(str(NODE))} {command}"
    folder = _checked(code_folder(spec.command), form)
    node = [] if carries_node(spec.image) else [f"{_checked(PACKAGE, form)}:/opt/orchestrate"]
    mounts = ",".join([shlex.quote(f"{folder}:{folder}"), '"$JOB_DIR:$JOB_DIR"', *map(shlex.quote, node)])
    image = shlex.quote(spec.image)
    if form == "apptainer":
        return (
            f"apptainer exec --nv --pwd {shlex.quote(folder)} --bind {mounts} \\\n"
            f"        docker://{image} python {container.PROGRAM} {command}"
        )
    return (
        f"--container-image={image} --container-mounts={mounts} --container-workdir={shlex.quote(folder)} \\\n"
        f"        python {container.PROGRAM} {command}"
    )
