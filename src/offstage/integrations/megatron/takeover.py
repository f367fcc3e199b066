# SPDX-License-Identifier: Apache-2.0
"""Taking over: every optimizer of a chain is made ready first, then all of them change at once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer

import offstage
from offstage import OffloadConfig, OffloadedOptimizer, OffloadIneffectiveError
from offstage.integrations.megatron import inner, views
from offstage.integrations.megatron.optimizers import OFFLOADED, OffloadedChain
from offstage.integrations.megatron.reduction import FetchUnderReduction
from offstage.integrations.megatron.refusals import check_models, check_optimizer, check_settings, check_window

logger = logging.getLogger("offstage")


@dataclasses.dataclass
class _Ready:
    """One Megatron optimizer and what it will have."""

    optimizer: Any
    views: views.Views
    offloaded: OffloadedOptimizer
    was_fused: bool


def take_over(optimizer: Any, config: OffloadConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Make every inner optimizer of `optimizer` an offloaded one. If it fails, nothing has changed."""
    is_chain = type(optimizer) in (ChainedOptimizer, OffloadedChain)
    chain = list(optimizer.chained_optimizers) if is_chain else [optimizer]
    for one in chain:
        check_optimizer(one, list(OFFLOADED))
    there = [one for one in chain if not one.is_stub_optimizer]
    check_settings(config, len(there))
    known = list(dict.fromkeys([*chunks, *(chunk for one in there for chunk in getattr(one, "model_chunks", ()))]))
    check_models(known)
    check_window(config, known)
    if not there:
        logger.info("Megatron: this rank trains no parameters; there is nothing to offload")
    for ready in _all_ready(there, config, known):
        _commit(ready, known)
    if is_chain:
        optimizer.__class__ = OffloadedChain


def _all_ready(chain: Sequence[Any], config: OffloadConfig, chunks: Sequence[torch.nn.Module]) -> list[_Ready]:
    """An optimizer of a chain in which nothing can leave stays resident if others have something."""
    ready: list[_Ready] = []
    idle: list[tuple[Any, OffloadIneffectiveError]] = []
    for one in chain:
        try:
            ready.append(_ready(one, config, chunks))
        except OffloadIneffectiveError as error:
            idle.append((one, error))
    if idle and not ready:
        raise idle[0][1]
    resident = OffloadConfig(
        fraction=0.0, rule=config.rule, master_weights=config.master_weights, state_dtype=config.state_dtype
    )
    for one, reason in idle:
        logger.warning("Megatron: one optimizer of the chain stays on the device: %s", reason)
        ready.append(_ready(one, resident, chunks))
    return ready


def _ready(optimizer: Any, config: OffloadConfig, chunks: Sequence[torch.nn.Module]) -> _Ready:
    """Everything that `optimizer` will have; it has not changed yet."""
    made = views.views_of(optimizer, chunks)
    plain = optimizer.optimizer
    offloaded = offstage.offload(inner.torch_twin(plain, made), made.as_module(), config)
    return _Ready(optimizer, made, offloaded, inner.is_fused(plain))


def _commit(ready: _Ready, chunks: Sequence[torch.nn.Module]) -> None:
    optimizer, offloaded = ready.optimizer, ready.offloaded
    plain = optimizer.optimizer
    for group, new in zip(plain.param_groups, offloaded.param_groups, strict=True):
        group.clear()
        group.update(new)
    offloaded.param_groups = plain.param_groups  # schedulers may hold its dicts
    inner.keep_step_format(offloaded, fused=ready.was_fused)
    optimizer.optimizer = offloaded
    optimizer.init_state_fn = inner.init_state_fn
    views.install(optimizer, ready.views)
    optimizer.__class__ = OFFLOADED[type(optimizer)]
    optimizer.fetching = FetchUnderReduction(offloaded, chunks) if offloaded.config.window else None
    optimizer.view_of = {}
    plain.state = {}
    plain.step = _refuse
    plain._offstage_consumed = True


def _refuse(*_: Any, **__: Any) -> None:
    raise offstage.OffstageError(
        "This optimizer was inside a Megatron optimizer that was given to offstage, which took over its state. Call "
        "step() on the Megatron optimizer."
    )
