"""A node in a container image on a cluster: with Pyxis, a plug-in of srun, or with Apptainer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from orchestrate.errors import OrchestrateError, ResourceError, UsageError
from orchestrate.files.paths import NODE
from orchestrate.host import slurm
from orchestrate.record.paths import JobPaths
from orchestrate.spec.folders import data_folders
from orchestrate.spec.spec import IMAGE, JobSpec

MOUNTABLE = re.compile(r"[\w./@%+=~-]+")  # paths that all versions of Apptainer and Pyxis can mount
FILE = re.compile(r"^[./]|\.(sif|sqsh)$")  # an image that is no name in a registry
REGISTRY = re.compile(r"^((?:[^/#]*[.:](?!//)[^/#]*)|localhost)/")  # at the start of a name, as Docker reads it
APPTAINER = ("apptainer", "singularity")  # the latter is the name of earlier versions


def form() -> str:
    """Return what runs images on this cluster: `pyxis` or the name of the command; raises ResourceError if nothing."""
    try:
        if "--container-image" in slurm.call("srun", "--help"):
            return "pyxis"
    except OrchestrateError:  # Slurm's commands are missing, which others say
        pass
    if found := [name for name in APPTAINER if shutil.which(name)]:
        return found[0]
    hint = "load Apptainer in this shell if it is a module, or remove image: nodes then use this Python environment"
    raise ResourceError("neither Apptainer nor Pyxis, which run images on Slurm, was found", hint)


def mountable(path: str, form: str) -> str:
    """Return a path to mount; raises UsageError for one that the form does not support."""
    if not MOUNTABLE.fullmatch(path):
        raise UsageError(f"{path!a} cannot be mounted by {form}", "use only letters, digits and ._-+=@%~/ in the path")
    return path


def before(spec: JobSpec, paths: JobPaths, folder: str) -> list[str]:
    """Return what srun needs before a command that runs in `folder` of the job's image; nothing without an image.

    Raises ResourceError if nothing can run it, UsageError for a path that cannot be mounted or is no image.
    """
    if spec.image == IMAGE:
        return []
    if FILE.search(spec.image) and not (Path(spec.image).is_absolute() and Path(spec.image).exists()):
        raise UsageError(f"there is no image {spec.image}", "use the full path of a file that all machines see")
    found, shown = form(), [str(NODE), *data_folders(spec).values()]
    for path in (str(paths.root), *shown):
        mountable(path, found)
    mounts = [f"{paths.root}:{paths.root}", *(f"{path}:{path}:ro" for path in shown)]
    return words(found, spec.image, folder, mounts, spec.gpus not in ("auto", "none", 0))


def words(form: str, image: str, folder: str, mounts: Sequence[str], gpus: bool = True) -> list[str]:
    """Return what srun needs before the command of a node that runs in `folder` of an image.

    A mount is SOURCE:TARGET or SOURCE:TARGET:ro.
    """
    if form == "pyxis":
        image = image if FILE.search(image) else REGISTRY.sub(r"\1#", image)
        return [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={folder}"]
    source = image if FILE.search(image) or "://" in image else f"docker://{image}"
    return [form, "exec", *["--nv"] * gpus, "--pwd", folder, "--bind", ",".join(mounts), source]
