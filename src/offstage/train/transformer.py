# SPDX-License-Identifier: Apache-2.0
"""`Transformer`: blocks between an embedding and a head, and the loss.

It is made on meta and then allocated on its device, so that there is never a second copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offstage.train.blocks import Block, rotary
from offstage.train.language_model import LanguageModel, initialize
from offstage.train.model_sizes import ModelConfig

LOSS_SLICE_BYTES = 256 * 2**20
"""Most bytes of fp32 logits at a time while the loss is computed."""


class Transformer(LanguageModel):
    """Decoder-only, over tokens."""

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config, self.vocabulary = config, config.vocabulary
        factory: dict[str, Any] = {"device": "meta", "dtype": dtype}  # without torch's own initialization
        self.embedding = nn.Embedding(config.vocabulary, config.width, **factory)
        self.blocks = nn.ModuleList(Block(config, **factory) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps, **factory)
        self.head = Head(config.width, config.vocabulary, bias=False, **factory)
        self.checkpointed: frozenset[int] = frozenset()
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type != "meta":
            self.materialize(device)

    def materialize(self, device: torch.device | str, seed: int = 0, home: torch.device | None = None) -> None:
        self.to_empty(device=device if home is None else home)
        initialize(self, self.config.layers, seed, device)

    def reset_parameters(self, seed: int = 0) -> None:
        """Fill in first weights."""
        initialize(self, self.config.layers, seed)

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)

    def groups(self) -> list[nn.Module | list[nn.Module]]:
        return [*self.blocks, [self.norm, self.head]]

    def checkpoint_layers(self, numbers: Collection[int] | None = None) -> None:
        self.checkpointed = frozenset(range(len(self.blocks)) if numbers is None else numbers)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x, balance = run_blocks(self.config, enumerate(self.blocks), self.embedding(tokens), self.checkpointed)
        result: torch.Tensor = self.head(self.norm(x), targets)
        return result if targets is None else with_balance(self.config, result, balance if self.training else None)


# Parts of a forward, for whole models and for stages of them


class Head(nn.Linear):
    """Logits [B, T, V] of the last features `x` [B, T, W]; with `targets` [B, T], the mean loss instead.

    Logits are the largest tensor of a model with a large vocabulary. For the loss, only one slice of them exists at a
    time, in forward and, recomputed, in backward. All slices are in one forward, so that FSDP2 gathers the weight once
    and reduces its gradient once.
    """

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if targets is None:
            return super().forward(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        num_slices = -(-4 * self.out_features * len(targets) // LOSS_SLICE_BYTES)
        if num_slices == 1:
            return self._summed_loss(x, targets) / len(targets)
        sums = [
            checkpoint(self._summed_loss, part, expected, use_reentrant=False, preserve_rng_state=False)
            for part, expected in zip(x.chunk(num_slices), targets.chunk(num_slices), strict=True)
        ]
        return torch.stack(sums).sum() / len(targets)

    def _summed_loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(x).float(), targets, reduction="sum")


def run_blocks(
    config: ModelConfig, blocks: Iterable[tuple[int, nn.Module]], x: torch.Tensor, checkpointed: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`x` [B, T, W] after the numbered blocks, and the sum of their balancing losses if they have experts."""
    table, balance = rotary(config, x), None
    for number, block in blocks:
        if number in checkpointed:
            # A block uses no random numbers.
            x, added = checkpoint(block, x, table, use_reentrant=False, preserve_rng_state=False)
        else:
            x, added = block(x, table)
        if added is not None:
            balance = added if balance is None else balance + added
    return x, balance


def with_balance(config: ModelConfig, loss: torch.Tensor, balance: torch.Tensor | None) -> torch.Tensor:
    """The loss to train on; `balance` is the sum over all blocks."""
    return loss if balance is None else loss + config.balance_weight / config.layers * balance
