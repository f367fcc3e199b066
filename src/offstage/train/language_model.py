# SPDX-License-Identifier: Apache-2.0
"""`LanguageModel`: what the trainer needs of a model, be it ours (`transformer.py`) or another's (`causal_lm.py`)."""

from __future__ import annotations

import abc
from collections.abc import Collection

import torch
from torch import nn


class LanguageModel(nn.Module, abc.ABC):
    """What the trainer needs of a model. `forward` does everything: whatever hooks a model hooks its forward."""

    vocabulary: int
    """Tokens are smaller than this."""

    @abc.abstractmethod
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, T, vocabulary] of `tokens` [B, T]; with `targets` [B, T], the mean loss instead."""

    @abc.abstractmethod
    def materialize(self, device: torch.device | str, seed: int = 0) -> None:
        """Give a model that was made on meta its memory and first weights, after `fully_shard` if it is sharded."""

    @abc.abstractmethod
    def layers(self) -> list[nn.Module]:
        """The blocks in order: what is compiled, checkpointed and offloaded one by one."""

    def groups(self) -> list[nn.Module | list[nn.Module]]:
        """What FSDP2 gathers and reduces together. What is in none of them is reduced when backward is over."""
        return [*self.layers()]

    @abc.abstractmethod
    def checkpoint_layers(self, numbers: Collection[int] | None = None) -> None:
        """Keep only the inputs of these layers (all, if ``None``) for backward, which runs them again."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, T, vocabulary]: what follows each of `tokens` [B, T]."""
        return self(tokens)  # type: ignore[no-any-return]

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting `targets` [B, T], in fp32. While training, with the balancing loss of experts."""
        return self(tokens, targets)  # type: ignore[no-any-return]
