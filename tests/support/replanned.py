# SPDX-License-Identifier: Apache-2.0
"""Training runs whose settings change all the time, and the one that they must equal, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage
from offstage.errors import OffloadIneffectiveError
from tests.support.contract import SMALL, adamw
from tests.support.training import lazily

WIDTH, LAYERS = 40, 6
FORMATS = {
    "fp32": (torch.float32, {}),
    "fp32 masters": (torch.bfloat16, {"master_weights": "fp32"}),
    "split masters": (torch.bfloat16, {"master_weights": "split"}),
}
CLIPS: dict[str, tuple[float | None, ...]] = {
    "no clipping": (None,),
    "hits": (1e4,),
    "misses": (1e-3,),
    "both": (1e4, 1e4, 1e-3),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    """Layers that may leave, checkpointed, between two that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if torch.is_grad_enabled() else layer(x)
        return self.last(x)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(batch(number).to(next(model.parameters()).dtype)).float().pow(2).mean()


def made(dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Net, offstage.OffloadedOptimizer]:
    model = net(dtype)
    return model, offstage.offload(adamw(model.parameters()), model, **{**SMALL, **config})


def iterate(model: nn.Module, optimizer: Any, number: int = 0, clip: float | None = None) -> None:
    loss_of(model, number).backward()
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad()


Change = Callable[[random.Random], dict[str, Any]]


def trained(
    *,
    kind: str,
    clip: str,
    micro_batches: int,
    change: Change | None = None,
    seed: int = 0,
    steps: int = 30,
    **config: Any,
) -> tuple[Any, ...]:
    """What is left of a training run, and what it saw. `change` draws what `replan` changes, before each of the steps
    and, with several micro-batches, also between them."""
    dtype, formats = FORMATS[kind]
    model, optimizer = made(dtype, **formats, **config)
    rng, told = random.Random(seed), []
    for step in range(steps):
        max_norm = CLIPS[clip][step % len(CLIPS[clip])]
        for micro_batch in range(micro_batches):
            if change is not None and rng.random() < (0.6 if micro_batch == 0 else 0.3):
                with contextlib.suppress(OffloadIneffectiveError):  # a small share of the state, and of other weights
                    optimizer.replan(**change(rng))
            loss = loss_of(model, 10 * step + micro_batch)
            told.append(loss.detach())
            if micro_batch < micro_batches - 1:
                with optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
        if max_norm is not None:
            told.append(optimizer.clip_grad_norm_(max_norm).clone())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return weights, optimizer.state_dict()["state"], told


@functools.cache
def plainly_trained(**run: Any) -> tuple[Any, ...]:
    return trained(**run, fraction=0.0)


def replanned(change: Change, *, lanes: int | None, seed: int, **run: Any) -> tuple[Any, ...]:
    with lazily(lanes):
        return trained(**run, change=change, seed=seed)
