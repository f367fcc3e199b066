# SPDX-License-Identifier: Apache-2.0
"""Which modules are a model's layers, what the configuration says of each, and `LayerCall`: one call of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from offstage.activations.plan import Choice, spread
from offstage.config import ActivationConfig
from offstage.errors import ConfigError
from offstage.modules import size_of

ORDINARY = (torch.Tensor, nn.Parameter)


def choices_of(layers: Sequence[nn.Module], config: ActivationConfig) -> tuple[Choice, ...]:
    """What each layer does, as far as the configuration says it."""
    if isinstance(config.layers, Sequence) and not isinstance(config.layers, str):
        return (Choice.OFFLOAD,) * len(layers)
    movable = max(0, len(layers) - config.keep_last)
    count = config.layers if isinstance(config.layers, int) else movable
    if count >= len(layers) and isinstance(config.layers, int):
        raise ConfigError(
            f"layers={count}: the model has {len(layers)} layers, and backward needs the last one at once; expected a "
            f"number from 0 to {len(layers) - 1}. Leave it out for all but the last."
        )
    away = spread(min(count, movable), movable)
    return tuple(Choice.OFFLOAD if number in away else Choice.KEEP for number in range(len(layers)))


def kind_of(layer: nn.Module) -> tuple[type[nn.Module], int]:
    """Layers of one kind save as much as each other, and do the same with it."""
    return type(layer), size_of(layer)


class GraphLifetime:
    """Lives as long as anything that one forward has saved."""


class LayerCall:
    """One call of a layer in one forward."""

    def __init__(
        self,
        lifetime: GraphLifetime,
        number: int,
        layer: int,
        choice: Choice,
        kind: tuple[object, ...],
        arguments: Any,
    ) -> None:
        """`number`: of the call in its forward; `layer`: of the layer in its model."""
        self._lifetime = lifetime
        self.number, self.layer, self.choice, self.kind = number, layer, choice, kind
        leaves = [leaf for leaf in tree_leaves(arguments) if type(leaf) is torch.Tensor]
        self.inputs = _references(leaf for leaf in leaves if leaf.layout == torch.strided)
        """Storages of its arguments."""
        self.path = 0
        """A hash over the kinds of all that was saved in it so far: another way through a layer has another one."""

    def follow(self, tensor: torch.Tensor, *, is_movable: bool) -> None:
        """`tensor` is saved in it."""
        # Which operation of this layer made it: an argument may come from any.
        is_argument = tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self.inputs
        maker = None if tensor.grad_fn is None or is_argument else tensor.grad_fn.name()
        self.path = hash((self.path, maker, tensor.dtype, is_movable))


def storages_of(module: nn.Module) -> dict[int, StorageWeakRef]:
    """Of parameters and buffers. While there is a reference to a storage, its address is not used for another."""
    tensors = [*module.parameters(), *module.buffers()]
    return _references(tensor for tensor in tensors if type(tensor) in ORDINARY)


def _references(tensors: Iterable[torch.Tensor]) -> dict[int, StorageWeakRef]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: StorageWeakRef(storage) for storage in storages}  # type: ignore[no-untyped-call]
