"""Frozen dataclasses back from the JSON types that `dataclasses.asdict` made of them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """An instance of a dataclass, nested ones included; keys that are no field (derived values) are ignored.

    Raises KeyError for a missing field without default, TypeError for a value of another shape.
    """
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name in data or not has_default:
            values[field.name] = _value(hints[field.name], data[field.name])
    return kind(**values)


def _value(hint: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        [inner] = [argument for argument in arguments if argument is not types.NoneType]
        return _value(inner, value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"found {type(value).__name__}, wanted a list")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        return tuple(_value(kind, item) for kind, item in zip(kinds, value, strict=True))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise TypeError(f"found {type(value).__name__}, wanted an object")
        return from_plain(typing.cast(type[Any], hint), value)
    return value
