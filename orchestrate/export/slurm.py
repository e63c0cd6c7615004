"""Export a job to Slurm: a script for sbatch that starts a node on each machine and restarts all if one fails."""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path

from orchestrate import console
from orchestrate.engines.slurm.script import flags, given, requested
from orchestrate.errors import UsageError
from orchestrate.export import carries_node, check_folders, quoted, shape
from orchestrate.files.paths import NODE, PACKAGE, code_folder, is_text
from orchestrate.plan import container
from orchestrate.plan.plan import pluralize
from orchestrate.spec.spec import IMAGE, JobSpec

NO_RESTART = "2|64|78|126|127"  # exit codes that a restart cannot fix; see docs/restarts.md
MOUNTABLE = re.compile(r"[\w./@%+=~-]+")  # paths that all versions of Apptainer and Pyxis can mount
IMAGE_FILE = re.compile(r"^[./]|://|\.(sif|sqsh)$")  # an image that is no name in a registry
LINE = re.compile(r"[^\s\"'#\\]*")  # what sbatch does not split, unquote or cut off
HEAD = {
    "venv": "Nodes run the Python of this environment, which every machine must see at the same path.",
    "apptainer": "Each node runs in the image {image}, with Apptainer.",
    "pyxis": "Each node runs in the image {image}, with Enroot and Pyxis.",
}
SCRIPT = """\
#!/bin/bash
# {name}: {shape}, for sbatch. Submit it from a folder that all machines share.
# {head}
{options}

set -u
{secrets}cd {folder} || exit 2
export JOB_DIR="$SLURM_SUBMIT_DIR/runs/{name}"
export NODE_FAILED="$JOB_DIR/.failed" NODE_PATIENT=1
own() {{  # a link from the code or an earlier job could lead elsewhere
    mkdir -p -m 700 "$1" && [ -d "$1" ] && [ -O "$1" ] && [ ! -L "$1" ] && return
    echo "error: $1 is not a folder that you own: remove it, or export the job under another --name" >&2
    exit 2
}}
first_failure() {{  # the exit code of the worker that failed first, from a file that workers can write
    [ -f "$NODE_FAILED" ] && [ ! -L "$NODE_FAILED" ] && set -- "$(head -c 4 "$NODE_FAILED")" &&
        [[ $1 =~ ^[1-9][0-9]{{0,2}}$ ]] && (($1 < 256)) && echo "$1"
}}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

stop=
trap 'stop=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM  # reaches the nodes; srun would kill them
for attempt in $(seq 0 {max_restarts}); do
    # Each generation has its own number and port, even if Slurm has requeued this script.
    export TORCHELASTIC_RESTART_COUNT=$((${{SLURM_RESTART_COUNT:-0}} * ({max_restarts} + 1) + attempt))
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 97 + TORCHELASTIC_RESTART_COUNT) % 20000))
    own "$SLURM_SUBMIT_DIR/runs"
    own "$JOB_DIR"
    rm -f "$NODE_FAILED"
    env {env}"$(command -v srun)" \\
        --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus} --cpu-bind=none \\
        --kill-on-bad-exit=1 --wait={wait} \\
        {launch} &
    step=$!
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # a signal interrupts a wait
    wait "$step"  # bash remembers the exit code of a process that has ended during the trap
    code=$?
    [ "$code" = 0 ] || code=$(first_failure || echo "$code")
    case $code in 0) exit 0 ;; {no_restart}) exit "$code" ;; esac
    [ -z "$stop" ] || exit "$code"
    echo "generation $TORCHELASTIC_RESTART_COUNT ended with exit code $code" >&2
done
exit "$code"
"""


def slurm(spec: JobSpec, name: str, form: str) -> str:
    """Return the sbatch script of a job; `form` is venv, apptainer or pyxis.

    Raises UsageError for settings that cannot be exported.
    """
    job = shape(spec, name)
    runs = Path.cwd() / "runs"
    check_folders(runs, runs / name)
    if spec.user != "auto":
        raise UsageError(f"user is {spec.user}, but Slurm runs a job as the user who submits it", "remove it")
    options = requested(spec, name, job.nodes, f"slurm-{name}-%j.log")
    if spec.max_run:
        options["time"] = str(max(1, math.ceil(spec.max_run / 60)))
    heads = [HEAD[form].format(image=spec.image)]
    if job.secrets:
        heads.append(f"Set in the environment of sbatch: {', '.join(job.secrets)}.")
    for key, value in given(spec).items():
        if not LINE.fullmatch(value):
            hint = "remove spaces, quotes, # and backslashes, or set it on the command line of sbatch"
            raise UsageError(f"slurm.{key}: {console.quoted(value)} cannot be in a #SBATCH line", hint)
    words = flags(options | given(spec))
    return SCRIPT.format(
        name=name,
        nodes=job.nodes,
        shape=f"{pluralize(job.nodes, 'node')} × {pluralize(job.nproc, 'worker')}",
        head="\n# ".join(heads),
        options="\n".join(f"#SBATCH {word}" for word in words),
        secrets="".join(f': "${{{key}:?set {key} in the environment of sbatch}}"\n' for key in job.secrets),
        folder=quoted(_checked(code_folder(spec.command), form)),
        env="".join(f"{key}={quoted(value)} \\\n        " for key, value in job.env.items()),
        cpus=options["cpus-per-task"],
        max_restarts=spec.max_restarts,
        wait=container.stop_seconds(spec.grace),
        launch=_launch(spec, form),
        no_restart=NO_RESTART,
    )


def _checked(folder: Path, form: str) -> str:
    """Return the path of a folder to mount; raises UsageError for a path that the form does not support."""
    path = str(folder)
    if not is_text(path):
        raise UsageError(f"the path {path!a} is not UTF-8", "use another folder")
    if form != "venv" and not MOUNTABLE.fullmatch(path):
        raise UsageError(f"{path!a} cannot be mounted by {form}", "use only letters, digits and ._-+=@%~/ in the path")
    return path


def _launch(spec: JobSpec, form: str) -> str:
    command = " ".join(map(quoted, spec.command_line))
    if form == "venv":
        return f"{quoted(sys.executable)} {quoted(str(NODE))} {command}"
    folder = _checked(code_folder(spec.command), form)
    node = [] if carries_node(spec.image) else [f"{_checked(PACKAGE, form)}:/opt/orchestrate"]
    mounts = ",".join([shlex.quote(f"{folder}:{folder}"), '"$JOB_DIR:$JOB_DIR"', *map(shlex.quote, node)])
    if spec.image == IMAGE:
        hint = "push an image with the packages of the job to a registry, or convert it to a file, and set image"
        raise UsageError(f"{form} cannot get {IMAGE}, which is only on this machine", hint)
    image = shlex.quote(spec.image)
    if form == "apptainer":
        image = image if IMAGE_FILE.search(spec.image) else f"docker://{image}"
        return (
            f"apptainer exec --nv --pwd {shlex.quote(folder)} --bind {mounts} \\\n"
            f"        {image} python {container.PROGRAM} {command}"
        )
    return (
        f"--container-image={image} --container-mounts={mounts} --container-workdir={shlex.quote(folder)} \\\n"
        f"        python {container.PROGRAM} {command}"
    )
