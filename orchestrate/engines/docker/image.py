"""Resources of a Docker Engine for a job: the image, and the GPUs that containers can use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from orchestrate.console import clean, during, phase, print_message
from orchestrate.engines.base import SWARMS, ignoring
from orchestrate.engines.docker import folders, helper_containers, mounts, packages, probe, toolkit
from orchestrate.engines.docker.client import Daemon, reason
from orchestrate.engines.docker.volumes import volumes
from orchestrate.errors import EngineError, EngineLost, ResourceError
from orchestrate.files.paths import NODES, code_folder
from orchestrate.host.cores import cores
from orchestrate.host.gpus import DETAILS, LIST, NVIDIA_SMI_TIMEOUT, Offer, claimed, fields, offer, read, trouble_of
from orchestrate.plan.plan import Inventory, Placement, may_use_torch, pluralize
from orchestrate.plan.preload import preload
from orchestrate.spec.folders import data_paths, without_stores
from orchestrate.spec.spec import IMAGE, JobSpec

NO_TOOLKIT = "the engine has no NVIDIA runtime"
NO_GPU = "containers cannot see any GPU"
NOT_CHECKED = f"GPUs were not checked: that needs the image {IMAGE}, which is missing"


def gpus_unavailable(daemon: Daemon, spec: JobSpec) -> bool:
    """Whether a job requires GPUs that containers cannot have, so that it needs no image."""
    return spec.gpus not in ("auto", "none") and not toolkit.gpu_mode(daemon.info)


def prepare(daemon: Daemon, spec: JobSpec, run: Path) -> None:
    """Build or pull the image of a job, unless the job cannot run here anyway; raises ResourceError."""
    if gpus_unavailable(daemon, spec):
        return
    if spec.dockerfile or spec.pip:  # which can take minutes: folders that nodes cannot read are reported before
        folders.given_mounts(spec, run.parent.parent)
    if spec.dockerfile:
        packages.build(daemon, spec)
    else:
        ensure_image(daemon, spec)
    if spec.pip and not has_image(daemon, packages.with_packages(daemon, spec)):
        packages.install(daemon, spec, probe.python(daemon, packages.base(spec), run))


def inventory(daemon: Daemon, spec: JobSpec, run: Path, run_image: bool) -> tuple[Inventory, Placement]:
    """Check the image, and list the GPUs; raises ResourceError.

    `run` is the folder to mount in nodes; `run_image` allows running the job's image, which must exist then. Raises
    UsageError for folders that cannot be mounted.
    """
    gpu_mode, possible = toolkit.gpu_mode(daemon.info), not gpus_unavailable(daemon, spec)
    folders.given_mounts(spec if run_image else without_stores(spec), run.parent.parent)
    run_image, about = run_image and possible, _about(spec)
    spec = dataclasses.replace(spec, image=_image(daemon, spec))
    if possible:
        volumes(daemon, spec.image, spec)  # raises ResourceError for unsupported volumes
    code = code_folder(spec.command)
    mounts.check_link(spec.command[0], code / spec.chdir)
    python = probe.python(daemon, spec.image, run) if run_image else "python"
    modules = preload(spec, code, copied=True)
    offered = Offer(why=NO_TOOLKIT)
    if spec.gpus != "none" and gpu_mode:
        image = _gpu_check_image(daemon, spec, run_image)
        offered = _offer(daemon, image, run, spec) if image else Offer(why=NOT_CHECKED)
    if offered.gpus and may_use_torch(spec, modules):
        if run_image:
            why = probe.gpu_problem(daemon, spec.image, run, python, offered.gpus)
        else:
            why = (has_image(daemon, spec.image) and probe.known_problem(daemon, spec.image, offered.gpus)) or ""
        offered = Offer(why=f"{spec.image} cannot use the GPUs: {why}") if why else offered
    if run.name == NODES:
        mounts.node_mounts(run, Path.cwd())  # a cluster runs no command
    else:
        mounts.check_script(mounts.node_mounts(run, code, spec.chdir), spec.command, spec.chdir)
    here, count = cores(), max(1, daemon.info["NCPU"])  # the engine may run in a virtual machine
    ignored = ignoring(spec, SWARMS, "a single Docker Engine")
    inventory = Inventory(
        engine="docker",
        about=f"Docker Engine {daemon.info['ServerVersion']}, image {about}{ignored}",
        cores=here if len(here) == count else tuple(range(count)),
        **fields(offered, spec.pin),
        memory=daemon.info.get("MemTotal", 0) if daemon.info.get("MemoryLimit", True) else 0,
    )
    placement = Placement(
        network=spec.network,
        master_addr="127.0.0.1" if spec.network == "host" else "",
        interface="lo" if spec.network == "host" else "eth0",
        job_dir="/job",
        code=str(code),
        original=mounts.CODE,
        data=data_paths(spec),
        image=spec.image,
        python=python,
        preload=modules,
    )
    return inventory, placement


def _image(daemon: Daemon, spec: JobSpec) -> str:
    """Return the name of a job's image, its id if a Dockerfile may change it, or its base image if that is missing."""
    name = packages.base(spec)
    if not (spec.pip or spec.dockerfile) or not has_image(daemon, name):
        return name
    return packages.with_packages(daemon, spec) if spec.pip else packages.image_id(daemon, name)


def _about(spec: JobSpec) -> str:
    """Describe a job's image for the plan."""
    name = f"built from {spec.dockerfile}" if spec.dockerfile else spec.image
    return f"{name} with {pluralize(len(spec.pip), 'package')}" if spec.pip else name


def has_image(daemon: Daemon, image: str) -> bool:
    """Whether an image exists on the engine."""
    return daemon.image(image) is not None


def ensure_image(daemon: Daemon, spec: JobSpec) -> None:
    """Build or pull the image of a job if it is missing; raises ResourceError, EngineLost if no engine responds."""
    if has_image(daemon, spec.image):
        return
    if spec.image == IMAGE:
        return _build(daemon)
    with daemon.translating_errors(f"could not pull {spec.image}"):
        _pull(daemon.client.api, spec.image)


def _build(daemon: Daemon) -> None:
    print_message(f"building the image {IMAGE} (once, about 6 GB; takes a few minutes)")
    try:
        daemon.compose("--profile", "gpu", "build", "master", env={"NODE_IMAGE": IMAGE})
    except EngineLost:
        raise
    except EngineError as error:
        hint = error.hint or "BASE_IMAGE selects the base image: python -m orchestrate help image"
        raise ResourceError(f"could not build the image {IMAGE}: {error}", hint) from None


def _pull(api: Any, image: str) -> None:
    """Pull an image by the SDK's client; raises ResourceError, and what `errors` returns."""
    from docker.errors import APIError, DockerException
    from docker.utils import parse_repository_tag

    print_message(f"pulling the image {image}")
    done: dict[str, tuple[int, int]] = {}  # layer: bytes downloaded and in total
    try:
        repository, tag = parse_repository_tag(image)
        for event in api.pull(repository, tag or "latest", stream=True, decode=True):
            if error := event.get("error"):
                raise APIError(error)
            sizes = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and sizes.get("total"):
                done[event["id"]] = sizes["current"], sizes["total"]
                current, total = (sum(each) for each in zip(*done.values()))
                phase(f"pulling the image {image}: {current >> 20} of {total >> 20} MB")
    except DockerException as error:
        hint = "check the name, run docker login, or build it: docker build -t NAME ."
        raise ResourceError(f"cannot find or pull the image {image}: {reason(error)}", hint) from None
    phase("")


def _gpu_check_image(daemon: Daemon, spec: JobSpec, run_image: bool) -> str:
    """Return the image for the GPU check: the project's if it exists; the job's only if the job will run."""
    return IMAGE if has_image(daemon, IMAGE) else spec.image if run_image else ""


@during("looking for GPUs")
def _offer(daemon: Daemon, image: str, run: Path, spec: JobSpec) -> Offer:
    """Return the GPUs that `nvidia-smi` lists in a container with all GPUs; none if the container cannot start."""
    gpu_mode, every = toolkit.gpu_mode(daemon.info), ["all"]
    text, failure = helper_containers.output(
        daemon,
        run,
        ["sh", "-c", "; ".join(" ".join(command) for command in (LIST, DETAILS))],
        int(NVIDIA_SMI_TIMEOUT),
        toolkit.host_config(gpu_mode, every),
        image=image,
        memory=1 << 30,
        log="4m",  # details of one GPU take some 50 KB
        config={"Env": toolkit.environment(gpu_mode, every)},
    )
    found = offer(claimed(read(text, text), run.parent.name), spec.gpus, queue=spec.queued_gpus)
    if found.gpus or found.why:
        return found
    return Offer(why=trouble_of(text) or NO_GPU + (f": {clean(failure)[-200:]}" if failure else ""))
