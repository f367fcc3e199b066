# SPDX-License-Identifier: Apache-2.0
"""`Views`: what the offloaded optimizer updates in place of Megatron's fp32 main parameters.

A 16-bit weight is updated through a view of its own memory: its fp32 master is part of the state, and Megatron's copies
between main and model parameters have nothing left to do. A view is another tensor than the parameter because Megatron
clears the gradient of one when it has put it into the other. It takes fp32 gradients (`grad_dtype`), as Megatron
reduces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.optimizer import DistributedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer import copy_optimizer_param_metadata

from offstage.integrations.megatron.refusals import check_plain

Groups = list[list[torch.Tensor]]


@dataclass
class Views:
    """Of one Megatron optimizer."""

    params: Groups
    """What to update, in the places of what each of its parameter groups has now."""
    before: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    """By view: what was updated there so far, with its own memory where the view is of a 16-bit weight."""
    names: dict[torch.Tensor, str] = field(default_factory=dict)
    low: Groups = field(default_factory=list)
    """Those of 16-bit weights, by group."""
    full: Groups = field(default_factory=list)
    """Those of fp32 weights, by group."""

    def as_module(self) -> torch.nn.Module:
        """A module that never runs and has every parameter under its name, as `offstage.offload` wants a model."""
        root = torch.nn.Module()
        for number, param in enumerate(param for group in self.params for param in group):
            *path, last = self.names.get(param, f"parameter {number}").split(".")
            module = root
            for name in path:
                if name not in module._modules:
                    module.add_module(name, torch.nn.Module())
                module = module.get_submodule(name)
            # The chunks of a pipeline's stage have the same names.
            module.register_parameter(last if last not in module._parameters else f"{last} ({number})", param)  # type: ignore[arg-type]
        return root

    def master_of(self, view: torch.Tensor) -> torch.Tensor | None:
        """The fp32 master that Megatron has kept so far."""
        main = self.before.get(view)
        return main.detach() if main is not None and main.dtype != view.dtype else None


def views_of(optimizer: Any, chunks: Iterable[torch.nn.Module]) -> Views:
    """The views that `optimizer` needs; nothing of it changes."""
    names: dict[torch.Tensor, str] = {param: name for chunk in chunks for name, param in chunk.named_parameters()}
    now = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    views = Views(now)
    if isinstance(optimizer, DistributedOptimizer):
        pairs = _pairs(optimizer.model_float16_groups, optimizer.shard_float16_groups)
        views.low = _replace(views, pairs, optimizer.shard_fp32_from_float16_groups, names)
        pairs = _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
        views.full = _replace(views, pairs, optimizer.shard_fp32_groups, names)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = _pairs(optimizer.float16_groups, optimizer.float16_groups)
        views.low = _replace(views, pairs, optimizer.fp32_from_float16_groups, names)
        views.names |= names
    else:
        views.names |= names
    return views


def _pairs(models: Groups, locals_: Groups) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(parameter of the model, this rank's part of it), by group."""
    return [list(zip(model, local, strict=True)) for model, local in zip(models, locals_, strict=True)]


def _replace(
    views: Views,
    models: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    mains: Groups,
    names: dict[torch.Tensor, str],
) -> Groups:
    """Put a view in the place of every one of `mains`."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    result: Groups = []
    for model_group, main_group in zip(models, mains, strict=True):
        result.append([])
        for (param, local), main in zip(model_group, main_group, strict=True):
            name = names.get(param, f"of shape {tuple(param.shape)}")
            check_plain(param, name)
            view = _view(local, main)
            views.before[view], views.names[view], made[main] = main, name, view
            result[-1].append(view)
    views.params = [[made.get(param, param) for param in group] for group in views.params]
    return result


def _view(local: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    view = torch.nn.Parameter(local.detach())  # which is trained, though autograd never sees it
    view.grad_dtype = None  # type: ignore[attr-defined]  # any: Megatron's gradients are fp32
    tensor_parallel.copy_tensor_model_parallel_attributes(view, main)
    tensor_parallel.copy_gtp_attributes(view, main)
    copy_optimizer_param_metadata(view, main)
    return view


def install(optimizer: Any, views: Views) -> None:
    """Put the views where `optimizer` looks for its main parameters; those are freed."""
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.shard_float16_groups = optimizer.shard_fp32_from_float16_groups = views.low
        optimizer.shard_fp32_groups = views.full
        for group_range, params in zip(optimizer.opt_group_ranges, views.params, strict=True):
            group_range["orig_group"]["params"] = params  # another list of them, from when it was made
        model_params: Iterable[Any] = (param for buffer in optimizer.buffers for param in buffer.params)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        optimizer.fp32_from_float16_groups = views.low
        model_params = (param for group in optimizer.float16_groups for param in group)
    else:
        model_params = ()
    for param in model_params:  # Megatron's own measure of weights then reads the weights
        for name in ("main_param", "main_param_sharded"):
            if hasattr(param, name):
                delattr(param, name)
    views.before.clear()
