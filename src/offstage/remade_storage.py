# SPDX-License-Identifier: Apache-2.0
"""`RemadeStorage`: a saved tensor that is made again from others that are saved anyway, so that it need not move.

An activation function saves its input, and the linear layer behind it saves its output. So of what `down(silu(gate) *
up)` leaves for backward, `silu(gate)` and the product are made again from `gate` and `up`: by the same kernels from the
same bits, in a small part of the time in which the link would carry them. Used by `activations.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from offstage.host_weight import SavedWeight
from offstage.saved_storage import Saved, Stayed, bytes_of

if TYPE_CHECKING:
    from offstage.activation_side import Side
    from offstage.activations import Visit

_Operation = Callable[..., torch.Tensor]
_HOW: Mapping[str, tuple[tuple[str, ...], Callable[[Any], _Operation]]] = {
    "GeluBackward0": (("self",), lambda node: functools.partial(F.gelu, approximate=node._saved_approximate)),
    "MulBackward0": (("self", "other"), lambda _: torch.mul),
    "SiluBackward0": (("self",), lambda _: F.silu),
}
"""By autograd's name of an operation: what it saves, and what it was. Each is one kernel, element by element."""


class Recipe:
    """Keeps what autograd keeps of the operation's inputs: it lives as long as what was saved of the result."""

    def __init__(self, made: torch.Tensor, operation: _Operation, inputs: list[Any]) -> None:
        self.inputs = inputs
        self._operation = operation
        self._device_type, self._stride = made.device.type, made.stride()

    def make(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        inputs = [unpack(kept) for kept in self.inputs]
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):  # what had to be cast was, before
            made = self._operation(*inputs)
        assert made.stride() == self._stride, "inputs with the strides that they had lead to those it had"
        return made


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """How to make the storage of `tensor`, which autograd is about to save; `None` if nobody knows."""
    root = tensor._base if tensor._is_view() else tensor
    if root is None or type(root) is not torch.Tensor or not root.is_contiguous():
        return None
    node = root.grad_fn
    if node is None or node.name() not in _HOW or root._version or root.nbytes != root.untyped_storage().nbytes():
        return None
    names, operation = _HOW[node.name()]
    inputs = [getattr(node, f"_raw_saved_{name}").data for name in names]
    if not all(isinstance(kept, (Saved, Stayed, SavedWeight)) for kept in inputs):
        return None  # saved by others, or not at all: a factor that needs no gradient
    return Recipe(root, operation(node), inputs)


class RemadeStorage:
    """Stands where a `SavedStorage` would. Holds no memory: it is made as often as backward asks for it."""

    traffic = None

    def __init__(
        self, side: Side, tensor: torch.Tensor, visit: Visit, recipe: Recipe, unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self.side, self.visit = side, visit
        self.nbytes = tensor.untyped_storage().nbytes()
        self._recipe, self._unpack = recipe, unpack
        self._alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, whose storage has the same address, is of this one and has the values that were saved."""
        return not self._alive.expired() and tensor._version == 0  # type: ignore[no-untyped-call]

    def saved(self, tensor: torch.Tensor) -> Saved:
        """What autograd keeps in place of `tensor`."""
        self.expect()
        return Saved(self, tensor)

    def expect(self) -> None:
        """It will be asked for once more, and so will what it is made of."""
        for kept in self._recipe.inputs:
            if isinstance(kept, Saved):
                kept.storage.expect()

    def bytes_for_backward(self) -> torch.Tensor:
        """The storage."""
        return bytes_of(self._recipe.make(self._unpack))
