# SPDX-License-Identifier: Apache-2.0
"""Fetch → update → store over a ring of slots. The only module that moves state between host and device.

A chunk's trip is ASIDE → FETCHING → STAGED → UPDATING → STORING → ASIDE, or STAGED → ASIDE when it is discarded
unused. A state is left when its work has been submitted; the marks say what has really happened by then.

Who touches what, and which mark separates them:

| buffer | written by | read by | separated by |
|---|---|---|---|
| slot | fetch, update | update, store | `fetched`, `updated`; the next fetch into it waits for `slot.free` |
| arena range | store | fetch | the next fetch of the chunk waits for `chunk.stored` |
| host gradient | store in backward | fetch | `HostGradient.stored`; its update is settled before the next one |
| layer's weights | their fetch, update | update, store | `layer.fetched`, `updated`; dropped behind `layer.used` |
| weight | update | the caller | a mark when its gradient is taken, `Pending.updated` after (both in `engine.py`) |

Slots beyond the ring's own number are the window: chunks fetched ahead wait there (`staged`), and stores that are
late leave from there.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offstage.engine.arenas import StateChunk, StatePiece
from offstage.engine.gradients import HostGradient
from offstage.lanes.lanes import Lane, Lanes, Mark, copy_work
from offstage.memory.arena import Arena, round_up
from offstage.rules.rule import HostedLayer


class ChunkState(enum.Enum):
    """How far a chunk is on its trip."""

    ASIDE = "aside"
    FETCHING = "fetching"
    STAGED = "staged"
    UPDATING = "updating"
    STORING = "storing"

    __hash__ = object.__hash__  # looked up at every turn of every trip; enum's own is slow


_NEXT = {
    ChunkState.ASIDE: {ChunkState.FETCHING},
    ChunkState.FETCHING: {ChunkState.STAGED},
    ChunkState.STAGED: {ChunkState.UPDATING, ChunkState.ASIDE},
    ChunkState.UPDATING: {ChunkState.STORING},
    ChunkState.STORING: {ChunkState.ASIDE},
}


class Ring:
    """Which chunk holds which slot and how far it is. Pure bookkeeping, small enough to check exhaustively."""

    def __init__(self, num_slots: int) -> None:
        self.free: deque[int] = deque(range(num_slots))
        self.slot_of: dict[object, int] = {}
        self._state: dict[object, ChunkState] = {}

    def state(self, chunk: object) -> ChunkState:
        return self._state.get(chunk, ChunkState.ASIDE)

    def add(self, slot: int) -> None:
        self.free.append(slot)

    def remove(self) -> int:
        """The free slot whose last store is the oldest, to be given back."""
        return self.free.popleft()

    def advance(self, chunk: object, to: ChunkState) -> None:
        """Move `chunk` on; taking a slot when it leaves and giving it back when it is aside again."""
        now = self.state(chunk)
        assert to in _NEXT[now], f"a chunk cannot go from {now.value} to {to.value}"
        if to is ChunkState.FETCHING:
            assert self.free, "no slot is free: a trip must end before the next begins"
            self.slot_of[chunk] = self.free.popleft()
        if to is ChunkState.ASIDE:
            self.free.append(self.slot_of.pop(chunk))
            del self._state[chunk]
        else:
            self._state[chunk] = to


@dataclass(eq=False)
class Slot:
    """A device staging buffer and the mark after which it may be written again."""

    buffer: torch.Tensor
    free: Mark
    views: dict[tuple[tuple[str, torch.dtype, int], ...], dict[str, torch.Tensor]] = field(default_factory=dict)
    """How the buffer is divided among the keys of a chunk: most chunks are of one size."""

    def staged(self, trip: Trip) -> dict[str, torch.Tensor]:
        """Each key's part: the keys lie one behind the other, aligned as in the arenas."""
        layout, arenas = trip.chunk.home.layout, trip.chunk.home.arenas
        sizes = tuple((key, arenas[key].dtype, stop - start) for key, (start, stop) in trip.chunk.ranges.items())
        if sizes not in self.views:
            offset, views = 0, {}
            for key, dtype, length in sizes:
                views[key] = self.buffer[offset : offset + length * dtype.itemsize].view(dtype)
                offset += layout.padded(length) * dtype.itemsize
            self.views[sizes] = views
        return self.views[sizes]


@dataclass(eq=False)
class Trip:
    """One chunk's way through a slot. Only pieces whose parameter has a gradient move."""

    chunk: StateChunk
    pieces: Sequence[StatePiece]
    speculative: bool = False
    """Store to the spare set: then what was fetched stays untouched on the host."""
    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    """From FETCHING on: each key's part of the slot."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """From FETCHING on: (arena, slot) slices to copy between, one per key and run."""
    left: dict[StatePiece, HostGradient] = field(default_factory=dict)
    """Pieces whose gradients left for the host: they are fetched with the state."""
    staged_grads: dict[StatePiece, torch.Tensor] = field(default_factory=dict)
    """From FETCHING on: these gradients in the slot, behind the state."""
    fetched: Mark = None
    updated: Mark = None

    @property
    def hosted(self) -> list[StatePiece]:
        """Pieces whose weights live on the host: all of the chunk, which is of one layer, or none."""
        return [piece for piece in self.pieces if piece.owner.hosted is not None]

    @property
    def layer(self) -> HostedLayer | None:
        """Whose copy of the weights is updated and stored."""
        hosted = self.chunk.pieces[0].owner.hosted
        return None if hosted is None else hosted.layer

    def runs(self, key: str) -> list[tuple[int, int]]:
        """The ranges of `key`'s arena that move: neighbouring pieces in one copy."""
        runs: list[tuple[int, int]] = []
        previous = None
        for piece in self.pieces:
            start, stop = piece.ranges[key]
            if previous is not None and piece.index == previous + 1:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
            previous = piece.index
        return [(start, stop) for start, stop in runs if stop > start]


class Pipeline:
    """One device's lanes, ring and slots."""

    def __init__(self, lanes: Lanes, *, num_slots: int, slot_bytes: int = 0) -> None:
        """`slot_bytes`: 0 as long as nothing is streamed."""
        self.lanes = lanes
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots if slot_bytes else 0
        self.gradient_bytes = 0
        """Room in a slot behind the state, for gradients that left for the host."""
        self.ring = Ring(self.num_slots)
        self.bytes_fetched = 0
        self.bytes_stored = 0
        self.gradient_bytes_fetched = 0
        self.weight_bytes_stored = 0
        self.staged: dict[StateChunk, Trip] = {}
        """Trips fetched ahead of their update."""
        self._slots: dict[int, Slot] = {}
        self._made = 0

    @property
    def device_bytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self._slots.values())

    @property
    def missing_bytes(self) -> int:
        """Of the slots that `prepare` has still to allocate."""
        return max(0, self.num_slots - len(self._slots)) * (self.slot_bytes + self.gradient_bytes)

    def resize(self, num_slots: int, slot_bytes: int, gradient_bytes: int = 0) -> None:
        """Chunks, or their gradients, are larger than before: other slots from now on."""
        self.close()
        self.num_slots, self.slot_bytes, self.gradient_bytes = num_slots, slot_bytes, gradient_bytes
        self.ring, self._made = Ring(num_slots), 0

    def prepare(self) -> None:
        """Allocate the slots, once. Before anything moves, so that running out of memory loses nothing."""
        while len(self._slots) < self.num_slots:
            self._make_slot()

    @property
    def window_slots(self) -> int:
        """Slots that exist beyond the ring's own number."""
        return max(0, len(self._slots) - self.num_slots)

    def widen(self, window_slots: int) -> None:
        """Allocate until the window has `window_slots`."""
        self.prepare()
        while self.window_slots < window_slots:
            self._make_slot()
            self.ring.add(self._made - 1)

    def narrow(self, window_slots: int) -> None:
        """Give memory back, behind the oldest stores, until the window has `window_slots`.

        Chunks that wait in slots keep theirs, and the ring keeps its own number beside them.
        """
        while self.window_slots > window_slots and self.room_ahead > 0:
            slot = self._slots.pop(self.ring.remove())
            self.lanes.release(slot.buffer, slot.free, "window: the slot's last store is done")

    def _make_slot(self) -> None:
        buffer = self.lanes.empty(self.slot_bytes + self.gradient_bytes)
        # The memory may have just been freed by work still queued on the caller's stream.
        self._slots[self._made] = Slot(buffer, free=self.lanes.mark())
        self._made += 1

    @property
    def room_ahead(self) -> int:
        """How many chunks may be fetched ahead now: the ring's own slots stay free for the others."""
        return len(self.ring.free) - self.num_slots if self._slots else 0

    def fetch_ahead(self, trip: Trip) -> None:
        """ASIDE → STAGED, to wait there for its update."""
        self.fetch(trip)
        self.staged[trip.chunk] = trip

    def take_staged(self, trip: Trip) -> bool:
        """Continue the trip of the same chunk that was fetched ahead, if there is one; fetching pieces it lacks."""
        ahead = self.staged.pop(trip.chunk, None)
        if ahead is None:
            return False
        lacking = [piece for piece in trip.pieces if piece not in ahead.pieces]
        trip.staged, trip.copies, trip.fetched = ahead.staged, ahead.copies, ahead.fetched
        if lacking or trip.left:
            more = Trip(trip.chunk, lacking, staged=ahead.staged, left=trip.left)
            self._stage_gradients(more)
            self._copy_in(more, free=None)
            trip.staged_grads = more.staged_grads
            trip.copies, trip.fetched = ahead.copies + more.copies, more.fetched
        trip.pieces = sorted({*ahead.pieces, *lacking}, key=lambda piece: (piece.index, piece.start))
        return True

    def state_of(self, trip: Trip, piece: StatePiece) -> dict[str, torch.Tensor]:
        """The piece's state in the slot that holds its chunk."""
        state = {}
        for key, view in trip.staged.items():
            start, stop = piece.ranges[key]
            base = trip.chunk.ranges[key][0]
            state[key] = view[start - base : stop - base]
        return state

    def fetch(self, trip: Trip) -> None:
        """ASIDE → STAGED."""
        self.ring.advance(trip.chunk, ChunkState.FETCHING)
        slot = self._slots[self.ring.slot_of[trip.chunk]]
        trip.staged = slot.staged(trip)
        self._stage_gradients(trip)
        self._copy_in(trip, free=slot.free)
        self.ring.advance(trip.chunk, ChunkState.STAGED)

    def _stage_gradients(self, trip: Trip) -> None:
        """Give gradients that left for the host their places in the slot."""
        buffer, offset = self._slots[self.ring.slot_of[trip.chunk]].buffer, self.slot_bytes
        for piece, gradient in trip.left.items():
            nbytes = (piece.stop - piece.start) * gradient.dtype.itemsize
            trip.staged_grads[piece] = buffer[offset : offset + nbytes].view(gradient.dtype)
            offset += round_up(nbytes)

    def _copy_in(self, trip: Trip, *, free: Mark | None) -> None:
        trip.copies = _copies(trip, trip.chunk.home.arenas)
        gradients = [
            (gradient.flat[piece.start : piece.stop], trip.staged_grads[piece]) for piece, gradient in trip.left.items()
        ]
        last_left = max(trip.left.values(), key=lambda gradient: gradient.order, default=None)
        trip.fetched = self.lanes.submit(
            Lane.FETCH,
            copy_work((device, host) for host, device in (*trip.copies, *gradients)),
            after={
                "fetch: the slot is free": free,
                "fetch: the chunk's last store is done": trip.chunk.stored,
                "fetch: the gradients are on the host": None if last_left is None else last_left.stored,
            },
            reads=[host for host, _ in (*trip.copies, *gradients)],
            writes=[device for _, device in (*trip.copies, *gradients)],
            low_priority=True,
        )
        for gradient in trip.left.values():
            gradient.read = trip.fetched
        self.bytes_fetched += sum(host.nbytes for host, _ in trip.copies)
        self.gradient_bytes_fetched += sum(host.nbytes for host, _ in gradients)

    def update(
        self,
        trip: Trip,
        work: Callable[[], None],
        *,
        weights: Sequence[torch.Tensor] = (),
        grads: Sequence[torch.Tensor] = (),
    ) -> None:
        """STAGED → UPDATING: `work` updates the staged state and `weights`, and reads `grads`."""
        self.ring.advance(trip.chunk, ChunkState.UPDATING)
        trip.updated = self.lanes.submit(
            Lane.UPDATE,
            work,
            after={
                "update: the state is fetched": trip.fetched,
                "update: the weights are fetched": None if trip.layer is None else trip.layer.fetched,
            },
            reads=[grad for grad in grads if grad.numel()],
            writes=[*(device for _, device in trip.copies), *trip.staged_grads.values(), *weights],
        )

    def store(self, trip: Trip, updated: Collection[StatePiece] = ()) -> None:
        """UPDATING → ASIDE; the slot is free again behind the store. `updated`: pieces that had gradients."""
        self.ring.advance(trip.chunk, ChunkState.STORING)
        slot = self._slots[self.ring.slot_of[trip.chunk]]
        copies = _copies(trip, trip.chunk.home.spare) if trip.speculative else trip.copies
        weights = _weight_copies(trip, updated)
        target = trip.chunk.home.spare if trip.speculative else trip.chunk.home.arenas
        stored = self.lanes.submit(
            Lane.STORE,
            copy_work([*copies, *weights]),
            after={
                "store: the state is updated": trip.updated,
                "store: the snapshot has its copy": trip.chunk.home.preserve(trip.chunk, target, self.lanes),
            },
            reads=[device for _, device in (*copies, *weights)],
            writes=[host for host, _ in (*copies, *weights)],
        )
        slot.free = trip.chunk.stored = stored
        if trip.layer is not None:
            trip.layer.was_stored(stored)
            for piece in trip.hosted if trip.speculative else ():
                hosted = piece.owner.hosted
                if hosted is not None and hosted.spare is not None:
                    hosted.was_speculated(piece.start, piece.stop)
        self.bytes_stored += sum(host.nbytes for host, _ in copies)
        self.weight_bytes_stored += sum(host.nbytes for host, _ in weights)
        self.ring.advance(trip.chunk, ChunkState.ASIDE)

    def discard(self, trip: Trip) -> None:
        """STAGED → ASIDE: fetched and not needed. What is on the host is still the newest."""
        slot = self._slots[self.ring.slot_of[trip.chunk]]
        slot.free = trip.fetched
        self.ring.advance(trip.chunk, ChunkState.ASIDE)

    def discard_staged(self) -> None:
        """Nothing that was fetched ahead is needed."""
        for trip in self.staged.values():
            self.discard(trip)
        self.staged.clear()

    def reset(self) -> None:
        """Forget trips under way, after the lanes have been drained: what is on the host is what counts."""
        for slot in self._slots.values():
            slot.free = self.lanes.mark()  # the one before may never come
        self.staged.clear()
        self.ring = Ring(0)
        missing = max(0, self.num_slots - len(self._slots))  # which `prepare` makes next
        for number in (*self._slots, *range(self._made, self._made + missing)):
            self.ring.add(number)

    def close(self) -> None:
        """Give the slots' memory back, behind the last store from each."""
        self.discard_staged()
        for slot in self._slots.values():
            self.lanes.release(slot.buffer, slot.free, "close: the slot's last store is done")
        self._slots.clear()


def _copies(trip: Trip, arenas: Mapping[str, Arena]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(host, device) slices to copy between, one per key and run."""
    pairs = []
    for key, view in trip.staged.items():
        flat, base = arenas[key].flat, trip.chunk.ranges[key][0]
        pairs += [(flat[a:b], view[a - base : b - base]) for a, b in trip.runs(key)]
    return pairs


def _weight_copies(trip: Trip, updated: Collection[StatePiece]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(host, device) slices of weights that live on the host, for the store. `updated`: pieces with gradients."""
    pairs = []
    for piece in trip.hosted:
        hosted = piece.owner.hosted
        assert hosted is not None
        # Frozen weights have no spare memory; one that is not frozen any more is not updated speculatively.
        host = hosted.spare if trip.speculative and hosted.spare is not None else hosted.host
        if trip.speculative and hosted.spare is None and piece not in updated:
            continue
        pairs.append((host[piece.start : piece.stop], hosted.on_device()[piece.start : piece.stop]))
    return pairs
