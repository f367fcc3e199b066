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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine.arenas import Arenas, StateChunk, StatePiece
from offstage.engine.late import LateWeights
from offstage.engine.pipeline import Trip
from offstage.engine.transport import Transport
from offstage.errors import StepLostError
from offstage.lanes.lanes import Lane, Lanes, Mark, Place
from offstage.memory.interrupts import deferred_interrupts
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
    kept: set[ParamState] = field(default_factory=set)
    """Speculative: those whose weights before are kept, here or on the host."""

    def forget(self, state: ParamState) -> None:
        """It was not taken after all."""
        for taken in (self.ready, self.left, self.up, self.places, self.old_weights, self.on_device):
            taken.pop(state, None)  # type: ignore[attr-defined]
        self.kept.discard(state)


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
        self.late = LateWeights()
        weakref.finalize(self, self.late.let_go)  # dropped, it makes its updates all the same
        self.round: Round | None = None
        self.postponed: Round | None = None
        """A round whose last chunks wait for their layers' weights: they are updated when the next forward has sent for
        these, or when something needs them."""
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

    def follow(self, config: OffloadConfig) -> None:
        """Other settings, with which all state stays where it is. Nothing is under way."""
        self._config = config
        self.arenas.follow(config)
        self.transport.follow(config)

    # Runtime

    def run(self, updates: Sequence[ParamUpdate], later: Collection[ParamState] = ()) -> None:
        """Take `updates`, make all of the round that are not under way yet, and end it. The host waits for nothing.

        `later`: parameters whose weights live on the host and are needed by the next forward. They are updated when it
        sends for them, unless the round is speculative, which ends as a whole.
        """
        if updates or self.round is not None:
            self.take(updates, decided=True)
            assert self.round is not None
            self._flush(self.round, set() if self.round.speculative else set(later))
            self._end_round()

    def observe(self, updates: Sequence[ParamUpdate]) -> None:
        """`run` comes next, unless the norm forbids it: what the rule may do before that is known.

        Only where the caller's stream does everything: the order is then that in which the host gives it.
        """
        lanes = self.transport.lanes
        mine = [one for one in updates if one.of.placement is Placement.RESIDENT and one.of.hosted is None]
        if lanes.at_once and self.round is None and self.postponed is None and mine:
            lanes.submit(Lane.UPDATE, functools.partial(self._rule.observe, self.device, mine), after={})

    def take(self, updates: Sequence[ParamUpdate], *, speculative: bool = False, decided: bool = False) -> None:
        """The gradients of `updates` are final. Opens a round if there is none.

        `decided`: it is known that these updates stay, though the round is speculative.
        """
        self.finish_postponed()
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
        _touch(lanes, updates)
        begun = lanes.submit(
            Lane.UPDATE,
            functools.partial(_begin, self._rule, self.device, round, updates, keep),
            # Once for all of them: what follows on the same lane comes after.
            after={"update: the gradients are ready": lanes.mark()},
            reads=[update.weight for update in updates if update.of in round.old_weights],
            writes=[round.old_weights[update.of] for update in updates if update.of in round.old_weights],
        )
        self._last_update = self._begun = begun
        for update in updates:
            if not round.left[update.of]:  # it has no elements
                self._add_pending(round, update, begun)

    def _register(self, round: Round, update: ParamUpdate, *, keep: bool) -> None:
        state, lanes = update.of, self.transport.lanes
        resident = state.placement is Placement.RESIDENT
        round.ready[state] = update
        round.left[state] = 1 if resident else len(self.arenas.chunks_of.get(state, ()))
        round.places[state] = lanes.here()
        if keep and (state.hosted is not None or state.placement is Placement.STREAMED):
            round.kept.add(state)
        if state.hosted is not None:  # the host has the weights before
            return
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
            self._update_resident(round, [round.ready[state] for state in states])
            for chunk in dict.fromkeys(chunk for state in states for chunk in self.arenas.chunks_of.get(state, ())):
                if all(piece.owner in round.left or _is_idle(piece.owner) for piece in chunk.pieces):
                    self._update_chunk(round, chunk)

    def _flush(self, round: Round, later: set[ParamState]) -> None:
        """Update everything that was taken and is not under way yet, in the order in which forward needs it."""
        self._update_resident(round, [update for state, update in round.ready.items() if round.left[state]])
        waiting: set[ParamState] = set()
        for chunk in self.arenas.chunks:
            owners = [piece.owner for piece in chunk.pieces]
            if later.isdisjoint(owners):
                self._update_chunk(round, chunk)
            else:
                waiting.update(owners)
        left = {state for state, chunks in round.left.items() if chunks}
        assert left <= waiting, "a gradient was taken and not used"
        self.postponed = round if left else None
        for gradient in [round.ready[state].left for state in left]:
            if gradient is not None:
                gradient.postpone(weakref.WeakMethod(self.finish_postponed))

    def resume(self, states: Iterable[ParamState]) -> None:
        """The weights of `states` are on the device or on their way: make the updates of them that were postponed."""
        round = self.postponed
        if round is None:
            return
        wanted = [state for state in states if round.left.get(state)]
        if not wanted:
            return
        self.updating = True
        try:
            with deferred_interrupts(), torch.inference_mode(False), torch.no_grad():  # an evaluation may be running
                for chunk in dict.fromkeys(chunk for state in wanted for chunk in self.arenas.chunks_of[state]):
                    self._update_chunk(round, chunk)
        except Exception as error:
            if not round.travelling:  # there was no room for a layer: nothing is half done, and it can be tried again
                self.updating = False
                raise
            self.postponed = None  # what is left of it is lost with the step
            self._lose(error)
        self.updating = False
        if not any(round.left.values()):
            self.postponed = None

    def awaits_gradients(self, state: ParamState) -> bool:
        """Whether the update of `state` was taken, and some of its chunks wait for gradients of other parameters."""
        return self.round is not None and bool(self.round.left.get(state))

    def has_postponed(self, states: Iterable[ParamState]) -> bool:
        """Whether updates of `states` wait for the next forward."""
        round = self.postponed
        return round is not None and any(round.left.get(state) for state in states)

    @property
    def unsettled(self) -> list[ParamState]:
        """Parameters whose last update the caller's stream has not waited for, or that was postponed."""
        postponed = self.postponed.left.items() if self.postponed is not None else ()
        return [*self.pending, *(state for state, chunks in postponed if chunks and state not in self.pending)]

    def finish_postponed(self) -> None:
        """Make all updates that wait for the next forward, now."""
        if self.postponed is not None:
            self.resume([state for state, chunks in self.postponed.left.items() if chunks])

    def finish_in_place(self) -> None:
        """Return when no update that the CPU makes where its gradient is needs that gradient."""
        try:
            self.transport.host_updates.finish_in_place()
        except Exception as error:
            self._lose(error)

    def _end_round(self) -> None:
        """All its updates are under way, and stay."""
        assert self.round is not None
        if self.round.speculative:
            self.arenas.flip()
            for state in self.arenas.hosted:
                if state.hosted is not None and state.placement is Placement.STREAMED:
                    state.hosted.flip()
        self.transport.pipeline.discard_staged()  # of parameters that got no gradient this time
        self._last_ready = set(self.round.left)
        self.round = None
        self.transport.external_writes.look()
        self.updating = False
        self.transport.timer.stop()

    def _batches(self, updates: Sequence[ParamUpdate]) -> Iterable[list[PieceUpdate]]:
        """Resident parameters, about `chunk_bytes` of state at a time: a rule may need temporary memory for each.

        All at once where it needs none, and none of their gradients has to come back.
        """
        batch: list[PieceUpdate] = []
        room = self._config.most_chunk_bytes
        limited = self._rule.needs_memory or any(update.left is not None for update in updates)
        for update in updates:
            if update.of.placement is Placement.RESIDENT:
                batch.append(PieceUpdate(update, 0, update.weight.numel(), update.of.resident))
                room -= update.of.nbytes if limited else 0
                if room <= 0:
                    yield batch
                    batch, room = [], self._config.most_chunk_bytes
        if batch:
            yield batch

    def _update_resident(self, round: Round, updates: Sequence[ParamUpdate]) -> None:
        lanes = self.transport.lanes
        for pieces in self._batches(updates):
            returned = [piece.update.left for piece in pieces if piece.update.left is not None]
            for piece in pieces:
                if piece.update.left is not None:
                    piece.staged_grad = piece.update.left.on_device()
            self.updating = True
            state = [tensor for piece in pieces for tensor in piece.state.values()]
            updated = lanes.submit(
                Lane.UPDATE,
                functools.partial(self._rule.update, pieces),
                after={"update: the gradients have returned": lanes.mark() if returned else None},
                reads=[piece.grad for piece in pieces],
                writes=[*(piece.weight for piece in pieces), *state],
            )
            if returned:  # a batch at a time: they left because there is no room for all of them
                lanes.wait(updated, "update: the gradients were used")
                for gradient in returned:
                    gradient.forget_here()
            for piece in pieces:
                round.left[piece.update.of] = 0
                self._add_pending(round, piece.update, updated)

    def _update_chunk(self, round: Round, chunk: StateChunk) -> None:
        """One chunk's trip. Parameters without a gradient do not move, unless the whole chunk goes to the spare set.

        A second trip takes what the first one did not: a gradient that was set between backward and `step()`.
        """
        pipeline = self.transport.pipeline
        left = [piece for piece in chunk.pieces if piece not in round.done]
        ready = [piece for piece in left if piece.owner in round.ready]
        if chunk.home.on_host:
            self._update_on_host(round, chunk, ready)
            return
        others = [piece for piece in left if piece not in ready and piece not in round.moved]
        moving = sorted([*ready, *others], key=chunk.pieces.index) if round.speculative else ready
        if not moving:
            return
        left_grads = {piece: grad for piece in ready if (grad := round.ready[piece.owner].left) is not None}
        trip = Trip(chunk, moving, round.speculative, left=left_grads)
        _bind_weights(trip, round)
        round.travelling = True
        if not pipeline.take_staged(trip):
            pipeline.fetch(trip)
        updates = [
            PieceUpdate(
                round.ready[piece.owner],
                piece.start,
                piece.stop,
                pipeline.state_of(trip, piece),
                staged_grad=trip.staged_grads.get(piece),
            )
            for piece in ready
        ]
        scales = [(trip.staged_grads[piece], factor) for piece, grad in left_grads.items() for factor in grad.scales]
        self.updating = True
        pipeline.update(
            trip,
            functools.partial(_scale_and_update, scales, self._rule, updates),
            weights=[piece.weight for piece in updates],
            grads=[piece.grad for piece in updates],
        )
        pipeline.store(trip, ready)
        round.travelling = False
        round.done.update(ready)
        round.moved.update(piece for piece in moving if piece not in ready)
        self._last_update = trip.updated
        self._count_down(round, [piece.update for piece in updates], trip.updated)

    def _update_on_host(self, round: Round, chunk: StateChunk, ready: list[StatePiece]) -> None:
        """One chunk's trip to the CPU, with the pieces that have gradients."""
        if not ready:
            return
        updates = [round.ready[piece.owner] for piece in ready]
        pieces = list(zip(ready, updates, strict=True))
        self.updating = True
        if chunk.is_in_place:
            up = self.transport.host_updates.update_in_place(chunk, pieces, self._begun)
            for update in updates:
                update.left.postpone(weakref.WeakMethod(self.finish_in_place))
        else:
            up = self.transport.host_updates.send(chunk, pieces, self._begun)
        self.transport.bytes_updated_on_host += sum(
            arena.dtype.itemsize * (stop - start)
            for key, arena in chunk.home.arenas.items()
            for start, stop in (piece.ranges[key] for piece in ready)
        )
        round.done.update(ready)
        for update in updates:
            round.up.setdefault(update.of, []).append(up)
        self._count_down(round, updates, None)

    def _count_down(self, round: Round, updates: Sequence[ParamUpdate], updated: Mark) -> None:
        """One chunk less for each; the last one makes it pending."""
        for update in updates:
            round.left[update.of] -= 1
            if not round.left[update.of]:
                self._add_pending(round, update, updated)

    def fetch_ahead(self, at_most: int = _MOST_AT_ONCE) -> None:
        """Fetch chunks that the next step needs, in its order, as far as the window has room."""
        pipeline = self.transport.pipeline
        if pipeline.room_ahead <= 0 or self.round is not None or self.postponed is not None:
            return  # an open round fetches for itself
        if not pipeline.staged:
            # What the next step will probably update: what had no gradient the last time is not fetched.
            self._ahead = self.arenas.chunks_with(self._last_ready)
        with self.transport.timer.working():
            for _ in range(at_most):  # the next hook goes on: backward's own launches must not wait for all of them
                if pipeline.room_ahead <= 0 or (found := next(self._ahead, None)) is None:
                    return
                pipeline.fetch_ahead(Trip(*found))

    # Settling

    def _add_pending(self, round: Round, update: ParamUpdate, updated: Mark) -> None:
        state = update.of
        self._order += 1
        up = round.up.pop(state, [])
        memory = round.on_device.get(state)
        self.pending[state] = Pending(update, updated, self._order, up, round.places[state], memory)

    def settle(self, states: Iterable[ParamState], reason: str) -> None:
        """Make the caller's stream wait for the updates of `states`; then their gradients may go.

        Speculative updates are not settled before it is decided that they stay.
        """
        self.transport.check_process()
        states = list(states)
        self.resume(states)
        undecided = self.round.ready if self.round is not None and self.round.speculative else {}
        states = [state for state in states if state in self.pending and state not in undecided]
        due = [self.pending[state] for state in states]
        if not due:
            return
        lanes = self.transport.lanes
        with self.transport.timer.waiting():
            self._wait(due, reason)
        self.late.settled(states)
        updates = [pending.update for pending in due]
        for state in states:
            if state.hosted is not None:  # a speculative update's gradient may be on its way to the host
                self.transport.gradients.let_go_of(state)
        _touch(lanes, updates)
        self._finish(updates)
        for state in states:  # not before: a caller that is interrupted settles again, which changes nothing
            del self.pending[state]
        for round in (self.round, self.postponed):
            if round is not None:
                for update in updates:  # the gradient goes with the update
                    if round.ready.get(update.of) is update:
                        del round.ready[update.of]
        for pending in due:
            if pending.old_weights is not None:
                lanes.drop(pending.old_weights)
        for place in {pending.place for pending in due}:
            lanes.follow(place)

    def guard_late(self, settle: weakref.WeakMethod[Callable[[torch.Tensor], None]]) -> None:
        """A step is made: `settle` is called before a weight is used that is not the newest where it is."""
        self.late.hold(self.unsettled, self.arenas.hosted, settle)

    def unbind(self, states: Iterable[ParamState]) -> None:
        """The layer of `states`, whose weights live on the host, is about to leave the device.

        What is due of them has been given to the lanes. A speculative update is not settled yet, but neither its weight
        nor its gradient has to stay on the device for that. One of which only some chunks are updated, because the rest
        waits for another gradient, needs its own.
        """
        lanes = self.transport.lanes
        rounds = [round for round in (self.round, self.postponed) if round is not None]
        for state in [one for one in states if one.placement is not Placement.HOST]:
            pending = self.pending.get(state)
            if pending is not None:
                lanes.wait(pending.updated, "weights: the update is done")
                self.transport.gradients.let_go_of(state)
                _touch(lanes, [pending.update])
            elif any(0 < round.left.get(state, 0) < len(self.arenas.chunks_of[state]) for round in rounds):
                lanes.wait(self._last_update, "weights: a part of the update is done")
            for update in [round.ready[state] for round in rounds if state in round.ready]:
                update.weight = torch.empty_like(update.weight[:0])  # a slice would keep the whole copy alive
                if pending is not None:
                    update.grad = torch.empty_like(update.grad[:0])

    def _wait(self, due: Sequence[Pending], reason: str) -> None:
        on_device = [pending for pending in due if not pending.up]
        last = [max(on_device, key=lambda pending: pending.order).updated] if on_device else []
        up = {id(mark): mark for pending in due for mark in pending.up}
        try:
            for mark in (*last, *up.values()):
                self.transport.lanes.wait(mark, reason)
        except Exception as error:
            self._lose(error)

    @torch.inference_mode(False)  # an evaluation may be running
    @torch.no_grad()
    def _finish(self, updates: Sequence[ParamUpdate]) -> None:
        for update in updates:
            if update.of.hosted is None:
                copy_back(update.weight, update.of.local)
        self._rule.finish(updates)

    # Failing

    def _lose(self, error: Exception) -> NoReturn:
        """Work that another thread did, or gave to its lane, has failed."""
        self.lost = (
            f"An update failed ({type(error).__name__}: {error}); the weights and state are between two steps. "
            "Load a checkpoint into the model and this optimizer (load_state_dict) to go on."
        )
        self.late.let_go()  # a checkpoint must be able to write them
        # Other updates of the step may still be on their way, and must not come after what is loaded next.
        with contextlib.suppress(Exception):  # where the device itself has failed, `error` says so
            self.transport.synchronize("reset: nothing is under way")
            self.transport.forget_host_marks()
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
        if on_host := [old for state, old in round.old_weights.items() if state not in round.on_device]:
            # Host memory goes when the lanes have been drained: a lane has to know that the caller's stream reads it.
            lanes.submit(Lane.UPDATE, _nothing, after={"redo: the old weights are back": lanes.mark()}, reads=on_host)
        for state in self.arenas.hosted:
            assert state.hosted is not None
            state.hosted.unspeculate()
            self.pending.pop(state, None)
        self._rule.revert(self.device, [round.ready[state] for state in round.kept])
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
        self.late.let_go()
        self.round = self.postponed = None
        self.updating = False
        self.lost = None

    def close(self) -> None:
        """Give everything back, after the last copy."""
        if self.lost is not None:
            self.reset()
        self._ahead, self._last_ready = iter(()), set()
        self.transport.close()


def _touch(lanes: Lanes, updates: Sequence[ParamUpdate]) -> None:
    """What the caller's stream uses as well as the lanes. A layer's copy of weights is declared where it runs."""
    if lanes.checks:
        weights = [update.weight for update in updates if update.of.hosted is None]
        grads = [update.grad for update in updates if update.left is None]
        lanes.touch(writes=[one for one in (*weights, *grads) if one.numel()])


def _bind_weights(trip: Trip, round: Round) -> None:
    """Have the weights that live on the host on the device, or on their way, and the updates know where."""
    for piece in trip.hosted:
        hosted = piece.owner.hosted
        assert hosted is not None
        hosted.bring()
        if piece.owner in round.ready:
            round.ready[piece.owner].weight = hosted.on_device()


def _scale_and_update(
    scales: Sequence[tuple[torch.Tensor, torch.Tensor]], rule: Rule, updates: Sequence[PieceUpdate]
) -> None:
    for grad, factor in scales:
        torch._foreach_mul_([grad], factor.to(grad.device))  # as clipping would have
    rule.update(updates)


def _begin(rule: Rule, device: torch.device, round: Round, updates: Sequence[ParamUpdate], keep: bool) -> None:
    rule.begin(device, updates)
    for update in updates:
        if update.of in round.old_weights:
            round.old_weights[update.of].copy_(update.weight, non_blocking=True)
        if keep and update.of in round.kept:
            rule.remember(device, update)


def _nothing() -> None:
    """Work that is there for its marks."""


def _is_idle(state: ParamState) -> bool:
    """Neither has it a gradient, nor can backward bring one."""
    return not state.param.requires_grad and state.param.grad is None
