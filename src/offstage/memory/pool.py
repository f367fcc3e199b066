# SPDX-License-Identifier: Apache-2.0
"""`HostPool`: pinned host memory in ranges of any size, which are reused: for activations, and for what sleeps.

The pool allocates slabs and hands out ranges of them; a range that is given back is joined with its free neighbours. So
the pool grows to about the largest amount in use at one time, whatever the sizes, and stays at that.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.config import format_size
from offstage.errors import HostMemoryError
from offstage.memory.arena import Arena, check_host_memory, round_up

_SMALLEST_SLAB, _LARGEST_SLAB = 1024 * 1024, 512 * 1024 * 1024


@dataclass(eq=False)
class Range:
    """`nbytes` of a slab."""

    pool: HostPool
    slab: _Slab
    start: int
    nbytes: int
    handed_out: list[StorageWeakRef] = field(default_factory=list)

    @property
    def tensor(self) -> torch.Tensor:
        """The memory, as bytes."""
        return self.slab.arena.flat[self.start : self.start + self.nbytes]

    def storage(self) -> torch.UntypedStorage:
        """The memory as a storage of exactly this size: what users get."""
        made = self.slab.arena.tensor(self.start, self.nbytes).untyped_storage()
        self.handed_out = [one for one in self.handed_out if not one.expired()]  # type: ignore[no-untyped-call]
        self.handed_out.append(StorageWeakRef(made))  # type: ignore[no-untyped-call]
        return made

    @property
    def is_handed_out(self) -> bool:
        """Whether other code still has tensors of it."""
        return not all(one.expired() for one in self.handed_out)  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class _Slab:
    arena: Arena
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Free ranges, in order: (start, stop)."""


class HostPool:
    """The pool of one device. Not thread-safe."""

    def __init__(self, device: torch.device, host_budget: int | None, *, shared: bool = False) -> None:
        """`shared`: other processes can map its memory."""
        self._device, self._budget, self._shared = device, host_budget, shared
        self._slabs: list[_Slab] = []

    @property
    def nbytes(self) -> int:
        """Host memory of all slabs."""
        return sum(slab.arena.nbytes for slab in self._slabs)

    @property
    def arenas(self) -> list[Arena]:
        return [slab.arena for slab in self._slabs]

    @property
    def used_bytes(self) -> int:
        """Host memory of all ranges in use."""
        return self.nbytes - sum(stop - start for slab in self._slabs for start, stop in slab.gaps)

    def take(self, nbytes: int) -> Range:
        """A range of `nbytes`. Raises if `host_budget` or the machine has no room for it."""
        found = self._fit(nbytes)
        if found is None:
            self._add_slab(_padded(nbytes))
            found = self._fit(nbytes)
        assert found is not None
        return found

    def take_all(self, sizes: Sequence[int]) -> Iterator[Range]:
        """Ranges of `sizes`, in order, from what is free and from slabs of exactly what is missing.

        A slab is made when its first range is asked for: the caller can use the others meanwhile. Ranges that are not
        asked for, because the caller or the allocation of a slab has failed, are free again.
        """
        found = [self._fit(size) for size in sizes]
        given = 0
        try:
            for number, size in enumerate(sizes):
                taken = found[number]
                if taken is None:
                    taken = self._fit(size)
                if taken is None:
                    self._slabs.append(_Slab(self._arena(_next_slab(sizes[number:], found[number:]))))
                    self._slabs[-1].gaps = [(0, self._slabs[-1].arena.nbytes)]
                    taken = self._fit(size)
                assert taken is not None
                given = number + 1
                yield taken
        finally:
            for unused in found[given:]:
                if unused is not None:
                    self.give_back(unused)

    def missing_bytes(self, sizes: Sequence[int]) -> int:
        """How much larger the pool would be after `take_all(sizes)`."""
        found = [self._fit(size) for size in sizes]
        for taken in found:
            if taken is not None:
                self.give_back(taken)
        return sum(_padded(size) for size, taken in zip(sizes, found, strict=True) if taken is None)

    def _fit(self, nbytes: int) -> Range | None:
        """A range of what is free."""
        padded = _padded(nbytes)
        for slab in self._slabs:
            for number, (start, stop) in enumerate(slab.gaps):
                if stop - start >= padded:
                    slab.gaps[number : number + 1] = [(start + padded, stop)] if stop - start > padded else []
                    return Range(self, slab, start, nbytes)
        return None

    def _arena(self, nbytes: int) -> Arena:
        return Arena(nbytes, torch.uint8, self._device, pin=True, shared=self._shared)

    def _add_slab(self, padded: int) -> None:
        room = padded if self._budget is None else self._budget - self.nbytes
        if room < padded:
            raise HostMemoryError(
                f"Activations need {format_size(self.nbytes + padded)} of host memory at once; host_budget allows "
                f"{format_size(self._budget or 0)}. Raise host_budget, or offload fewer layers or a smaller fraction."
            )
        grown = min(_LARGEST_SLAB, max(_SMALLEST_SLAB, self.nbytes))
        nbytes = max(padded, grown if self._budget is None else min(grown, room))
        remedy = "Offload fewer layers or a smaller fraction, or free host memory."
        with check_host_memory(nbytes, None, what="The pool for activations", remedy=remedy):
            self._slabs.append(_Slab(self._arena(nbytes), [(0, nbytes)]))

    def give_back(self, taken: Range) -> None:
        """Free `taken` for reuse. The caller's stream has waited for its last copy, and so has all later work on it."""
        start, stop = taken.start, taken.start + _padded(taken.nbytes)
        gaps = taken.slab.gaps
        place = bisect.bisect(gaps, (start, stop))
        if place < len(gaps) and gaps[place][0] == stop:
            stop = gaps.pop(place)[1]
        if place > 0 and gaps[place - 1][1] == start:
            place -= 1
            start = gaps.pop(place)[0]
        gaps.insert(place, (start, stop))

    def trim(self) -> list[torch.Tensor]:
        """Close unused slabs; returns their memory. The caller has waited, on the host, for the last copy."""
        idle = [slab for slab in self._slabs if slab.gaps == [(0, slab.arena.nbytes)]]
        for slab in idle:
            slab.arena.close()
            self._slabs.remove(slab)
        return [slab.arena.flat for slab in idle]


def _padded(nbytes: int) -> int:
    return round_up(max(nbytes, 1))


def _next_slab(sizes: Sequence[int], found: Sequence[Range | None]) -> int:
    """The size of a slab for the first of `sizes` and those behind it that have no range yet."""
    total = 0
    for size, taken in zip(sizes, found, strict=True):
        if taken is None:
            if total and total + _padded(size) > _LARGEST_SLAB:
                break
            total += _padded(size)
    return total
