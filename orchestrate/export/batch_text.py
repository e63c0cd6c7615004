"""What batch scripts for Slurm and PBS have in common."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from orchestrate.engines.slurm.image import mountable, words
from orchestrate.errors import UsageError
from orchestrate.export import Shape, carries_node, check_folders, quoted, shape
from orchestrate.files.paths import NODE, PACKAGE, code_folder, is_text
from orchestrate.plan import container
from orchestrate.plan.plan import pluralize
from orchestrate.spec.spec import IMAGE, JobSpec

NO_RESTART = "2|64|78|126|127"  # exit codes that a restart cannot fix; see docs/restarts.md
FORMS = {
    "venv": "Nodes run the Python of this environment, which every machine must see at the same path.",
    "apptainer": "Each node runs in the image {image}, with Apptainer.",
    "pyxis": "Each node runs in the image {image}, with Enroot and Pyxis.",
}
FUNCTIONS = """\
own() {  # a link from the code or an earlier job could lead elsewhere
    mkdir -p -m 700 "$1" && [ -d "$1" ] && [ -O "$1" ] && [ ! -L "$1" ] && return
    echo "error: $1 is not a folder that you own: remove it, or export the job under another --name" >&2
    exit 2
}
first_failure() {  # the exit code of the worker that failed first, from a file that workers can write
    [ -f "$NODE_FAILED" ] && [ ! -L "$NODE_FAILED" ] && set -- "$(head -c 4 "$NODE_FAILED")" &&
        [[ $1 =~ ^[1-9][0-9]{0,2}$ ]] && (($1 < 256)) && echo "$1"
}
"""


def unattended(spec: JobSpec, name: str, system: str) -> Shape:
    """Return the shape of a job whose files are in `runs` of the folder that it is submitted from.

    Raises UsageError for settings that cannot be exported.
    """
    job, runs = shape(spec, name), Path.cwd() / "runs"
    check_folders(runs, runs / name)
    if spec.user != "auto":
        raise UsageError(f"user is {spec.user}, but {system} runs a job as the user who submits it", "remove it")
    return job


def filled(
    template: str, spec: JobSpec, job: Shape, form: str, submit: str, env: Mapping[str, str], **values: object
) -> str:
    """Return a script that the command `submit` submits; `env` are variables of its nodes, `values` what only it has.

    Raises UsageError for what the form does not support.
    """
    folder = _checked(code_folder(spec.command), form)
    return template.format(
        name=job.name,
        nodes=job.nodes,
        head=_head(spec, job, form, submit),
        functions=FUNCTIONS,
        secrets=_required(job, submit),
        folder=quoted(folder),
        env="".join(f"{key}={quoted(value)} \\\n        " for key, value in env.items()),
        max_restarts=spec.max_restarts,
        launch=_launch(spec, form, folder),
        no_restart=NO_RESTART,
        **values,
    )


def _head(spec: JobSpec, job: Shape, form: str, submit: str) -> str:
    """Return the first lines of a script that the command `submit` submits."""
    lines = [
        f"{job.name}: {pluralize(job.nodes, 'node')} × {pluralize(job.nproc, 'worker')}, for {submit}. "
        "Submit it from a folder that all machines share.",
        FORMS[form].format(image=spec.image),
    ]
    if job.secrets:
        lines.append(f"Set in the environment of {submit}: {', '.join(job.secrets)}.")
    return "\n".join(["#!/bin/bash", *(f"# {line}" for line in lines)])


def _required(job: Shape, submit: str) -> str:
    """Return lines that end a script unless the environment of `submit` has the secrets of the job."""
    return "".join(f': "${{{key}:?set {key} in the environment of {submit}}}"\n' for key in job.secrets)


def _checked(folder: Path, form: str) -> str:
    """Return the path of a folder to mount; raises UsageError for a path that the form does not support."""
    path = str(folder)
    if not is_text(path):
        raise UsageError(f"the path {path!a} is not UTF-8", "use another folder")
    return path if form == "venv" else mountable(path, form)


def _launch(spec: JobSpec, form: str, folder: str) -> str:
    """Return the command that runs a node with its code in `folder`; raises UsageError for what a form cannot run."""
    command = " ".join(map(quoted, spec.command_line))
    if form == "venv":
        return f"{quoted(sys.executable)} {quoted(str(NODE))} {command}"
    if spec.image == IMAGE:
        hint = "push an image with the packages of the job to a registry, or convert it to a file, and set image"
        raise UsageError(f"{form} cannot get {IMAGE}, which is only on this machine", hint)
    node = [] if carries_node(spec.image) else [f"{_checked(PACKAGE, form)}:/opt/orchestrate"]
    mounts = [f"{folder}:{folder}", "$JOB_DIR:$JOB_DIR", *node]
    own = ",".join(mounts)  # in which nothing has to be quoted, and of which the shell knows a part
    options = words(form, spec.image, folder, mounts)
    line = " ".join(
        f'"{word}"' if word in (own, f"--container-mounts={own}") else shlex.quote(word) for word in options
    )
    return f"{line} \\\n        python {container.PROGRAM} {command}"
