# SPDX-License-Identifier: Apache-2.0
"""One device's part of a step: resident parameters updated in place, chunks sent through the pipeline.

Owns the device's lanes, pipeline and arenas. Called by `optimizer.py` and `overlap.py`. Without streamed parameters
none of the three exists and the update runs on the caller's stream.

A step is a round: gradients are taken (`take`), all at `step()` or one by one during backward; chunks go on their
trips (`advance`, and `flush` for all that is left); and before anyone reads a weight the caller's stream waits for
its update (`settle`), at the end of `step()` or as late as in the next forward.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import torch

from offstage.config import OffloadConfig, format_size
from offstage.errors import OffstageError, StepLostError
from offstage.flat import copy_back
from offstage.foreign_watch import ForeignWatch
from offstage.held_state import HeldState
from offstage.host_cpus import num_threads
from offstage.host_side import HostSide
from offstage.host_threads import HostThreads, is_host_thread
from offstage.host_trips import HostTrips
from offstage.lanes import Lane, Lanes, Mark, lanes_for, on_device
from offstage.layout import Chunk, Piece
from offstage.numa import cpus_near
from offstage.pipeline import HostState, Pipeline, Trip
from offstage.plan import HOST_SLOTS, Placement
from offstage.receipt import StepTimer
from offstage.rounds import Pending, Round
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
        self.lost: str | None = None
        """What to say after an update has failed in another thread."""
        self.timer: StepTimer | None = None
        self.link_gb_per_s: float | None = None
        """Measured before the first step; 0 where there is no link."""
        self._rule = rule
        self._config = config
        self._lanes: Lanes | None = None
        self._pipeline: Pipeline | None = None
        self._trips: HostTrips | None = None
        self._in_use: list[object] = []
        """What lanes may still use when this engine is dropped."""
        self.host_side = HostSide(device, rule, config)
        self._round: Round | None = None
        self.pending: dict[HeldState, Pending] = {}
        self._order = 0
        self._last_update: Mark = None
        self._begun: Mark = None
        self.bytes_updated_on_host = 0
        self._last_ready: set[HeldState] = set()
        self._ahead: Iterator[tuple[HostState, Chunk, list[Piece]]] = iter(())
        self._moved_before = (0, 0)
        self._closed = False
        self._foreign = ForeignWatch(rule, device)
        self._most_window_slots = sys.maxsize
        self.window_cut: str | None = None
        """Why the window is smaller than it should be."""
        _alive.add(self)

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
            self._pipeline = Pipeline(lanes, num_slots=self._config.slots, slot_bytes=slot_bytes)
            self._in_use.append(self._pipeline)
        if self._trips is None and any(host.on_host for host, _ in self.host_side.states):
            self._trips = HostTrips(lanes, self._rule, self.device, pin=self._config.pin_memory)
            self._in_use += [self._trips, self.host_side]

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

    def carry_on(self, other: Engine) -> None:
        """This engine takes the place of `other` on the same device."""
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
                f"on {self.device}. Nothing was changed. Lower chunk_bytes or slots, or free device memory."
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
        raised = self._trips.send(host, list(zip(ready, turns, strict=True)), self._begun)
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

    def fetch_ahead(self) -> None:
        """Fetch chunks that the next step needs, in its order, as far as the window has room."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.room_ahead <= 0 or self._round is not None:  # an open round fetches for itself
            return
        if not pipeline.staged:
            # What the next step will probably update: what had no gradient the last time is not fetched.
            self._ahead = self.host_side.chunks_with(self._last_ready)
        while pipeline.room_ahead > 0 and (found := next(self._ahead, None)) is not None:
            pipeline.fetch_ahead(Trip(*found))

    def discard_staged(self) -> None:
        """What was fetched ahead is not needed, or no longer the newest."""
        if self._pipeline is not None:
            self._pipeline.discard_staged()

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
            copy_back(turn.weight, turn.of.param)
        self._rule.finish(turns)

    # Reading

    def synchronize(self, reason: str) -> None:
        """Make the host wait until everything that was given to the lanes is done."""
        if self._lanes is not None:
            self._lanes.synchronize(reason)
            if self._lanes.checks:
                arenas = [arena.flat for host, _ in self.host_side.states for arena in host.arenas.values()]
                self._lanes.touch_on_host(writes=arenas)

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
    def slot_bytes(self) -> int:
        """Device memory of the slots that are allocated now."""
        return self._pipeline.device_bytes if self._pipeline else 0


def _begin(rule: Rule, device: torch.device, round: Round, turns: Sequence[Turn]) -> None:
    rule.begin(device, turns)
    for turn in turns:
        if _held(turn) in round.kept:
            round.kept[_held(turn)].copy_(turn.weight, non_blocking=True)
            rule.remember(device, turn)


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


def _is_idle(held: HeldState) -> bool:
    """Neither has it a gradient, nor can backward bring one."""
    return not held.param.requires_grad and held.param.grad is None


def _held(turn: Turn) -> HeldState:
    assert isinstance(turn.of, HeldState)
    return turn.of
