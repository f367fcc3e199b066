# SPDX-License-Identifier: Apache-2.0
"""Layout: every element in exactly one chunk, aligned, within bounds, for any sizes."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from offstage.memory.arena import ALIGN_BYTES
from offstage.planning.layout import Layout, make_layout, padded_bytes

FORMATS = [
    {"exp_avg": 4, "exp_avg_sq": 4},
    {"master_weight": 4, "exp_avg": 4, "exp_avg_sq": 4},
    {"master_low": 2, "exp_avg": 2, "exp_avg_sq": 2},
    {"master_low": 2, "exp_avg": 4, "exp_avg_sq": 2, "max_exp_avg_sq": 4},
    {"momentum_buffer": 8},
]
SIZES = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 20_000)), max_size=30)


def make(sizes: list[int], itemsize: dict[str, int], chunk_bytes: int, split: bool) -> Layout:
    extents = [dict.fromkeys(itemsize, numel) for numel in sizes]
    return make_layout(extents, itemsize, sizes, chunk_bytes=chunk_bytes, split=split)


@given(SIZES, st.sampled_from(FORMATS), st.integers(16 * 1024, 300_000), st.booleans())
@settings(deadline=None, max_examples=300)
def test_every_element_is_in_exactly_one_chunk(sizes, itemsize, chunk_bytes, split):
    layout = make(sizes, itemsize, chunk_bytes, split)
    covered = {index: [] for index in range(len(sizes))}
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            covered[piece.index].append((piece.start, piece.stop))
            assert piece.whole == (piece.stop - piece.start == sizes[piece.index])
    for index, size in enumerate(sizes):
        position = 0
        for start, stop in covered[index]:  # in order, without gap or overlap
            assert start == position
            assert stop > start
            position = stop
        assert position == size


@given(SIZES, st.sampled_from(FORMATS), st.integers(16 * 1024, 300_000), st.booleans())
@settings(deadline=None, max_examples=300)
def test_ranges_are_aligned_disjoint_and_bounded(sizes, itemsize, chunk_bytes, split):
    layout = make(sizes, itemsize, chunk_bytes, split)
    for key, size in itemsize.items():
        end = 0
        for chunk in layout.chunks:
            start, stop = chunk.ranges[key]
            assert start >= end
            assert start * size % ALIGN_BYTES == 0
            assert stop <= layout.arena_numel[key]
            end = stop
            inside = [layout.range_of(piece, key) for piece in chunk.pieces]
            assert inside[0][0] == start
            assert inside[-1][1] == stop
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(inside))
            assert all(first * size % ALIGN_BYTES == 0 for first, _ in inside)
    largest = max((padded_bytes(extent, itemsize) for extent in layout.extents), default=0)
    for chunk in layout.chunks:
        assert chunk.nbytes <= (chunk_bytes if split else max(chunk_bytes, largest))


@given(SIZES, st.sampled_from(FORMATS), st.integers(16 * 1024, 300_000))
@settings(deadline=None)
def test_elementwise_chunks_are_the_same_range_in_every_arena(sizes, itemsize, chunk_bytes):
    for chunk in make(sizes, itemsize, chunk_bytes, split=True).chunks:
        assert len(set(chunk.ranges.values())) == 1


@given(SIZES, st.sampled_from(FORMATS), st.integers(16 * 1024, 300_000))
@settings(deadline=None)
def test_whole_parameters_are_not_split(sizes, itemsize, chunk_bytes):
    pieces = [piece for chunk in make(sizes, itemsize, chunk_bytes, split=False).chunks for piece in chunk.pieces]
    assert [piece.index for piece in pieces] == [index for index, size in enumerate(sizes) if size]
    assert all(piece.whole for piece in pieces)


def test_keys_of_whole_parameters_may_have_sizes_of_their_own():
    """Adafactor keeps a row and a column per matrix."""
    extents = [{"row_var": 10, "col_var": 3000}, {"row_var": 500, "col_var": 7}]
    layout = make_layout(extents, {"row_var": 4, "col_var": 4}, [30_000, 3500], chunk_bytes=16 * 1024, split=False)
    assert [len(chunk.pieces) for chunk in layout.chunks] == [2]
    assert [layout.range_of(piece, "row_var") for piece in layout.chunks[0].pieces] == [(0, 10), (64, 564)]
    assert [layout.range_of(piece, "col_var") for piece in layout.chunks[0].pieces] == [(0, 3000), (3008, 3015)]


def test_padding_is_small():
    """The arenas are exact: alignment adds at most 256 bytes per parameter and key."""
    layout = make([100_001, 65_537], FORMATS[1], 64 * 1024, split=True)
    arena_bytes = sum(numel * layout.itemsize[key] for key, numel in layout.arena_numel.items())
    assert arena_bytes - (100_001 + 65_537) * 12 <= 2 * 3 * ALIGN_BYTES
