"""Replacements for methods of engines and sessions."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def before(method: Callable[P, R], action: Callable[[], object]) -> Callable[P, R]:
    """A method that first calls `action`, then does the same as `method`."""

    def both(*arguments: P.args, **options: P.kwargs) -> R:
        action()
        return method(*arguments, **options)

    return both


def after(method: Callable[P, R], action: Callable[[], object]) -> Callable[P, R]:
    """A method that does the same as `method`, then calls `action`."""

    def both(*arguments: P.args, **options: P.kwargs) -> R:
        result = method(*arguments, **options)
        action()
        return result

    return both


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A method that raises `error`."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
