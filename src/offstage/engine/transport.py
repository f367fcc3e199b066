# SPDX-License-Identifier: Apache-2.0
"""`DeviceSide`: what one device needs for state that is not on it. The counterpart of `HostSide`, under `engine.py`.

Lanes, the pipeline with its slots and its window, staging buffers for updates on the host, and what these have counted.
Without parameters that are off the device none of them exists.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence

import torch

from offstage.config import OffloadConfig, format_size
from offstage.engine.arenas import HostSide
from offstage.engine.external_writes import ForeignWatch
from offstage.engine.host_trips import HostTrips
from offstage.engine.param_state import HeldState
from offstage.engine.pipeline import Pipeline, Trip
from offstage.engine.timer import StepTimer
from offstage.errors import OffstageError
from offstage.lanes.host_threads import HostThreads, is_host_thread
from offstage.lanes.lanes import Lanes, lanes_for
from offstage.memory.cpus import cpus_near, num_threads
from offstage.planning.plan import HOST_SLOTS
from offstage.rules.rule import Rule

logger = logging.getLogger("offstage")


class DeviceSide:
    """Lanes, slots, staging buffers and counters of one device."""

    # Initialization

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig) -> None:
        self.device = device
        self.timer: StepTimer | None = None
        self.link_gb_per_s: float | None = None
        """Measured before the first step; 0 where there is no link."""
        self.window_cut: str | None = None
        """Why the window is smaller than it should be."""
        self.bytes_updated_on_host = 0
        self.host_side = HostSide(device, rule, config)
        self._rule = rule
        self._config = config
        self._lanes: Lanes | None = None
        self._pipeline: Pipeline | None = None
        self._trips: HostTrips | None = None
        self._in_use: list[object] = [self.host_side]
        """What lanes may still use when this object is dropped."""
        self._foreign = ForeignWatch(rule, device)
        self._moved_before = (0, 0)
        self._most_window_slots = sys.maxsize
        self._closed = False

    def add(self, states: Sequence[HeldState]) -> None:
        """Give parameters that are not resident their arenas, chunks, and the way there."""
        self.host_side.add(states)
        if not self.host_side.states:
            return
        lanes = self._make_lanes()
        slot_bytes = self.host_side.slot_bytes
        if slot_bytes and (self._pipeline is None or self._pipeline.slot_bytes < slot_bytes):
            if self._pipeline is not None:
                self._retire(self._pipeline)
            self._pipeline = Pipeline(lanes, num_slots=self._config.num_slots, slot_bytes=slot_bytes)
            self._in_use.append(self._pipeline)
        if self._trips is None and any(host.on_host for host, _ in self.host_side.states):
            self._trips = HostTrips(lanes, self._rule, self.device, pin=self._config.pin_memory)
            self._in_use.append(self._trips)

    def _make_lanes(self) -> Lanes:
        if self._lanes is None:
            self._lanes = lanes_for(self.device)
            # torch has threads of its own, and a set of them for each thread that calls it.
            asked = 1 if self._rule.threads_itself else self._config.threads
            self._lanes.threads = _threads_near(self.device, asked)
            # Dropped with work under way: what the lanes still use must not be freed before they are done.
            weakref.finalize(self, _drain, self._lanes, self._in_use, os.getpid())
            self._foreign.attach(self._lanes)
            self.timer = StepTimer(self._lanes)
        return self._lanes

    def carry_on(self, other: DeviceSide) -> None:
        """This one takes the place of `other` on the same device."""
        if self._config.pin_memory == other._config.pin_memory:
            self.link_gb_per_s = other.link_gb_per_s
        self._foreign.carry_on(other._foreign)
        self._moved_before = other.moved_bytes

    def _retire(self, pipeline: Pipeline) -> None:
        fetched, stored = self._moved_before
        self._moved_before = fetched + pipeline.bytes_fetched, stored + pipeline.bytes_stored
        pipeline.close()

    # Runtime

    def prepare(self) -> None:
        """Allocate what the step needs on the device, before anything moves."""
        if self._closed:
            raise OffstageError(
                "This optimizer was closed: its slots and pinned memory were given back. Build a new one and load its "
                "state_dict() to go on training."
            )
        self._foreign.report()
        if self._trips is not None:
            self._trips.prepare(self.host_side.staging_bytes)
        if self._pipeline is None:
            return
        try:
            if self._pipeline.prepare() and self.link_gb_per_s is None:
                self.link_gb_per_s = self._measure_link(self._pipeline)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"offstage: {self._pipeline.num_slots} slots of {format_size(self._pipeline.slot_bytes)} did not fit "
                f"on {self.device}. Nothing was changed. Lower chunk_bytes or slots (3 are enough), or free device "
                "memory."
            )
            self._name_budget(error, self._pipeline.missing_bytes)
            raise

    def _name_budget(self, error: torch.OutOfMemoryError, need_bytes: int) -> None:
        """Say which `device_budget` would have worked, if one was given."""
        if self._config.device_budget is None or self._lanes is None:
            return
        budget = int(self._config.device_budget)
        works = budget - max(1, need_bytes - self._lanes.free_bytes())
        remedy = (
            f"{format_size(works)} would have worked: optimizer.replan(device_budget={works})"
            if works > 0
            else "no smaller one would have worked either; free device memory"
        )
        error.add_note(f"offstage: device_budget={format_size(budget)} is more than {self.device} has left; {remedy}.")

    def _measure_link(self, pipeline: Pipeline) -> float:
        """What the link carries each way when both directions are busy; once, with the first chunks and no change."""
        streamed = (Trip(host, chunk, chunk.pieces) for host, _, chunk in self.host_side.chunks() if not host.on_host)
        trips = list(itertools.islice(streamed, 2))
        if self.device.type == "cpu" or len(trips) < 2 or pipeline.num_slots < 2:
            return 0.0
        return pipeline.measure_link(trips)

    def synchronize(self, reason: str) -> None:
        """Make the host wait until everything that was given to the lanes is done."""
        if self._lanes is not None:
            self._lanes.synchronize(reason)
            if self._lanes.checks:
                arenas = [arena.flat for host, _ in self.host_side.states for arena in host.arenas.values()]
                self._lanes.touch_on_host(writes=arenas)

    # The window

    @property
    def num_chunks(self) -> int:
        """How many could wait in the window."""
        return self.host_side.num_streamed_chunks

    def widen(self, window_slots: int) -> None:
        """Let `window_slots` more chunks be on the device. Without memory for them the window stays smaller."""
        if self._pipeline is None or self._pipeline.window_slots >= min(window_slots, self._most_window_slots):
            return
        try:
            self._pipeline.widen(window_slots)
        except torch.OutOfMemoryError:
            self._most_window_slots = self._pipeline.window_slots  # failing allocations are slow: not again
            self.window_cut = (
                f"{self.device} has memory for {self._most_window_slots} window slots of "
                f"{format_size(self._pipeline.slot_bytes)} instead of {window_slots}; chunks are fetched later"
            )
            logger.warning(self.window_cut)

    def narrow(self, window_slots: int) -> None:
        """Give the memory of window slots back, behind their stores, until `window_slots` are left."""
        if self._pipeline is not None:
            self._pipeline.narrow(window_slots)

    def discard_staged(self) -> None:
        """What was fetched ahead is not needed, or no longer the newest."""
        if self._pipeline is not None:
            self._pipeline.discard_staged()

    # Looking

    @property
    def lanes(self) -> Lanes | None:
        return self._lanes

    def capturing(self) -> bool:
        return self._lanes is not None and self._lanes.capturing()

    @property
    def peak_bytes(self) -> int:
        """The most that the whole process has had allocated on the device so far."""
        return self._lanes.peak_bytes() if self._lanes is not None else 0

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """(to the device, to the host) since the beginning: state, and weights and gradients of updates on the host."""
        fetched, stored = self._moved_before
        if self._pipeline is not None:
            fetched, stored = fetched + self._pipeline.bytes_fetched, stored + self._pipeline.bytes_stored
        if self._trips is not None:
            fetched, stored = fetched + self._trips.bytes_raised, stored + self._trips.bytes_lowered
        return fetched, stored

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging buffers, whether they are allocated yet or not."""
        return HOST_SLOTS * self.host_side.staging_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory: arenas and staging buffers."""
        return self.host_side.nbytes + max(self.staging_bytes, self._trips.nbytes if self._trips is not None else 0)

    @property
    def host_busy_s(self) -> float:
        """For how long the CPU was updating, so far."""
        return self._lanes.threads.busy_s if self._lanes is not None else 0.0

    @property
    def host_gb_per_s(self) -> float:
        """State that the CPU updates, over the time in which it did so far."""
        busy = self.host_busy_s
        return self.bytes_updated_on_host / busy / 1e9 if busy else 0.0

    @property
    def planned_slot_bytes(self) -> int:
        """The size of one slot; 0 without streamed parameters."""
        return self._pipeline.slot_bytes if self._pipeline else 0

    @property
    def planned_bytes(self) -> int:
        """Of the ring's own slots together."""
        return self._pipeline.num_slots * self._pipeline.slot_bytes if self._pipeline else 0

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots that are allocated now."""
        return self._pipeline.device_bytes if self._pipeline else 0


def _threads_near(device: torch.device, asked: int | None) -> HostThreads:
    """Threads on the accelerator's NUMA node, where its arenas are; not more than it has CPUs."""
    cpus = cpus_near(device)
    count = num_threads(asked)
    return HostThreads(count if cpus is None or asked is not None else min(count, len(cpus)), cpus)


def _drain(lanes: Lanes, in_use: list[object], owner: int) -> None:
    if os.getpid() != owner:
        return
    if is_host_thread():  # the garbage collector runs anywhere, and this one must not wait for itself
        threading.Thread(target=_drain, args=(lanes, in_use, owner)).start()
        return
    lanes.synchronize("drop: nothing is under way")
    in_use.clear()
