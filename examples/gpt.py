# SPDX-License-Identifier: Apache-2.0
"""A small decoder-only GPT over bytes, and the bytes: Python's own standard library. For the other examples."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """About 3.3 million parameters: small enough for two CPU cores."""

    vocabulary: int = 256
    width: int = 256
    blocks: int = 4
    heads: int = 4
    context: int = 64


class Linear(nn.Module):
    """bf16 weights, products in the format of the activations."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(std=0.02).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), eps=1e-6)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = RMSNorm(shape.width), RMSNorm(shape.width)
        self.qkv, self.out = Linear(shape.width, 3 * shape.width), Linear(shape.width, shape.width)
        self.up, self.down = Linear(shape.width, 4 * shape.width), Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.norm_attention(x), hidden))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))

    def attend(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Attention in plain products, which are deterministic everywhere. `hidden` marks the future."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5  # (B, H, T, T)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v  # (B, H, T, D)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """Byte tokens in, loss of the next byte out."""

    def __init__(self, shape: Shape, activations: torch.dtype) -> None:
        super().__init__()
        self.activations = activations
        self.tokens = nn.Embedding(shape.vocabulary, shape.width, dtype=torch.bfloat16)
        self.positions = nn.Embedding(shape.context, shape.width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm, self.head = RMSNorm(shape.width), Linear(shape.width, shape.vocabulary)
        hidden = torch.ones(shape.context, shape.context, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        where = torch.arange(tokens.shape[1], device=tokens.device)
        x = (self.tokens(tokens) + self.positions(where)).to(self.activations)  # (B, T, C)
        for block in self.blocks:
            x = block(x, self.hidden)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stdlib_bytes(most: int = 4 * 2**20) -> torch.Tensor:
    """The standard library's source, file after file in the order of their names."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
    return torch.frombuffer(data[:most], dtype=torch.uint8)


def make_repeatable(device: torch.device) -> None:
    """Two runs may differ only in where the state lives, so everything else must repeat exactly."""
    # cuBLAS gives the same bits every time only with a fixed workspace, chosen before its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if device.type == "cpu":
        # Some virtual machines report AMX and do not allow it: oneDNN's bf16 matrix products then die of an
        # illegal instruction. torch has other kernels.
        torch.backends.mkldnn.enabled = False
