# SPDX-License-Identifier: Apache-2.0
"""One device's part of a step: resident parameters updated in place, the others on their trips.

A `Round` is what one iteration has got so far on this device: gradients are taken (`take`), all at `step()` or one by
one during backward; chunks go on their trips (`advance`, and `run` for all that are left); and before the caller reads
a weight its stream waits for the update (`settle`), at the end of `step()` or as late as in the next forward. `run`
ends a round; `revert` and `reset` give it up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine.arenas import Arenas, StateChunk, StatePiece
from offstage.engine.pipeline import Trip
from offstage.engine.transport import Transport
from offstage.errors import StepLostError
from offstage.lanes.lanes import Lane, Mark, Place
from offstage.planning.plan import Plan
from offstage.rules.rule import ParamState, ParamUpdate, PieceUpdate, Rule
from offstage.tensors import copy_back

_MOST_AT_ONCE = 8
"""Chunks that one hook sends for: about a millisecond of the host's time."""
_alive: weakref.WeakSet[Engine] = weakref.WeakSet()
_kept_in_child: list[Engine] = []
# A forked child (a DataLoader worker) must not destroy events and streams of its parent's accelerator: torch aborts the
# process that tries. So the child never lets go of an engine, whatever it drops.
os.register_at_fork(after_in_child=lambda: _kept_in_child.extend(_alive))


@dataclass(eq=False)
class Pending:
    """A parameter whose updates have all been given to the lanes and which the caller's stream has not waited for."""

    update: ParamUpdate
    updated: Mark
    """Its last update on the device."""
    order: int
    """These follow each other on one lane, which stays failed once one has failed: waiting for a larger number waits
    for this one."""
    up: list[Mark]
    """Updated on the host: when each of its pieces is on the device again. Nothing orders these."""
    place: Place
    """The stream in whose order the gradient's memory goes back."""
    old_weights: torch.Tensor | None
    """Device memory that holds the weights before, if they were kept there."""


@dataclass(eq=False)
class Round:
    """What one iteration has got so far on one device."""

    speculative: bool
    """State goes to the spare arenas and old weights are kept."""
    ready: dict[ParamState, ParamUpdate] = field(default_factory=dict)
    """Taken and not settled yet."""
    left: dict[ParamState, int] = field(default_factory=dict)
    """Chunks that have still to be updated."""
    up: dict[ParamState, list[Mark]] = field(default_factory=dict)
    """Updated on the host: its pieces so far."""
    done: set[StatePiece] = field(default_factory=set)
    """Pieces that have been updated."""
    moved: set[StatePiece] = field(default_factory=set)
    """Speculative: pieces that have only been moved to the spare set, with the others of their chunk."""
    travelling: bool = False
    """A trip has begun and is not given to the lanes as a whole: still so after a failure in the middle of one."""
    places: dict[ParamState, Place] = field(default_factory=dict)
    old_weights: dict[ParamState, torch.Tensor] = field(default_factory=dict)
    """Speculative: the weights before."""
    on_device: dict[ParamState, torch.Tensor] = field(default_factory=dict)
    """Memory of the lanes that holds some of them."""

    def forget(self, state: ParamState) -> None:
        """It was not taken after all."""
        for taken in (self.ready, self.left, self.up, self.places, self.old_weights, self.on_device):
            taken.pop(state, None)  # type: ignore[attr-defined]


class Engine:
    """Makes the steps of one device."""

    # Initialization

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig) -> None:
        self.device = device
        self.arenas = Arenas(device, rule, config)
        self.transport = Transport(device, rule, config, self.arenas)
        self.chunk_bytes = config.most_chunk_bytes
        """State that is worth a trip."""
        self.updating = False
        """True between the first update of a step and its end: a failure then leaves weights between two steps."""
        self.lost: str | None = None
        """What to say after an update has failed in another thread."""
        self.pending: dict[ParamState, Pending] = {}
        self.round: Round | None = None
        self._rule, self._config = rule, config
        self._order = 0
        self._last_update: Mark = None
        self._begun: Mark = None
        self._last_ready: set[ParamState] = set()
        self._ahead: Iterator[tuple[StateChunk, list[StatePiece]]] = iter(())
        _alive.add(self)

    def add(self, states: Sequence[ParamState], plan: Plan) -> None:
        """Give parameters that are not resident their arenas, chunks of the plan's size, and the way there."""
        self._ahead = iter(())
        self.chunk_bytes = plan.chunk_bytes or plan.host_chunk_bytes or self.chunk_bytes
        self.arenas.add(states, plan)
        self.transport.open()

    # Runtime

    def run(self, updates: Sequence[ParamUpdate]) -> None:
        """Take `updates`, make all of the round that are not under way yet, and end it. The host waits for nothing."""
        if updates or self.round is not None:
            self.take(updates, decided=True)
            self._flush()
            self._end_round()

    def take(self, updates: Sequence[ParamUpdate], *, speculative: bool = False, decided: bool = False) -> None:
        """The gradients of `updates` are final. Opens a round if there is none.

        `decided`: it is known that these updates stay, though the round is speculative.
        """
        if self.round is None:
            self.round = Round(speculative)
            self.transport.timer.start()
        if not updates:
            return
        try:
            with self.transport.timer.working():
                self._take(self.round, updates, keep=self.round.speculative and not decided)
        except BaseException:
            for update in updates:
                if (memory := self.round.on_device.get(update.of)) is not None:
                    self.transport.lanes.drop(memory)
                self.round.forget(update.of)
            self.round = self.round if self.round.left else None
            raise

    def _take(self, round: Round, updates: Sequence[ParamUpdate], *, keep: bool) -> None:
        lanes = self.transport.lanes
        for update in updates:
            self._register(round, update, keep=keep)
        buffers = [tensor for update in updates for tensor in (update.weight, update.grad)] if lanes.checks else []
        lanes.touch(writes=buffers)
        begun = lanes.submit(
            Lane.UPDATE,
            functools.partial(_begin, self._rule, self.device, round, updates),
            # Once for all of them: what follows on the same lane comes after.
            after={"update: the gradients are ready": lanes.mark()},
            reads=[update.weight for update in updates if update.of in round.old_weights],
            writes=[round.old_weights[update.of] for update in updates if update.of in round.old_weights],
        )
        self._last_update = self._begun = begun
        for update in updates:
            if not round.left[update.of]:  # it has no elements
                self._add_pending(update, begun)

    def _register(self, round: Round, update: ParamUpdate, *, keep: bool) -> None:
        state, lanes = update.of, self.transport.lanes
        resident = state.placement is Placement.RESIDENT
        round.ready[state] = update
        round.left[state] = 1 if resident else len(self.arenas.chunks_of.get(state, ()))
        round.places[state] = lanes.here()
        if keep and state in self.arenas.old_weights:
            round.old_weights[state] = self.arenas.old_weights[state].flat
        elif keep and state.placement is Placement.STREAMED:
            round.on_device[state] = lanes.empty(update.weight.nbytes)
            round.old_weights[state] = round.on_device[state].view(update.weight.dtype)

    def advance(self, states: Sequence[ParamState]) -> None:
        """Update what is resident of `states`, and their chunks for which all gradients are there."""
        round = self.round
        assert round is not None
        with self.transport.timer.working():
            self._update_resident([round.ready[state] for state in states])
            for chunk in dict.fromkeys(chunk for state in states for chunk in self.arenas.chunks_of.get(state, ())):
                if all(piece.owner in round.left or _is_idle(piece.owner) for piece in chunk.pieces):
                    self._update_chunk(chunk)

    def _flush(self) -> None:
        """Update everything that was taken and is not under way yet, in the order in which forward needs it."""
        round = self.round
        assert round is not None
        self._update_resident([update for state, update in round.ready.items() if round.left[state]])
        for chunk in self.arenas.chunks:
            self._update_chunk(chunk)
        assert not any(round.left.values()), "a gradient was taken and not used"

    def _end_round(self) -> None:
        """All its updates are under way, and stay."""
        assert self.round is not None
        if self.round.speculative:
            self.arenas.flip()
        self.transport.pipeline.discard_staged()  # of parameters that got no gradient this time
        self._last_ready = set(self.round.left)
        self.round = None
        self.transport.external_writes.look()
        self.updating = False
        self.transport.timer.stop()

    def _batches(self, updates: Sequence[ParamUpdate]) -> Iterable[list[PieceUpdate]]:
        """Resident parameters, about `chunk_bytes` of state at a time: a rule may need temporary memory for each."""
        batch: list[PieceUpdate] = []
        room = self._config.most_chunk_bytes
        for update in updates:
            if update.of.placement is Placement.RESIDENT:
                batch.append(PieceUpdate(update, 0, update.weight.numel(), update.of.resident))
                room -= update.of.nbytes
                if room <= 0:
                    yield batch
                    batch, room = [], self._config.most_chunk_bytes
        if batch:
            yield batch

    def _update_resident(self, updates: Sequence[ParamUpdate]) -> None:
        round = self.round
        assert round is not None
        for pieces in self._batches(updates):
            self.updating = True
            state = [tensor for piece in pieces for tensor in piece.state.values()]
            updated = self.transport.lanes.submit(
                Lane.UPDATE,
                functools.partial(self._rule.update, pieces),
                after={},
                reads=[piece.grad for piece in pieces],
                writes=[*(piece.weight for piece in pieces), *state],
            )
            for piece in pieces:
                round.left[piece.update.of] = 0
                self._add_pending(piece.update, updated)

    def _update_chunk(self, chunk: StateChunk) -> None:
        """One chunk's trip. Parameters without a gradient do not move, unless the whole chunk goes to the spare set.

        A second trip takes what the first one did not: a gradient that was set between backward and `step()`.
        """
        round, pipeline = self.round, self.transport.pipeline
        assert round is not None
        left = [piece for piece in chunk.pieces if piece not in round.done]
        ready = [piece for piece in left if piece.owner in round.ready]
        if chunk.home.on_host:
            self._update_on_host(chunk, ready)
            return
        others = [piece for piece in left if piece not in ready and piece not in round.moved]
        moving = sorted([*ready, *others], key=chunk.pieces.index) if round.speculative else ready
        if not moving:
            return
        trip = Trip(chunk, moving, round.speculative)
        round.travelling = True
        if not pipeline.take_staged(trip):
            pipeline.fetch(trip)
        updates = [
            PieceUpdate(round.ready[piece.owner], piece.start, piece.stop, pipeline.state_of(trip, piece))
            for piece in ready
        ]
        self.updating = True
        pipeline.update(
            trip,
            functools.partial(self._rule.update, updates),
            weights=[piece.weight for piece in updates],
            grads=[piece.grad for piece in updates],
        )
        pipeline.store(trip)
        round.travelling = False
        round.done.update(ready)
        round.moved.update(piece for piece in moving if piece not in ready)
        self._last_update = trip.updated
        self._count_down([piece.update for piece in updates], trip.updated)

    def _update_on_host(self, chunk: StateChunk, ready: list[StatePiece]) -> None:
        """One chunk's trip to the CPU, with the pieces that have gradients."""
        round = self.round
        assert round is not None
        if not ready:
            return
        updates = [round.ready[piece.owner] for piece in ready]
        self.updating = True
        up = self.transport.host_updates.send(chunk, list(zip(ready, updates, strict=True)), self._begun)
        self.transport.bytes_updated_on_host += sum(
            arena.dtype.itemsize * (stop - start)
            for key, arena in chunk.home.arenas.items()
            for start, stop in (piece.ranges[key] for piece in ready)
        )
        round.done.update(ready)
        for update in updates:
            round.up.setdefault(update.of, []).append(up)
        self._count_down(updates, None)

    def _count_down(self, updates: Sequence[ParamUpdate], updated: Mark) -> None:
        """One chunk less for each; the last one makes it pending."""
        assert self.round is not None
        for update in updates:
            self.round.left[update.of] -= 1
            if not self.round.left[update.of]:
                self._add_pending(update, updated)

    def fetch_ahead(self, at_most: int = _MOST_AT_ONCE) -> None:
        """Fetch chunks that the next step needs, in its order, as far as the window has room."""
        pipeline = self.transport.pipeline
        if pipeline.room_ahead <= 0 or self.round is not None:  # an open round fetches for itself
            return
        if not pipeline.staged:
            # What the next step will probably update: what had no gradient the last time is not fetched.
            self._ahead = self.arenas.chunks_with(self._last_ready)
        with self.transport.timer.working():
            for _ in range(at_most):  # the next hook goes on: backward's own launches must not wait for all of them
                if pipeline.room_ahead <= 0 or (found := next(self._ahead, None)) is None:
                    return
                pipeline.fetch_ahead(Trip(*found))

    # Settling

    def _add_pending(self, update: ParamUpdate, updated: Mark) -> None:
        round, state = self.round, update.of
        assert round is not None
        self._order += 1
        up = round.up.pop(state, [])
        memory = round.on_device.get(state)
        self.pending[state] = Pending(update, updated, self._order, up, round.places[state], memory)

    def settle(self, states: Iterable[ParamState], reason: str) -> None:
        """Make the caller's stream wait for the updates of `states`; then their gradients may go.

        Speculative updates are not settled before it is decided that they stay.
        """
        self.transport.check_process()
        undecided = self.round.ready if self.round is not None and self.round.speculative else {}
        states = [state for state in states if state in self.pending and state not in undecided]
        due = [self.pending[state] for state in states]
        if not due:
            return
        lanes = self.transport.lanes
        with self.transport.timer.waiting():
            self._wait(due, reason)
        updates = [pending.update for pending in due]
        if lanes.checks:
            lanes.touch(writes=[tensor for update in updates for tensor in (update.weight, update.grad)])
        self._finish(updates)
        for state in states:  # not before: a caller that is interrupted settles again, which changes nothing
            del self.pending[state]
        if self.round is not None:
            for update in updates:  # the gradient goes with the update
                self.round.ready.pop(update.of, None)
        for pending in due:
            if pending.old_weights is not None:
                lanes.drop(pending.old_weights)
        for place in {pending.place for pending in due}:
            lanes.follow(place)

    def _wait(self, due: Sequence[Pending], reason: str) -> None:
        on_device = [pending for pending in due if not pending.up]
        last = [max(on_device, key=lambda pending: pending.order).updated] if on_device else []
        up = {id(mark): mark for pending in due for mark in pending.up}
        try:
            for mark in (*last, *up.values()):
                self.transport.lanes.wait(mark, reason)
        except Exception as error:
            self._lose(error)

    @torch.no_grad()  # a forward may be running
    def _finish(self, updates: Sequence[ParamUpdate]) -> None:
        for update in updates:
            copy_back(update.weight, update.of.local)
        self._rule.finish(updates)

    # Failing

    def _lose(self, error: Exception) -> NoReturn:
        """Work that another thread did, or gave to its lane, has failed."""
        self.lost = (
            f"An update failed ({type(error).__name__}: {error}); the weights and state are between two steps. "
            "Load a checkpoint into the model and this optimizer (load_state_dict) to go on."
        )
        # Other updates of the step may still be on their way, and must not come after what is loaded next.
        with contextlib.suppress(Exception):  # where the device itself has failed, `error` says so
            self.transport.synchronize("reset: nothing is under way")
        raise StepLostError(self.lost) from error

    @property
    def has_failed(self) -> bool:
        """Whether something that another thread did has failed."""
        try:
            self.check()
        except StepLostError:
            return True
        return self.lost is not None

    def check(self) -> None:
        """Raise if something that another thread did has failed."""
        if self.lost is None:
            try:
                self.transport.lanes.check()
            except Exception as error:
                self._lose(error)

    # Ending

    def revert(self) -> None:
        """The round's speculative updates do not count: weights are as before, and so is the state on the host."""
        round, lanes = self.round, self.transport.lanes
        if round is None:
            return
        assert round.speculative
        if round.travelling:  # a trip failed on its way
            self.transport.synchronize("reset: nothing is under way")
            self.transport.pipeline.reset()
        if round.ready:
            try:
                with self.transport.timer.waiting():
                    lanes.wait(self._last_update, "redo: the speculative updates are done")
            except Exception as error:  # not all old weights were kept
                self._lose(error)
        for state, old in round.old_weights.items():
            update = round.ready[state]
            if lanes.checks:
                lanes.touch(writes=[update.weight, update.grad, old])
            update.weight.copy_(old, non_blocking=True)
            self.pending.pop(state, None)
        self._rule.revert(self.device, [round.ready[state] for state in round.old_weights])
        for memory in round.on_device.values():
            lanes.drop(memory)
        for place in set(round.places.values()):
            lanes.follow(place)
        self.round = None
        self.updating = False

    def reset(self) -> None:
        """After a lost step: forget what was under way."""
        self.transport.reset()
        self.pending.clear()
        self.round = None
        self.updating = False
        self.lost = None

    def close(self) -> None:
        """Give everything back, after the last copy."""
        if self.lost is not None:
            self.reset()
        self._ahead, self._last_ready = iter(()), set()
        self.transport.close()


def _begin(rule: Rule, device: torch.device, round: Round, updates: Sequence[ParamUpdate]) -> None:
    rule.begin(device, updates)
    for update in updates:
        if update.of in round.old_weights:
            round.old_weights[update.of].copy_(update.weight, non_blocking=True)
            rule.remember(device, update)


def _is_idle(state: ParamState) -> bool:
    """Neither has it a gradient, nor can backward bring one."""
    return not state.param.requires_grad and state.param.grad is None
