# SPDX-License-Identifier: Apache-2.0
"""Shapes: what values read from JSON must be, checked before anything is made of them.

A shape takes a value and the name of its place, and returns the value or raises `BadFileError`. Types are exact: `True`
and ``"1"`` are not 1. Numbers are bounded such that sums, ratios and axes of them are finite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from offstage.train.reading import BadFileError

Shape = Callable[[Any, str], Any]
MOST = 1e60
"""The largest number: more than the norm of any gradients."""
_MOST_NAME = 200
_SHOWN = 60
"""Characters of a wrong value in a message."""


def refuse(where: str, expected: str, value: Any) -> BadFileError:
    """The error for `value` at `where`."""
    return BadFileError(f"{where[:_SHOWN]}: expected {expected}; found {shown(value)}")


def shown(value: Any) -> str:
    """A short description of a value of any size."""
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…")
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return repr(value)


def number(least: float = -MOST, most: float = MOST) -> Shape:
    """A finite number in a range."""

    def check(value: Any, where: str) -> Any:
        if type(value) not in (int, float) or not least <= value <= most:
            raise refuse(where, f"a number of at least {least:g}" if least > -MOST else "a finite number", value)
        return value

    return check


def whole(least: int = 0, most: int = 2**62) -> Shape:
    """A whole number in a range."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not int or not least <= value <= most:
            raise refuse(where, f"a whole number of at least {least}", value)
        return value

    return check


def text(most: int = 2000) -> Shape:
    """A string of at most `most` characters."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not str or len(value) > most:
            raise refuse(where, f"a text of at most {most} characters", value)
        return value

    return check


def flag(value: Any, where: str) -> Any:
    """True or false."""
    if type(value) is not bool:
        raise refuse(where, "true or false", value)
    return value


def one_of(*words: str) -> Shape:
    """One of some words."""

    def check(value: Any, where: str) -> Any:
        if value not in words:
            raise refuse(where, f"one of {', '.join(words)}", value)
        return value

    return check


def optional(shape: Shape) -> Shape:
    """`shape`, or `None`."""
    return lambda value, where: None if value is None else shape(value, where)


def either(first: Shape, second: Shape) -> Shape:
    """`first`; of what does not fit, `second`."""

    def check(value: Any, where: str) -> Any:
        try:
            return first(value, where)
        except BadFileError:
            return second(value, where)

    return check


def list_of(shape: Shape, length: int | None = None) -> Shape:
    """A list of values with this shape."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not list or length not in (None, len(value)):
            raise refuse(where, "a list" if length is None else f"a list of {length}", value)
        return [shape(one, f"{where}[{i}]") for i, one in enumerate(value)]

    return check


def mapping(shape: Shape) -> Shape:
    """An object with any names."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise refuse(where, "an object", value)
        for name in value:
            text(_MOST_NAME)(name, f"a name in {where}")
        return {name: shape(one, f"{where}.{name}") for name, one in value.items()}

    return check


def record(shapes: Mapping[str, Shape], may_lack: Collection[str] = ()) -> Shape:
    """An object with these names, but for those that it `may_lack`; other names are left out."""

    def check(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise refuse(where, "an object", value)
        missing = [name for name in shapes if name not in value and name not in may_lack]
        if missing:
            raise refuse(where, f"an object with {missing[0]}", value)
        return {name: shape(value[name], f"{where}.{name}") for name, shape in shapes.items() if name in value}

    return check


def plain(depth: int = 3) -> Shape:
    """Values to be shown as text: lists and objects are nested at most `depth` times."""
    scalar = optional(either(number(), either(flag, text())))

    def check(value: Any, where: str) -> Any:
        if depth and type(value) is list:
            return list_of(plain(depth - 1))(value, where)
        if depth and type(value) is dict:
            return mapping(plain(depth - 1))(value, where)
        return scalar(value, where)

    return check


# Of types #


@functools.cache
def shapes_of(kind: type) -> dict[str, Shape]:
    """The shape of each field of a dataclass, by its type."""
    hints = get_type_hints(kind)
    return {field.name: _shape_of(hints[field.name]) for field in dataclasses.fields(kind)}


def _shape_of(hint: Any) -> Shape:
    """What `dataclasses.asdict` and JSON make of a value of this type."""
    scalars: dict[Any, Shape] = {int: whole(), float: number(), str: text(), bool: flag}
    if hint in scalars:
        return scalars[hint]
    if dataclasses.is_dataclass(hint):
        defaults = [f.name for f in dataclasses.fields(hint) if _has_default(f)]
        return record(shapes_of(cast(type, hint)), defaults)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return one_of(*(member.value for member in hint))
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        shape = functools.reduce(either, (_shape_of(one) for one in arguments if one is not NoneType))
        return optional(shape) if NoneType in arguments else shape
    if origin is tuple:
        return list_of(_shape_of(arguments[0]))
    assert issubclass(origin, Mapping), hint
    return mapping(_shape_of(arguments[1]))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


# Of files #


def fields_of(
    values: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    problems: list[str],
    file: str,
    *,
    others: Shape | None = None,
) -> dict[str, Any]:
    """The fields of a file that have their shape. One that has not is left out, with a problem.

    `others`: the shape of fields that are not in `shapes`; without it these are left out.
    """
    found = {}
    for name, value in values.items():
        shape = shapes.get(name, others)
        try:
            if shape is not None:
                text(_MOST_NAME)(name, "a name")
                found[name] = shape(value, name)
        except BadFileError as error:
            problems.append(f"In {file}, {error}. It is left out.")
    return found
