# SPDX-License-Identifier: Apache-2.0
"""`Snapshot`: state on the host as it was at one moment, for a writer that reads it while training goes on.

Nothing is copied when it is taken. A chunk that is about to be overwritten while the writer still needs it is copied
first (`preserve`), by the threads of the host, and what overwrites it waits for the copy. If the writer comes first, it
makes the copy itself: a save waits for no lane, whatever becomes of the optimizer.

Who touches what, and what separates them:

| buffer | written by | read by | separated by |
|---|---|---|---|
| arena range | store, host threads | the writer | `Unit.copies`, set before an overwrite may begin, seen after a read |
| copy | the job of `preserve` or the writer, whichever comes first | the writer | the copy's lock |
| arena range | store, host threads | whichever copies | the mark of the job, which the overwrite waits for |
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offstage.lanes.lanes import Lanes, Mark
from offstage.memory.arena import Arena, map_exact
from offstage.memory.threads import Latch
from offstage.planning.layout import Chunk, Layout, Piece


class _Copy:
    """One key of a chunk: room for it, and what is to be copied there."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source, self._room = source, _room_for(source)
        self._lock, self._is_made = threading.Lock(), False

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def make(self) -> torch.Tensor:
        """The copy. The first caller makes it; a second one waits for that."""
        with self._lock:
            if not self._is_made:
                self._room.copy_(self._source)
                self._is_made = True
        return self._room


@dataclass(eq=False)
class Unit:
    """One chunk of a snapshot."""

    readers: int | None = None
    """How many lines of it the writer has still to read, as soon as that is known."""
    copies: dict[str, _Copy] | None = None
    mark: Mark = None


class Snapshot:
    """The chunks of one set of arenas."""

    def __init__(self, layout: Layout, arenas: Mapping[str, Arena]) -> None:
        self.layout, self.arenas = layout, arenas
        self.copied_bytes = 0
        """Memory that copies have taken at most; it is given back chunk by chunk."""
        self._lock = threading.Lock()
        self._units = {chunk.number: Unit() for chunk in layout.chunks}
        self._pieces: dict[int, list[tuple[Piece, Chunk]]] = {}
        for chunk in layout.chunks:
            for piece in chunk.pieces:
                self._pieces.setdefault(piece.index, []).append((piece, chunk))
        self._held_bytes = 0
        self._over = Latch()

    # For the side that overwrites

    def preserve(self, number: int, lanes: Lanes) -> Mark | None:
        """Before chunk `number` is overwritten: the mark after which it may be. `None`: now."""
        with self._lock:
            unit = self._units.get(number)
            if unit is None:
                return None
            if unit.copies is not None:
                return unit.mark
            ranges = self.layout.chunks[number].ranges
            sources = {key: arena.flat[slice(*ranges[key])] for key, arena in self.arenas.items()}
            copies = {key: _Copy(source) for key, source in sources.items()}
            unit.copies = copies
            self._held_bytes += sum(copy.nbytes for copy in copies.values())
            self.copied_bytes = max(self.copied_bytes, self._held_bytes)
        unit.mark = lanes.submit_on_host(
            [functools.partial(_make, copy) for copy in copies.values()],
            after={},
            reads=list(sources.values()),  # the copies are the writer's, who waits for none of the marks
        )
        return unit.mark

    def wait(self) -> None:
        """Return when the writer needs the arenas no more."""
        self._over.wait()

    # For the writer

    def expect(self, lines: Mapping[int, int]) -> None:
        """The writer will read so many lines of the parameter at each position, and no others."""
        with self._lock:
            for number, unit in list(self._units.items()):
                unit.readers = sum(lines.get(piece.index, 0) for piece in self.layout.chunks[number].pieces)
                self._release_if_read(number)

    def finished(self, index: int) -> None:
        """One line of the parameter at position `index` has been read."""
        with self._lock:
            for _, chunk in self._pieces.get(index, ()):
                unit = self._units.get(chunk.number)
                if unit is not None and unit.readers is not None:
                    unit.readers -= 1
                    self._release_if_read(chunk.number)

    def read(self, index: int, key: str, start: int, stop: int, into: torch.Tensor) -> None:
        """Elements `[start, stop)` of what the parameter at position `index` keeps under `key`."""
        base = self.layout.offsets[index][key]
        for piece, chunk in self._pieces.get(index, ()):
            first, last = (place - base for place in self.layout.range_of(piece, key))
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                self._read(chunk, key, base + begin, base + end, into[begin - start : end - start])

    def _read(self, chunk: Chunk, key: str, start: int, stop: int, into: torch.Tensor) -> None:
        unit = self._units[chunk.number]
        if unit.copies is None:
            into.copy_(self.arenas[key].flat[start:stop])
        with self._lock:  # what was read before a copy was asked for cannot have been overwritten yet
            copies = unit.copies
        if copies is not None:
            offset = chunk.ranges[key][0]
            into.copy_(copies[key].make()[start - offset : stop - offset])

    def _release_if_read(self, number: int) -> None:
        if self._units[number].readers == 0:
            unit = self._units.pop(number)
            self._held_bytes -= sum(copy.nbytes for copy in (unit.copies or {}).values())
        if not self._units:
            self._over.set()

    def close(self) -> None:
        """The writer is done, or has failed: nothing of it is needed any more."""
        with self._lock:
            self._units.clear()
        self._over.set()


def _room_for(source: torch.Tensor) -> torch.Tensor:
    """Memory as large as `source`, in huge pages: a step may copy all state, and is the first to touch any of this."""
    if not source.numel():
        return torch.empty_like(source)
    return torch.frombuffer(map_exact(source.nbytes), dtype=source.dtype, count=source.numel())


def _make(copy: _Copy) -> None:
    copy.make()
