# SPDX-License-Identifier: Apache-2.0
"""A model, a state dict or plain numbers → `ParamSize`s. Pure: only shapes and formats are looked at.

Used by `planner.py`. State is counted as the AdamW rule keeps it; whoever trains with another optimizer gives
`ParamSize`s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.planning.layout import padded_bytes
from offstage.planning.plan import ParamSize
from offstage.rules.adamw import AdamRule
from offstage.tensors import local_of

EXPERTS = r"(^|\.)experts(\.|$)"
"""Which names belong to routed experts: a part of the dotted name is ``experts``. ``shared_experts`` are not meant:
every token uses them."""

Shape = int | Sequence[int]
Source = nn.Module | Mapping[str, "torch.Tensor | Shape"] | Sequence[ParamSize]
"""What a plan can be made of."""


def param_sizes(
    source: Source,
    config: OffloadConfig | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    experts: str = EXPERTS,
) -> list[ParamSize]:
    """What AdamW keeps for each parameter of `source` in the formats of `config`, in the order of forward.

    `source` is a model (on any device, the meta device too), a state dict, or a mapping from names to shapes or numbers
    of elements; the last are taken to be of `dtype`. `ParamSize`s are returned as they are. `experts` is a pattern that
    finds the names of routed experts.
    """
    if isinstance(source, nn.Module):
        named: Iterable[tuple[str, torch.Tensor]] = source.named_parameters()
    elif isinstance(source, Mapping):
        named = _of_mapping(source, dtype)
    elif all(isinstance(size, ParamSize) for size in source):
        return list(source)
    else:
        raise ConfigError(
            "make_plan expects a model, a state dict, ParamSizes, or a mapping from names to shapes or numbers of "
            f"elements; found a {type(source).__name__} of {', '.join(sorted({type(one).__name__ for one in source}))}."
            " Pass dict(model.named_parameters()), or {'layers.0.weight': (4096, 4096), ...}."
        )
    rule = AdamRule(config or OffloadConfig(), decoupled=True)
    return [_size(name, tensor, rule, bool(re.search(experts, name))) for name, tensor in named]


def _of_mapping(source: Mapping[str, torch.Tensor | Shape], dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
    seen = set()
    for name, given in source.items():
        if not isinstance(given, torch.Tensor):
            yield name, _stand_in(name, given, dtype)
        elif given.is_floating_point():  # a state dict holds buffers too; those that count something are not trained
            storage = (given.untyped_storage()._cdata, given.storage_offset(), tuple(given.shape))
            if storage not in seen:  # tied parameters have two names
                seen.add(storage)
                yield name, given


def _stand_in(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if isinstance(shape, bool) or not all(isinstance(dim, int) and dim >= 0 for dim in dims):
        raise ConfigError(
            f"A plan from plain sizes expects a number of elements or a shape for each name; found {shape!r} for "
            f"{name!r}. Write {{{name!r}: (4096, 4096)}}."
        )
    return torch.empty(dims, dtype=dtype, device="meta")


def _size(name: str, tensor: torch.Tensor, rule: AdamRule, expert: bool) -> ParamSize:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    tensor = local_of(tensor)  # a plan is one rank's
    keys = () if frozen else rule.keys(tensor, {"amsgrad": False})
    itemsize = {key.name: key.dtype.itemsize for key in keys}
    return ParamSize(
        name,
        str(tensor.device),
        state_bytes=tensor.numel() * sum(itemsize.values()),
        padded_bytes=padded_bytes(dict.fromkeys(itemsize, tensor.numel()), itemsize) if itemsize else 0,
        splits=rule.splits(tensor.device),
        numel=tensor.numel(),
        weight_bytes=tensor.nbytes,
        expert=expert,
    )
