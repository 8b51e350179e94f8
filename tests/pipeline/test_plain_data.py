"""Dataclasses through JSON types and back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import pytest

from pipeline.plain_data import from_plain


@dataclass(frozen=True)
class Inner:
    value: float | None
    pair: tuple[str, int] = ("x", 1)


@dataclass(frozen=True)
class Outer:
    name: str
    items: tuple[Inner, ...]
    best: Inner | None
    extra: dict[str, int]


FULL = Outer("a", (Inner(0.5), Inner(None, ("y", 2))), Inner(1.0), {"k": 3})


def test_round_trip_and_derived_keys() -> None:
    data = json.loads(json.dumps(asdict(FULL))) | {"derived": 1}
    assert from_plain(Outer, data) == FULL
    assert from_plain(Outer, data | {"best": None}).best is None
    assert from_plain(Inner, {"value": 1.0}) == Inner(1.0)


def test_missing_and_misshapen_values_are_errors() -> None:
    data = asdict(FULL)
    with pytest.raises(KeyError, match="name"):
        from_plain(Outer, {key: value for key, value in data.items() if key != "name"})
    with pytest.raises(TypeError, match="found int, wanted a list"):
        from_plain(Outer, data | {"items": 3})
    with pytest.raises(TypeError, match="found str, wanted an object"):
        from_plain(Outer, data | {"best": "x"})
