# SPDX-License-Identifier: Apache-2.0
"""`DeviceMemory`: which storages are memory of a simulated device, how large they are together, and how large they may
be.

Every CPU storage that it was told of is device memory until it dies or shrinks; all others are host memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Set

import torch

from offstage.config import format_size
from offstage.memory.arena import round_up

_BLOCK = 512
"""Bytes: what CUDA's allocator rounds up to."""


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Knows what died with the storage."""

    __slots__ = ("address", "nbytes")
    address: int
    nbytes: int


class DeviceMemory:
    """The memory of one simulated device: without fragments, and without a reserve of the allocator's."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._allocated = self._peak = 0
        self.most = 0
        """The largest peak ever: it is not reset."""
        self._alive: dict[int, _StorageRef] = {}
        self._dead: deque[_StorageRef] = deque()
        """A storage may die in any thread and in the middle of any statement: it is only noted then."""

    @property
    def allocated(self) -> int:
        self._bury()
        return self._allocated

    @property
    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.allocated

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is device memory."""
        self._bury()
        return storage._cdata in self._alive

    def holds_any(self, addresses: Set[int]) -> bool:
        """Whether any of the storages there is device memory."""
        self._bury()
        return not self._alive.keys().isdisjoint(addresses)

    def take(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """These are device memory from now on: all of them, or none if there is no room."""
        self._bury()
        new = {storage._cdata: storage for storage in storages if storage._cdata not in self._alive}
        self._grow(sum(_rounded(storage.nbytes()) for storage in new.values()))
        for address, storage in new.items():
            reference = _StorageRef(storage, self._dead.append)
            reference.address, reference.nbytes = address, _rounded(storage.nbytes())
            self._alive[address] = reference

    def look_again(self, storage: torch.UntypedStorage) -> None:
        """It may have another size than before."""
        self._bury()
        if (reference := self._alive.get(storage._cdata)) is not None:
            self._change(reference, storage.nbytes())

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """It is about to have another size."""
        self._bury()
        if (reference := self._alive.get(storage._cdata)) is not None:
            self._change(reference, nbytes)

    def _change(self, reference: _StorageRef, nbytes: int) -> None:
        self._grow(_rounded(nbytes) - reference.nbytes)
        reference.nbytes = _rounded(nbytes)

    def _grow(self, nbytes: int) -> None:
        if nbytes > 0 and self._allocated + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"Simulated device out of memory. Tried to allocate {format_size(nbytes)}. The device has a total "
                f"capacity of {format_size(self.limit)}, of which {format_size(self.limit - self._allocated)} is free "
                f"and {format_size(self._allocated)} is allocated. Offload more, or give it more memory_bytes."
            )
        self._allocated += nbytes
        self._peak = max(self._peak, self._allocated)
        self.most = max(self.most, self._allocated)

    def _bury(self) -> None:
        while self._dead:
            reference = self._dead.popleft()
            del self._alive[reference.address]
            self._allocated -= reference.nbytes


def _rounded(nbytes: int) -> int:
    return round_up(nbytes, _BLOCK)
