# SPDX-License-Identifier: Apache-2.0
"""Readers: this rank's elements of one saved tensor, read piece by piece in the form in which they are saved.

State whose saved form differs from the one in memory (split masters) is converted as it is read, a block at a time.
State of a snapshot is read as it was when the snapshot was taken.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator

import torch

from offstage.engine.snapshot import Snapshot
from offstage.rules import master_weights


class Reader(abc.ABC):
    """Reads elements in memory order, from the writer's threads."""

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements `[start, stop)` on the host."""

    def snapshots(self) -> Iterator[tuple[Snapshot, int]]:
        """Each snapshot that is read, with the parameter's position in it."""
        return iter(())


class TensorReader(Reader):
    """A flat tensor, on the host or on a device."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._flat[start:stop].to("cpu")


class SnapshotReader(Reader):
    """State in an arena, as it was when the snapshot was taken."""

    def __init__(self, snapshot: Snapshot, index: int, key: str) -> None:
        self._snapshot, self._index, self._key = snapshot, index, key
        self._dtype = snapshot.arenas[key].dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        block = torch.empty(stop - start, dtype=self._dtype, device="cpu")
        self._snapshot.read(self._index, self._key, start, stop, into=block)
        return block

    def snapshots(self) -> Iterator[tuple[Snapshot, int]]:
        yield self._snapshot, self._index


class ZeroReader(Reader):
    """State that this rank has not created, though other ranks that hold the same parameter may have."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.zeros(stop - start, dtype=self._dtype, device="cpu")


class ConvertedReader(Reader):
    """What `convert` makes of the same elements of each of `sources`."""

    def __init__(self, convert: Callable[..., torch.Tensor], *sources: Reader) -> None:
        self._convert, self._sources = convert, sources

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._convert(*(source.read(start, stop) for source in self._sources))

    def snapshots(self) -> Iterator[tuple[Snapshot, int]]:
        for source in self._sources:
            yield from source.snapshots()


def weight_as_master(weight: Reader) -> Reader:
    """Masters that equal the weights: none exist yet, or code outside the optimizer has written the weights since."""
    return ConvertedReader(lambda block: block.to(torch.float32), weight)


def joined_master(weight: Reader, low: Reader, squares: Reader) -> Reader:
    """Split masters, joined."""
    return ConvertedReader(lambda *blocks: master_weights.join(*blocks)[0], weight, low, squares)


def without_sign(squares: Reader) -> Reader:
    """`exp_avg_sq` without the bit of the split master that it carries in its sign."""
    return ConvertedReader(torch.abs, squares)
