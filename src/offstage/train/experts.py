# SPDX-License-Identifier: Apache-2.0
"""`Mixture`: a mixture of experts. A router sends each token to a few of a block's SwiGLUs, and no token is dropped.

Experts take any number of tokens each: tokens are sorted by expert and multiplied group by group, in bf16 by one kernel
and without the host learning how many there are. All experts are in one parameter: each has a gradient in every step,
of zeros if no token came, which is what FSDP2 expects of all ranks alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offstage.train.sizes import ModelConfig


class Mixture(nn.Module):
    """Shapes: N tokens, W width, E experts, k of them per token, h hidden features."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.experts, self.per_token = config.experts, config.experts_per_token
        self.router = nn.Linear(config.width, config.experts, bias=False, **factory)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.hidden, config.width, **factory))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.hidden, **factory))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the experts make of `x` [..., W], and the balancing loss."""
        tokens = x.flatten(0, -2)  # [N, W]
        shares = self.router(tokens).float().softmax(dim=-1)  # [N, E]
        weights, chosen = shares.topk(self.per_token, dim=-1)  # [N, k]
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        expert_of, order = chosen.flatten().sort(stable=True)  # [N k], the tokens of expert 0 first
        ends = torch.searchsorted(expert_of, torch.arange(self.experts, device=x.device), right=True)

        # Copies first, then a permutation: its gradient adds nothing up, so that its bits do not depend on an order.
        copies = tokens.unsqueeze(1).expand(-1, self.per_token, -1).flatten(0, 1)[order]  # [N k, W]
        fed = self._feed(copies, ends.to(torch.int32))[order.argsort()]  # each token's k next to each other again
        mixed = (fed.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)  # [N, W]
        return mixed.view_as(x), balancing_loss(shares, ends)

    def _feed(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """SwiGLU of each group of tokens with its own expert; `ends` says where groups end."""
        grouped = F.grouped_mm if tokens.dtype == torch.bfloat16 else grouped_product
        gate, up = grouped(tokens, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)  # [N k, h]
        return grouped(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)


@torch.compiler.disable
def grouped_product(tokens: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm` for formats other than bf16, which its compiler does not take."""
    parts = torch.tensor_split(tokens, offs[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def balancing_loss(shares: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """1 where tokens are spread evenly over the experts, more where they are not, up to the number of experts.

    For each expert: the share of visits it got times the router's mean share for it, as in the Switch Transformer. The
    first has no gradient, so that the router lowers its shares where visits are many.
    """
    visits = ends.diff(prepend=ends.new_zeros(1))  # [E]
    return shares.shape[-1] * (visits / ends[-1] * shares.mean(dim=0)).sum()
