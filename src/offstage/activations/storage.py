# SPDX-License-Identifier: Apache-2.0
"""`SavedStorage`: the way to the host and back of a storage of which autograd has saved tensors.

`HERE → LEAVING → AWAY → RETURNING → HERE`. Several saved tensors may be views of one storage; it moves once. It is not
copied when its layer is not chosen, and not fetched when its device memory has not been let go yet.

| buffer | written by | read by | separated by |
|---|---|---|---|
| the storage | the caller | store | a mark when it is saved; its memory is used again behind `left` |
| host range | store | fetch | the caller has waited for `left` when it lets go, for the last copy when it gives back |
| the storage that returned | fetch | the caller | a mark when it is allocated, `returned` |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.activations.device import DeviceActivations
from offstage.activations.layers import LayerCall
from offstage.activations.proofs import bytes_of
from offstage.lanes.lanes import Mark
from offstage.memory.pool import Range
from offstage.modules import check_unchanged


class Storage(ABC):
    """One storage of which autograd has saved tensors. Lives as long as autograd keeps one of them."""

    depth = 0
    """How many results have to be remade for it."""

    def __init__(self, device: DeviceActivations, tensor: torch.Tensor) -> None:
        self.device = device
        self.call: LayerCall | None = None
        """Whose it is."""
        self.send_for: Callable[[], int] | None = None
        """If it has left: has it return, with those that backward needs next. Returns how many bytes move."""
        self.nbytes = tensor.untyped_storage().nbytes()
        self._version = tensor._version
        self._alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, whose storage has the same address, is of this one and has the values that were saved."""
        is_gone = self._alive.expired()  # type: ignore[no-untyped-call]
        return not is_gone and tensor._version == self._version

    def saved(self, tensor: torch.Tensor) -> Saved:
        """What autograd keeps in place of `tensor`."""
        self.expect()
        return Saved(self, tensor)

    @abstractmethod
    def expect(self) -> None:
        """Each backward will ask for it once more."""

    @abstractmethod
    def unexpect(self) -> None:
        """Once less: the last use was for a proof."""

    @abstractmethod
    def bytes_for_backward(self) -> torch.Tensor:
        """The storage, after the caller's stream has waited for it."""


class SavedStorage(Storage):
    """On the device or on the host."""

    def __init__(self, device: DeviceActivations, tensor: torch.Tensor) -> None:
        super().__init__(device, tensor)
        self.is_claimed = False
        """Enough of it was saved that its layer decides whether it leaves."""
        self._bytes: torch.Tensor | None = bytes_of(tensor)
        """The storage, while it is on the device."""
        self._seen: torch.Tensor | None = tensor.detach()  # shares the version counter with `tensor`, without its graph
        self._seen_bytes = 0
        self._range: Range | None = None
        self._left: Mark = None
        self._returned: Mark = None
        self._is_back = False
        """What is on the device is a copy that returned."""
        self._was_back = False
        self._num_saved = 0
        """How often backward will ask for it."""
        self._num_used = 0

    def belongs_to(self, call: LayerCall) -> None:
        """It was saved by this call. What belongs to no layer is not counted."""
        assert self.call is None
        assert self._bytes is not None
        self.call = call
        self.device.here_bytes += self.nbytes

    def saved(self, tensor: torch.Tensor) -> Saved:
        self._seen_bytes += self.nbytes if 0 in tensor.stride() else tensor.nbytes
        return super().saved(tensor)

    def expect(self) -> None:
        self._num_saved += 1

    def unexpect(self) -> None:
        self._num_saved -= 1
        if self._is_back:
            self._num_used -= 1

    @property
    def is_worth_it(self) -> bool:
        """Not for a small part of something large; but parts of one storage may be saved one after the other."""
        return 2 * self._seen_bytes >= self.nbytes

    # Leaving

    def leave(self) -> None:
        """HERE → LEAVING."""
        assert self._bytes is not None
        assert self.call is not None
        self._range = self.device.pool.take(self.nbytes)
        self._left = self.device.store(self._range.tensor, self._bytes)

    def let_go(self) -> None:
        """LEAVING → AWAY: the memory may be used for something else, behind the copy."""
        if self._bytes is None or self._range is None:
            return
        self._check_unchanged()
        lanes = self.device.lanes
        lanes.wait(self._left, "leave: the tensor has left")
        lanes.touch(writes=[self._bytes])
        self._bytes = self._seen = None
        self.device.here_bytes -= self.nbytes

    def _check_unchanged(self) -> None:
        if self._seen is not None:
            check_unchanged(self._seen, self._version)

    # Returning

    @property
    def has_returned(self) -> bool:
        """Whether it has been on its way back before, in this backward or an earlier one."""
        return self._was_back and not self._is_back

    def come_back(self) -> bool:
        """AWAY → RETURNING. Returns whether anything had to move."""
        if self._bytes is not None:
            return False
        assert self._range is not None
        self._is_back = self._was_back = True
        self.device.here_bytes += self.nbytes
        self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device.lanes.device)
        self._returned = self.device.fetch(self._bytes, self._range.tensor)
        return True

    def bytes_for_backward(self) -> torch.Tensor:
        self._check_unchanged()
        self.come_back()
        found = self._bytes
        assert found is not None
        if self._is_back:
            lanes = self.device.lanes
            lanes.wait(self._returned, "backward: the tensor is back")
            lanes.touch(reads=[found])
            self._num_used += 1
            if self._num_used >= self._num_saved:  # each was asked for once: a second backward fetches it again
                self._bytes, self._is_back, self._num_used = None, False, 0
                self.device.here_bytes -= self.nbytes
        return found

    def __del__(self) -> None:
        if getattr(self, "_bytes", None) is not None and self.call is not None:
            self.device.here_bytes -= self.nbytes
        if getattr(self, "_range", None) is not None:
            after = self._left if self._returned is None else self._returned
            self.device.queue_release(self._range, after, self._bytes)  # type: ignore[arg-type]


class Saved:
    """What autograd keeps in place of one tensor."""

    __slots__ = ("_dtype", "_offset", "_shape", "_stride", "storage")

    def __init__(self, storage: Storage, tensor: torch.Tensor) -> None:
        self.storage = storage
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved."""
        found = self.storage.bytes_for_backward()
        made = torch.empty(0, dtype=self._dtype, device=found.device)
        return made.set_(found.untyped_storage(), self._offset, self._shape, self._stride)  # type: ignore[no-any-return]
