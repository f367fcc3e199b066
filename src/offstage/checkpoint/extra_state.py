# SPDX-License-Identifier: Apache-2.0
"""The extra state of a module in a checkpoint: as one object, or as stock torch saves the values within it.

`torch.distributed.checkpoint` saves each value of a dict, and of a list with tensors, under a name of its own, and
records in the metadata where it belongs. Keys that are not strings, and empty dicts, are lost there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from offstage.checkpoint.stored import Stored
from offstage.errors import CheckpointError

Path = tuple[str | int, ...]
_DEEPEST = 100
"""The longest path of a value: no real one comes near."""


def saved_extra_state(stored: Stored, name: str, now: Any, value_of: Callable[[str], Any]) -> Any:
    """What a module whose extra state is `now` had as `name`, read with `value_of`."""
    if name in stored:
        return value_of(name)
    within = {one: _path_within(stored, one, name) for one in stored.names if one.startswith(f"{name}.")}
    if within:
        return _nested([(path, value_of(one)) for one, path in within.items()], f"{stored.folder}: {name}")
    if not flatten_state_dict({name: now})[0]:  # stock torch saves nothing of empty dicts
        return now
    raise CheckpointError(
        f"{stored.folder}: the extra state of a module is saved as {name!r}; found nothing of that name. Load a "
        "checkpoint of this model."
    )


def _path_within(stored: Stored, one: str, name: str) -> Path:
    """Where the value saved as `one` is in the object `name`: keys of dicts and positions in lists."""
    path: Any = stored.paths.get(one)
    plain = isinstance(path, tuple) and len(path) <= _DEEPEST and all(isinstance(step, (str, int)) for step in path)
    if not plain or ".".join(map(str, path)) != one or ".".join(map(str, path[:2])) != name:
        raise CheckpointError(
            f"{stored.folder}: expected the place of {one!r} in {name!r}; found {str(path)[:200]}. The metadata is "
            "damaged. Use another checkpoint."
        )
    return tuple(path[2:])


def _nested(leaves: Sequence[tuple[Path, Any]], what: str) -> Any:
    """The dicts and lists in which each value has its path."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    inner: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in leaves:
        inner.setdefault(path[0] if path else -1, []).append((path[1:], value))
    if all(isinstance(step, str) for step in inner):
        return {step: _nested(found, what) for step, found in inner.items()}
    if inner.keys() != set(range(len(inner))):
        raise CheckpointError(
            f"{what}: expected the values of a dict, or of a list from 0 on; found {list(inner)[:9]}. The metadata is "
            "damaged. Use another checkpoint."
        )
    return [_nested(inner[place], what) for place in range(len(inner))]
