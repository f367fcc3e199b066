# SPDX-License-Identifier: Apache-2.0
"""`RemadeStorage`: a saved tensor that is made again from others that are saved anyway, so that it need not move.

An activation function saves its input, and the linear layer behind it saves its output. So of what `down(silu(gate) *
up)` leaves for backward, `silu(gate)` and the product are made again from `gate` and `up`: by the same kernels from the
same bits, in a small part of the time in which the link would carry them. Used by `activations.py`.

[Note: proofs] Autograd counts who writes to a tensor, but not everyone lets it: collectives do not, and neither does
`.data`. So a result that was written to could be made again as it was before, and nobody would know. Therefore the
first time that a kind of layer saves a result, it moves like everything else, and is made again beside it in backward:
only if the bits are the same it is not moved from then on. `Proofs` knows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from offstage.saved_storage import Saved, bytes_of

if TYPE_CHECKING:
    from offstage.activation_side import Side
    from offstage.activations import Visit

logger = logging.getLogger("offstage")

_DEEPEST = 2
"""How many results may be made for one, as in `silu(gate) * up`: all of them are made for each that is asked for."""
_Operation = Callable[..., torch.Tensor]
_HOW: Mapping[str, tuple[tuple[str, ...], Callable[[Any], _Operation]]] = {
    "GeluBackward0": (("self",), lambda node: functools.partial(F.gelu, approximate=node._saved_approximate)),
    "MulBackward0": (("self", "other"), lambda _: torch.mul),
    "SiluBackward0": (("self",), lambda _: F.silu),
}
"""By autograd's name of an operation: what it saves, and what it was. Each is one kernel, element by element."""


class Recipe:
    """Keeps what autograd keeps of the operation's inputs: it lives as long as what was saved of the result."""

    def __init__(self, made: torch.Tensor, name: str, operation: _Operation, inputs: list[Saved]) -> None:
        self.name, self.inputs = name, inputs
        self.depth: int = 1 + max(kept.storage.depth for kept in inputs)
        self._operation = operation
        self._device_type, self._stride = made.device.type, made.stride()

    def expect(self) -> None:
        """It will be made once more: so its inputs will be asked for."""
        for kept in self.inputs:
            kept.storage.expect()

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
    # Not of parameters: they change, or are somewhere else, as soon as their own layer's backward is over. Nor of what
    # others have saved, nor where nothing was: a factor that needs no gradient.
    if not all(isinstance(kept, Saved) for kept in inputs):
        return None
    recipe = Recipe(root, node.name(), operation(node), inputs)
    return recipe if recipe.depth <= _DEEPEST else None


Key = tuple[object, ...]


class Trial:
    """A result that is made once beside the one that was saved."""

    def __init__(self, key: Key, recipe: Recipe) -> None:
        self.key, self.recipe = key, recipe
        recipe.expect()


class Proofs:
    """Whose results are made again with the same bits. See [Note: proofs]."""

    def __init__(self) -> None:
        self._are_same: dict[Key, bool] = {}
        self._differ: dict[Key, torch.Tensor] = {}
        """Compared, and not looked at yet: that would make the host wait."""

    def verdict(self, key: Key) -> bool | None:
        """`None`: not known."""
        return self._are_same.get(key)

    @torch.no_grad()
    def compare(self, key: Key, made: torch.Tensor, found: torch.Tensor) -> None:
        """Both are of the same storage: what was made again, and what was saved."""
        differ = _words(made).ne(_words(found)).any()
        self._differ[key] = differ | self._differ[key] if key in self._differ else differ

    def look(self) -> None:
        """A forward begins: what has been found out? Waits for the device, in the first iterations."""
        while self._differ:
            key, differ = self._differ.popitem()
            self._are_same[key] = same = not bool(differ)
            if not same:
                logger.warning(
                    "activations: what %s has made in a %s was written to without autograd's knowledge (by a "
                    "collective, through .data): it moves like everything else, and is not made again",
                    str(key[-1]).removesuffix("Backward0"),
                    getattr(key[0], "__name__", key[0]),
                )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """All of the tensor's storage, in words of eight bytes where that is possible."""
    found = bytes_of(tensor)
    return found.view(torch.int64) if found.numel() % 8 == 0 else found


class RemadeStorage:
    """Stands where a `SavedStorage` would. Holds no memory: it is made as often as backward asks for it."""

    traffic = None

    def __init__(
        self, side: Side, tensor: torch.Tensor, visit: Visit, recipe: Recipe, unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self.side, self.visit = side, visit
        self.nbytes = tensor.untyped_storage().nbytes()
        self.depth: int = recipe.depth
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
        self._recipe.expect()

    def bytes_for_backward(self) -> torch.Tensor:
        """The storage."""
        return bytes_of(self._recipe.make(self._unpack))
