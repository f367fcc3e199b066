# SPDX-License-Identifier: Apache-2.0
"""Which modules are a model's layers, and what the configuration says of each. Used by `activations.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from offstage.activations.plan import Choice, spread
from offstage.config import ActivationConfig
from offstage.errors import ConfigError


def layers_of(model: nn.Module, layers: Any) -> list[nn.Module]:
    """The model's layers: those given, or the children of its longest `ModuleList`."""
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        known = set(model.modules())
        for layer in layers:
            if layer not in known:
                raise ConfigError(
                    f"layers names a {type(layer).__name__} that is not part of the model; expected modules of the "
                    f"{type(model).__name__} given. Pass them as list(model.layers)."
                )
        return list(layers)
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    if not lists or not any(len(one) for one in lists):
        raise ConfigError(
            f"{type(model).__name__} has no ModuleList whose children could be its layers; expected one. Name them "
            "yourself, as in offload_activations(model, layers=[...])."
        )
    return list(max(lists, key=len))


def num_layers_of(model: nn.Module, layers: Sequence[nn.Module]) -> int:
    """How many layers the model has, where some of them may have been named."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    return max([len(layers), *(len(one) for one in lists if set(one) & set(layers))])


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


def size_of(layer: nn.Module) -> int:
    return sum(param.numel() for param in layer.parameters())
