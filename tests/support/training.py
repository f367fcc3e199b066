# SPDX-License-Identifier: Apache-2.0
"""The training runs that equality tests compare: clipping, accumulation, a scheduler, two groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offstage
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.happens_before import Clocks
from offstage.lanes.testing.lazy import LazyLanes, WaitLog
from tests.support.threaded_lanes import with_threads

WIDTH = 48
THREADED = "threaded"
"""For `lazily`: lanes whose updates on the host run in real threads."""


class Model(nn.Module):
    """Parameters of many sizes: odd ones, a scalar, one without elements and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide = nn.Linear(WIDTH, 211)
        self.narrow = nn.Linear(211, 7)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.unused = nn.Parameter(torch.ones(513))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.narrow(torch.relu(self.wide(x))) * self.scale + self.empty.sum()


class Block(nn.Module):
    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, times * width)
        self.down = nn.Linear(times * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]


def lazily(kind: int | str | None, waits: WaitLog | None = None) -> contextlib.AbstractContextManager[None]:
    """A number: lazy lanes with that seed. `THREADED`: real threads. `None`: work runs at once."""
    if kind is None:
        return contextlib.nullcontext()
    if kind == THREADED:
        return with_threads()
    shared = Clocks()  # a race between an optimizer and a model's activations is one, too
    return use_lanes(lambda device: LazyLanes(device, seed=kind, waits=waits, clocks=shared.beside()))


def train(
    config: dict[str, Any] | None,
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 50,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    between: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`steps` steps of two micro-batches each. `config=None` is the plain optimizer."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = make(groups_of(model), **({"lr": 3e-3, "weight_decay": 0.1} if options is None else options))
    if config is not None:
        optimizer = offstage.offload(optimizer, model, **{"min_bytes": 0, **config})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for _ in range(2):
            tokens = torch.randint(67, (4, 6), generator=generator)
            targets = torch.randint(7, (24,), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets)
            (loss / 2).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p is not model.unused], 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if between is not None:
            between(model, optimizer, step)
    return model, optimizer


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    return {
        (index, name): torch.as_tensor(value).clone()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: unlike `==`, +0 and -0 differ, and NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    same = a.contiguous().view(-1).view(integers) == b.contiguous().view(-1).view(integers)
    return bool((same | (a.isnan() & b.isnan()).reshape(-1)).all())


def same_run(
    a: tuple[nn.Module, torch.optim.Optimizer], b: tuple[nn.Module, torch.optim.Optimizer], *, masters: bool = True
) -> bool:
    """Equal weights and equal state, bit for bit."""
    if not all(same_bits(x, y) for x, y in zip(weights(a[0]), weights(b[0]), strict=True)):
        return False
    first, second = state(a[1]), state(b[1])
    if not masters:
        first, second = ({k: v for k, v in s.items() if k[1] != "master_weight"} for s in (first, second))
    return first.keys() == second.keys() and all(same_bits(first[key], second[key]) for key in first)
