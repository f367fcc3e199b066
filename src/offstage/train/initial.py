# SPDX-License-Identifier: Apache-2.0
"""`initialize`: the first weights, which depend on the seed and on a parameter's name and nothing else.

Not on the order in which parameters are made, nor on how many there are in this process: a pipeline stage, a shard of
FSDP2 and a whole model begin with the same weights, and no process ever holds more than it keeps plus one parameter.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

STD = 0.02
INTO_THE_STREAM = ("attention.out.weight", "feed_forward.down.weight", "feed_forward.down")
"""Ends of the names of projections whose result is added to what flows from block to block."""


@torch.no_grad()
def initialize(module: nn.Module, num_layers: int, seed: int) -> None:
    """Fill all parameters of `module` in place, on whatever device they are; those on meta are left alone."""
    for name, param in module.named_parameters():
        if param.is_meta:
            continue
        if param.dim() == 1:  # a norm
            nn.init.ones_(param)
            continue
        # Every block adds twice to the stream; scaled, the sum does not grow with the number of blocks.
        std = STD / math.sqrt(2 * num_layers) if name.endswith(INTO_THE_STREAM) else STD
        if isinstance(param, DTensor):
            whole = torch.empty(param.shape, dtype=param.dtype, device=param.to_local().device)
            copy_shard(param, _normal(whole, std, seed, name))
        else:
            _normal(param, std, seed, name)


def copy_shard(param: DTensor, whole: torch.Tensor) -> None:
    """This rank's part of `whole`, of which every rank has the same: nothing is sent."""
    shard = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    param.to_local().copy_(shard.to_local())


def _normal(tensor: torch.Tensor, std: float, seed: int, name: str) -> torch.Tensor:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "big") >> 1)
    return tensor.normal_(std=std, generator=generator)
