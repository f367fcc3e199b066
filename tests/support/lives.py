# SPDX-License-Identifier: Apache-2.0
"""One training loop under two configurations: what is left must be the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import offstage
from tests.support.contract import SMALL, MakeOptimizer, adamw, assert_same, assert_same_tree
from tests.support.training import lazily

CPU = torch.device("cpu")


def stack(layers: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Equal layers, the AdamW state of each a little larger than a chunk of 16 KiB."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(layers))).to(dtype)


def inputs(number: int, width: int = 48) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(inputs(number).to(next(model.parameters()).dtype)).float().pow(2).mean()


def clip_to(optimizer: Any, max_norm: float | None) -> None:
    if max_norm is not None:
        optimizer.clip_grad_norm_(max_norm)


def end_step(optimizer: Any, clip: float | None = None) -> None:
    """What follows backward in a loop."""
    clip_to(optimizer, clip)
    optimizer.step()
    optimizer.zero_grad()


def iterate(model: nn.Module, optimizer: Any, numbers: Iterable[int], clip: float | None = None) -> None:
    for number in numbers:
        loss_of(model, number).backward()
        end_step(optimizer, clip)


def offloaded_stack(
    model: nn.Module | None = None, *, make: MakeOptimizer = adamw, **config: Any
) -> tuple[nn.Module, offstage.OffloadedOptimizer]:
    model = stack() if model is None else model
    return model, offstage.offload(make(model.parameters()), model, **{**SMALL, **config})


def assert_same_lives(
    live: Callable[[Any, Any], Any],
    *configs: dict[str, Any],
    model: Callable[[], nn.Module] = stack,
    make: MakeOptimizer = adamw,
    plain: dict[str, Any] = SMALL,
    seeds: Iterable[int | str | None] = range(3),
) -> tuple[Any, offstage.OffloadedOptimizer]:
    """`live(model, optimizer)` leaves and returns the same under `plain` and every one of `configs`, on all lanes.

    Weights are compared as `step()` left them, unless it leaves updates to the next forward. Returns the last life's
    model and optimizer.
    """

    def lived(config: dict[str, Any]) -> tuple[Any, Any, Any]:
        made = model()
        optimizer = offstage.offload(make(made.parameters()), made, **{**SMALL, **config})
        told = live(made, optimizer)
        if config.get("overlap_forward"):
            optimizer.synchronize()
        return made, optimizer, told

    expected = lived(plain)
    for config in configs:
        for seed in seeds:
            with lazily(seed):
                got = lived(config)
            assert_same(*expected[:2], *got[:2])
            assert_same_tree(expected[2], got[2])
    return got[:2]


def fail_at(calls: int, owner: Any, name: str, error: BaseException) -> Callable[[], None]:
    """Let the `calls`-th call of a method raise. Returns what undoes that."""
    inner, made = getattr(owner, name), []

    def fail(*args: Any) -> Any:
        made.append(1)
        if len(made) == calls:
            raise error
        return inner(*args)

    setattr(owner, name, fail)
    return lambda: delattr(owner, name)
