# SPDX-License-Identifier: Apache-2.0
"""Dataclasses as command-line flags: a flag for every field, with the field's docstring as its help.

tyro parses the flags and prints the help. Names, numbers of words and values are checked here and in `settings.py`, so
that a mistake gets the same message as in a TOML file or in Python, with the nearest existing name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from offstage import ConfigError
from offstage.config import descriptions
from offstage.train.settings import TRUTHS, choices, field_types, from_text, nearest

_HELP = ("-h", "--help")
_QUOTED = re.compile(r"``(?:\"([^\"]*)\"|(.*?))``")
_NEGATIVE = re.compile(r"-\.?\d")

Values = dict[str, dict[str, Any]]
"""Section → field → value, for given values only."""


@dataclass(frozen=True)
class Words:
    """The words of one field on the command line."""

    texts: tuple[str, ...]


def missing_extra(error: ModuleNotFoundError) -> ConfigError:
    """The error for a package of the command line that is not installed."""
    return ConfigError(
        f"The command line expects the packages of the extra 'cli'; found no module {error.name!r}. Install them: "
        "pip install 'offstage[cli]', or pip install '.[cli]' in a checkout."
    )


def positional(default: Any) -> Any:
    """A dataclass field given by position, without a flag. At most one per command."""
    return dataclasses.field(default=default, metadata={"positional": True})


def parse_sections(
    sections: Mapping[str, type],
    values: Mapping[str, Mapping[str, Any]],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str = "",
) -> Values:
    """`values` (section → field → value, where one was given) with `arguments` over them.

    A section is the prefix of its flags; ``""`` has none. `--help` among the arguments prints the help, with `values`
    as defaults, and ends the process.
    """
    known = {
        _dotted(section, one.name): field_types(cls)[one.name]
        for section, cls in sections.items()
        for one in dataclasses.fields(cls)
        if not _is_positional(one)
    }
    places = {one.name: field_types(cls)[one.name] for cls in sections.values() for one in _positionals(cls)}
    if any(word in _HELP for word in arguments):
        arguments = ["--help"]
    else:
        arguments = _grouped(arguments, known, places, prog)
    found = _by_tyro(sections, values, arguments, prog, description)
    merged = {name: dict(fields) for name, fields in values.items()}
    for section, cls in sections.items():
        for name, annotation in field_types(cls).items():
            words = getattr(getattr(found, section) if section else found, name)
            if isinstance(words, Words):
                shown = name if name in places else _flag(_dotted(section, name))
                merged.setdefault(section, {})[name] = from_text(words.texts, annotation, shown)
    return merged


def _dotted(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_positional(one: dataclasses.Field[Any]) -> bool:
    return bool(one.metadata.get("positional"))


def _positionals(cls: Any) -> list[dataclasses.Field[Any]]:
    return [one for one in dataclasses.fields(cls) if _is_positional(one)]


# Checks #


def _grouped(arguments: Sequence[str], known: Mapping[str, Any], places: Mapping[str, Any], prog: str) -> list[str]:
    """The arguments as tyro takes them, positional ones first; raises for unknown flags and wrong numbers of words."""
    flags = {_flag(name): annotation for name, annotation in known.items()}
    free: list[str] = []
    given: dict[str, list[str]] = {}
    flag, room = "", 0.0
    for word in arguments:
        if _is_flag(word):
            name, is_set, value = word.partition("=")
            flag = name.replace("_", "-")
            if flag not in flags:
                raise ConfigError(f"{prog} has no flag {name}. {_hint(flag, known) or f'See {prog} --help.'}")
            given[flag] = [value] if is_set else []  # given twice, the last one counts
            room = num_words(flags[flag]) - len(given[flag])
        elif room > 0 and (not _is_switch(flags[flag]) or word.lower() in TRUTHS):
            given[flag].append(word)
            room -= 1
        else:
            free.append(word)
    for flag, words in given.items():
        if _is_switch(flags[flag]) and not words:
            words.append("true")
        needs = num_words(flags[flag])
        if needs < float("inf") and len(words) < needs:
            raise ConfigError(
                f"{flag} expects {needs:.0f} value{'s' * (needs > 1)} after it; found {len(words)}. See {prog} --help."
            )
    most = sum(num_words(one) for one in places.values())
    if len(free) > most:
        takes = f"at most {most:.0f} word without a flag" if places else f"flags such as {next(iter(flags))}"
        raise ConfigError(f"{prog} expects {takes}; found {free[int(most)]!r}. See {prog} --help.")
    joined = [[f"{flag}={words[0]}"] if len(words) == 1 else [flag, *words] for flag, words in given.items()]
    return [*free, *(word for group in joined for word in group)]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.match(word)


def _is_switch(annotation: Any) -> bool:
    return bool in choices(annotation)


def _hint(flag: str, known: Mapping[str, Any]) -> str:
    hint = nearest(flag.lstrip("-").replace("-", "_"), known)
    return re.sub(r"[\w.]*\w", lambda found: _flag(found[0]) if found[0] in known else found[0], hint)


def num_words(annotation: Any) -> float:
    """The most words that a field of this type takes: one, or several for tuples."""
    for choice in choices(annotation):
        if get_origin(choice) is tuple:
            return float("inf") if get_args(choice)[-1] is ... else len(get_args(choice))
    return 1


# tyro #


def _by_tyro(
    sections: Mapping[str, type],
    values: Mapping[str, Mapping[str, Any]],
    arguments: Sequence[str],
    prog: str,
    description: str,
) -> Any:
    try:
        import tyro
    except ModuleNotFoundError as error:
        raise missing_extra(error) from None
    fields: list[tuple[str, Any, Any]] = _leaves(sections[""], values.get("", {})) if "" in sections else []
    for name, cls in sections.items():
        if name:
            shadow = dataclasses.make_dataclass(cls.__name__, _leaves(cls, values.get(name, {})), kw_only=True)
            about = tyro.conf.arg(help=_plain((cls.__doc__ or "").split("\n\n")[0]))
            fields.append((name, Annotated[shadow, about], dataclasses.field(default_factory=shadow)))
    everything = dataclasses.make_dataclass("Everything", fields, kw_only=True)
    return tyro.cli(everything, args=list(arguments), prog=prog, description=description)


def _leaves(cls: type, values: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The fields of `cls`, each holding `Words` or its default, unchecked."""
    from tyro.conf import Positional, arg

    texts = descriptions(cls)
    fields = []
    for one in dataclasses.fields(cls):
        metavar = one.name.upper() if _is_positional(one) else _metavar(field_types(cls)[one.name])
        about = [_reader(field_types(cls)[one.name], metavar), arg(help=_plain(texts.get(one.name, "")))]
        shape: Any = Annotated[(Any, *about, *([Positional] if _is_positional(one) else []))]
        default = values.get(one.name, one.default)
        fields.append((one.name, shape, dataclasses.field(default=default)))
    return fields


def _plain(text: str) -> str:
    return " ".join(_QUOTED.sub(r"\1\2", text).split())


def _reader(annotation: Any, metavar: str) -> Any:
    from tyro.constructors import PrimitiveConstructorSpec

    words = num_words(annotation)
    return PrimitiveConstructorSpec(
        nargs="*" if words == float("inf") else int(words),
        metavar=metavar,
        instance_from_str=lambda texts: Words(tuple(texts)),
        is_instance=lambda _: True,
        str_from_instance=_shown,
    )


def _metavar(annotation: Any) -> str:
    names = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false", type(None): "none"}
    kinds = choices(annotation)
    if int in kinds and str in kinds:  # bytes, or text such as 8GiB
        kinds, names = tuple(kind for kind in kinds if kind is not int), {**names, str: "SIZE"}
    parts = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            parts += [str(one) for one in get_args(kind)]
        elif get_origin(kind) is tuple:
            first, *others = get_args(kind)
            if get_origin(first) is Literal:
                parts.append(f"[{'|'.join(get_args(first))} ...]")
                continue
            parts.append(f"[{names[first]} ...]" if others == [...] else " ".join([names[first]] * (len(others) + 1)))
        else:
            parts.append(names.get(kind, "NAME=NAME,..."))
    return "|".join(sorted(parts, key=lambda part: part == "none"))


def _shown(value: Any) -> list[str]:
    if value is None:
        return ["none"]
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return [str(value).lower() if isinstance(value, bool) else str(value)]
