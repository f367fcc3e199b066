# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model can live on the host, and which of these do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from offstage.config import OffloadConfig, format_size
from offstage.errors import ConfigError
from offstage.memory.guarded import class_of
from offstage.modules import layers_of, uses_ddp
from offstage.planning.host_weights import LAYERS_ON_DEVICE
from offstage.weights.host_weights import refuse_ddp

Chosen = dict[nn.Module, dict[str, nn.Parameter]]
"""The parameters of each layer that live on the host, by name."""


def movable(model: nn.Module, layers: Iterable[nn.Module], min_bytes: int) -> Chosen:
    """The layers' own parameters of at least `min_bytes`. What another module uses, too, under any name, stays."""
    refuse_ddp(uses_ddp(model))
    names = {param: name for name, param in model.named_parameters()}
    return {layer: _movable(model, layer, min_bytes, names) for layer in dict.fromkeys(layers)}


def _movable(
    model: nn.Module, layer: nn.Module, min_bytes: int, names: Mapping[nn.Parameter, str]
) -> dict[str, nn.Parameter]:
    inside = set(layer.modules())
    shared = [
        tensor
        for module in model.modules()
        for tensor in (
            *(module.parameters(recurse=False) if module not in inside else ()),
            *module.buffers(recurse=False),
        )
    ]
    others = {tensor.untyped_storage()._cdata for tensor in shared if class_of(tensor) in (torch.Tensor, nn.Parameter)}
    own = list(layer.parameters())
    found = {}
    for param in own:
        if isinstance(param, DTensor):
            raise ConfigError(
                f"Only ordinary parameters can live on the host; found a DTensor, {names[param]!r}. FSDP2 divides "
                "weights among ranks: use its CPUOffloadPolicy for them, or leave weights out."
            )
        storage = param.untyped_storage()
        alone = sum(other.untyped_storage()._cdata == storage._cdata for other in own) == 1
        dense = param.nbytes == storage.nbytes() and param.is_contiguous()
        if storage._cdata not in others and alone and dense and param.nbytes >= max(1, min_bytes):
            found[names[param]] = param
    return found


def choose_weights(model: nn.Module, config: OffloadConfig) -> Chosen:
    """What of `model` may live on the host by `config`: whole layers, the last ones first.

    The first layers stay: the next forward needs them as soon as backward, which updates them last, is over.
    """
    candidates = movable(model, layers_of(model, None), int(config.min_bytes))
    sizes = {layer: sum(param.nbytes for param in params.values()) for layer, params in candidates.items()}
    everything = sum(sizes.values())
    if not everything:
        raise ConfigError(
            f"weights={config.weights!r}: no weight of the model's {len(candidates)} layers can leave; expected some "
            f"of at least min_bytes={format_size(int(config.min_bytes))} that no other module uses. Lower min_bytes, "
            "or leave weights out."
        )
    stays = _stays(model, list(sizes.values()), everything, config)
    chosen: Chosen = {}
    for layer, params in candidates.items():
        if stays >= sizes[layer]:
            stays -= sizes[layer]
        else:
            stays = 0
            chosen[layer] = params
    return chosen


def _stays(model: nn.Module, sizes: Sequence[int], everything: int, config: OffloadConfig) -> int:
    """Bytes of the layers' weights that may stay on the device."""
    if config.weights == "host":
        return 0
    if isinstance(config.weights, float):
        return int((1.0 - config.weights) * everything)
    total = sum(param.nbytes for param in model.parameters())
    budget = int(config.weights)
    if total <= budget:
        return everything
    need = total - everything + LAYERS_ON_DEVICE * max(sizes)
    if need > budget:
        raise ConfigError(
            f"weights={format_size(budget)} cannot hold what is not in the model's layers, "
            f"{format_size(total - everything)}, and {LAYERS_ON_DEVICE} layers of {format_size(max(sizes))} that are "
            f"on their way. Raise it to {format_size(need, up=True)}."
        )
    return budget - need
