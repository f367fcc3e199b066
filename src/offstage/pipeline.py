# SPDX-License-Identifier: Apache-2.0
"""Fetch → update → store over a ring of slots. The only module that moves state. Called by `engine.py`.

A chunk's trip is ASIDE → FETCHING → STAGED → UPDATING → STORING → ASIDE, or STAGED → ASIDE when it is discarded
unused. A state is left when its work has been submitted: what has really happened by then is the marks' business.

Who touches what, and which mark separates them:

| buffer | written by | read by | separated by |
|---|---|---|---|
| slot | fetch, update | update, store | `fetched`, `updated`; the next fetch into it waits for `slot.free` |
| arena range | store | fetch | the next fetch of the chunk waits for `stored` |
| weight | update | the caller | `gradients_ready` before, `weights_ready` after (both in `engine.py`) |
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offstage.host_memory import Arena
from offstage.lanes import Lane, Lanes, Mark
from offstage.layout import Chunk, Layout, Piece


class ChunkState(enum.Enum):
    """How far a chunk is on its trip."""

    ASIDE = "aside"
    FETCHING = "fetching"
    STAGED = "staged"
    UPDATING = "updating"
    STORING = "storing"


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
class HostState:
    """The arenas of one layout, and for each chunk the mark after which they hold its newest state."""

    layout: Layout
    arenas: dict[str, Arena]
    stored: dict[int, Mark] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas.values())


@dataclass(eq=False)
class Slot:
    """A device staging buffer and the mark after which it may be written again."""

    buffer: torch.Tensor
    free: Mark


@dataclass(eq=False)
class Trip:
    """One chunk's way through a slot. Only pieces whose parameter has a gradient move."""

    host: HostState
    chunk: Chunk
    pieces: Sequence[Piece]
    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    """From FETCHING on: each key's part of the slot."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """From FETCHING on: (arena, slot) slices to copy between, one per key and run."""
    fetched: Mark = None
    updated: Mark = None

    @property
    def key(self) -> tuple[int, int]:
        return id(self.host), self.chunk.number

    def runs(self, key: str) -> list[tuple[int, int]]:
        """The ranges of `key`'s arena that move: neighbouring pieces in one copy."""
        layout = self.host.layout
        runs: list[tuple[int, int]] = []
        previous = None
        for piece in self.pieces:
            start, stop = layout.range_of(piece, key)
            if previous is not None and piece.index == previous + 1:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
            previous = piece.index
        return [(start, stop) for start, stop in runs if stop > start]


class Pipeline:
    """One device's lanes, ring and slots."""

    def __init__(self, lanes: Lanes, *, num_slots: int, slot_bytes: int) -> None:
        self.lanes = lanes
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.ring = Ring(num_slots)
        self.bytes_fetched = 0
        self.bytes_stored = 0
        self._slots: list[Slot] = []

    @property
    def device_bytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self._slots)

    def prepare(self) -> None:
        """Allocate the slots, once. Before anything moves, so that running out of memory loses nothing."""
        while len(self._slots) < self.num_slots:
            buffer = self.lanes.empty(self.slot_bytes)
            # The memory may have just been freed by work still queued on the caller's stream.
            self._slots.append(Slot(buffer, free=self.lanes.mark()))

    def state_of(self, trip: Trip, piece: Piece) -> dict[str, torch.Tensor]:
        """The piece's state in the slot that holds its chunk."""
        state = {}
        for key, view in trip.staged.items():
            start, stop = trip.host.layout.range_of(piece, key)
            base = trip.chunk.ranges[key][0]
            state[key] = view[start - base : stop - base]
        return state

    def fetch(self, trip: Trip) -> None:
        """ASIDE → STAGED."""
        self.ring.advance(trip.key, ChunkState.FETCHING)
        slot = self._slots[self.ring.slot_of[trip.key]]
        trip.staged = _staged(trip, slot.buffer)
        trip.copies = _copies(trip)

        def copy_in() -> None:
            for host, device in trip.copies:
                device.copy_(host, non_blocking=True)

        trip.fetched = self.lanes.submit(
            Lane.FETCH,
            copy_in,
            after={
                "fetch: the slot is free": slot.free,
                "fetch: the chunk's last store is done": trip.host.stored.get(trip.chunk.number),
            },
            reads=[host for host, _ in trip.copies],
            writes=[device for _, device in trip.copies],
        )
        self.bytes_fetched += sum(host.nbytes for host, _ in trip.copies)
        self.ring.advance(trip.key, ChunkState.STAGED)

    def update(
        self,
        trip: Trip,
        work: Callable[[], None],
        *,
        weights: Sequence[torch.Tensor] = (),
        grads: Sequence[torch.Tensor] = (),
    ) -> None:
        """STAGED → UPDATING: `work` updates the staged state and `weights`, and reads `grads`."""
        self.ring.advance(trip.key, ChunkState.UPDATING)
        trip.updated = self.lanes.submit(
            Lane.UPDATE,
            work,
            after={"update: the state is fetched": trip.fetched},
            reads=grads,
            writes=[*(device for _, device in trip.copies), *weights],
        )

    def store(self, trip: Trip) -> None:
        """UPDATING → ASIDE; the slot is free again behind the store."""
        self.ring.advance(trip.key, ChunkState.STORING)
        slot = self._slots[self.ring.slot_of[trip.key]]

        def copy_out() -> None:
            for host, device in trip.copies:
                host.copy_(device, non_blocking=True)

        stored = self.lanes.submit(
            Lane.STORE,
            copy_out,
            after={"store: the state is updated": trip.updated},
            reads=[device for _, device in trip.copies],
            writes=[host for host, _ in trip.copies],
        )
        slot.free = trip.host.stored[trip.chunk.number] = stored
        self.bytes_stored += sum(host.nbytes for host, _ in trip.copies)
        self.ring.advance(trip.key, ChunkState.ASIDE)

    def discard(self, trip: Trip) -> None:
        """STAGED → ASIDE: fetched and not needed. What is on the host is still the newest."""
        slot = self._slots[self.ring.slot_of[trip.key]]
        slot.free = trip.fetched
        self.ring.advance(trip.key, ChunkState.ASIDE)

    def reset(self) -> None:
        """Forget trips under way, after the lanes have been drained: what is on the host is what counts."""
        self.ring = Ring(self.num_slots)

    def close(self) -> None:
        """Give the slots' memory back, behind the last store from each."""
        for slot in self._slots:
            self.lanes.release(slot.buffer, slot.free, "close: the slot's last store is done")
        self._slots.clear()


def _staged(trip: Trip, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each key's part of a slot: the keys lie one behind the other, aligned as in the arenas."""
    views, offset = {}, 0
    for key, (start, stop) in trip.chunk.ranges.items():
        dtype = trip.host.arenas[key].dtype
        views[key] = buffer[offset : offset + (stop - start) * dtype.itemsize].view(dtype)
        offset += trip.host.layout.padded(stop - start) * dtype.itemsize
    return views


def _copies(trip: Trip) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = []
    for key, view in trip.staged.items():
        flat, base = trip.host.arenas[key].flat, trip.chunk.ranges[key][0]
        pairs += [(flat[a:b], view[a - base : b - base]) for a, b in trip.runs(key)]
    return pairs
