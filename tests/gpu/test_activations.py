# SPDX-License-Identifier: Apache-2.0
"""Activations on real streams: the same gradients as without, whatever leaves, however late the lanes are."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offstage
from benchmarks.overlap_bits import Checked, delayed_lanes
from offstage.activations.offload import ActivationOffload, offload_activations
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from offstage.planning.choices import Choice
from tests.support.gates import no_synchronisation
from tests.support.lives import end_step

DEVICE = torch.device("cuda", 0)
WIDTH, TOKENS = 256, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ v)
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # both results are made again in backward


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 8)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x).logsumexp(-1).sum()


def train(
    config: dict[str, Any] | None,
    *,
    checkpointed: bool = False,
    state: dict[str, Any] | None = None,
    iterations: int = 8,
) -> tuple[list[torch.Tensor], ActivationOffload | None]:
    """Losses and weights after some iterations with sequences of changing length, and what moved."""
    torch.manual_seed(0)
    model = Model(checkpointed).to(DEVICE)
    handle = None if config is None else offload_activations(model, min_bytes="4KiB", **config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = offstage.offload(optimizer, model, min_bytes=0, chunk_bytes="256KiB", **(state or {}))
    found = []
    for number in range(iterations):
        generator = torch.Generator(DEVICE).manual_seed(number)
        x = torch.randn(2, TOKENS // (1 + number % 3), WIDTH, device=DEVICE, generator=generator)
        loss = model(x)
        loss.backward()
        if state is None or not state.get("update_in_backward"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        end_step(optimizer)
        found.append(loss.detach())
    optimizer.synchronize()
    if handle is not None:
        handle.remove()
    found += [param.detach().to(DEVICE).clone() for param in model.parameters()]
    optimizer.close()
    return found, handle


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


CONFIGS: dict[str, dict[str, Any]] = {
    "all": {},
    "half of the bytes": {"fraction": 0.5},
    "two layers, two ahead": {"layers": 2, "prefetch": 2},
    "nothing kept": {"keep_last": 0},
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_same_bits(config: str, checkpointed: bool) -> None:
    expected, _ = train(None, checkpointed=checkpointed)
    found, handle = train(CONFIGS[config], checkpointed=checkpointed)
    assert_same(found, expected)
    assert handle is not None
    assert handle.bytes_offloaded > 0
    assert bool(handle.receipt().bytes_remade) is not checkpointed


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.STORE, Lane.UPDATE])
@pytest.mark.parametrize("state", [{"window": "2MiB"}, {"overlap_forward": True}, {"update_in_backward": True}])
def test_the_same_bits_with_delays_and_with_state(lane: Lane, state: dict[str, Any]) -> None:
    expected, _ = train(None, state=state)
    with delayed_lanes(lane):
        found, _ = train({}, state=state)
    assert_same(found, expected)


def test_the_checker_finds_nothing_on_real_streams() -> None:
    lanes = Checked()
    expected, _ = train(None, state={"window": "2MiB"})
    with use_lanes(lanes):
        found, _ = train({}, state={"window": "2MiB"})
    assert lanes.accesses > 500
    assert_same(found, expected)


@pytest.mark.parametrize("config", [{}, {"activations": False}, {"prefetch": 2, "layers": 3}])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_on_the_host_get_the_same_gradients(config: dict[str, Any], checkpointed: bool) -> None:
    def gradients(config: dict[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model(checkpointed).to(DEVICE)
        handle = None if config is None else offload_activations(model, min_bytes="4KiB", weights=True, **config)
        found = []
        for number in range(4):
            x = torch.randn(2, 64, WIDTH, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(number))
            model(x).backward()
            if number % 2:  # gradients of two micro-batches
                found += [param.grad.to(DEVICE, copy=True) for param in model.parameters() if param.grad is not None]
                model.zero_grad()
        if handle is not None:
            assert any(param.device.type == "cpu" for param in model.parameters())
            handle.remove()
        assert all(param.device == DEVICE for param in model.parameters())
        return [*found, *(param.detach() for param in model.parameters())]

    assert_same(gradients(config), gradients(None))


@pytest.mark.parametrize("choice", [Choice.OFFLOAD, Choice.RECOMPUTE])
def test_choices_lower_the_peak_and_keep_the_gradients(choice: Choice) -> None:
    """All layers but the last, from one iteration to the next and back."""
    torch.manual_seed(0)
    model = Model(checkpointed=False).to(DEVICE)
    x = torch.randn(32, TOKENS, WIDTH, device=DEVICE)

    def iterate() -> tuple[int, list[torch.Tensor]]:
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        model(x).backward()
        return torch.cuda.max_memory_allocated(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    iterate()
    plain, expected = iterate()
    with offload_activations(model, min_bytes="4KiB") as handle:
        num_layers = len(handle.layers)
        found = {}
        for one in (choice, Choice.KEEP, choice):
            handle.replan([one] * (num_layers - 1) + [Choice.KEEP])
            for _ in range(3):
                found[one], gradients = iterate()
                assert_same(gradients, expected)
    assert found[choice] < 0.8 * found[Choice.KEEP]
    assert found[Choice.KEEP] < 1.05 * plain


def test_no_synchronisation_and_no_growth() -> None:
    torch.manual_seed(0)
    model = Model(checkpointed=False).to(DEVICE)
    lengths = [64 * (1 + number % 8) for number in range(64)]
    with offload_activations(model, min_bytes="4KiB") as handle:

        def iterate(length: int) -> None:
            model(torch.randn(2, length, WIDTH, device=DEVICE)).backward()
            model.zero_grad()

        for length in lengths:
            iterate(length)
        pool, reserved = handle.host_bytes, torch.cuda.memory_reserved()
        with no_synchronisation():
            for length in lengths:
                iterate(length)
        assert handle.host_bytes == pool
        assert torch.cuda.memory_reserved() == reserved


def test_a_capture_is_refused() -> None:
    model = Model(checkpointed=False).to(DEVICE)
    x = torch.randn(2, 64, WIDTH, device=DEVICE)
    with offload_activations(model, min_bytes="4KiB"):
        model(x).backward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(offstage.OffstageError, match="graph is being captured"), torch.cuda.graph(graph):
            model(x)
