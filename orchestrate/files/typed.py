"""Conversion of dataclasses to JSON data and back; field types define the format. Pure."""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Convert dataclasses, enums, tuples, lists and mappings to data for `json.dumps`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field: encode(getattr(value, field)) for field in _fields(type(value))}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [encode(each) for each in value]
    if isinstance(value, dict):
        return {str(name): encode(each) for name, each in value.items()}
    return value


def decode(value: Any, kind: type[T]) -> T:
    """Convert the result of `encode` back to a dataclass; unknown fields are ignored.

    Types may be plain ones, enums, dataclasses, `X | None`, `tuple[X, ...]`, `list[X]`, `dict[str, X]`, `dict[int, X]`
    and `Annotated` ones with a check of `node/messages/checks.py`. Raises ValueError that names the invalid field.
    """
    decoded: T = _decode(value, kind, kind.__name__)
    return decoded


def _decode(value: Any, kind: Any, name: str) -> Any:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        if why := inner[1](value):
            raise ValueError(f"{name}{why}")
        return _decode(value, inner[0], name)
    if origin in (Union, UnionType):
        (other,) = (one for one in inner if one is not NoneType)
        return None if value is None else _decode(value, other, name)
    if dataclasses.is_dataclass(origin) and isinstance(value, dict):
        return _dataclass(value, origin, name)
    if origin in (tuple, list) and isinstance(value, list):
        return origin(_decode(each, inner[0], name) for each in value)
    if origin is dict and isinstance(value, dict):
        return {
            _key(key, inner[0], name): _decode(each, inner[1], f"{name} of {key!a:.60}") for key, each in value.items()
        }
    if isinstance(origin, type) and issubclass(origin, Enum) and value in [one.value for one in origin]:
        return origin(value)
    if origin is float and type(value) is int:
        return float(value)
    if type(value) is not origin:
        raise ValueError(f"{name} must not be {value!a:.60}")
    return value


def _dataclass(value: dict[str, Any], kind: Any, name: str) -> Any:
    fields = _fields(kind)
    if missing := [field for field, (_, required) in fields.items() if required and field not in value]:
        raise ValueError(f"{missing[0]} is missing")
    return kind(**{field: _decode(value[field], fields[field][0], field) for field in fields if field in value})


def _key(key: str, kind: Any, name: str) -> Any:
    if kind is int and not (key.isdecimal() and len(key) < 10):
        raise ValueError(f"{name} must have numbers as names")
    return kind(key)


@lru_cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the fields of a dataclass, with their types and whether they are required."""
    hints, missing = get_type_hints(kind, include_extras=True), dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }
