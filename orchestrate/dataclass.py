"""`dataclasses` with frozen classes that are made in a third of the time: commands make 70 of them, with 400 methods.

The type checker sees those of the standard library, and keeps frozen ones from being changed; nothing does at runtime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field as field
from dataclasses import replace as replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, *, frozen: bool = False, **options: Any) -> Any:
        """Make a class a dataclass, like the standard library's function of this name."""
        if cls is None:
            return lambda made: dataclass(made, frozen=frozen, **options)
        if not frozen:
            return dataclasses.dataclass(**options)(cls)
        for name, method in METHODS.items():
            if name not in cls.__dict__:
                setattr(cls, name, method)
        return dataclasses.dataclass(repr=False, eq=False, **options)(cls)


def _compared(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, one.name) for one in dataclasses.fields(value) if one.compare)


def _equal(self: Any, other: object) -> bool:
    return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _repr(self: Any) -> str:
    shown = [f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"


METHODS: dict[str, Callable[..., Any]] = {"__eq__": _equal, "__hash__": _hash, "__repr__": _repr}
