"""What to do about a module or a file that a script does not find, by a look at the folder of the job."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from orchestrate.plan.plan import Plan

MAX_FOLDERS = 1000  # entries of the code folder that are looked at

# The project that contains a module, on the package index; only names that were checked there. Without an entry, no
# hint names one: anybody could have published a project of that name.
PROJECTS = {
    **dict.fromkeys(["accelerate", "datasets", "deepspeed", "diffusers", "einops", "evaluate", "h5py", "lightning"]),
    **dict.fromkeys(
        ["matplotlib", "numpy", "omegaconf", "pandas", "peft", "pytest", "regex", "requests", "safetensors"]
    ),
    **dict.fromkeys(["scipy", "seaborn", "sentencepiece", "tensorboard", "timm", "tokenizers", "torchmetrics", "tqdm"]),
    **dict.fromkeys(["transformers", "trl", "wandb", "monai", "albumentations", "nltk", "jsonargparse", "cowsay"]),
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "git": "gitpython",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "open_clip": "open_clip_torch",
    "PIL": "pillow",
    "pippy": "torchpippy",
    "pkg_resources": "setuptools<82",
    "pytorch_lightning": "pytorch-lightning",
    "sentence_transformers": "sentence-transformers",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torch_geometric": "torch-geometric",
    "yaml": "pyyaml",
}


def module(name: str, plan: Plan) -> str:
    """Return how a script of this job finds a module that Python has not found; empty if that is not known."""
    top, _, rest = name.partition(".")
    code = plan.placement.start
    if _holds(code, top):
        start = f", or start it with {as_module(plan)}" if as_module(plan) else ""
        return "" if rest else f"{top} is in your folder, but Python searches the script's: -e PYTHONPATH=.{start}"
    for folder in _folders(code):
        if _holds(code / folder, top):
            return f"{top} is in {folder}/, which Python does not search: -e PYTHONPATH={shlex.quote(folder)}"
    if top in ("torch", "torchvision") and not plan.contained:
        return f"{name} is neither in your folder nor installed: {plan.placement.python} -m pip install {top}"
    if top in PROJECTS:
        where = "in the image" if plan.contained else "installed"
        return (
            f"{name} is neither in your folder nor {where}: install it with --pip {shlex.quote(PROJECTS[top] or top)}"
        )
    return ""


def as_module(plan: Plan) -> str:
    """Return the options that start a script in a folder of the job's as a module of it; empty if that is not one."""
    script = Path(plan.command[0])
    parts = script.with_suffix("").parts
    is_module = script.suffix == ".py" and len(parts) > 1 and all(part.isidentifier() for part in parts)
    return f"-m {'.'.join(parts)}" if is_module else ""


def file(path: str, plan: Plan) -> str:
    """Return how workers in containers get a file that a script has not found; empty if that is not known."""
    code = plan.placement.code
    there = os.path.normpath(plan.placement.start / path)
    folder, command = _in_its_folder(plan.command)
    if folder and os.path.lexists(plan.placement.start / folder / path) and not os.path.isabs(path):
        chdir = shlex.quote(os.path.join(plan.placement.chdir, folder))
        return f"{path} is there from the folder of the script: --chdir {chdir} {shlex.join(command)}"
    if not plan.contained or not there.startswith("/"):
        return ""
    if os.path.isabs(path):
        asked = any(path.startswith(word) for word in plan.command if os.path.isabs(word))
        return f"nodes do not see {path} of this machine: {_data(path)}" if asked and os.path.lexists(path) else ""
    if there == code or there.startswith(f"{code}/"):
        if os.path.lexists(there):
            return f"{path} is in your folder, but not in the nodes' copy of it: see .dockerignore, and who can read it"
        return f"there is no {path} in {code}"
    outside = path[: len(path) - len(path.lstrip("./"))] + path.lstrip("./").partition("/")[0]
    if not os.path.lexists(there):
        return ""
    higher = _higher(plan, there)
    return f"{path} is outside of the folder that nodes see: {_data(outside)}{f'; or {higher}' if higher else ''}"


def _in_its_folder(command: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the folder of a script or module, and the command that starts it there, with arguments that name it."""
    is_module = command[0] == "-m" and len(command) > 1
    folder, script = os.path.split(command[1].replace(".", "/") if is_module else command[0])
    start = ["-m", script] if is_module else [script]
    arguments = command[1 + is_module :]
    changed = [word.removeprefix(f"{folder}/") for word in arguments]
    return folder, start + changed * (changed != [*arguments])


def _higher(plan: Plan, path: str) -> str:
    """Return a command that starts the job in a folder which contains a path; empty if that is the root."""
    start = plan.placement.start
    above = os.path.commonpath([start, path])
    up, folder = os.path.relpath(above, start), os.path.relpath(start, above)
    shared = above in ("/", os.path.expanduser("~"))  # nodes would see all that is in it
    return "" if shared else f"cd {shlex.quote(up)}, and run --chdir {shlex.quote(folder)}"


def _data(path: str) -> str:
    return f"--data {shlex.quote(f'data={path}')} makes it available at $DATA_DATA"


def _holds(folder: Path, name: str) -> bool:
    return os.path.isdir(folder / name) or os.path.isfile(folder / f"{name}.py")


def _folders(code: Path) -> list[str]:
    """The folders in the code folder, which are not hidden, in order; empty if it cannot be read."""
    try:
        with os.scandir(code) as entries:
            found = [entry.name for _, entry in zip(range(MAX_FOLDERS), entries) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(name for name in found if not name.startswith("."))
