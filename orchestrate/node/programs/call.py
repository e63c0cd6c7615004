"""Calls a function on every rank of a job; `orchestrate.run(function)` copies this file to the job folder.

    call.py FILE:FUNCTION

`call.json` next to it has the arguments. What the function returns goes to `values/rank-N.json`: values of JSON types,
and in the place of each tensor null; the bytes of all tensors are in `values/rank-N.bin`, one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import sys
import traceback
from typing import Any

MAX_BYTES = 1 << 30  # of all tensors that a rank returns
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bfloat16"),
    *("float16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)
HINT = "return less, or save a file in $JOB_DIR and return its path"


def main() -> None:
    """Import the function, call it, and write its value; exits with 1 and a traceback without our frames."""
    here = os.path.dirname(os.path.abspath(__file__))
    with open(f"{here}/call.json") as file:
        call = json.load(file)
    sys.path[0:1] = [os.path.abspath(folder) for folder in call["folders"]] or [os.getcwd()]
    sys.argv[:] = [sys.argv[1]]
    values, name = f"{here}/values", f"rank-{os.environ['RANK']}"
    with contextlib.suppress(FileNotFoundError):  # of an earlier generation
        os.remove(f"{values}/{name}.json")
    try:
        function: Any = importlib.import_module(call["module"])
        for part in call["function"].split("."):
            function = getattr(function, part)
        value = function(*call["args"], **call["kwargs"])
    except Exception as error:
        mine = error.__traceback__
        traceback.print_exception(type(error), error, mine.tb_next if mine else None)
        sys.exit(1)
    try:
        write(value, values, name)
    except TypeError as error:
        sys.exit(f"TypeError: {error}")


def write(value: Any, folder: str, name: str) -> None:
    """Write a value to `folder/name.json` and `folder/name.bin`; raises TypeError if that is not possible."""
    tensors: list[tuple[list[Any], Any]] = []
    plain = _plain(value, [], tensors)
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    if size > MAX_BYTES:
        raise TypeError(f"cannot return {size} bytes of tensors, more than {MAX_BYTES}: {HINT}")
    os.makedirs(folder, exist_ok=True)
    head, offset = [], 0
    with open(f"{folder}/.{name}.bin", "wb") as file:
        for place, tensor in tensors:
            data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            length = data.numel() * data.element_size()
            file.write((ctypes.c_char * length).from_address(data.data_ptr()) if length else b"")
            head.append([place, str(data.dtype).partition(".")[2], list(data.shape), offset])
            offset += length
    with open(f"{folder}/.{name}.json", "w") as text:
        json.dump({"value": plain, "tensors": head}, text)
    for suffix in ("bin", "json"):
        os.replace(f"{folder}/.{name}.{suffix}", f"{folder}/{name}.{suffix}")


def _plain(value: Any, place: list[Any], tensors: list[tuple[list[Any], Any]]) -> Any:
    """Return a value as JSON has it, and add the tensors in it to a list, each with its place; raises TypeError."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each, [*place, index], tensors) for index, each in enumerate(value)]
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"cannot return a dict with the key {wrong[0]!r}: keys must be strings")
        return {key: _plain(each, [*place, key], tensors) for key, each in value.items()}
    torch: Any = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        own = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # otherwise it may have no memory
        if not own or value.layout is not torch.strided or str(value.dtype).partition(".")[2] not in DTYPES:
            raise TypeError(
                f"cannot return a {type(value).__name__} with the layout {value.layout} and the type {value.dtype}"
            )
        tensors.append((place, value))
        return None
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return _plain(value.item(), place, tensors)
    raise TypeError(f"cannot return a value of type {type(value).__name__}: only JSON types and dense tensors")


if __name__ == "__main__":
    main()
