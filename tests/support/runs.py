# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves, how much of it happened outside `step()`, and what differs between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import offstage
from offstage.optimizer.optimizer import runtime_of
from tests.support.training import same_bits


@dataclass
class Run:
    """What a run left on this rank, and how much of it happened outside `step()`."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[tuple[int, int, str], torch.Tensor] = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    receipt: Any = None
    optimizer: Any = None
    updated_in_backward: int = 0
    fetched_in_backward: int = 0
    left_to_forward: int = 0


def look(run: Run, optimizers: Sequence[torch.optim.Optimizer], *, before_step: bool) -> None:
    """Count what is under way outside `step()`, from the engines' own books."""
    for engine in [engine for optimizer in _offloaded(optimizers) for engine in runtime_of(optimizer).engines]:
        if not before_step:
            run.left_to_forward += len(engine.pending)
            continue
        run.fetched_in_backward += len(engine.transport.pipeline.staged)
        run.updated_in_backward += len(engine.round.done) if engine.round is not None else 0


def keep(run: Run, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take down what the run has come to."""
    for optimizer in _offloaded(optimizers):
        optimizer.synchronize()
        run.receipt = optimizer.receipt()
    run.weights = {name: local(param.detach()).clone() for name, param in model.named_parameters()}
    run.state = {
        (number, index, name): local(torch.as_tensor(value)).clone()
        for number, optimizer in enumerate(optimizers)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def differences(expected: Run, found: Run) -> list[str]:
    """What of two runs on this rank is not equal bit for bit: weights, state, norms."""
    assert expected.weights.keys() == found.weights.keys()
    named = [
        f"weight {name}" for name in expected.weights if not same_bits(expected.weights[name], found.weights[name])
    ]
    if expected.state.keys() != found.state.keys():
        named.append(f"state keys {expected.state.keys() ^ found.state.keys()}")
    both = expected.state.keys() & found.state.keys()
    named += [f"state {key}" for key in both if not same_bits(expected.state[key], found.state[key])]
    norms = zip(expected.norms, found.norms, strict=True)
    return named + [f"norm of step {step}" for step, (a, b) in enumerate(norms) if not same_bits(a, b)]


def _offloaded(optimizers: Sequence[torch.optim.Optimizer]) -> list[offstage.OffloadedOptimizer]:
    return [optimizer for optimizer in optimizers if isinstance(optimizer, offstage.OffloadedOptimizer)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
