# SPDX-License-Identifier: Apache-2.0
"""Parameters → element ranges → chunks. Pure: sizes in, ranges out, no tensors and no device calls.

Parameters that keep the same state keys on the same device are laid end to end, in `param_groups` order. Each state key
has an arena, in which a parameter is one contiguous, aligned range. A chunk is a run of pieces, and a piece is a
parameter or a part of one. A chunk is fetched, updated and stored as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from offstage.memory.arena import ALIGN_BYTES, round_up

Extent = Mapping[str, int]
"""The number of elements that one parameter keeps of each state key."""


@dataclass(frozen=True)
class Piece:
    """Elements `[start, stop)` of the parameter at position `index` of the layout."""

    index: int
    start: int
    stop: int
    whole: bool
    """The piece is the whole parameter. Only then may a state key's number of elements differ from the parameter's."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Chunk:
    """Pieces that are fetched, updated and stored together."""

    number: int
    """Its position in `Layout.chunks`."""
    pieces: tuple[Piece, ...]
    """In the order of the layout."""
    ranges: Mapping[str, tuple[int, int]]
    """Per state key: the elements `[start, stop)` of the arena."""
    nbytes: int
    """What it takes in a slot, all keys together, with alignment."""


@dataclass(frozen=True)
class Layout:
    """Where each parameter's state lies in the arenas, and the chunks that cover it."""

    itemsize: Mapping[str, int]
    """Per state key: bytes of one element."""
    extents: tuple[Extent, ...]
    """Per parameter: the number of elements of each key."""
    offsets: tuple[Mapping[str, int], ...]
    """Per parameter: its first element in each key's arena."""
    arena_numel: Mapping[str, int]
    """Per state key: elements of the arena."""
    chunks: tuple[Chunk, ...]

    @property
    def slot_bytes(self) -> int:
        """The size of a slot that can hold any chunk."""
        return max((chunk.nbytes for chunk in self.chunks), default=0)

    def padded(self, numel: int) -> int:
        """`numel` rounded up to the next element that may be the first of a range."""
        return round_up(numel, _align_elements(self.itemsize))

    def range_of(self, piece: Piece, key: str) -> tuple[int, int]:
        """The elements `[start, stop)` of `key`'s arena that `piece` covers."""
        offset = self.offsets[piece.index][key]
        if piece.whole:
            return offset, offset + self.extents[piece.index][key]
        return offset + piece.start, offset + piece.stop


def make_layout(
    extents: Sequence[Extent],
    itemsize: Mapping[str, int],
    numel: Sequence[int],
    *,
    chunk_bytes: int,
    split: bool,
    firsts: Collection[int] = (),
) -> Layout:
    """Lay the parameters end to end and cut the line into chunks of at most `chunk_bytes`.

    With `split` (elementwise rules) a chunk may end inside a parameter; every key then has as many elements as the
    parameter. Without it chunks end between parameters, and a larger parameter is a chunk of its own. `firsts`:
    parameters that begin a chunk in any case.
    """
    offsets: list[dict[str, int]] = []
    cursor = dict.fromkeys(itemsize, 0)
    align = _align_elements(itemsize)
    for extent in extents:
        offsets.append(dict(cursor))
        for key in itemsize:
            cursor[key] += round_up(extent[key], align)
    if split:
        pieces = _cut(numel, itemsize, chunk_bytes, firsts)
    else:
        pieces = _whole(extents, numel, itemsize, chunk_bytes, firsts)
    chunks = []
    for number, group in enumerate(pieces):
        ranges = {key: _span(group, offsets, extents, key) for key in itemsize}
        nbytes = sum(round_up(stop - start, align) * itemsize[key] for key, (start, stop) in ranges.items())
        chunks.append(Chunk(number, tuple(group), ranges, nbytes))
    return Layout(dict(itemsize), tuple(extents), tuple(offsets), cursor, tuple(chunks))


def padded_bytes(extent: Extent, itemsize: Mapping[str, int]) -> int:
    """Bytes of one parameter's state in the arenas, with alignment."""
    align = _align_elements(itemsize)
    return sum(round_up(extent[key], align) * size for key, size in itemsize.items())


def _cut(
    numel: Sequence[int], itemsize: Mapping[str, int], chunk_bytes: int, firsts: Collection[int]
) -> list[list[Piece]]:
    """For elementwise rules: fill each chunk up to the last aligned element that fits."""
    align = _align_elements(itemsize)
    capacity = max(align, chunk_bytes // sum(itemsize.values()) // align * align)
    chunks: list[list[Piece]] = []
    room = 0
    for index, size in enumerate(numel):
        start = 0
        room = 0 if index in firsts else room
        while start < size:
            if room == 0:
                chunks.append([])
                room = capacity
            stop = min(size, start + room)
            chunks[-1].append(Piece(index, start, stop, whole=stop - start == size))
            room -= round_up(stop - start, align)
            start = stop
    return chunks


def _whole(
    extents: Sequence[Extent],
    numel: Sequence[int],
    itemsize: Mapping[str, int],
    chunk_bytes: int,
    firsts: Collection[int],
) -> list[list[Piece]]:
    """Whole parameters only: start a new chunk when the next parameter does not fit."""
    chunks: list[list[Piece]] = []
    used = 0
    for index, extent in enumerate(extents):
        size = padded_bytes(extent, itemsize)
        if size == 0:
            continue
        if not chunks or used + size > chunk_bytes or index in firsts:
            chunks.append([])
            used = 0
        chunks[-1].append(Piece(index, 0, numel[index], whole=True))
        used += size
    return chunks


def _span(
    pieces: Sequence[Piece], offsets: Sequence[Mapping[str, int]], extents: Sequence[Extent], key: str
) -> tuple[int, int]:
    first, last = pieces[0], pieces[-1]
    start = offsets[first.index][key] + (0 if first.whole else first.start)
    stop = offsets[last.index][key] + (extents[last.index][key] if last.whole else last.stop)
    return start, stop


def _align_elements(itemsize: Mapping[str, int]) -> int:
    # One number for all keys, those of the narrowest one, so that a range has the same elements in every arena.
    return ALIGN_BYTES // min(itemsize.values())
