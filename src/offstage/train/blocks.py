# SPDX-License-Identifier: Apache-2.0
"""`Block`: one layer of the transformer, with attention, rotary positions, and a SwiGLU or a `Mixture` of them.

A block does not know its number, so that `torch.compile` compiles one graph for all of them. Shapes in comments
are named B (batch), T (tokens of a sequence), H and K (heads of queries; of keys and values), D (features of a head)
and W (width).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from offstage.train.model_sizes import ModelConfig


class Rotary(NamedTuple):
    """The rotation of each pair of features at each position: one table for all blocks and heads."""

    cos: torch.Tensor  # [T, 1, D]: each value twice, once per feature of the pair
    sin: torch.Tensor  # [T, 1, D / 2]


def rotary(config: ModelConfig, x: torch.Tensor) -> Rotary:
    """The table for `x` [B, T, W], in its dtype; angles are computed in fp32, which keeps large positions distinct."""
    pairs = torch.arange(0, config.head_width, 2, device=x.device, dtype=torch.float32) / config.head_width
    positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, config.rotary_base**-pairs).unsqueeze(1)  # [T, 1, D / 2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return Rotary(torch.cat((cos, cos), dim=-1), sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, heads, D] rotated; features i and i + D / 2 are a pair."""
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin)
    return turned


class _Turn(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation: only the table is saved for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, -sin), None, None


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values than of queries."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_width
        self.qkv = nn.Linear(config.width, config.qkv_width, bias=False, **factory)
        self.out = nn.Linear(config.width, config.width, bias=False, **factory)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        qkv = self.qkv(x).view(*x.shape[:-1], -1, self.head_width)  # [B, T, H + 2 K, D]
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        turned: torch.Tensor = _Turn.apply(qk, *rotary)  # type: ignore[no-untyped-call]
        q, k = torch.split(turned, [self.heads, self.kv_heads], dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D] and twice [B, K, T, D]
        grouped = self.heads != self.kv_heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Two projections up, computed as one product, of which one gates the other; and one down."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False, **factory)
        self.down = nn.Linear(config.hidden, config.width, bias=False, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """A mixture of experts: a router sends each token to a few of E SwiGLUs, and no token is dropped.

    An expert takes any number of tokens: tokens are sorted by expert and multiplied group by group, in bf16 by one
    kernel and without the host learning their number. All experts are in one parameter: each has a gradient in every
    step, of zeros if no token came, because FSDP2 expects the same gradients on all ranks.

    Shapes: N tokens, W width, E experts, k of them per token, h hidden features.
    """

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.experts, self.per_token = config.experts, config.experts_per_token
        self.router = nn.Linear(config.width, config.experts, bias=False, **factory)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.hidden, config.width, **factory))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.hidden, **factory))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mixed output for `x` [..., W], and the balancing loss."""
        tokens = x.flatten(0, -2)  # [N, W]
        shares = self.router(tokens).float().softmax(dim=-1)  # [N, E]
        weights, chosen = shares.topk(self.per_token, dim=-1)  # [N, k]
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        expert_of, order = chosen.flatten().sort(stable=True)  # [N k], the tokens of expert 0 first
        ends = torch.searchsorted(expert_of, torch.arange(self.experts, dtype=torch.int64, device=x.device), right=True)

        # Copy first, then permute: the gradient of a permutation sums nothing, so its bits do not depend on an order.
        copies = tokens.unsqueeze(1).expand(-1, self.per_token, -1).flatten(0, 1)[order]  # [N k, W]
        fed = self._feed(copies, ends.to(torch.int32))[order.argsort()]  # each token's k are adjacent again
        mixed = (fed.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)  # [N, W]
        return mixed.view_as(x), balancing_loss(shares, ends)

    def _feed(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """SwiGLU of each group of tokens with its expert; `ends` are the ends of the groups."""
        grouped = F.grouped_mm if tokens.dtype == torch.bfloat16 else grouped_product
        gate, up = grouped(tokens, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)  # [N k, h]
        return grouped(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)


@torch.compiler.disable
def grouped_product(tokens: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm` for dtypes other than bf16, which it does not support when compiled."""
    parts = torch.tensor_split(tokens, offs[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def balancing_loss(shares: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """1 where tokens are spread evenly over the experts, more where they are not, up to the number of experts.

    For each expert: its share of visits times the router's mean probability for it, as in the Switch Transformer. The
    first has no gradient, so that the router lowers its probabilities where visits are many.
    """
    visits = ends.diff(prepend=ends.new_zeros(1))  # [E]
    return shares.shape[-1] * (visits / ends[-1] * shares.mean(dim=0)).sum()


class Block(nn.Module):
    """Attention, then SwiGLU or a mixture of experts, each on normed input and added to it."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps, **factory)
        self.attention = Attention(config, **factory)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_eps, **factory)
        self.feed_forward = Mixture(config, **factory) if config.experts else SwiGLU(config, **factory)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`x` [B, T, W] after this block, and the block's balancing loss if it has experts.

        The loss is returned, not stored in an attribute: wrappers of a block (checkpointing, FSDP2, a compiler) track
        only its outputs.
        """
        x = x + self.attention(self.attention_norm(x), rotary)
        fed = self.feed_forward(self.feed_forward_norm(x))
        if isinstance(fed, tuple):
            return x + fed[0], fed[1]
        return x + fed, None
