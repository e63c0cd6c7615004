"""Frozen dataclasses of ours: as those of the standard library, except that only the type checker freezes them."""

import dataclasses

import pytest

from orchestrate import dataclass as ours


@pytest.fixture(params=[dataclasses, ours], ids=["standard", "ours"])
def kinds(request):
    made = request.param.dataclass(frozen=True)

    @made
    class Point:
        x: int
        y: list[int] = dataclasses.field(default_factory=list, compare=False)
        secret: str = dataclasses.field(default="s", repr=False, kw_only=True)

    class Other(Point):
        pass

    @made
    class Named(Point):
        z: int = 0

        def __repr__(self) -> str:
            return "named"

    return Point, Other, Named


def test_equality_and_hash_must_be_those_of_the_fields(kinds):
    Point, Other, Named = kinds
    assert Point(1, [2]) == Point(1, [3]) and hash(Point(1, [2])) == hash(Point(1))
    assert Point(1) != Point(2) and Point(1) != Point(1, secret="t") and Point(1) != Other(1)
    assert Named(1, z=2) != Named(1, z=3) and Point(1) != 1


def test_the_text_must_show_the_fields_unless_a_class_has_its_own(kinds):
    Point, _, Named = kinds
    assert repr(Point(1, [2])).endswith("<locals>.Point(x=1, y=[2])")
    assert repr(Named(1)) == "named"


def test_a_copy_with_changes_must_be_of_the_same_class(kinds):
    _, _, Named = kinds
    assert dataclasses.replace(Named(1, z=2), x=3) == Named(3, z=2)
    assert dataclasses.asdict(Named(1, z=2)) == {"x": 1, "y": [], "secret": "s", "z": 2}
