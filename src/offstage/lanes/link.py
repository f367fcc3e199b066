# SPDX-License-Identifier: Apache-2.0
"""`Link`: the way between one device and the host, one per device, for state, activations and weights alike.

It makes the lanes of each user, decides whose copies go first, and knows what it carries, which is measured once.

[Note: lanes of several users] Every optimizer and every model with offloaded activations has lanes of its own over one
link. One shared fetch lane would let state that was sent for early stand in front of an activation that backward waits
for; and work that fails on one optimizer's lanes must not be another optimizer's failure. What they share is the
priority: copies that backward is about to wait for are announced to the link, and fetches of state go behind them.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from offstage.errors import HostMemoryError
from offstage.lanes.accelerator import AcceleratorLanes
from offstage.lanes.lanes import CallerWaits, ImmediateLanes, Lane, Lanes, Mark, Priority, copy_work
from offstage.memory.arena import Arena

logger = logging.getLogger("offstage")

_COPY_BYTES, _COPIES, _REPEATS = 32 * 1024 * 1024, 4, 3
_SHORTEST_MS = 1e-6
"""Lanes of tests have clocks that stand still."""

LanesFactory = Callable[[torch.device], Lanes]


class Link:
    """What one device's copies to and from the host share."""

    def __init__(self, device: torch.device, make_lanes: LanesFactory) -> None:
        self.device, self._make_lanes = device, make_lanes
        self._priority = Priority()
        self.caller_waits = CallerWaits()
        self._rates: dict[bool, float] = {}
        self._one_way: dict[Lane, float] = {}

    def lanes(self) -> Lanes:
        """Lanes for one user."""
        made = self._make_lanes(self.device)
        made.priority, made.caller_waits = self._priority, self.caller_waits
        return made

    def gb_per_s(self, lanes: Lanes, *, pin: bool = True) -> float:
        """What the link carries each way with both ways busy; 0 if there is no device memory to find out.

        The first caller measures it on its lanes: a few copies, for which the host waits.
        """
        if pin not in self._rates:
            try:
                self._rates[pin] = measure_duplex(lanes, pin=pin)
            except torch.OutOfMemoryError:
                logger.warning("%s has no memory left to measure the link with; its rate is unknown", self.device)
                return 0.0
        return self._rates[pin]

    def one_way_gb_per_s(self, lanes: Lanes, lane: Lane) -> float:
        """What the link carries on `lane` when nothing goes the other way; 0 where there is none, or no memory."""
        if self.device.type == "cpu":
            return 0.0
        if lane not in self._one_way:
            try:
                self._one_way[lane] = measure_one_way(lanes, lane)
            except (torch.OutOfMemoryError, HostMemoryError):
                return 0.0
        return self._one_way[lane]

    def remember(self, gb_per_s: float) -> None:
        """The rate of pinned memory was measured elsewhere, just now."""
        self._rates[True] = gb_per_s


class _Links:
    """The links of all devices, and which lanes they make."""

    def __init__(self, make_lanes: LanesFactory) -> None:
        self._make_lanes = make_lanes
        self._links: dict[torch.device, Link] = {}

    def get(self, device: torch.device) -> Link:
        if device not in self._links:
            self._links[device] = Link(device, self._make_lanes)
        return self._links[device]


def _fitting_lanes(device: torch.device) -> Lanes:
    return ImmediateLanes(device) if device.type == "cpu" else AcceleratorLanes(device)


_real_links = _Links(_fitting_lanes)
_links: contextvars.ContextVar[_Links] = contextvars.ContextVar("offstage_links", default=_real_links)


def link_for(device: torch.device) -> Link:
    """The link of `device`."""
    return _links.get().get(device)


@contextlib.contextmanager
def use_lanes(factory: LanesFactory | None) -> Iterator[None]:
    """Within the context, optimizers are built on the lanes `factory` makes: lazy ones, checked ones, ones with delays.

    `None`: those that fit the device.
    """
    token = _links.set(_real_links if factory is None else _Links(factory))
    try:
        yield
    finally:
        _links.reset(token)


def measure_duplex(lanes: Lanes, *, pin: bool = True, nbytes: int = _COPY_BYTES) -> float:
    """GB/s each way, with both directions busy: the best of a few runs. `nbytes`: of a copy; it takes twice as much."""
    memory = torch.empty(2, nbytes, dtype=torch.uint8, device=lanes.device)
    arena = Arena(2 * nbytes, torch.uint8, lanes.device, pin=pin)
    down, up = arena.flat.chunk(2)
    lanes.touch(writes=[memory])
    copies = {Lane.STORE: (down, memory[0]), Lane.FETCH: (memory[1], up)}
    milliseconds = [_both_ways(lanes, copies) for _ in range(1 + _REPEATS)][1:]  # the first time is slower
    lanes.touch(writes=[memory])
    arena.close()
    return _COPIES * nbytes / max(min(milliseconds), _SHORTEST_MS) / 1e6


def measure_one_way(lanes: Lanes, lane: Lane) -> float:
    """GB/s of `lane` when nothing goes the other way: the best of a few runs."""
    memory = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=lanes.device)
    arena = Arena(_COPY_BYTES, torch.uint8, lanes.device, pin=True)
    lanes.touch(writes=[memory])
    pair = (arena.flat, memory) if lane is Lane.STORE else (memory, arena.flat)
    milliseconds = [_both_ways(lanes, {lane: pair}) for _ in range(1 + _REPEATS)][1:]
    lanes.touch(writes=[memory])
    arena.close()
    return _COPIES * _COPY_BYTES / max(min(milliseconds), _SHORTEST_MS) / 1e6


def _both_ways(lanes: Lanes, copies: dict[Lane, tuple[torch.Tensor, torch.Tensor]]) -> float:
    start, last = lanes.stamp(Lane.CALLER), _submit_all(lanes, copies)
    for mark in last:
        lanes.wait(mark, "measure: the copies are done")
    return lanes.elapsed_ms(start, lanes.stamp(Lane.CALLER))


def _submit_all(lanes: Lanes, copies: dict[Lane, tuple[torch.Tensor, torch.Tensor]]) -> Sequence[Mark]:
    ready, last = lanes.mark(), {}
    for _ in range(_COPIES):
        for lane, (target, source) in copies.items():
            last[lane] = lanes.submit(
                lane,
                copy_work([(target, source)]),
                after={"measure: the memory is free": ready},
                reads=[source],
                writes=[target],
            )
    return list(last.values())
