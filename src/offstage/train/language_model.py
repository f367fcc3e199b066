# SPDX-License-Identifier: Apache-2.0
"""`LanguageModel`: the interface of a model to the trainer; `initialize`: first weights.

First weights depend on the seed and on a parameter's name and nothing else: not on the order in which parameters are
made, nor on how many there are in this process. A pipeline stage, a shard of FSDP2 and a whole model begin with the
same weights, and no process ever holds more than it keeps plus one parameter.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

STD = 0.02
INTO_THE_STREAM = ("attention.out.weight", "feed_forward.down.weight", "feed_forward.down")
"""Name suffixes of projections whose result is added to the residual stream."""


class LanguageModel(nn.Module, abc.ABC):
    """The trainer's view of a model. All computation is in `forward`, where FSDP2 and offloading have their hooks."""

    vocabulary: int
    """Tokens are in ``range(vocabulary)``."""

    @abc.abstractmethod
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, T, vocabulary] of `tokens` [B, T]; with `targets` [B, T], the mean loss instead."""

    @abc.abstractmethod
    def materialize(self, device: torch.device | str, seed: int = 0, home: torch.device | None = None) -> None:
        """Allocate a model that was made on meta and fill in first weights; after `fully_shard` if it is sharded.

        `home`: where it is allocated, if not on `device`: for weights that live on the host.
        """

    @abc.abstractmethod
    def layers(self) -> list[nn.Module]:
        """The blocks in order, which are compiled, checkpointed and offloaded one by one."""

    def groups(self) -> list[nn.Module | list[nn.Module]]:
        """Modules that FSDP2 gathers and reduces together. The others are reduced at the end of backward."""
        return [*self.layers()]

    @abc.abstractmethod
    def checkpoint_layers(self, numbers: Collection[int] | None = None) -> None:
        """Keep only the inputs of these layers (all, if ``None``) for backward, which recomputes them."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, vocabulary]: predictions of the token after each of `tokens` [B, T]."""
        return self(tokens)  # type: ignore[no-any-return]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting `targets` [B, T], in fp32. While training, with the balancing loss of experts."""
        return self(tokens, targets)  # type: ignore[no-any-return]


@torch.no_grad()
def initialize(module: nn.Module, num_layers: int, seed: int, device: torch.device | str | None = None) -> None:
    """Fill all parameters of `module` in place, except those on meta.

    `device`: whose bits they have, if they are elsewhere. It holds one parameter at a time.
    """
    for name, param in module.named_parameters():
        if param.is_meta:
            continue
        if param.dim() == 1:  # a norm
            nn.init.ones_(param)
            continue
        # Every block adds twice to the residual stream: scaled so that the sum does not grow with the number of blocks.
        std = STD / math.sqrt(2 * num_layers) if name.endswith(INTO_THE_STREAM) else STD
        if isinstance(param, DTensor):
            whole = torch.empty(param.shape, dtype=param.dtype, device=param.to_local().device)
            copy_shard(param, _normal(whole, std, seed, name))
        elif device is None or param.device.type == torch.device(device).type:
            _normal(param, std, seed, name)
        else:
            param.copy_(_normal(torch.empty_like(param, device=device), std, seed, name))


def copy_shard(param: DTensor, whole: torch.Tensor) -> None:
    """Copy this rank's shard of `whole`, which is the same on every rank: no communication."""
    shard = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
    param.to_local().copy_(shard.to_local())


def _normal(tensor: torch.Tensor, std: float, seed: int, name: str) -> torch.Tensor:
    return tensor.normal_(std=std, generator=generator_for(tensor.device, seed, name))


def generator_for(device: torch.device, seed: int, name: str) -> torch.Generator:
    """Of the first values of the parameter called `name`."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)
