# SPDX-License-Identifier: Apache-2.0
"""`with_slots`: the number of slots, where the user has not set one.

One chunk is fetched, one updated, one stored: three slots keep the link busy while updates come one after the other.
FSDP2 delivers the gradients of a whole group at once, when the group's backward is over. So with `update_in_backward`
there are as many slots as the largest group's state fills, up to a limit. With many ranks, one rank's part of a group
is small and three slots are enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from offstage.config import OffloadConfig
from offstage.tensors import local_of

_MOST = 24
_ELEMENT_BYTES = 12
"""A master weight and two moments: most optimizers keep no more."""


def with_slots(config: OffloadConfig, model: nn.Module | None) -> OffloadConfig:
    """`config` with the number of slots for `model`. With a limit on device memory it stays at the default."""
    is_limited = config.device_budget is not None or config.device_peak is not None
    has_none = config.update_on == "host"
    if config.slots is not None or not config.update_in_backward or is_limited or has_none or model is None:
        return config
    filled = math.ceil(_ELEMENT_BYTES * _largest_group(model) / config.most_chunk_bytes)
    return dataclasses.replace(config, slots=max(config.num_slots, min(_MOST, filled)))


def _largest_group(model: nn.Module) -> int:
    """This rank's elements of the largest group of parameters that FSDP2 reduces together; 0 without FSDP2."""
    sizes: Counter[int] = Counter()
    seen: set[torch.Tensor] = set()
    for module in reversed(list(model.modules())):  # inner groups first; the outer one owns the rest
        if isinstance(module, FSDPModule):
            own = {param for param in module.parameters() if _is_trained_shard(param)} - seen
            sizes[id(module._get_fsdp_state())] += sum(
                local_of(param).numel() for param in own
            )  # a list of modules shares it
            seen |= own
    return max(sizes.values(), default=0)


def _is_trained_shard(param: torch.Tensor) -> bool:
    return param.requires_grad and isinstance(param, DTensor)
