# SPDX-License-Identifier: Apache-2.0
"""Parameters without a model: gradients set by hand, and everything that is left compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import offstage
from tests.support.lives import end_step
from tests.support.training import same_bits

SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}
ON_HOST = {**SMALL, "update_on": "host"}
RESIDENT = {"update_on": "device", "fraction": 0.0, "threads": None}
WHERE: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "streamed": {"update_on": "device", "threads": None},
    "host": {},
    "mixed": {"update_on": "auto", "host_fraction": 0.5, "fraction": 0.8},
}
"""On top of `ON_HOST`."""
SHAPES = ((900,),) * 8


def make_params(
    dtype: torch.dtype = torch.float32, shapes: Iterable[Any] = SHAPES, device: str = "cpu"
) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in shapes]


def offloaded(
    params: list[nn.Parameter], make: Any = torch.optim.AdamW, options: dict[str, Any] | None = None, **config: Any
) -> offstage.OffloadedOptimizer:
    """On the host, unless `config` says otherwise."""
    options = {"lr": 0.1, "weight_decay": 0.1} if options is None else options
    return offstage.offload(make(params, **options), **{**ON_HOST, **config})


def set_gradients(params: Iterable[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(5 + number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


def steps(params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, numbers: Iterable[int] = range(3)) -> None:
    """Gradients depend on the number of the step alone."""
    for number in numbers:
        set_gradients(params, number)
        end_step(optimizer)


def result(params: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights and state."""
    state = optimizer.state_dict()["state"]
    values = [torch.as_tensor(value).cpu().clone() for one in state.values() for _, value in sorted(one.items())]
    return [param.detach().cpu().clone() for param in params] + values


def resident_after(
    numbers: Iterable[int], dtype: torch.dtype = torch.float32, shapes: Iterable[Any] = SHAPES, **config: Any
) -> list[torch.Tensor]:
    """What the same steps come to with everything resident."""
    params = make_params(dtype, shapes)
    optimizer = offloaded(params, **config, **RESIDENT)
    steps(params, optimizer, numbers)
    return result(params, optimizer)


def equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    assert all(tensor.isfinite().all() for tensor in ours)
    return len(ours) == len(theirs) and all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@torch.no_grad()
def copy_weights(into: Iterable[nn.Parameter], source: Iterable[torch.Tensor]) -> None:
    for param, value in zip(into, source, strict=True):
        param.data.copy_(value.detach())
