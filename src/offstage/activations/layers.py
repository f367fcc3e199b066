# SPDX-License-Identifier: Apache-2.0
"""What each of a model's layers does, as the configuration or the user says, and `LayerCall`: one call of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from offstage.config import ActivationConfig
from offstage.errors import ConfigError
from offstage.memory.guarded import class_of, unguarded
from offstage.planning.choices import Choice, spread

ORDINARY = (torch.Tensor, nn.Parameter)


def choices_of(layers: Sequence[nn.Module], config: ActivationConfig) -> tuple[Choice, ...]:
    """What each layer does, as far as the configuration says it."""
    if isinstance(config.layers, Sequence):
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


def checked_choices(choices: Sequence[Choice], layers: Sequence[nn.Module]) -> tuple[Choice, ...]:
    """`choices`, if `layers` can do that."""
    found = tuple(choices)
    if len(found) != len(layers) or not all(isinstance(choice, Choice) for choice in found):
        raise ConfigError(
            f"replan() expects a Choice for each of {len(layers)} layers; found {len(found)}"
            f"{'' if len(found) != len(layers) else f', {found!r}'}. Give one for each of handle.layers, such as "
            "Choice.KEEP."
        )
    for number, (layer, choice) in enumerate(zip(layers, found, strict=True)):
        if choice is Choice.RECOMPUTE and not can_recompute(layer):
            raise ConfigError(
                f"replan() would recompute layer {number}, a {type(layer).__name__}, which has running statistics: "
                "they would count each batch twice; expected another choice. Use KEEP, REMAKE or OFFLOAD for it."
            )
    return found


def can_recompute(layer: nn.Module) -> bool:
    """Whether a second forward changes nothing: running statistics would count every batch twice."""
    norms = [module for module in layer.modules() if isinstance(module, _NormBase)]
    return not any(norm.track_running_stats for norm in norms)


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
    # A weight whose update is late is guarded. Its values are not used here: nothing has to wait for them.
    with unguarded():
        return _references(tensor for tensor in tensors if class_of(tensor) in ORDINARY)


def _references(tensors: Iterable[torch.Tensor]) -> dict[int, StorageWeakRef]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: StorageWeakRef(storage) for storage in storages}  # type: ignore[no-untyped-call]
