# SPDX-License-Identifier: Apache-2.0
"""`SavedWeight`: what autograd keeps of a weight that lives on the host, so that it keeps no copy alive."""

from __future__ import annotations

from typing import Protocol

import torch

from offstage.errors import OffstageError
from offstage.modules import Stayed
from offstage.weights.host_layer import HostWeight


class Owner(Protocol):
    """The layers of a model whose weights live on the host."""

    def has(self, weight: HostWeight) -> bool:
        """Whether `weight` is one of them still."""

    def copy_of(self, weight: HostWeight) -> torch.Tensor:
        """Backward asks for a weight: the layer's copy."""


class SavedWeight:
    """What autograd keeps in place of a weight, or of a view of one."""

    __slots__ = ("_dtype", "_offset", "_owner", "_size", "_stride", "_version", "_weight")

    def __init__(self, owner: Owner, weight: HostWeight, tensor: torch.Tensor) -> None:
        self._owner, self._weight, self._dtype = owner, weight, tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._version = weight.param._version

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved."""
        weight = self._weight
        param = weight.param
        if param._version != self._version:
            raise OffstageError(
                f"Parameter {weight.name!r} was changed in place after a forward whose backward still needs it "
                f"(version {param._version}, expected {self._version}). Call backward before the optimizer's step."
            )
        made = torch.empty(0, dtype=self._dtype, device=weight.device)
        if not self._owner.has(weight):
            if param.device != made.device:
                raise OffstageError(
                    f"The optimizer was closed, or replanned, between a forward and its backward, which needs "
                    f"{weight.name!r} on {made.device}; found it on {param.device}. Call backward first."
                )
            first = weight.first_byte // made.itemsize
            return made.set_(param.data.untyped_storage(), self._offset - first, self._size, self._stride)  # type: ignore[no-any-return]
        copy = self._owner.copy_of(weight)
        return made.set_(copy.untyped_storage(), self._offset, self._size, self._stride)  # type: ignore[no-any-return]


def unpack(kept: SavedWeight | Stayed) -> torch.Tensor:
    """What autograd gets back."""
    return kept.tensor()
