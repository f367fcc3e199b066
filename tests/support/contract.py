# SPDX-License-Identifier: Apache-2.0
"""Small models, a training loop and exact comparisons, shared by the contract's tests."""

from __future__ import annotations

import contextlib
import copy
import io
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import offstage
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes
from offstage.optimizer.optimizer import runtime_of
from tests.support.training import same_bits

MakeOptimizer = Callable[..., torch.optim.Optimizer]

SMALL = {"min_bytes": 0, "chunk_bytes": "16KiB"}
"""Everything leaves, in the smallest chunks there are: a `make_model()` takes several."""

TORCH = {**SMALL, "rule": "torch"}
"""The same with the user's own class doing the arithmetic: the bits are plain torch's."""

MASTERS = {
    "fp32": {**SMALL, "master_weights": "fp32"},
    "split": {**SMALL, "master_weights": "split"},
    "fp32 half": {**SMALL, "master_weights": "fp32", "fraction": 0.5},
    "split half": {**SMALL, "master_weights": "split", "fraction": 0.5},
    "fp32 off": {"fraction": 0.0, "master_weights": "fp32"},
    "split off": {"fraction": 0.0, "master_weights": "split"},
    "fp32 one chunk": {"min_bytes": 0, "chunk_bytes": "1MiB", "slots": 1},
}
"""Plans for bf16 parameters that all keep the same masters."""

TWO_KEYS = {"exp_avg", "exp_avg_sq", "step"}

PLANS: dict[str, dict[str, Any]] = {
    "off": {"fraction": 0.0},
    "half": {**SMALL, "fraction": 0.5},
    "all": SMALL,
    "one slot": {**SMALL, "slots": 1},
    "one chunk": {"min_bytes": 0, "chunk_bytes": "1MiB"},
}
"""Plans between which no bit may differ."""

CLASSES: dict[str, MakeOptimizer] = {
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
"""Every class that keeps state, under the settings that keep the most of it."""


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 0.01, "weight_decay": 0.1, **options})


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two layers whose AdamW state takes four chunks of 16 KiB."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48)).to(dtype)


class Blocks(nn.Module):
    """Three equal layers in a list, whose weights can live on the host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(number: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + number)
    inputs, target = torch.randn(2, 16, 48, generator=generator).to(dtype)
    return inputs, target


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    inputs, target = batch(number, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(inputs), target)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range | int) -> None:
    for number in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def twin(
    make: MakeOptimizer = adamw, *, dtype: torch.dtype = torch.float32, model: nn.Module | None = None, **config: Any
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, offstage.OffloadedOptimizer]:
    """The same model twice: one with plain torch, one offloaded (by default with torch's own arithmetic)."""
    plain_model = make_model(dtype) if model is None else model
    model = copy.deepcopy(plain_model)
    offloaded = offstage.offload(make(model.parameters()), model, **(config or TORCH))
    return plain_model, make(plain_model.parameters()), model, offloaded


def offloaded_model(
    make: MakeOptimizer = adamw, *, dtype: torch.dtype = torch.float32, **config: Any
) -> tuple[nn.Module, offstage.OffloadedOptimizer]:
    model = make_model(dtype)
    return model, offstage.offload(make(model.parameters()), model, **(config or SMALL))


def trained(
    steps: range | int, make: MakeOptimizer = adamw, **arguments: Any
) -> tuple[nn.Module, offstage.OffloadedOptimizer]:
    """An `offloaded_model` after some steps."""
    model, optimizer = offloaded_model(make, **arguments)
    train(model, optimizer, steps)
    return model, optimizer


def trained_twins(steps: range | int, make: MakeOptimizer = adamw, **arguments: Any) -> Any:
    """A `twin` after some steps of both."""
    plain_model, plain, model, optimizer = twin(make, **arguments)
    train(plain_model, plain, steps)
    train(model, optimizer, steps)
    return plain_model, plain, model, optimizer


def lazily_offloaded(
    make: MakeOptimizer = adamw, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> tuple[nn.Module, offstage.OffloadedOptimizer, LazyLanes]:
    """Offloaded on lanes that run nothing until forced (with `seed` divisible by 3) and check every access."""
    made: list[LazyLanes] = []
    with use_lanes(lambda device: made.append(LazyLanes(device, seed=seed)) or made[-1]):
        model, optimizer = offloaded_model(make, dtype=dtype, **config)
    return model, optimizer, made[0]


def chunk_count(optimizer: offstage.OffloadedOptimizer) -> int:
    return sum(
        len(host.layout.chunks)
        for host in {
            held.home for held in runtime_of(optimizer).all_states() if held.home is not None
        }  # one per set of arenas
    )


def snapshot(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict that later steps do not change."""
    return copy.deepcopy(optimizer.state_dict())


def saved_and_loaded(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Through a file, as tensors and primitives only."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(
    model: nn.Module, optimizer: torch.optim.Optimizer, make: MakeOptimizer = adamw, **arguments: Any
) -> tuple[nn.Module, offstage.OffloadedOptimizer]:
    """A new model and optimizer with the state of these."""
    other_model, other = offloaded_model(make, **arguments)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    return other_model, other


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        assert a.dtype == b.dtype, name
        mine, theirs = a.detach().cpu(), b.detach().cpu()  # one of them may live on the host
        assert same_bits(mine, theirs), f"{name}: {int((mine != theirs).sum())} of {mine.numel()} weights differ"


def assert_same_tree(left: Any, right: Any, path: str = "") -> None:
    """The same structure, types and bits."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), path
        assert left.dtype == right.dtype, f"{path}: {left.dtype} and {right.dtype}"
        assert same_bits(left, right), f"{path}: {int((left != right).sum())} of {left.numel()} elements differ"
    elif isinstance(left, Mapping):
        assert left.keys() == right.keys(), f"{path}: {sorted(map(str, left))} and {sorted(map(str, right))}"
        for key in left:
            assert_same_tree(left[key], right[key], f"{path}/{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same_tree(a, b, f"{path}/{number}")
    else:
        assert left == right, f"{path}: {left!r} and {right!r}"


def assert_same_optimizer(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    assert_same_tree(left.state_dict(), right.state_dict())


def assert_same(
    left: nn.Module, left_optimizer: torch.optim.Optimizer, right: nn.Module, right_optimizer: torch.optim.Optimizer
) -> None:
    assert_same_weights(left, right)
    assert_same_optimizer(left_optimizer, right_optimizer)


def assert_same_future(
    left: tuple[nn.Module, torch.optim.Optimizer], right: tuple[nn.Module, torch.optim.Optimizer], steps: range
) -> None:
    """Both train on, to the same bits."""
    for one in (left, right):
        train(*one, steps)
    assert_same(*left, *right)


@contextlib.contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever happens inside, weights, state and options are afterwards what they were."""
    weights, state = copy.deepcopy(model.state_dict()), snapshot(optimizer)
    try:
        yield
    finally:
        assert_same_tree(dict(model.state_dict()), dict(weights))
        assert_same_tree(optimizer.state_dict(), state)


@contextlib.contextmanager
def one_process_group() -> Iterator[None]:
    """A gloo process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = torch.distributed.TCPStore("127.0.0.1", port, world_size=1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
