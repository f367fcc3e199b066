# SPDX-License-Identifier: Apache-2.0
"""One device's part of a step: resident parameters updated in place, the others on their trips.

Called by `optimizer.py` and `overlap.py`; works with what `device_side.py` and `host_side.py` have. If everything is
resident the update runs on the caller's stream.

A step is a round: gradients are taken (`take`), all at `step()` or one by one during backward; chunks go on their
trips (`advance`, and `flush` for all that is left); and before anyone reads a weight the caller's stream waits for
its update (`settle`), at the end of `step()` or as late as in the next forward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import torch

from offstage.config import OffloadConfig, Placement
from offstage.engine.param_state import HeldState
from offstage.engine.pipeline import HostState, Trip
from offstage.engine.rounds import Pending, Round
from offstage.engine.transport import DeviceSide
from offstage.errors import StepLostError
from offstage.lanes.lanes import Lane, Lanes, Mark, on_device
from offstage.planning.layout import Chunk, Piece
from offstage.rules.rule import Rule, Share, Turn
from offstage.tensors import copy_back

logger = logging.getLogger("offstage")


_MOST_AT_ONCE = 8
"""Chunks that one cue sends for: about a millisecond of the host's time."""
_alive: weakref.WeakSet[Engine] = weakref.WeakSet()
_kept_in_child: list[Engine] = []
# A forked child (a DataLoader worker) must not destroy events and streams of its parent's accelerator: torch aborts the
# process that tries. So the child never lets go of an engine, whatever it drops.
os.register_at_fork(after_in_child=lambda: _kept_in_child.extend(_alive))


class Engine(DeviceSide):
    """Makes the steps of one device."""

    # Initialization

    def __init__(self, device: torch.device, rule: Rule, config: OffloadConfig) -> None:
        super().__init__(device, rule, config)
        self.updating = False
        """True between the first update of a step and its end: a failure then leaves weights between two steps."""
        self.lost: str | None = None
        """What to say after an update has failed in another thread."""
        self.pending: dict[HeldState, Pending] = {}
        self._round: Round | None = None
        self._order = 0
        self._last_update: Mark = None
        self._begun: Mark = None
        self._last_ready: set[HeldState] = set()
        self._ahead: Iterator[tuple[HostState, Chunk, list[Piece]]] = iter(())
        _alive.add(self)

    # Runtime

    def run(self, turns: Sequence[Turn]) -> None:
        """Take `turns`, and update everything taken so far that is not under way yet. The host waits for nothing."""
        if self._lanes is None:
            if turns:
                with on_device(self.device):
                    self._run_on_caller(turns)
            return
        if turns or self._round is not None:
            self.take(turns, decided=True)
            self.flush()
            self._end_round()

    def _run_on_caller(self, turns: Sequence[Turn]) -> None:
        """Everything is resident: no lanes, nothing to wait for."""
        self._rule.begin(self.device, turns)
        self.updating = True
        for shares in self._batches(turns):
            self._rule.update(shares)
        self.updating = False
        self._foreign.look()
        self._finish(turns)

    def take(self, turns: Sequence[Turn], *, to_spare: bool = False, decided: bool = False) -> None:
        """The gradients of `turns` are final. Opens a round if there is none.

        `to_spare`: the round is speculative. `decided`: it is known that these updates stay.
        """
        lanes, timer = self._lanes, self.timer
        assert lanes is not None
        assert timer is not None
        if self._round is None:
            self._round = Round(to_spare)
            timer.start()
        if not turns:
            return
        try:
            self._take(lanes, self._round, turns, keep=self._round.to_spare and not decided)
        except BaseException:
            for turn in turns:
                if (lent := self._round.lent.get(_held(turn))) is not None:
                    lanes.drop(lent)
                self._round.forget(_held(turn))
            self._round = self._round if self._round.ready else None
            raise

    def _take(self, lanes: Lanes, round: Round, turns: Sequence[Turn], *, keep: bool) -> None:
        for turn in turns:
            self._register(round, turn, keep=keep)
        buffers = [tensor for turn in turns for tensor in (turn.weight, turn.grad)] if lanes.checks else []
        lanes.touch(writes=buffers)
        begun = lanes.submit(
            Lane.UPDATE,
            functools.partial(_begin, self._rule, self.device, round, turns),
            # Once for all updates of these turns: they follow on the same lane.
            after={"update: the gradients are ready": lanes.mark()},
            reads=[turn.weight for turn in turns if _held(turn) in round.kept],
            writes=[round.kept[_held(turn)] for turn in turns if _held(turn) in round.kept],
        )
        self._last_update = self._begun = begun
        for turn in turns:
            if not round.left[_held(turn)]:  # it has no elements
                self._add_pending(turn, begun)

    def _register(self, round: Round, turn: Turn, *, keep: bool) -> None:
        assert self._lanes is not None
        held = _held(turn)
        resident = held.placement is Placement.RESIDENT
        round.ready[held] = turn
        round.left[held] = 1 if resident else len(self.host_side.chunks_of.get(held, ()))
        round.places[held] = self._lanes.here()
        if keep and held in self.host_side.kept:
            round.kept[held] = self.host_side.kept[held].flat
        elif keep and held.placement is Placement.STREAMED:
            round.lent[held] = self._lanes.empty(turn.weight.nbytes)
            round.kept[held] = round.lent[held].view(turn.weight.dtype)

    def advance(self, held: HeldState) -> None:
        """Update the chunks of `held` for which all gradients are there."""
        round = self._round
        assert round is not None
        if held.placement is Placement.RESIDENT:
            self._update_resident([round.ready[held]])
        for host, members, chunk in self.host_side.chunks_of.get(held, ()):
            if all(members[piece.index] in round.left or _is_idle(members[piece.index]) for piece in chunk.pieces):
                self._update_chunk(host, members, chunk)

    def flush(self) -> None:
        """Update everything that was taken and is not under way yet, in the order in which forward needs it."""
        round = self._round
        assert round is not None
        self._update_resident([turn for held, turn in round.ready.items() if round.left[held]])
        for host, members, chunk in self.host_side.chunks():
            self._update_chunk(host, members, chunk)
        assert not any(round.left.values()), "a gradient was taken and not used"

    def _end_round(self) -> None:
        assert self._lanes is not None
        assert self.timer is not None
        assert self._round is not None
        if self._round.to_spare:
            self.host_side.flip()
        self.discard_staged()  # of parameters that got no gradient this time
        self._last_ready = set(self._round.left)
        self._round = None
        self._foreign.look()
        self.updating = False
        self.timer.stop()

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

    def _update_resident(self, turns: Sequence[Turn]) -> None:
        round = self._round
        assert self._lanes is not None
        assert round is not None
        for shares in self._batches(turns):
            self.updating = True
            state = [tensor for share in shares for tensor in share.state.values()]
            updated = self._lanes.submit(
                Lane.UPDATE,
                functools.partial(self._rule.update, shares),
                after={},
                reads=[share.grad for share in shares],
                writes=[*(share.weight for share in shares), *state],
            )
            for share in shares:
                round.left[_held(share.turn)] = 0
                self._add_pending(share.turn, updated)

    def _update_chunk(self, host: HostState, members: list[HeldState], chunk: Chunk) -> None:
        """One chunk's trip. Parameters without a gradient do not move, unless the whole chunk goes to the spare set.

        A second trip takes what the first one did not: a gradient that was set between backward and `step()`.
        """
        round, pipeline = self._round, self._pipeline
        assert round is not None
        left = [piece for piece in chunk.pieces if (chunk, piece) not in round.done]
        ready = [piece for piece in left if members[piece.index] in round.ready]
        if host.on_host:
            self._update_on_host(host, members, chunk, ready)
            return
        assert pipeline is not None
        carried = [piece for piece in left if piece not in ready and (chunk, piece) not in round.carried]
        moving = sorted([*ready, *carried], key=chunk.pieces.index) if round.to_spare else ready
        if not moving:
            return
        trip = Trip(host, chunk, moving, round.to_spare)
        round.travelling = True
        if not pipeline.take_staged(trip):
            pipeline.fetch(trip)
        turns = [round.ready[members[piece.index]] for piece in ready]
        shares = [
            Share(turn, piece.start, piece.stop, pipeline.state_of(trip, piece))
            for piece, turn in zip(ready, turns, strict=True)
        ]
        self.updating = True
        pipeline.update(
            trip,
            functools.partial(self._rule.update, shares),
            weights=[share.weight for share in shares],
            grads=[share.grad for share in shares],
        )
        pipeline.store(trip)
        round.travelling = False
        round.done.update((chunk, piece) for piece in ready)
        round.carried.update((chunk, piece) for piece in moving if piece not in ready)
        self._last_update = trip.updated
        for turn in turns:
            round.left[_held(turn)] -= 1
            if not round.left[_held(turn)]:
                self._add_pending(turn, trip.updated)

    def _update_on_host(self, host: HostState, members: list[HeldState], chunk: Chunk, ready: list[Piece]) -> None:
        """One chunk's trip to the CPU, with the pieces that have gradients."""
        round = self._round
        assert round is not None
        assert self._trips is not None
        if not ready:
            return
        turns = [round.ready[members[piece.index]] for piece in ready]
        self.updating = True
        raised = self._trips.send(host, chunk, list(zip(ready, turns, strict=True)), self._begun)
        self.bytes_updated_on_host += sum(
            arena.dtype.itemsize * (stop - start)
            for key, arena in host.arenas.items()
            for start, stop in (host.layout.range_of(piece, key) for piece in ready)
        )
        round.done.update((chunk, piece) for piece in ready)
        for turn in turns:
            held = _held(turn)
            round.raised.setdefault(held, []).append(raised)
            round.left[held] -= 1
            if not round.left[held]:
                self._add_pending(turn, None)

    def fetch_ahead(self, at_most: int = _MOST_AT_ONCE) -> None:
        """Fetch chunks that the next step needs, in its order, as far as the window has room."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.room_ahead <= 0 or self._round is not None:  # an open round fetches for itself
            return
        if not pipeline.staged:
            # What the next step will probably update: what had no gradient the last time is not fetched.
            self._ahead = self.host_side.chunks_with(self._last_ready)
        for _ in range(at_most):  # the next cue goes on: backward's own launches must not wait for all of them
            if pipeline.room_ahead <= 0 or (found := next(self._ahead, None)) is None:
                return
            pipeline.fetch_ahead(Trip(*found))

    @property
    def in_round(self) -> bool:
        """Whether gradients have been taken for a step that is not over."""
        return self._round is not None

    # Settling

    def _add_pending(self, turn: Turn, updated: Mark) -> None:
        round, held = self._round, _held(turn)
        assert round is not None
        self._order += 1
        raised = round.raised.pop(held, [])
        self.pending[held] = Pending(turn, updated, self._order, raised, round.places[held], round.lent.get(held))

    def settle(self, states: Iterable[HeldState], reason: str) -> None:
        """Make the caller's stream wait for the updates of `states`; then their gradients may go.

        Speculative updates are not settled before it is decided that they stay.
        """
        undecided = self._round.ready if self._round is not None and self._round.to_spare else {}
        states = [held for held in states if held in self.pending and held not in undecided]
        due = [self.pending[held] for held in states]
        if not due or self._lanes is None or self.timer is None:
            return
        with self.timer.exposed():
            self._wait(self._lanes, due, reason)
        for held in states:  # not before: whoever is interrupted while waiting waits again
            del self.pending[held]
        turns = [pending.turn for pending in due]
        if self._round is not None:
            for turn in turns:  # the gradient goes with the turn
                self._round.ready.pop(_held(turn), None)
        if self._lanes.checks:
            self._lanes.touch(writes=[tensor for turn in turns for tensor in (turn.weight, turn.grad)])
        self._finish(turns)
        for pending in due:
            if pending.lent is not None:
                self._lanes.drop(pending.lent)
        for place in {pending.place for pending in due}:
            self._lanes.follow(place)

    def _wait(self, lanes: Lanes, due: Sequence[Pending], reason: str) -> None:
        on_device = [pending for pending in due if not pending.raised]
        last = [max(on_device, key=lambda pending: pending.order).updated] if on_device else []
        raised = {id(mark): mark for pending in due for mark in pending.raised}
        try:
            for mark in (*last, *raised.values()):
                lanes.wait(mark, reason)
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> NoReturn:
        """Work that another thread did, or gave to its lane, has failed."""
        self.lost = (
            f"An update failed ({type(error).__name__}: {error}); the weights and state are between two steps. "
            "Load a checkpoint into the model and this optimizer (load_state_dict) to go on."
        )
        # Other updates of the step may still be on their way, and must not come after what is loaded next.
        with contextlib.suppress(Exception):  # where the device itself has failed, `error` says so
            self.synchronize("reset: nothing is under way")
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
        if self._lanes is not None and self.lost is None:
            try:
                self._lanes.check()
            except Exception as error:
                self._lose(error)

    def revert(self) -> None:
        """The round's speculative updates do not count: weights are as before, and so is the state on the host."""
        round, lanes = self._round, self._lanes
        if round is None or lanes is None:
            return
        assert round.to_spare
        assert self._pipeline is not None
        if round.travelling:  # a trip failed on its way
            self.synchronize("reset: nothing is under way")
            self._pipeline.reset()
        if round.ready:
            try:
                lanes.wait(self._last_update, "redo: the speculative updates are done")
            except Exception as error:  # not all old weights were kept
                self._lose(error)
        for held, kept in round.kept.items():
            turn = round.ready[held]
            if lanes.checks:
                lanes.touch(writes=[turn.weight, turn.grad, kept])
            turn.weight.copy_(kept, non_blocking=True)
            self.pending.pop(held, None)
        self._rule.revert(self.device, [round.ready[held] for held in round.kept])
        for lent in round.lent.values():
            lanes.drop(lent)
        for place in set(round.places.values()):
            lanes.follow(place)
        self._round = None
        self.updating = False

    @torch.no_grad()  # a forward may be running
    def _finish(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            copy_back(turn.weight, turn.of.local)
        self._rule.finish(turns)

    # Ending

    def reset(self) -> None:
        """After a lost step: forget trips that were under way."""
        if self._lanes is not None:
            self.synchronize("reset: nothing is under way")
            self._lanes.forget()
        self._foreign.forget()
        for host, _ in self.host_side.states:
            host.stored.clear()
        if self._pipeline is not None:
            self._pipeline.reset()
        if self._trips is not None:
            self._trips.forget()
        self.pending.clear()
        self._round = None
        self.updating = False
        self.lost = None

    def close(self) -> None:
        """Give everything back: slots behind their last store, then the arenas."""
        if self.lost is not None:
            self.reset()
        if self._pipeline is not None:
            self._retire(self._pipeline)
        self._pipeline, self._closed = None, True
        self.synchronize("close: the last copies are done")
        if self._trips is not None:
            self._trips.close("close: the last copies are done")
        self.host_side.drop_unused(())


def _begin(rule: Rule, device: torch.device, round: Round, turns: Sequence[Turn]) -> None:
    rule.begin(device, turns)
    for turn in turns:
        if _held(turn) in round.kept:
            round.kept[_held(turn)].copy_(turn.weight, non_blocking=True)
            rule.remember(device, turn)


def _is_idle(held: HeldState) -> bool:
    """Neither has it a gradient, nor can backward bring one."""
    return not held.param.requires_grad and held.param.grad is None


def _held(turn: Turn) -> HeldState:
    assert isinstance(turn.of, HeldState)
    return turn.of
