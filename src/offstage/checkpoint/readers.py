# SPDX-License-Identifier: Apache-2.0
"""Lines: a rank's elements of one saved tensor, read piece by piece in the form that is saved.

State that is kept in another form than it is saved in (split masters) takes that form while it is read, a block at a
time; state of a snapshot is read from where it was when the snapshot was taken. Made by `catalogue.py`, read by
`writer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from offstage.engine.snapshot import Snapshot
from offstage.rules import master_weights


class Line(Protocol):
    """Elements in memory order. Reading happens in the writer's threads."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` on the host."""

    def places(self) -> Iterator[tuple[Snapshot, int]]:
        """What of snapshots it reads: the snapshot, and a parameter's position in it."""


class Plain:
    """A flat tensor, on the host or on a device."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._flat[start:stop].to("cpu")

    def places(self) -> Iterator[tuple[Snapshot, int]]:
        return iter(())


class Kept:
    """State in an arena, as it was when the snapshot was taken."""

    def __init__(self, snapshot: Snapshot, index: int, key: str) -> None:
        self._snapshot, self._index, self._key = snapshot, index, key
        self._dtype = snapshot.arenas[key].dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        block = torch.empty(stop - start, dtype=self._dtype)
        self._snapshot.read(self._index, self._key, start, stop, into=block)
        return block

    def places(self) -> Iterator[tuple[Snapshot, int]]:
        yield self._snapshot, self._index


class Zeros:
    """State that has not been created on this rank, though it may have been on others that hold the same parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start, dtype=self._dtype)

    def places(self) -> Iterator[tuple[Snapshot, int]]:
        return iter(())


class Widened:
    """Masters that are the weights: none were made yet, or someone else wrote the weights since."""

    def __init__(self, weight: Line) -> None:
        self._weight = weight

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._weight.read(start, stop).to(torch.float32)

    def places(self) -> Iterator[tuple[Snapshot, int]]:
        return self._weight.places()


class Joined:
    """Split masters, joined."""

    def __init__(self, weight: Line, low: Line, squares: Line) -> None:
        self._lines = (weight, low, squares)

    def read(self, start: int, stop: int) -> torch.Tensor:
        weight, low, squares = (line.read(start, stop) for line in self._lines)
        return master_weights.join(weight, low, squares)[0]

    def places(self) -> Iterator[tuple[Snapshot, int]]:
        for line in self._lines:
            yield from line.places()


class Unsigned:
    """`exp_avg_sq` without the bit that it carries for split masters."""

    def __init__(self, squares: Line) -> None:
        self._squares = squares

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._squares.read(start, stop).abs()

    def places(self) -> Iterator[tuple[Snapshot, int]]:
        return self._squares.places()
