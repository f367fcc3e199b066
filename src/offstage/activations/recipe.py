# SPDX-License-Identifier: Apache-2.0
"""`Recipe`: how a tensor that autograd saves is made again from others that it has saved. For `remade_storage.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offstage.activations.storage import Saved, Stayed
from offstage.errors import OffstageError

_DEEPEST = 2
"""How many results may be made for one, as in `silu(gate) * up`: all of them are made for each that is asked for."""
_Operation = Callable[..., torch.Tensor]
_CHEAP: Mapping[str, tuple[tuple[str, ...], Callable[[Any], _Operation]]] = {
    "GeluBackward0": (("self",), lambda node: functools.partial(F.gelu, approximate=node._saved_approximate)),
    "MulBackward0": (("self", "other"), lambda _: torch.mul),
    "SiluBackward0": (("self",), lambda _: F.silu),
}
"""By autograd's name of an operation: what it saves, and what it was. Each is one kernel, element by element."""
_DEAR: Mapping[str, tuple[str, str]] = {"AddmmBackward0": ("mat1", "mat2"), "MmBackward0": ("self", "mat2")}
"""What linear layers are for autograd, with a bias and without: a matrix product of what they save."""
Unpack = Callable[[Any], torch.Tensor]


class Recipe:
    """Keeps what autograd keeps of the operation's inputs: it lives as long as what was saved of the result."""

    def __init__(self, made: torch.Tensor, name: str, operation: _Operation, inputs: Sequence[Saved | Stayed]) -> None:
        self.name, self._all_inputs = name, inputs
        self.inputs = [kept for kept in inputs if isinstance(kept, Saved)]
        """Those that are not weights."""
        self.is_dear = name in _DEAR
        self.has_factors = name == "MulBackward0"
        self.depth: int = 0 if self.is_dear else 1 + max(kept.storage.depth for kept in self.inputs)
        """How many results have to be made for it, of those that nobody keeps."""
        self.dtype, self.nbytes = made.dtype, made.nbytes
        self._operation = operation
        self._device_type, self._numel = made.device.type, made.numel()

    @property
    def multiplications(self) -> int:
        """Of a matrix product."""
        return self._numel * self.inputs[0].shape[-1] if self.is_dear else 0

    def expect(self) -> None:
        """It will be made once more: so its inputs will be asked for."""
        for kept in self.inputs:
            kept.storage.expect()

    def unexpect(self) -> None:
        """It was made once for nobody."""
        for kept in self.inputs:
            kept.storage.unexpect()

    def make(self, unpack: Unpack) -> torch.Tensor:
        inputs = [unpack(kept) for kept in self._all_inputs]
        if any(one.numel() and not one.untyped_storage().nbytes() for one in inputs):
            raise OffstageError(
                f"What {operation_of(self.name)} has made cannot be made again: its weight is not on the device when "
                "backward needs the result; expected it there. Let whoever shards or offloads weights bring it for the "
                "layers behind it as well, or leave that layer out of layers."
            )
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):  # what had to be cast was, before
            made = self._operation(*inputs)
        assert made.is_contiguous(), "inputs with the strides that they had lead to what was contiguous before"
        assert made.nbytes == self.nbytes
        return made


def operation_of(name: str) -> str:
    """For messages, from autograd's name."""
    return "a linear layer" if name in _DEAR else name.removesuffix("Backward0")


def recipe_of(tensor: torch.Tensor, *, also_dear: bool) -> Recipe | None:
    """How to make the storage of `tensor`, which autograd is about to save; `None` if nobody knows."""
    root = tensor._base if tensor._is_view() else tensor
    if root is None or type(root) is not torch.Tensor or not root.is_contiguous():
        return None
    node = root.grad_fn
    if node is None or root._version or root.nbytes != root.untyped_storage().nbytes():
        return None
    if node.name() in _CHEAP:
        return _cheap(root, node)
    return _dear(root, node) if also_dear else None


def _cheap(made: torch.Tensor, node: Any) -> Recipe | None:
    names, operation = _CHEAP[node.name()]
    inputs = [getattr(node, f"_raw_saved_{name}").data for name in names]
    # Not of parameters: they change, or are somewhere else, as soon as their own layer's backward is over. Nor of what
    # others have saved, nor where nothing was: a factor that needs no gradient.
    if not all(isinstance(kept, Saved) for kept in inputs):
        return None
    recipe = Recipe(made, node.name(), operation(node), inputs)
    return recipe if recipe.depth <= _DEEPEST else None


def _dear(made: torch.Tensor, node: Any) -> Recipe | None:
    if node.name() == "UnsafeViewBackward0":  # a linear layer flattens its input, and what it has made is no view
        node = node.next_functions[0][0]
    if node is None or node.name() not in _DEAR:
        return None
    one, other = (getattr(node, f"_raw_saved_{name}").data for name in _DEAR[node.name()])
    # Of a tensor that returns, or is here: not of one that has to be made first. The weight has not changed: this
    # layer's own backward, which comes later, needs it as well.
    if not isinstance(one, Saved) or one.storage.is_remade or not isinstance(other, Stayed):
        return None
    if node.name() == "MmBackward0":
        return Recipe(made, node.name(), torch.mm, [one, other])
    bias = getattr(node.next_functions[0][0], "variable", None)
    if type(bias) is not nn.Parameter:
        return None
    bias = bias.detach().clone()  # autograd does not save it: it may change
    operation = functools.partial(_addmm, beta=node._saved_beta, alpha=node._saved_alpha)
    return Recipe(made, node.name(), operation, [one, other, Stayed(bias)])


def _addmm(one: torch.Tensor, other: torch.Tensor, bias: torch.Tensor, **factors: Any) -> torch.Tensor:
    return torch.addmm(bias, one, other, **factors)
