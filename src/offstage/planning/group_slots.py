# SPDX-License-Identifier: Apache-2.0
"""`with_slots`: how many slots, where nobody has said. Asked by whoever places state, or plans to.

One chunk is fetched, one updated, one stored: three slots keep the link busy as long as updates come one after the
other. Under FSDP2 they come in bursts: it hands over the gradients of a whole group at once, when the group's backward
is over. So with `update_in_backward` there are as many slots as the largest group's state fills, up to a limit. Among
many ranks a rank's part of a group is small, and three remain.
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
"""A master weight and two moments: most optimizers have no more."""


def with_slots(config: OffloadConfig, model: nn.Module | None) -> OffloadConfig:
    """`config` with a number of slots for `model`. A limit on device memory leaves it at the few that are needed."""
    is_limited = config.device_budget is not None or config.device_peak is not None
    if config.slots is not None or not config.update_in_backward or is_limited or model is None:
        return config
    filled = math.ceil(_ELEMENT_BYTES * _largest_group(model) / int(config.chunk_bytes))
    return dataclasses.replace(config, slots=max(config.num_slots, min(_MOST, filled)))


def _largest_group(model: nn.Module) -> int:
    """Elements of this rank, of the parameters whose gradients FSDP2 reduces together; 0 without it."""
    sizes: Counter[int] = Counter()
    seen: set[torch.Tensor] = set()
    for module in reversed(list(model.modules())):  # inner groups first: what is left is the outer one's
        if isinstance(module, FSDPModule):
            own = {param for param in module.parameters() if _is_trained_shard(param)} - seen
            sizes[id(module._get_fsdp_state())] += sum(local_of(param).numel() for param in own)  # shared by a list
            seen |= own
    return max(sizes.values(), default=0)


def _is_trained_shard(param: torch.Tensor) -> bool:
    return param.requires_grad and isinstance(param, DTensor)
