# SPDX-License-Identifier: Apache-2.0
"""Checks values of dataclass fields given in Python, in TOML or on a command line.

A settings class calls `checked` in `__post_init__`; `from_text` parses words of a command line; `nearest` suggests a
name for an unknown one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offstage import ConfigError

_MOST_NAMES = 20
_RETIRED = {
    ("activations.mode", "auto"): "Use --device-peak (in a file: device_peak, above all tables), with which the run "
    "decides for each layer, together with what state and weights do.",
}
"""Values that settings once had, and what takes their place."""
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one, or all of them if they are few."""
    known = list(known)
    # `steps` and `model.steps` should both find `run.steps`.
    same = [one for one in known if one.split(".")[-1] == name.split(".")[-1]]
    if found := same or difflib.get_close_matches(name, known, n=1):
        return f"Did you mean {' or '.join(found)}?"
    return f"Known: {', '.join(known)}." if len(known) <= _MOST_NAMES else ""


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def at_least(least: float, value: float, name: str) -> None:
    """Raise if the setting `name` is smaller."""
    if not (math.isfinite(value) and value >= least):
        whole = "whole " if isinstance(least, int) else ""
        raise ConfigError(
            f"{name} expects a {whole}number of at least {least:g}; found {value}. Leave it out for the default."
        )


def checked(settings: Any, section: str) -> None:
    """Convert every field of a frozen dataclass to its annotation, or raise a `ConfigError` that names it."""
    for name, annotation in field_types(settings.__class__).items():
        shown = f"{section}.{name}" if section else name
        object.__setattr__(settings, name, check(getattr(settings, name), annotation, shown))


def check(value: Any, annotation: Any, name: str) -> Any:
    """`value`, with lists converted to tuples and ints to floats where annotated so; raises if it does not fit."""
    for choice in choices(annotation):
        fits, found = _as(value, choice)
        if fits:
            return found
    raise ConfigError(f"{name} expects {expected(annotation)}; found {value!r}. {_remedy(value, annotation, name)}")


def from_text(texts: Sequence[str], annotation: Any, name: str) -> Any:
    """Parse the words of one field on a command line: most fields take one word, tuples several."""
    for choice in choices(annotation):
        fits, found = _read(texts, choice)
        if fits:
            return found
    written = " ".join(texts)
    raise ConfigError(f"{name} expects {expected(annotation)}; found {written!r}. {_remedy(written, annotation, name)}")


def expected(annotation: Any) -> str:
    """The annotation in words."""
    words = [_in_words(choice) for choice in choices(annotation)]
    values = [repr(one) for choice in choices(annotation) if get_origin(choice) is Literal for one in get_args(choice)]
    if values:
        words = [f"one of {', '.join(values)}" if len(values) > 1 else values[0], *filter(None, words)]
    return " or ".join(words)


def _in_words(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return ""
    if get_origin(choice) is tuple:
        first, *others = get_args(choice)
        if others == [...]:
            return f"a list, each {expected(first)}"
        return f"{len(others) + 1} values, each {_in_words(first)}"
    if get_origin(choice) is not None:
        return "a table from names to names"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}[choice]


def _remedy(value: Any, annotation: Any, name: str) -> str:
    for (setting, gone), instead in _RETIRED.items():
        if name.endswith(setting) and value == gone:
            return instead
    values = [str(one) for choice in choices(annotation) if get_origin(choice) is Literal for one in get_args(choice)]
    near = difflib.get_close_matches(str(value), values, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "Leave it out for the default."


@functools.cache
def choices(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, the narrower first: text that is a number is read as a number."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return (annotation,)
    order = [type(None), Literal, bool, int, float, tuple, Mapping, str]
    kinds = {choice: get_origin(choice) or choice for choice in get_args(annotation)}
    return tuple(sorted(kinds, key=lambda one: order.index(kinds[one])))


def _as(value: Any, choice: Any) -> tuple[bool, Any]:
    """Whether `value` fits one member of a union, and the converted value."""
    if get_origin(choice) is Literal:
        # True == 1: compare the type too.
        return any(value == one and type(value) is type(one) for one in get_args(choice)), value
    if get_origin(choice) is tuple:
        return _as_tuple(value, get_args(choice))
    if get_origin(choice) is not None:
        fits = isinstance(value, Mapping) and all(isinstance(one, str) for pair in value.items() for one in pair)
        return fits, value
    if choice is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        return fits, float(value) if fits else None
    return isinstance(value, choice) and (choice is bool or not isinstance(value, bool)), value


def _as_tuple(value: Any, items: tuple[Any, ...]) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, None
    if items[-1] is ...:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        return False, None
    pairs = [_as(one, item) for one, item in zip(value, items, strict=True)]
    return all(fits for fits, _ in pairs), tuple(found for _, found in pairs)


def _read(texts: Sequence[str], choice: Any) -> tuple[bool, Any]:
    """The same as `_as` for words of a command line."""
    if get_origin(choice) is tuple:
        items = get_args(choice)
        items = (items[0],) * len(texts) if items[-1] is ... else items
        pairs = [_read([text], item) for text, item in zip(texts, items, strict=False)]
        return len(texts) == len(items) and all(fits for fits, _ in pairs), tuple(found for _, found in pairs)
    if len(texts) != 1:
        return False, None
    (text,) = texts
    if get_origin(choice) is Literal:
        found = {str(one).lower(): one for one in get_args(choice)}
        return text.lower() in found, found.get(text.lower())
    if get_origin(choice) is not None:  # a table, as name=name,name=name
        table = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
        return all(name and value for name, value in table.items()), table
    if choice is type(None):
        return text.lower() == "none", None
    if choice is bool:
        return text.lower() in TRUTHS, TRUTHS.get(text.lower())
    try:
        return True, choice(text)
    except ValueError:
        return False, None
