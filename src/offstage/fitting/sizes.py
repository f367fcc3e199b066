# SPDX-License-Identifier: Apache-2.0
"""`sizes_of`: the parameters of a model that an optimizer trains, as planners see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from offstage.config import OffloadConfig
from offstage.optimizer.places import Places
from offstage.planning.sizes import ParamSize
from offstage.rules.rule import ParamState, Rule
from offstage.tensors import local_of


def sizes_of(
    model: nn.Module,
    groups: Iterable[dict[str, Any]],
    rule: Rule,
    config: OffloadConfig,
    layer_of: Mapping[torch.Tensor, int | None],
) -> list[ParamSize]:
    """Each parameter with the state that this optimizer keeps, and the number of its layer if it may leave."""
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}
    places = Places(rule, config, names)
    sizes, seen = [], set()
    for group in groups:
        for param in group["params"]:
            keys = rule.keys(local_of(param), group) if param.requires_grad else ()
            state = ParamState(param, names.get(param, ""), keys, rule=rule, frozen=not keys)
            size = places.size_of(state)
            sizes.append(dataclasses.replace(size, layer=layer_of.get(param), has_gradient=param.requires_grad))
            seen.add(param)
    for name, param in model.named_parameters():
        if param not in seen:
            size = ParamSize(name, str(param.device), 0, 0, True, numel=param.numel(), weight_bytes=param.nbytes)
            sizes.append(dataclasses.replace(size, layer=layer_of.get(param)))
    return sizes


def num_trained(groups: Iterable[dict[str, Any]]) -> int:
    """How many are trained now: sizes are of no use any more if it has changed."""
    return sum(param.requires_grad for group in groups for param in group["params"])
