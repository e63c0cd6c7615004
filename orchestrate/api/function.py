"""A Python function as a job: its module is imported on every rank, and what it returns comes back as data."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrate.dataclass import dataclass
from orchestrate.errors import OrchestrateError, ResourceError, UsageError
from orchestrate.files.folder import Folder
from orchestrate.files.paths import NODE
from orchestrate.node.messages import checks
from orchestrate.node.programs.call import DTYPES, MAX_BYTES
from orchestrate.plan.imports import CALL, CALLED
from orchestrate.spec.spec import FIELDS

SETTINGS = {*FIELDS, "nodes"}
MODULES = "define a function in a module, for example functions.py, and import it from there"
MAX_VALUE = 8 << 20  # bytes of a rank's value, without tensors
MOST_DIMENSIONS = 64  # as in torch's own iterators
MOST_BYTES = 4 << 30  # of the tensors of all ranks
MAX_ITEMS, MOST_ITEMS = 200_000, 1_000_000  # values of a rank, and of all ranks


@dataclass(frozen=True)
class Program:
    """A command, and what it needs in the job folder, by name."""

    command: Sequence[str]
    files: Mapping[str, bytes]


def split(function: Callable[..., Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keyword arguments into the settings of a job and the arguments of a function; raises UsageError."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise UsageError(f"{function!r} cannot be called on ranks: it is no function in Python", MODULES) from None
    if own := {"command", "hyperparameters", "source"} & {*options} - {*parameters}:
        raise UsageError(f"{min(own)} is for scripts, not for functions", "remove it")
    if both := [name for name in options if name in SETTINGS and name in parameters]:
        what = f"{both[0]} is a setting of a job, and a parameter of {function.__name__}()"
        raise UsageError(what, "pass the argument by its position, or give the parameter another name")
    settings = {name: value for name, value in options.items() if name in SETTINGS}
    return settings, {name: value for name, value in options.items() if name not in SETTINGS}


def program(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], start: Path) -> Program:
    """Return what calls a function in workers that start in the folder `start` of the current one.

    Raises UsageError for a function or arguments that cannot be passed to other processes.
    """
    file, name = _file(function), function.__qualname__
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{name}(): {error}", f"it is {name}{inspect.signature(function)}") from None
    try:
        given = json.loads(json.dumps([args, kwargs]))
    except (TypeError, ValueError) as error:
        hint = "pass JSON types: for other data, save a file, and pass its path"
        raise UsageError(f"the arguments of {name}() cannot be passed to other processes: {error}", hint) from None
    module = function.__module__
    top = file.parents[module.count(".") + (file.name == "__init__.py")]
    folders = [_shown(top, start)] if top.is_relative_to(Path.cwd().resolve()) else []
    if not folders and "site-packages" not in file.parts:
        raise UsageError(f"{name}() is in {file}, which nodes do not see", f"start from its folder: cd {top}")
    call = {"module": module, "function": name, "folders": folders, "args": given[0], "kwargs": given[1]}
    files = {CALL: (NODE / "programs" / "call.py").read_bytes(), "call.json": json.dumps(call).encode()}
    return Program((CALLED, f"{_shown(file, start)}:{name}"), files)


def _file(function: Callable[..., Any]) -> Path:
    """Return the file of a function that other processes can import; raises UsageError for any other."""
    name, module = getattr(function, "__qualname__", repr(function)), getattr(function, "__module__", None)
    found: Any = sys.modules.get(module or "")
    for part in name.split(".") if module != "__main__" else ():
        found = getattr(found, part, None)
    if module is None or found is not function or not getattr(sys.modules[module], "__file__", None):
        why = "it is in this program's main module or notebook" if module == "__main__" else "it is not in a module"
        raise UsageError(f"{name} cannot be imported by other processes: {why}", MODULES)
    return Path(str(sys.modules[module].__file__)).resolve()


def _shown(path: Path, start: Path) -> str:
    return os.path.relpath(path, start) if path.is_relative_to(Path.cwd().resolve()) else path.name


def values(folder: Folder, world_size: int) -> list[Any]:
    """Return what each rank's function has returned, None if it has not; raises OrchestrateError if it is damaged.

    Nothing of it is executed: it is JSON, and the bytes of tensors.
    """
    most, room = min(MAX_ITEMS, MOST_ITEMS // world_size), [MOST_BYTES]
    return [_value(folder, rank, most, room) for rank in range(world_size)]


def _value(folder: Folder, rank: int, most: int, room: list[int]) -> Any:
    try:
        with folder.open(f"values/rank-{rank}.json") as file:
            text = file.read(MAX_VALUE + 1)
        if len(text) > MAX_VALUE:
            raise ValueError(f"it has more than {MAX_VALUE >> 20} MiB")
        checks.limit_values(text, most)
        found = json.loads(text)
        value, head = found["value"], found["tensors"]
        return _with_tensors(value, head, folder, rank, room) if head else value
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:  # the last by torch, for odd shapes
        hint = "return less: for more, save a file in $JOB_DIR, and return its path"
        raise OrchestrateError(f"what rank {rank} returned cannot be read: {error}", hint) from None


def _with_tensors(value: Any, head: list[Any], folder: Folder, rank: int, room: list[int]) -> Any:
    """Put the tensors of a value in their places; `room` has the bytes that are left for them and those of others."""
    try:
        import torch  # only here: most jobs return none
    except ModuleNotFoundError:
        hint = f"install it ({sys.executable} -m pip install torch), or return numbers"
        raise ResourceError(f"rank {rank} returned tensors, and torch is missing here", hint) from None

    with folder.open(f"values/rank-{rank}.bin") as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:  # also of a file with holes
            raise ValueError(f"it has more than {MAX_BYTES >> 30} GiB of tensors")
        room[0] -= size
        if room[0] < 0:
            raise ValueError(f"all ranks have more than {MOST_BYTES >> 30} GiB of tensors")
        data = bytearray(size)
        if os.preadv(file.fileno(), [data], 0) != size:
            raise ValueError("a tensor is incomplete")
    left = len(data)
    for place, name, shape, offset in head:
        known = name in DTYPES and len(shape) <= MOST_DIMENSIONS
        if not known or not all(type(length) is int and 0 <= length < 1 << 62 for length in (*shape, offset)):
            raise ValueError(f"{name!a:.40} of shape {shape!a:.40} is no tensor")
        dtype, count = getattr(torch, name), math.prod(shape)
        size = count * dtype.itemsize
        if size > len(data) - offset or size > left:
            raise ValueError("a tensor is incomplete")
        left -= size
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        value = _put(value, place, flat.reshape(shape))
    return value


def _put(value: Any, place: list[Any], tensor: Any) -> Any:
    if not place:
        return tensor
    inner, last = value, place[-1]
    for key in place[:-1]:
        inner = _part(inner, key)
    if _part(inner, last) is not None:
        raise ValueError("two values are in the same place")
    inner[last] = tensor
    return value


def _part(value: Any, key: Any) -> Any:
    if not isinstance(value, list | dict):  # a tensor, of which a long key would make large copies
        raise ValueError("a value is inside a tensor")
    return value[key]
