# SPDX-License-Identifier: Apache-2.0
"""`SavedStorage`: the way of a storage that autograd saved tensors of, to the host and back. Used by `activations.py`.

`HERE → LEAVING → AWAY → RETURNING → HERE`. Several saved tensors may be views of one storage; it moves once. A tensor
that is saved is not copied when its layer is not chosen, and not fetched when it has not been let go yet.

Who touches what, and which mark separates them:

| buffer | written by | read by | separated by |
|---|---|---|---|
| the storage | the caller | store | a mark when it is saved; whoever reuses its memory comes after `left` |
| host range | store | fetch | the caller has waited for `left` when it lets go, for the last copy when it gives back |
| the storage that returned | fetch | the caller | a mark when it is allocated, `returned` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.errors import OffstageError
from offstage.lanes.lanes import Lane, Mark, copy_work
from offstage.memory.pool import Range

if TYPE_CHECKING:
    from offstage.activations.device import Side
    from offstage.activations.forward_pass import Visit
    from offstage.activations.proofs import Trial
    from offstage.activations.remaking import Factors, RemadeStorage
    from offstage.activations.traffic import Traffic


class SavedStorage:
    """One storage, on the device or on the host. Lives as long as autograd keeps a tensor of it."""

    depth = 0
    """Nothing has to be made for it."""
    is_remade = False

    def __init__(self, side: Side, tensor: torch.Tensor) -> None:
        self.visit: Visit | None = None
        """Which layer's it is."""
        self.traffic: Traffic | None = None
        """If it has left."""
        self.trial: Trial | None = None
        """How it might be made instead."""
        self.place = 0
        """Its number among those that have left."""
        self.nbytes = tensor.untyped_storage().nbytes()
        self.side = side
        self._device = tensor.device
        self._bytes: torch.Tensor | None = bytes_of(tensor)
        """The storage, while it is on the device."""
        self._seen: torch.Tensor | None = tensor.detach()  # counts its versions with `tensor`, without its graph
        self._version = tensor._version
        self._alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._range: Range | None = None
        self._left: Mark = None
        self._returned: Mark = None
        self._is_back = False
        """What is on the device is a copy that returned."""
        self._was_back = False
        self._saved = 0
        """How often backward will ask for it."""
        self._used = 0
        self._seen_bytes = 0
        self.is_claimed = False
        """It was decided whether it leaves."""
        side.here_bytes += self.nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, whose storage has the same address, is of this one and has the values that were saved."""
        is_gone = self._alive.expired()  # type: ignore[no-untyped-call]
        return not is_gone and tensor._version == self._version

    def saved(self, tensor: torch.Tensor) -> Saved:
        """What autograd keeps in place of `tensor`."""
        self.expect()
        self._seen_bytes += self.nbytes if 0 in tensor.stride() else tensor.nbytes
        return Saved(self, tensor)

    def expect(self) -> None:
        """Backward will ask for it once more."""
        self._saved += 1

    def unexpect(self) -> None:
        """It was asked for once by nobody."""
        self._saved -= 1
        if self._is_back:
            self._used -= 1

    def dear_ones(self) -> list[RemadeStorage]:
        """It is made of nothing."""
        return []

    @property
    def is_worth_it(self) -> bool:
        """Not for a small part of something large; but parts of one storage may be saved one after the other."""
        return 2 * self._seen_bytes >= self.nbytes

    # Leaving

    def leave(self) -> None:
        """HERE → LEAVING."""
        lanes, source = self.side.lanes, self._bytes
        assert source is not None
        self._range = taken = self.side.pool.take(self.nbytes)
        lanes.touch(writes=[source])
        with lanes.blocking():  # what is promised would hold its memory until another thread has let it go
            self._left = lanes.submit(
                Lane.STORE,
                copy_work([(taken.tensor, source)]),
                after={"leave: the tensor is made": lanes.mark()},
                reads=[source],
                writes=[taken.tensor],
            )

    def let_go(self) -> None:
        """LEAVING → AWAY: the memory may be used for something else, behind the copy."""
        if self._bytes is None or self._range is None:
            return
        self._check_unchanged()
        lanes = self.side.lanes
        lanes.wait(self._left, "leave: the tensor has left")
        lanes.touch(writes=[self._bytes])
        self._bytes = self._seen = None
        self.side.here_bytes -= self.nbytes

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
        lanes, taken = self.side.lanes, self._range
        assert taken is not None
        self._is_back = self._was_back = True
        self.side.here_bytes += self.nbytes
        self._bytes = target = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        lanes.touch(writes=[target])
        with lanes.blocking():
            self._returned = lanes.submit(
                Lane.FETCH,
                copy_work([(target, taken.tensor)]),
                after={"return: the memory is free": lanes.mark()},  # and behind `left`: the caller has waited for it
                reads=[taken.tensor],
                writes=[target],
            )
        lanes.prioritise(self._returned)
        return True

    def bytes_for_backward(self) -> torch.Tensor:
        """The storage, after the caller's stream has waited for it."""
        self._check_unchanged()
        if self._bytes is None:
            self.come_back()
        found = self._bytes
        assert found is not None
        if self._is_back:
            self.side.lanes.wait(self._returned, "backward: the tensor is back")
            self.side.lanes.touch(reads=[found])
            self._used += 1
            if self._used >= self._saved:  # every view has been asked for once: a second backward fetches it again
                self._bytes, self._is_back, self._used = None, False, 0
                self.side.here_bytes -= self.nbytes
        return found

    def __del__(self) -> None:
        if getattr(self, "_bytes", None) is not None:
            self.side.here_bytes -= self.nbytes
        if getattr(self, "_range", None) is not None:
            after = self._left if self._returned is None else self._returned
            self.side.lay_out((self._range, after, self._bytes))


class Saved:
    """What autograd keeps in place of one tensor."""

    __slots__ = ("_dtype", "_offset", "_stride", "factors", "shape", "storage")

    def __init__(self, storage: SavedStorage | RemadeStorage, tensor: torch.Tensor) -> None:
        self.storage = storage
        self.factors: Factors | None = None
        """If a product has saved it: with the other one."""
        self.shape = tensor.shape
        self._dtype, self._stride = tensor.dtype, tensor.stride()
        self._offset = tensor.storage_offset()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self._dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved."""
        found = self.storage.bytes_for_backward()
        made = torch.empty(0, dtype=self._dtype, device=found.device)
        return made.set_(found.untyped_storage(), self._offset, self.shape, self._stride)  # type: ignore[no-any-return]


class Stayed:
    """A tensor that autograd keeps on the device: a parameter, a small one, one of a kind that cannot be copied.

    Without its graph: an output that an operation saves would keep that operation, and so itself, alive.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version  # which counts its versions with `tensor`

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved: autograd does not look at versions where there are hooks."""
        check_unchanged(self._tensor, self._version)
        return self._tensor


def check_unchanged(seen: torch.Tensor, version: int) -> None:
    if seen._version != version:
        raise OffstageError(
            f"A tensor of shape {tuple(seen.shape)} that backward needs was changed in place after it was saved "
            f"(version {seen._version}, expected {version}). Without offload_activations() autograd would refuse it in "
            "backward. Use an operation that makes a new tensor; call backward before the optimizer's step."
        )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, as bytes."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[no-any-return]
