# SPDX-License-Identifier: Apache-2.0
"""One device's part of a step: resident parameters updated in place, chunks sent through the pipeline.

Owns the device's lanes, pipeline and arenas. Called by `optimizer.py`. Without streamed parameters none of the three
exists and the update runs on the caller's stream.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Iterable, Sequence

import torch

from offstage.config import OffloadConfig, format_size
from offstage.errors import OffstageError
from offstage.held_state import HeldState
from offstage.host_memory import Arena
from offstage.lanes import Lane, Lanes, Mark, lanes_for, on_device
from offstage.layout import make_layout
from offstage.pipeline import HostState, Pipeline, Trip
from offstage.plan import Placement
from offstage.receipt import StepTimer
from offstage.rules.rule import Rule, Share, Turn

logger = logging.getLogger("offstage")


_alive: weakref.WeakSet[Engine] = weakref.WeakSet()
_kept_in_child: list[Engine] = []
# A forked child (a DataLoader worker) must not destroy events and streams of its parent's accelerator: torch aborts the
# process that tries. So the child never lets go of an engine, whatever it drops.
os.register_at_fork(after_in_child=lambda: _kept_in_child.extend(_alive))


class Engine:
    """Everything offstage has on one device."""

    # Initialization

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig) -> None:
        self.device = device
        self.updating = False
        """True between the first update of a step and its end: a failure then leaves weights between two steps."""
        self.timer: StepTimer | None = None
        self._rule = rule
        self._config = config
        self._lanes: Lanes | None = None
        self._pipeline: Pipeline | None = None
        self._hosts: list[tuple[HostState, list[HeldState]]] = []
        self._moved_before = (0, 0)
        self._closed = False
        self._foreign = _ForeignWatch(rule, device)
        _alive.add(self)

    def add(self, states: Sequence[HeldState]) -> None:
        """Give streamed parameters their arenas and chunks."""
        kinds: dict[tuple[tuple[str, torch.dtype], ...], list[HeldState]] = {}
        for held in states:
            if held.placement is Placement.STREAMED:
                kinds.setdefault(tuple((key.name, key.dtype) for key in held.keys), []).append(held)
        self._hosts += [(self._make_host_state(members), members) for members in kinds.values()]
        slot_bytes = max((host.layout.slot_bytes for host, _ in self._hosts), default=0)
        if slot_bytes and (self._pipeline is None or self._pipeline.slot_bytes < slot_bytes):
            if self._lanes is None:
                self._lanes = lanes_for(self.device)
                self.timer = StepTimer(self._lanes)
            if self._pipeline is not None:
                self._retire(self._pipeline)
            self._pipeline = Pipeline(self._lanes, num_slots=self._config.slots, slot_bytes=slot_bytes)

    def _retire(self, pipeline: Pipeline) -> None:
        self._moved_before = self.moved_bytes
        pipeline.close()

    def drop_unused(self, live: Iterable[HeldState]) -> None:
        """Close arenas none of whose parameters are kept there any more. The lanes have been drained."""
        keep = set(live)
        for host, members in self._hosts:
            if keep.isdisjoint(members):
                for arena in host.arenas.values():
                    arena.close()
        self._hosts = [(host, members) for host, members in self._hosts if not keep.isdisjoint(members)]

    def _make_host_state(self, members: Sequence[HeldState]) -> HostState:
        keys = members[0].keys
        layout = make_layout(
            [{key.name: key.numel(held.param) for key in held.keys} for held in members],
            {key.name: key.dtype.itemsize for key in keys},
            [held.param.numel() for held in members],
            chunk_bytes=int(self._config.chunk_bytes),
            split=self._rule.splits(self.device),
        )
        arenas = {
            key.name: Arena(layout.arena_numel[key.name], key.dtype, self.device, pin=self._config.pin_memory)
            for key in keys
        }
        host = HostState(layout, arenas)
        for index, held in enumerate(members):
            held.host, held.index = host, index
        return host

    # Runtime

    def prepare(self) -> None:
        """Allocate what the step needs on the device, before anything moves."""
        if self._closed:
            raise OffstageError(
                "This optimizer was closed: its slots and pinned memory were given back. Build a new one and load its "
                "state_dict() to go on training."
            )
        self._foreign.report()
        if self._pipeline is None:
            return
        try:
            self._pipeline.prepare()
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"offstage: {self._pipeline.num_slots} slots of {format_size(self._pipeline.slot_bytes)} did not fit "
                f"on {self.device}. Nothing was changed. Lower chunk_bytes or slots, or free device memory."
            )
            raise

    def run(self, turns: Sequence[Turn]) -> None:
        """Update the parameters of `turns`. The caller's stream waits for the weights, the host for nothing."""
        if self._pipeline is None or self._lanes is None or self.timer is None:
            with on_device(self.device):
                self._run_on_caller(turns)
            return
        lanes = self._lanes
        self.timer.start()
        buffers = [tensor for turn in turns for tensor in (turn.weight, turn.grad)] if lanes.checks else []
        lanes.touch(writes=buffers)
        gradients_ready = lanes.mark()
        weights_ready = lanes.submit(
            Lane.UPDATE,
            lambda: self._rule.begin(self.device, turns),
            # Once for all updates: they follow on the same lane.
            after={"update: the gradients are ready": gradients_ready},
        )
        weights_ready = self._update_resident(lanes, turns) or weights_ready
        weights_ready = self._update_streamed(self._pipeline, turns) or weights_ready
        self._foreign.look(lanes)
        lanes.wait(weights_ready, "caller: the weights are ready")
        lanes.touch(writes=buffers)
        self.updating = False
        self.timer.stop()

    def _run_on_caller(self, turns: Sequence[Turn]) -> None:
        """Everything is resident: no lanes, nothing to wait for."""
        self._rule.begin(self.device, turns)
        self.updating = True
        for shares in self._batches(turns):
            self._rule.update(shares)
        self.updating = False
        self._foreign.look(None)

    def _batches(self, turns: Sequence[Turn]) -> Iterable[list[Share]]:
        """Resident parameters, about `chunk_bytes` of state at a time: a rule may need temporary memory for each."""
        batch: list[Share] = []
        room = int(self._config.chunk_bytes)
        for turn in turns:
            if _held(turn).placement is Placement.RESIDENT:
                batch.append(Share(turn, 0, turn.weight.numel(), _held(turn).resident))
                room -= _held(turn).nbytes
                if room <= 0:
                    yield batch
                    batch, room = [], int(self._config.chunk_bytes)
        if batch:
            yield batch

    def _update_resident(self, lanes: Lanes, turns: Sequence[Turn]) -> Mark | None:
        last = None
        for shares in self._batches(turns):
            self.updating = True
            state = [tensor for share in shares for tensor in share.state.values()]
            last = lanes.submit(
                Lane.UPDATE,
                functools.partial(self._rule.update, shares),
                after={},
                reads=[share.grad for share in shares],
                writes=[*(share.weight for share in shares), *state],
            )
        return last

    def _update_streamed(self, pipeline: Pipeline, turns: Sequence[Turn]) -> Mark | None:
        last = None
        for trip, trip_turns in self._trips({_held(turn): turn for turn in turns}):
            pipeline.fetch(trip)
            shares = [
                Share(turn, piece.start, piece.stop, pipeline.state_of(trip, piece))
                for piece, turn in zip(trip.pieces, trip_turns, strict=True)
            ]
            self.updating = True
            pipeline.update(
                trip,
                functools.partial(self._rule.update, shares),
                weights=[share.weight for share in shares],
                grads=[share.grad for share in shares],
            )
            pipeline.store(trip)
            last = trip.updated
        return last

    def _trips(self, by_state: dict[HeldState, Turn]) -> Iterable[tuple[Trip, list[Turn]]]:
        """The chunks that have something to update. Parameters without a gradient do not move."""
        for host, members in self._hosts:
            for chunk in host.layout.chunks:
                pieces = [piece for piece in chunk.pieces if members[piece.index] in by_state]
                if pieces:
                    yield Trip(host, chunk, pieces), [by_state[members[piece.index]] for piece in pieces]

    # Reading

    def synchronize(self, reason: str) -> None:
        """Make the host wait until everything that was given to the lanes is done."""
        if self._lanes is not None:
            self._lanes.synchronize(reason)
            if self._lanes.checks:
                arenas = [arena.flat for host, _ in self._hosts for arena in host.arenas.values()]
                self._lanes.touch_on_host(writes=arenas)

    def reset(self) -> None:
        """After a lost step: forget trips that were under way."""
        if self._pipeline is not None:
            self.synchronize("reset: nothing is under way")
            self._pipeline.reset()
        self.updating = False

    def close(self) -> None:
        """Give everything back: slots behind their last store, then the arenas."""
        if self._pipeline is not None:
            self._retire(self._pipeline)
        self._pipeline, self._closed = None, True
        self.synchronize("close: the last copies are done")
        self.drop_unused(())

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """(fetched, stored) since the beginning."""
        fetched, stored = self._moved_before
        if self._pipeline is None:
            return fetched, stored
        return fetched + self._pipeline.bytes_fetched, stored + self._pipeline.bytes_stored

    @property
    def planned_slot_bytes(self) -> int:
        """The size of one slot; 0 without streamed parameters."""
        return self._pipeline.slot_bytes if self._pipeline else 0

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots that are allocated now."""
        return self._pipeline.device_bytes if self._pipeline else 0

    @property
    def host_bytes(self) -> int:
        return sum(host.nbytes for host, _ in self._hosts)


class _ForeignWatch:
    """Brings the count of weights written by others to the host without waiting for it, and logs it once."""

    def __init__(self, rule: Rule, device: torch.device) -> None:
        self._rule, self._device = rule, device
        self._seen: torch.Tensor | None = None
        self._arrived: Mark = None
        self._lanes: Lanes | None = None
        self._logged = False

    def look(self, lanes: Lanes | None) -> None:
        counter = self._rule.foreign_weights(self._device)
        if counter is None or self._logged:
            return
        if lanes is None:
            # Without lanes nothing is offloaded; on a device the receipt still tells.
            self._seen = counter if self._device.type == "cpu" else None
            return
        if self._lanes is None:  # the first look on lanes; there may have been steps without
            self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=self._device.type != "cpu")
        elif not lanes.passed(self._arrived):
            return  # the last look has not arrived; the next step looks again
        seen = self._seen
        assert seen is not None
        self._arrived = lanes.submit(Lane.UPDATE, lambda: _copy_counter(seen, counter), after={}, writes=[seen])
        self._lanes = lanes

    def report(self) -> None:
        if self._seen is None or self._logged:
            return
        if self._lanes is not None:
            if not self._lanes.passed(self._arrived):
                return
            self._lanes.touch_on_host(reads=[self._seen])
        if int(self._seen):
            self._logged = True
            logger.warning(
                "%d weights on %s were written by someone else between steps; their fp32 masters follow the weights. "
                "Expected after loading a model; otherwise find out who writes them.",
                int(self._seen),
                self._device,
            )


def _copy_counter(seen: torch.Tensor, counter: torch.Tensor) -> None:
    seen.copy_(counter, non_blocking=True)


def _held(turn: Turn) -> HeldState:
    assert isinstance(turn.of, HeldState)
    return turn.of
