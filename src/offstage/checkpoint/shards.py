# SPDX-License-Identifier: Apache-2.0
"""Tables about single shards: offset and size of each, and what is said about it, by the name of the saved tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from offstage.checkpoint.parts import Box, Part
from offstage.checkpoint.stored import Stored
from offstage.errors import CheckpointError

Table = dict[str, list[Any]]


def read_table(stored: Stored, name: str, *said: type) -> Table:
    """The table saved under `name`, empty if there is none; `said`: the types of what it says about a shard."""
    table = stored.object(name) if name in stored else {}
    form = [list, list, *said]
    if type(table) is not dict or not all(
        type(shards) is list and all(_is_shard(shard, form) for shard in shards) for shards in table.values()
    ):
        raise CheckpointError(
            f"{stored.folder}: {name!r} is expected to be a dict of lists of shards; found other data. The checkpoint "
            "is damaged: use another one."
        )
    return dict(table)


def _is_shard(value: Any, form: list[type]) -> bool:
    if type(value) is not list or [type(one) for one in value] != form:
        return False
    return all(type(number) is int for numbers in value[:2] for number in numbers)


def box_of(shard: Sequence[Any]) -> Box:
    """The elements that a shard has."""
    return Box(tuple(shard[0]), tuple(shard[1]))


def check_shards(stored: Stored, part: Part, tables: Iterable[Table]) -> None:
    """Raise unless the shards that the tables have of a tensor fit its shape."""
    for table in tables:
        if wrong := [box for box in map(box_of, table.get(part.name, ())) if not box.is_inside(part.shape)]:
            raise CheckpointError(
                f"{stored.folder}: {part.name!r} of shape {part.shape} is expected to have the shards that the "
                f"checkpoint lists; found {wrong[0]}. The checkpoint is damaged: use another one."
            )
