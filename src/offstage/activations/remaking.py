# SPDX-License-Identifier: Apache-2.0
"""Saved tensors that backward remakes from other saved tensors, so that they need not move: `remakable_storage`.

An activation function saves its input, and the linear layer behind it saves its output. So of what `down(silu(gate) *
up)` leaves for backward, `silu(gate)` and the product are remade from `gate` and `up`: by the same kernels from the
same bits, in a small part of the time in which the link would carry them. Only operations of one elementwise kernel are
remade. Whether the bits are the same is found out first: see [Note: proofs].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from offstage.activations.device import DeviceActivations
from offstage.activations.layers import LayerCall
from offstage.activations.proofs import Key, bytes_of
from offstage.activations.storage import Saved, SavedStorage, Storage

_DEEPEST = 2
"""How many results may be remade for one, as in `silu(gate) * up`: all of them are remade for each use."""
_Operation = Callable[..., torch.Tensor]
_CHEAP: Mapping[str, tuple[tuple[str, ...], Callable[[Any], _Operation]]] = {
    "GeluBackward0": (("self",), lambda node: functools.partial(F.gelu, approximate=node._saved_approximate)),
    "MulBackward0": (("self", "other"), lambda _: torch.mul),
    "SiluBackward0": (("self",), lambda _: F.silu),
}
"""By autograd's name of an operation: what it saves, and what it was."""
Unpack = Callable[[Any], torch.Tensor]
"""From what autograd keeps in place of a tensor to the tensor."""


def remakable_storage(
    device: DeviceActivations, tensor: torch.Tensor, call: LayerCall, unpack: Unpack
) -> RemadeStorage | TriedStorage | None:
    """A storage that is remade or, where that has no proof yet, tried; `None` if it has to leave or stay."""
    recipe = _recipe_of(tensor)
    if recipe is None:
        return None
    key = (*call.kind, call.path, recipe.name)
    is_same = device.proofs.verdict(key)
    if is_same:
        return RemadeStorage(device, tensor, call, key, recipe, unpack)
    return TriedStorage(device, tensor, key, recipe) if is_same is None else None


class Recipe:
    """How to remake a tensor. Keeps what autograd keeps of the operation's inputs."""

    def __init__(self, made: torch.Tensor, name: str, operation: _Operation, inputs: Sequence[Saved]) -> None:
        self.name = name
        """Of the operation, for messages too."""
        self.depth: int = 1 + max(kept.storage.depth for kept in inputs)
        """How many results have to be remade for it, itself included."""
        self._operation, self._inputs = operation, inputs
        self._device_type, self._nbytes = made.device.type, made.nbytes

    def expect(self) -> None:
        """It will be used once more: so its inputs will be asked for."""
        for kept in self._inputs:
            kept.storage.expect()

    def unexpect(self) -> None:
        """A use that `expect` has announced does not come again in the next backward."""
        for kept in self._inputs:
            kept.storage.unexpect()

    def make(self, unpack: Unpack) -> torch.Tensor:
        inputs = [unpack(kept) for kept in self._inputs]
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):  # what had to be cast was, before
            made = self._operation(*inputs)
        assert made.is_contiguous(), "inputs with the strides that they had lead to what was contiguous before"
        assert made.nbytes == self._nbytes
        return made


def _recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """How to remake the storage of `tensor`, which autograd is about to save; `None` if it cannot be."""
    root = tensor._base if tensor._is_view() else tensor
    if root is None or type(root) is not torch.Tensor or not root.is_contiguous():
        return None
    node: Any = root.grad_fn
    if node is None or root._version or root.nbytes != root.untyped_storage().nbytes() or node.name() not in _CHEAP:
        return None
    names, operation = _CHEAP[node.name()]
    inputs = [getattr(node, f"_raw_saved_{name}").data for name in names]
    # Not from parameters: they change, or are somewhere else, as soon as their own layer's backward is over. Nor from
    # what other hooks have saved, nor where nothing was: a factor that needs no gradient.
    if not all(isinstance(kept, Saved) for kept in inputs):
        return None
    recipe = Recipe(root, node.name().removesuffix("Backward0"), operation(node), inputs)
    return recipe if recipe.depth <= _DEEPEST else None


class TriedStorage(SavedStorage):
    """Leaves or stays, and is remade once beside what backward gets, for the proof."""

    def __init__(self, device: DeviceActivations, tensor: torch.Tensor, key: Key, recipe: Recipe) -> None:
        super().__init__(device, tensor)
        self._key = key
        self._recipe: Recipe | None = recipe
        recipe.expect()

    def try_once(self, found: torch.Tensor, unpack: Unpack) -> None:
        """`found`: a tensor of it, as backward gets it."""
        recipe, self._recipe = self._recipe, None
        if recipe is None:
            return

        def remake() -> torch.Tensor:
            try:
                return recipe.make(unpack)
            finally:
                recipe.unexpect()

        self.device.proofs.compare(self._key, remake, found)


class RemadeStorage(Storage):
    """Holds no memory but its checksum."""

    def __init__(
        self,
        device: DeviceActivations,
        tensor: torch.Tensor,
        call: LayerCall,
        key: Key,
        recipe: Recipe,
        unpack: Unpack,
    ) -> None:
        super().__init__(device, tensor)
        self.call, self.depth = call, recipe.depth
        self._key, self._recipe, self._unpack = key, recipe, unpack
        self._digest = device.proofs.take_digest(tensor)

    def expect(self) -> None:
        self._recipe.expect()

    def unexpect(self) -> None:
        self._recipe.unexpect()

    def bytes_for_backward(self) -> torch.Tensor:
        made = self._recipe.make(self._unpack)
        self.device.proofs.watch(self._key, made, self._digest)
        return bytes_of(made)

    def __del__(self) -> None:
        digest: torch.Tensor | None = getattr(self, "_digest", None)
        if digest is not None:  # its next use comes later in the caller's stream
            self.device.proofs.give_back(digest)
