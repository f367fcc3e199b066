# SPDX-License-Identifier: Apache-2.0
"""The workload of every whole-iteration figure: a 2.70B GPT, bf16, every block checkpointed.

32 blocks, width 2560, SwiGLU 6912, 20 heads, vocabulary 32,000 untied, RMSNorm, 8 x 2048 tokens per micro-batch, the
loss computed in 8 checkpointed slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.anywhere import DEVICE

SLICES = 8


@dataclass(frozen=True)
class Size:
    blocks: int = 32
    width: int = 2560
    hidden: int = 6912
    heads: int = 20
    vocabulary: int = 32_000
    sequence: int = 2048


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.gate_up = nn.Linear(size.width, 2 * size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [batch, heads, sequence, head]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Head(nn.Linear):
    """The output projection and the loss behind it, of a slice at a time: one module, which FSDP2 can shard alone."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        losses = [
            checkpoint(self._loss, part, target, use_reentrant=False)
            for part, target in zip(x.chunk(SLICES), targets.chunk(SLICES), strict=True)
        ]
        return torch.stack(losses).sum() / len(targets)

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, self.weight).float(), targets, reduction="sum")


class GPT(nn.Module):
    """`forward` returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.RMSNorm(size.width)
        self.head = Head(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self._through_blocks(self.embedding(tokens))).flatten(0, 1)
        return self.head(x, tokens.roll(-1, dims=1).flatten())

    def _through_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


Kind = TypeVar("Kind", bound=GPT)


def build(size: Size, seed: int = 0, kind: type[Kind] = GPT) -> Kind:  # type: ignore[assignment]
    """The model in bf16 on the device, initialised there."""
    torch.manual_seed(seed)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            model = kind(size)
    finally:
        torch.set_default_dtype(previous)
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.02)
    return model


def tokens(size: Size, batch: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(size.vocabulary, (batch, size.sequence), generator=generator, device=DEVICE)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
