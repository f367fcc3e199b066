# SPDX-License-Identifier: Apache-2.0
"""What sleeps in `benchmarks.sleep`: layers with gradients, an optimizer with state, checksums of all their bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import offstage
from benchmarks.common import DEVICE, synchronize
from benchmarks.workload import Block, adamw, in_bf16, initialise
from offstage.phases.parking import lot_for
from offstage.phases.report import DeviceReport, Wake

PIECE = 4 * 2**20
"""Words of a tensor that go into its checksum together."""
FACTOR = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    hidden: int
    heads: int
    tokens: int
    cycles: int
    few_cycles: int
    copy_bytes: int
    """Of the second measurement of the link."""


class Layer(Block):
    """A block without attention: nothing is between tokens, so that the bits are the same in every run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.tanh(q) * torch.sigmoid(k) * v)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def build(size: Size) -> nn.Sequential:
    torch.manual_seed(0)
    with in_bf16(), DEVICE:
        model = nn.Sequential(*(Layer(size) for _ in range(size.layers)))
    initialise(model)
    return model


def batches_of(size: Size) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    shape = (size.tokens, size.width)
    return [torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]


def offloaded(config: Mapping[str, Any]) -> Callable[[nn.Module], Any]:
    return lambda model: offstage.offload(adamw(model), model, **config)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


class Training:
    """A model with gradients, and an optimizer with state."""

    def __init__(
        self, size: Size, make: Callable[[nn.Module], Any], batches: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.model = build(size)
        self.optimizer = make(self.model)
        self._batches = itertools.cycle(batches or batches_of(size))
        self.backward()
        self.step()  # the first one makes the state
        self.backward()
        synchronize()
        self.device = next(self.model.parameters()).device
        self.lot = lot_for(self.device)

    def backward(self) -> None:
        self.model(next(self._batches)).float().square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits_after_training_on(self) -> list[int]:
        """The step that belongs to the gradients, and one more iteration."""
        self.step()
        self.backward()
        self.step()
        synchronize()
        return self.bits()

    def tensors(self) -> list[torch.Tensor]:
        """On the device."""
        params = list(self.model.parameters())
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        found = [*params, *(param.grad for param in params), *state]
        return [one for one in found if isinstance(one, torch.Tensor) and one.device == self.device]

    def bits(self) -> list[int]:
        return checksums(self.tensors())

    def sleep(self, **arguments: Any) -> DeviceReport:
        return offstage.sleep(self.model, self.optimizer, **arguments).devices[0]

    def wake(self) -> Wake:
        return offstage.wake(self.model, self.optimizer)

    def close(self) -> None:
        if isinstance(self.optimizer, offstage.OffloadedOptimizer):
            self.optimizer.close()


@torch.no_grad()
def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each that depends on every bit and its place, made on the device."""
    return torch.stack([_checksum(tensor.detach().reshape(-1).view(torch.uint8)) for tensor in tensors]).tolist()


def _checksum(memory: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=memory.device)
    whole = memory.numel() // 8 * 8
    for words in (*memory[:whole].view(torch.int64).split(PIECE), memory[whole:].to(torch.int64)):
        odd = torch.arange(words.numel(), dtype=torch.int64, device=memory.device).mul_(2).add_(1)
        total = total * FACTOR + odd.mul_(FACTOR).mul_(words ^ (words >> 31)).sum()
    return total
