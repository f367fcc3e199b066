# SPDX-License-Identifier: Apache-2.0
"""The times that receipts give, against a clock: work of known length, and `time.perf_counter` around and within it.

The machine may stop any thread for a while. So what must hold in spite of that is checked in every step, and what
cannot is checked in the best of a few.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import offstage
from offstage.engine.engine import Engine
from offstage.engine.timer import StepTimer
from offstage.lanes.accelerator import AcceleratorLanes
from offstage.lanes.host_threads import Slice
from offstage.lanes.lanes import ImmediateLanes, Lane, Lanes, Mark, Work, new_log, pieces_of
from offstage.lanes.link import use_lanes
from offstage.lanes.spans import Span, busy_ms, covered_ms
from offstage.lanes.testing.checked import CheckedLanes
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from tests.support.lives import end_step
from tests.support.threaded_lanes import ThreadedLanes, wait_until
from tests.support.training import lazily

WIDTH, LAYERS = 44, 8
CHUNKS = LAYERS
CHUNK = {"min_bytes": 0, "chunk_bytes": "16KiB", "slots": 2}


def _without_slots(config: dict[str, Any]) -> dict[str, None]:
    """Where the CPU updates everything there are none."""
    return {"slots": None} if config.get("update_on") == "host" else {}


"""One layer's state to a chunk."""
DELAYS_MS = {Lane.FETCH: 0.3, Lane.UPDATE: 0.6, Lane.STORE: 0.9, Lane.GRADIENTS_DOWN: 0.2, Lane.WEIGHTS_UP: 0.4}
HOST_MS = 6.0
STEPS = 3


def spin(ms: float) -> None:
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass


def _slow(slices: Sequence[Slice]) -> list[Slice]:
    return [partial(spin, HOST_MS), *slices]


class SlowLanes(ImmediateLanes):
    """Every piece of work takes at least as long as `DELAYS_MS` says, and is timed from within and from outside."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.within, self.around = Counter[str](), Counter[str]()

    def submit(self, lane: Lane, work: Work, **others: Any) -> Mark:
        times = [time.perf_counter()]

        def clock() -> None:
            times.append(time.perf_counter())

        mark = super().submit(lane, [clock, partial(spin, DELAYS_MS[lane]), *pieces_of(work), clock], **others)
        clock()
        self.within[lane.value] += 1e3 * (times[2] - times[1])
        self.around[lane.value] += 1e3 * (times[3] - times[0])
        return mark

    def submit_on_host(self, slices: Sequence[Slice], **others: Any) -> Mark:
        return super().submit_on_host(_slow(slices), **others)


class SlowThreads(ThreadedLanes):
    """The host's threads work beside the caller, and take a while."""

    def submit_on_host(self, slices: Sequence[Slice], **others: Any) -> Mark:
        return super().submit_on_host(_slow(slices), **others)


class Training:
    def __init__(self, factory: Callable[[torch.device], Lanes], *, on_host: bool = False, **config: Any) -> None:
        """`on_host`: the weights live there, too."""
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        with use_lanes(factory):
            if on_host:
                config = {**config, "weights": "host", "min_bytes": 0}
            adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.optimizer: OffloadedOptimizer = offstage.offload(
                adamw, self.model, **{**CHUNK, **config, **_without_slots(config)}
            )

    @property
    def engine(self) -> Engine:
        (engine,) = runtime_of(self.optimizer).engines
        return engine

    @property
    def lanes(self) -> Any:
        return self.engine.transport.lanes

    @property
    def timer(self) -> StepTimer:
        return self.engine.transport.timer

    def forward(self) -> torch.Tensor:
        return self.model(torch.ones(4, WIDTH)).pow(2).mean()

    def backward(self) -> None:
        self.forward().backward()

    def step(self) -> float:
        """The milliseconds that `step()` takes, by the clock."""
        start = time.perf_counter()
        self.optimizer.step()
        took = 1e3 * (time.perf_counter() - start)
        self.optimizer.zero_grad()
        return took

    def iterate(self) -> float:
        self.backward()
        return self.step()


# Without an accelerator, the caller's thread does all the work


@pytest.mark.parametrize(
    ("factory", "config"),
    [
        (SlowLanes, {}),
        (SlowLanes, {"update_on": "host", "threads": 2}),
        (SlowLanes, {"on_host": True}),
        (SlowLanes, {"on_host": True, "update_in_backward": True}),
        (CheckedLanes, {}),
    ],
)
def test_all_of_step_is_exposed(factory, config):
    """And whatever else lanes do for it: weights on the host come for forward and backward, and gradients leave."""
    training = Training(factory, **config)
    late = config.get("update_in_backward", False)  # the receipt is of the step before the last one
    took: list[float] = []
    left_out = []
    for number in range(STEPS + 2):
        start = time.perf_counter()
        in_step = training.iterate()
        took.append(1e3 * (time.perf_counter() - start) if config.get("on_host") else in_step)
        receipt = training.optimizer.receipt()
        if number < 2:
            continue
        in_lanes = training.timer.lane_ms(last=not late)
        assert 0 < sum(in_lanes.values()) <= receipt.exposed_ms <= took[-1 - late]
        left_out.append((took[-1 - late] - receipt.exposed_ms) / took[-1 - late])
    assert min(left_out) < 0.5


def test_each_lane_has_the_time_of_its_own_work():
    training = Training(SlowLanes)
    training.iterate()
    for _ in range(STEPS):
        training.lanes.within.clear()
        training.lanes.around.clear()
        took = training.iterate()
        receipt = training.optimizer.receipt()
        assert set(receipt.lane_ms) == {"fetch", "update", "store"}
        assert sum(receipt.lane_ms.values()) <= took  # one after the other
        for lane, found in receipt.lane_ms.items():
            assert CHUNKS * DELAYS_MS[Lane(lane)] <= training.lanes.within[lane] <= found <= training.lanes.around[lane]
        assert receipt.lane_bytes == {"fetch": receipt.bytes_fetched, "store": receipt.bytes_stored}
        for lane, rate in receipt.link_gb_per_s.items():
            assert 0 < rate <= receipt.lane_bytes[lane] / training.lanes.within[lane] / 1e6


def test_what_the_cpu_updates_has_times_and_rates_of_its_own():
    training = Training(SlowLanes, host_fraction=0.5, threads=2)
    training.iterate()
    training.iterate()
    receipt = training.optimizer.receipt()
    assert set(receipt.lane_ms) == {"fetch", "update", "store", "lower", "host", "raise"}
    assert receipt.host_update_ms == receipt.lane_ms["host"] >= HOST_MS
    assert set(receipt.link_gb_per_s) == {"fetch", "store", "lower", "raise"}
    assert receipt.lane_bytes["fetch"] + receipt.lane_bytes["raise"] == receipt.bytes_fetched
    assert receipt.lane_bytes["store"] + receipt.lane_bytes["lower"] == receipt.bytes_stored
    shown = str(receipt)
    assert "raise lane" in shown
    assert shown.count("host  ") == shown.count("updates on the host") + shown.count("state on the host") == 2


@pytest.mark.parametrize(
    ("config", "max_norm"),
    [({}, None), ({"window": "all"}, None), ({"update_in_backward": True}, None), ({"update_in_backward": True}, 1e-4)],
)
def test_work_in_backward_is_exposed_where_it_is_done(config, max_norm):
    """Trips of an attempt that is given up are of the step that makes them again, too."""
    training = Training(SlowLanes, overlap_forward=True, **config)
    at_least = sum(DELAYS_MS[lane] * CHUNKS for lane in (Lane.FETCH, Lane.UPDATE, Lane.STORE))
    for number in range(2 + STEPS):
        loss = training.forward()
        start = time.perf_counter()
        loss.backward()
        if max_norm is not None:
            training.optimizer.clip_grad_norm_(max_norm)
        training.step()
        took = 1e3 * (time.perf_counter() - start)
        if number >= 2:
            exposed, lane_ms = training.timer.exposed_ms(last=True), training.timer.lane_ms()
            assert at_least <= sum(lane_ms.values()) <= exposed <= took
            assert training.timer.exposed_ms(last=True, in_step=False) <= exposed
    in_passes = training.timer.exposed_ms(last=True, in_step=False)
    assert (in_passes > DELAYS_MS[Lane.FETCH]) == bool(config)


def test_a_step_that_changes_nothing_leaves_the_times_of_the_last_one():
    training = Training(SlowLanes)
    training.iterate()
    training.iterate()
    before = training.optimizer.receipt()
    training.backward()
    training.model[0].weight.grad.fill_(torch.inf)
    training.optimizer.clip_grad_norm_(1.0)
    training.step()
    after = training.optimizer.receipt()
    assert after.skipped_steps == 1
    assert (after.exposed_ms, after.lane_ms, after.lane_bytes) == (before.exposed_ms, before.lane_ms, before.lane_bytes)


# Beside the caller


@pytest.mark.parametrize("hidden", [True, False])
def test_only_what_the_caller_waits_for_is_exposed(hidden):
    training = Training(SlowThreads, update_on="host", overlap_forward=True, threads=1)
    for _ in range(2):
        training.iterate()
    found, known = [], len(training.engine.arenas.chunks) * HOST_MS
    for _ in range(STEPS):
        training.backward()
        start = time.perf_counter()
        training.step()
        if hidden:
            assert wait_until(lambda: not training.lanes.has_promised())
        training.backward()
        last = time.perf_counter()
        training.step()
        receipt = training.optimizer.receipt()
        assert known <= receipt.host_update_ms <= 1e3 * (time.perf_counter() - last)
        assert receipt.exposed_ms <= 1e3 * (last - start)  # of the step before: the caller has waited for all of it
        found.append(receipt.exposed_ms)
    if hidden:
        assert min(found) < 0.5 * known
    else:
        assert max(found) > 0.5 * known


def test_work_that_is_given_to_its_lane_later_is_of_its_step():
    """Weights go up when a thread has updated them, after `step()` has returned."""
    training = Training(SlowThreads, update_on="host", overlap_forward=True, threads=1)
    for _ in range(3):
        training.iterate()
        receipt = training.optimizer.receipt()
        assert receipt.lane_bytes == {"lower": receipt.bytes_stored, "raise": receipt.bytes_fetched}
        assert receipt.lane_ms["raise"] > 0


class Moment:
    """In place of `torch.Event`."""

    made = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        Moment.made += 1
        self._at = 0.0

    def record(self, stream: object) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Moment) -> float:
        return 1e3 * (later._at - self._at)


class StampedLanes(ThreadedLanes):
    _stamp = AcceleratorLanes._stamp


@pytest.mark.parametrize("config", [{}, {"host_fraction": 0.5, "overlap_forward": True}], ids=str)
def test_events_are_recorded_again_when_no_log_needs_them(monkeypatch, config):
    monkeypatch.setattr(torch, "Event", Moment)
    training = Training(StampedLanes, **config)

    def iterate_times(steps: int) -> None:
        for _ in range(steps):
            took = training.iterate()
            training.optimizer.synchronize()
        if not config:
            assert 0 < sum(training.optimizer.receipt().lane_ms.values()) <= took

    def read() -> list[float]:
        lanes = training.lanes
        return [lanes.elapsed_ms(span.start, span.stop) for spans in log.values() for span in spans]

    for _ in range(5):  # threads may need some more at the same time in a later step than in the first ones
        made = Moment.made
        iterate_times(3)
        if Moment.made == made:
            break
    assert Moment.made == made
    log = new_log()
    training.lanes.open_log(log)
    iterate_times(1)
    training.lanes.close_log(log)
    seen = read()
    iterate_times(4)
    assert read() == seen
    assert len(seen) > CHUNKS


def test_lanes_whose_clock_stands_still_say_nothing():
    with lazily(0):
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = offstage.offload(torch.optim.AdamW(model.parameters()), **CHUNK)
    model(torch.ones(1, WIDTH)).sum().backward()
    end_step(optimizer)
    receipt = optimizer.receipt()
    assert receipt.lane_ms == {"fetch": 0.0, "update": 0.0, "store": 0.0}
    assert receipt.exposed_ms == 0.0
    assert receipt.link_gb_per_s == {}


# Spans


def test_what_runs_at_the_same_time_counts_once():
    times = [(3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (0.5, 1.0), (4.0, 5.0)]
    assert covered_ms(times) == 4.5
    assert covered_ms([]) == 0.0
    assert busy_ms([Span(*one) for one in times], lambda start, stop: stop - start) == 4.5
