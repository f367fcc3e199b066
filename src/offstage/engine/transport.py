# SPDX-License-Identifier: Apache-2.0
"""`Transport`: the way between one device and its arenas: lanes, slots, staging buffers, what they counted and took.

As long as nothing is off the device its lanes are immediate and it owns no memory, stream or thread.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from offstage.config import OffloadConfig, format_size
from offstage.engine.arenas import Arenas
from offstage.engine.external_writes import ExternalWrites
from offstage.engine.gradients import HostGradients
from offstage.engine.host_updates import HostUpdates
from offstage.engine.pipeline import Pipeline
from offstage.engine.timer import StepTimer
from offstage.errors import OffstageError
from offstage.lanes.host_threads import HostThreads, may_wait_for_threads
from offstage.lanes.lanes import ImmediateLanes, Lanes
from offstage.lanes.link import link_for
from offstage.memory.arena import check_owner
from offstage.memory.cpus import beside_a_loop, cpus_near, num_threads
from offstage.memory.interrupts import deferred_interrupts
from offstage.planning.plan import HOST_SLOTS
from offstage.rules.rule import HostedLayer, ParamState, Rule

logger = logging.getLogger("offstage")


@dataclass(frozen=True)
class Moved:
    """Bytes that were copied to the device, up, and to the host, down."""

    state_up: int = 0
    state_down: int = 0
    weights_up: int = 0
    weights_down: int = 0
    gradients_up: int = 0
    gradients_down: int = 0

    @property
    def up(self) -> int:
        return self.state_up + self.weights_up + self.gradients_up

    @property
    def down(self) -> int:
        return self.state_down + self.weights_down + self.gradients_down

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Moved) -> Moved:
        return Moved(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Transport:
    """Lanes, slots, staging buffers and counters of one device."""

    # Initialization

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig, arenas: Arenas) -> None:
        self.device = device
        self.is_open = False
        """Whether something is off the device."""
        self.link_gb_per_s: float | None = None
        """Measured before the first step; 0 where there is no link."""
        self.window_cut: str | None = None
        """Why the window is smaller than it should be."""
        self.bytes_updated_on_host = 0
        self.layers: Sequence[HostedLayer] = ()
        """Layers whose weights live on the host."""
        self._rule, self._config, self._arenas = rule, config, arenas
        self.external_writes = ExternalWrites(rule, device)
        self._moved_before = Moved()
        self._most_window_slots = sys.maxsize
        self._closed = False
        self._owner = os.getpid()
        self._connect(ImmediateLanes(device))

    def _connect(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.timer = StepTimer(lanes)
        self.pipeline = Pipeline(lanes, num_slots=self._config.num_slots)
        self.host_updates = HostUpdates(lanes, self._rule, self.device, pin=self._config.pin_memory)
        self.gradients = HostGradients(lanes, self.timer, pin=self._config.pin_memory)

    def open(self) -> None:
        """The arenas have chunks: give them lanes, and slots of their size."""
        if not self._arenas.sets:
            return
        self.connect()
        if self.pipeline.slot_bytes < self._arenas.slot_bytes:
            self.pipeline.resize(self._config.num_slots, self._arenas.slot_bytes, self.pipeline.gradient_bytes)

    def connect(self) -> None:
        """Something is off the device from now on: lanes of the link."""
        if not self.is_open:
            self._link = link_for(self.device)
            self._connect(self._link.lanes())
            self.timer.open_log()
            # torch has threads of its own, and a set of them for each thread that calls it.
            asked = 1 if self._rule.threads_itself else self._config.threads
            self.lanes.threads = _threads_near(self.device, asked)
            # Dropped with work under way: what the lanes still use must not be freed before they are done.
            in_use = (self.pipeline, self.host_updates, self.gradients)
            weakref.finalize(self, _drain, self.lanes, self._arenas, in_use, os.getpid())
            self.external_writes.attach(self.lanes)
            self.is_open = True

    def follow(self, config: OffloadConfig) -> None:
        """Other settings, with which all state stays where it is. Nothing is under way."""
        self._config = config
        if self.pipeline.num_slots != config.num_slots:
            self.pipeline.resize(config.num_slots, self.pipeline.slot_bytes, self.pipeline.gradient_bytes)

    def carry_on(self, other: Transport, states: Mapping[torch.Tensor, ParamState]) -> None:
        """This one takes the place of `other` on the same device. `states`: those of now."""
        if self._config.pin_memory == other._config.pin_memory:
            self.link_gb_per_s = other.link_gb_per_s
        self.external_writes.carry_on(other.external_writes)
        self._moved_before = other.moved
        self.gradients.carry_on(other.gradients, states)

    # Runtime

    def prepare(self, *, with_gradients: bool = False) -> None:
        """Allocate what the step needs on the device, before anything moves.

        `with_gradients`: some have left for the host, and come back through the slots.
        """
        if self._closed:
            raise OffstageError(
                "This optimizer was closed: its slots and pinned memory were given back. Build a new one and load its "
                "state_dict() to go on training."
            )
        self.external_writes.report()
        self.host_updates.begin_step()
        self.host_updates.prepare(self._arenas.staging_bytes)
        if with_gradients and self.pipeline.gradient_bytes < (need := self._arenas.gradient_bytes):
            self.pipeline.resize(self.pipeline.num_slots, self.pipeline.slot_bytes, need)
        try:
            self.pipeline.prepare()
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"offstage: {self.pipeline.num_slots} slots of {format_size(self.pipeline.slot_bytes)} did not fit "
                f"on {self.device}. Nothing was changed. Lower chunk_bytes or slots (3 are enough), or free device "
                "memory."
            )
            self._name_budget(error, self.pipeline.missing_bytes)
            raise
        if self.link_gb_per_s is None and self.pipeline.num_slots:
            has_link = self.device.type != "cpu"
            pin = self._config.pin_memory
            self.link_gb_per_s = self._link.gb_per_s(self.lanes, pin=pin) if has_link else 0.0

    def _name_budget(self, error: torch.OutOfMemoryError, need_bytes: int) -> None:
        """Say which `device_budget` would have worked, if one was given."""
        if self._config.device_budget is None:
            return
        budget = int(self._config.device_budget)
        works = budget - max(1, need_bytes - self.lanes.free_bytes())
        remedy = (
            f"{format_size(works)} would have worked: optimizer.replan(device_budget={works})"
            if works > 0
            else "no smaller one would have worked either; free device memory"
        )
        error.add_note(f"offstage: device_budget={format_size(budget)} is more than {self.device} has left; {remedy}.")

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that it was made in."""
        return os.getpid() != self._owner

    def check_process(self) -> None:
        """Raise in a forked child, which would wait for ever for threads that it does not have."""
        if self.is_open:
            check_owner(self._owner)

    def synchronize(self, reason: str) -> None:
        """Make the host wait until everything that was given to the lanes is done."""
        self.check_process()
        self.lanes.synchronize(reason)
        if self.lanes.checks:
            self.lanes.touch_on_host(
                writes=[arena.flat for host in self._arenas.sets for arena in host.arenas.values()]
            )

    def reset(self) -> None:
        """After a lost step: forget trips that were under way."""
        self.synchronize("reset: nothing is under way")
        self.lanes.forget()
        self.forget_host_marks()
        self.external_writes.forget()
        self._arenas.forget_stores()
        self.pipeline.reset()
        self.host_updates.forget()

    def forget_host_marks(self) -> None:
        """The lanes have been drained: weights and gradients on the host are as the last work left them."""
        for layer in self.layers:
            layer.forget()
        self.gradients.forget_marks()

    def close(self) -> None:
        """Give everything back: slots behind their last store, then the arenas."""
        self.pipeline.close()
        self._closed = True
        self.synchronize("close: the last copies are done")
        self.host_updates.close("close: the last copies are done")
        self.gradients.drop()
        self._arenas.drop_unused(())

    # The window

    def widen(self, window_slots: int) -> None:
        """Let `window_slots` more chunks be on the device. Without memory for them the window stays smaller."""
        if self.pipeline.window_slots >= min(window_slots, self._most_window_slots):
            return
        try:
            self.pipeline.widen(window_slots)
        except torch.OutOfMemoryError:
            self._most_window_slots = self.pipeline.window_slots  # failing allocations are slow: not again
            self.window_cut = (
                f"{self.device} has memory for {self._most_window_slots} window slots of "
                f"{format_size(self.pipeline.slot_bytes)} instead of {window_slots}; chunks are fetched later"
            )
            logger.warning(self.window_cut)

    # Looking

    @property
    def moved(self) -> Moved:
        """Since the beginning. For updates on the host, weights and gradients together count as weights."""
        pipeline, gradients, by_cpu = self.pipeline, self.gradients, self.host_updates
        return self._moved_before + Moved(
            state_up=pipeline.bytes_fetched,
            state_down=pipeline.bytes_stored,
            weights_up=by_cpu.bytes_up,
            weights_down=pipeline.weight_bytes_stored + by_cpu.bytes_down,
            gradients_up=pipeline.gradient_bytes_fetched + gradients.bytes_returned,
            gradients_down=gradients.bytes_left,
        )

    @property
    def staging_bytes(self) -> int:
        """Host memory of the staging buffers, whether they are allocated yet or not."""
        return HOST_SLOTS * self._arenas.staging_bytes

    @property
    def host_state_bytes(self) -> int:
        """Host memory: arenas and staging buffers."""
        return self._arenas.nbytes + max(self.staging_bytes, self.host_updates.nbytes)

    @property
    def host_bytes(self) -> int:
        """Host memory for state, for gradients that leave, and for weights that live there."""
        return self.host_state_bytes + self.gradients.nbytes + sum(layer.host_bytes for layer in self.layers)

    @property
    def host_gb_per_s(self) -> float:
        """State that the CPU updates, over the time in which it did so far."""
        busy = self.lanes.threads.busy_s if self.is_open else 0.0
        return self.bytes_updated_on_host / busy / 1e9 if busy else 0.0


def _threads_near(device: torch.device, asked: int | None) -> HostThreads:
    """Threads on the accelerator's NUMA node, where its arenas are; not more than it has CPUs."""
    cpus = cpus_near(device)
    count = num_threads(asked)
    if asked is None and cpus is not None:
        count = min(count, len(cpus))
    if asked is None and device.type != "cpu":  # where the device is the CPU, the loop waits for its updates
        count = beside_a_loop(count)
    return HostThreads(count, cpus)


def _drain(lanes: Lanes, arenas: Arenas, in_use: object, owner: int) -> None:
    """Keeps `in_use` and the arenas alive until the lanes are done with them."""
    if os.getpid() != owner:
        return
    with deferred_interrupts():  # or memory that the lanes still use would be freed
        if may_wait_for_threads():
            _dissolve(lanes, arenas, in_use)
        else:
            lanes.after_promises(functools.partial(_dissolve, lanes, arenas, in_use))


def _dissolve(lanes: Lanes, arenas: Arenas, in_use: object) -> None:
    lanes.synchronize("drop: nothing is under way")
    arenas.dissolve()
