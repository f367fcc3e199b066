# SPDX-License-Identifier: Apache-2.0
"""`Block`: one layer of the transformer, with its attention, its rotary positions and its SwiGLU.

Nothing in a block knows its number, so that `torch.compile` makes one piece of code for all of them. Shapes in comments
are named B (batch), T (tokens of a sequence), H and K (heads of queries; of keys and values), D (features of a head)
and W (width).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from offstage.train.experts import Mixture
from offstage.train.sizes import ModelConfig


class Rotary(NamedTuple):
    """How far each position turns each pair of features: one table for all blocks and heads."""

    cos: torch.Tensor  # [T, 1, D]: that of a pair twice, once for each of its features
    sin: torch.Tensor  # [T, 1, D / 2]


def rotary(config: ModelConfig, x: torch.Tensor) -> Rotary:
    """The table for `x` [B, T, W], in its format; angles are computed in fp32, where large positions stay apart."""
    pairs = torch.arange(0, config.head_width, 2, device=x.device, dtype=torch.float32) / config.head_width
    positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, config.rotary_base**-pairs).unsqueeze(1)  # [T, 1, D / 2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return Rotary(torch.cat((cos, cos), dim=-1), sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, heads, D] with feature i and feature i + D / 2 as the two of a pair."""
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin, value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin)
    return turned


class _Turn(torch.autograd.Function):
    """The gradient of a rotation is the rotation back: nothing but the table is kept, and half as much is moved."""

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
    """Two projections up, of which one gates the other, and one down. The two are one product."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False, **factory)
        self.down = nn.Linear(config.hidden, config.width, bias=False, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


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

        The loss is returned, not left in an attribute: what wraps a block (checkpointing, FSDP2, a compiler) knows
        about its outputs and nothing else.
        """
        x = x + self.attention(self.attention_norm(x), rotary)
        fed = self.feed_forward(self.feed_forward_norm(x))
        if isinstance(fed, tuple):
            return x + fed[0], fed[1]
        return x + fed, None
