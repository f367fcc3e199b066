# SPDX-License-Identifier: Apache-2.0
"""Megatron-core: `offload()` takes over the state inside Megatron's own optimizers.

    from offstage.integrations import megatron

    optimizer = get_megatron_optimizer(config, model)
    optimizer = megatron.offload(optimizer, model=model)

`config_from_megatron()` reads Megatron's own offload flags, and `offload_activations()` is for its layers.

megatron-core is imported when `offload()` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, Unpack

import torch

from offstage import OffloadConfig, OffloadedOptimizer
from offstage.config import OffloadSettings, documents
from offstage.integrations.megatron.activations import ActivationOffloads, offload_activations
from offstage.integrations.megatron.flags import MegatronFlags, config_from_megatron, switch_off
from offstage.integrations.megatron.package import megatron_core

_Megatron = TypeVar("_Megatron")


@documents(OffloadConfig)
def offload(
    optimizer: _Megatron,
    config: OffloadConfig | None = None,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    **settings: Unpack[OffloadSettings],
) -> _Megatron:
    """Keep the state of a Megatron optimizer in host memory, fp32 masters included, and return the same optimizer.

    `optimizer` is what `get_megatron_optimizer` has returned: an FP32Optimizer, a Float16OptimizerWithFloat16Params, a
    DistributedOptimizer, or a ChainedOptimizer of these. Its inner `optimizer` is an `OffloadedOptimizer` afterwards;
    clipping, loss scale, skipped steps, schedulers and checkpoints go on through Megatron's own methods. `model`: the
    model chunks, for names in messages, and for `window`, which is filled while gradients are reduced; a
    DistributedOptimizer knows them. `settings` are these fields of `OffloadConfig`:
    """
    megatron_core("megatron.core", why=f"{__name__}.offload()")
    from offstage.integrations.megatron.takeover import take_over

    take_over(optimizer, OffloadConfig.build(config, settings), _chunks(model))
    return optimizer


def parts(optimizer: Any) -> list[OffloadedOptimizer]:
    """The offloaded optimizers inside a Megatron optimizer, for `receipt()`, `plan`, `replan()` and `synchronize()`."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(one, "optimizer", None) for one in chain]
    return [one for one in inner if isinstance(one, OffloadedOptimizer)]


def _chunks(model: torch.nn.Module | Sequence[torch.nn.Module] | None) -> list[torch.nn.Module]:
    if model is None:
        return []
    return [model] if isinstance(model, torch.nn.Module) else list(model)


__all__ = [
    "ActivationOffloads",
    "MegatronFlags",
    "config_from_megatron",
    "offload",
    "offload_activations",
    "parts",
    "switch_off",
]
