# SPDX-License-Identifier: Apache-2.0
"""The times that receipts give on real streams, against events of the caller's stream and delays of known length."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offstage
from benchmarks.bits import DELAY_CYCLES, DelayedLanes
from offstage.lanes.lanes import Lane
from offstage.lanes.link import use_lanes
from offstage.optimizer.optimizer import runtime_of
from offstage.train.observe import Observer

DEVICE = torch.device("cuda", 0)
WIDTH, LAYERS = 2048, 8
"""The state of each layer is 32 MiB, and a chunk."""
WARM_UP = 4


class Clock:
    """Milliseconds of the caller's stream."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self._events[0].record()
        yield
        self._events[1].record()

    @property
    def ms(self) -> float:
        torch.cuda.synchronize()
        return self._events[0].elapsed_time(self._events[1])


def delay_ms() -> float:
    """How long `DELAY_CYCLES` last here."""
    clock = Clock()
    torch.cuda._sleep(DELAY_CYCLES)
    with clock():
        torch.cuda._sleep(10 * DELAY_CYCLES)
    return clock.ms / 10


class Training:
    def __init__(self, delayed: Lane | None = None, **config: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=DEVICE) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        lanes = use_lanes(lambda device: DelayedLanes(device, delayed)) if delayed else contextlib.nullcontext()
        with lanes:
            self.optimizer = offstage.offload(adamw, self.model, chunk_bytes="32MiB", **config)
        self.clock = Clock()
        for _ in range(WARM_UP):
            self.iterate()

    def iterate(self) -> None:
        self.backward()
        with self.clock():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        self.model(torch.ones(16, WIDTH, device=DEVICE)).pow(2).mean().backward()


@pytest.mark.parametrize("lane", [Lane.FETCH, Lane.UPDATE, Lane.STORE])
def test_a_delay_is_in_the_time_of_its_own_lane(lane: Lane) -> None:
    known = LAYERS * delay_ms()
    plain, delayed = Training(), Training(lane)
    for training in (plain, delayed):
        torch.cuda.synchronize()
        training.iterate()
    without, receipt = plain.optimizer.receipt(), delayed.optimizer.receipt()
    assert receipt.lane_ms[lane.value] >= 0.9 * known
    for other in {"fetch", "update", "store"} - {lane.value}:
        # A delay is a kernel: it may slow other work a little, and is not part of it.
        assert receipt.lane_ms[other] < without.lane_ms[other] + 0.5 * known


def test_what_step_waits_for_is_exposed() -> None:
    training = Training(Lane.FETCH)
    torch.cuda.synchronize()
    training.iterate()
    took, receipt = training.clock.ms, training.optimizer.receipt()
    assert receipt.lane_ms["fetch"] >= 0.9 * LAYERS * delay_ms()
    assert 0.8 * receipt.lane_ms["fetch"] <= receipt.exposed_ms <= took + 0.1
    assert receipt.exposed_ms >= 0.8 * took


@pytest.mark.parametrize("hidden", [True, False])
def test_only_what_the_caller_waits_for_is_exposed(hidden: bool) -> None:
    training = Training(Lane.FETCH, overlap_forward=True)
    known = LAYERS * delay_ms()
    torch.cuda.synchronize()
    if hidden:  # the host is ahead, so that the caller's stream does not stand idle in step()
        torch.cuda._sleep(100 * DELAY_CYCLES)
    training.iterate()
    if hidden:  # and that stream has other work until all updates are done
        torch.cuda._sleep(20 * LAYERS * DELAY_CYCLES)
    training.iterate()
    receipt = training.optimizer.receipt()  # of the step before
    assert receipt.lane_ms["fetch"] >= 0.9 * known
    if hidden:
        assert receipt.exposed_ms < 0.2 * known
    else:
        assert receipt.exposed_ms > 0.5 * known


@pytest.mark.parametrize("config", [{}, {"overlap_forward": True, "update_in_backward": True}], ids=str)
def test_rates_are_not_more_than_the_link_can_do(config: dict[str, Any]) -> None:
    training = Training(**config)
    receipt = training.optimizer.receipt()
    link = receipt.link_measured_gb_per_s
    assert link
    assert set(receipt.link_gb_per_s) == {"fetch", "store"}
    for rate in receipt.link_gb_per_s.values():
        assert 0.3 * link < rate < 1.3 * link  # `link` is with both directions busy, and one alone is faster


def test_updates_on_the_host_have_times_of_their_own() -> None:
    training = Training(update_on="host")
    receipt = training.optimizer.receipt()
    assert receipt.lane_bytes == {"lower": receipt.bytes_stored, "raise": receipt.bytes_fetched}
    assert 0 < receipt.host_update_ms == receipt.lane_ms["host"] <= training.clock.ms + 1.0
    assert receipt.exposed_ms <= training.clock.ms + 0.1
    assert all(rate < 100 for rate in receipt.link_gb_per_s.values())


@pytest.mark.parametrize("config", [{}, {"host_fraction": 0.5}, {"update_in_backward": True}], ids=str)
def test_lanes_are_busy_for_as_long_as_the_receipt_says(config: dict[str, Any]) -> None:
    training = Training(**config)
    with Observer(training.model, training.optimizer, DEVICE) as observer:
        observer.mark("forward")
        training.backward()
        observer.mark("step")
        training.optimizer.step()
    receipt, observed = training.optimizer.receipt(), observer.observed()
    assert observed["notes"] == []
    for lane, busy in receipt.lane_ms.items():
        assert observed["busy_ms"].get(lane, 0.0) == pytest.approx(busy, rel=0.01, abs=0.05)


class Spare(list[torch.Event]):
    """Counts what is taken out, and how often there was nothing."""

    taken = missing = 0

    def pop(self, *args: Any) -> torch.Event:
        self.taken, self.missing = self.taken + 1, self.missing + (not self)
        return super().pop(*args)


@pytest.mark.parametrize("config", [{}, {"overlap_forward": True}], ids=str)
def test_events_for_times_are_recorded_again(config: dict[str, Any]) -> None:
    training = Training(**config)
    lanes: Any = runtime_of(training.optimizer).engines[0].transport.lanes
    lanes._spare_stamps = spare = Spare(lanes._spare_stamps)
    for _ in range(3):
        training.iterate()
    assert spare.taken > 3 * 3 * LAYERS
    assert spare.missing == 0
