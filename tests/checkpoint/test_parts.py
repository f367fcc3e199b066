# SPDX-License-Identifier: Apache-2.0
"""Parts: boxes, ranges and blocks against indexing a real tensor, for any shape."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offstage.checkpoint.parts import Box, Part, blocks_of, boxes_of_range, row_major, whole

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    first = [draw(st.integers(0, size)) for size in shape]
    return Box(
        tuple(first), tuple(draw(st.integers(0, size - start)) for start, size in zip(first, shape, strict=True))
    )


@st.composite
def shape_and_boxes(draw, count):
    shape = draw(SHAPES)
    return shape, [draw(boxes(shape)) for _ in range(count)]


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(box.offset, box.size, strict=True))]


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(
        itertools.product(*(range(first, first + size) for first, size in zip(box.offset, box.size, strict=True)))
    )


def check_overlap_and_rest(one: Box, other: Box) -> None:
    common = one.overlap(other)
    expected = indices(one) & indices(other)
    assert (indices(common) if common else set()) == expected
    rest = one.without(other)
    assert sum(box.numel for box in rest) == one.numel - len(expected)  # disjoint
    assert set().union(*map(indices, rest)) == indices(one) - expected
    assert all(box.numel for box in rest)


@given(shape_and_boxes(2))
@settings(deadline=None)
def test_overlap_and_rest_are_those_of_sets(case):
    check_overlap_and_rest(*case[1])


def test_overlap_and_rest_of_all_boxes_of_a_small_matrix():
    ranges = [(first, size) for first in range(3) for size in range(1, 4 - first)]
    every = [Box((r, c), (rows, columns)) for (r, rows), (c, columns) in itertools.product(ranges, ranges)]
    for one, other in itertools.product(every, every):
        check_overlap_and_rest(one, other)


@given(shape_and_boxes(1))
@settings(deadline=None)
def test_within_counts_from_the_origin(case):
    shape, (box,) = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    inner = Box(
        tuple(first + size // 2 for first, size in zip(box.offset, box.size, strict=True)),
        tuple(s - s // 2 for s in box.size),
    )
    assert torch.equal(at(at(tensor, box), inner.within(box)), at(tensor, inner))


@given(SHAPES, st.data())
@settings(deadline=None, max_examples=300)
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).view(shape)
    found = boxes_of_range(shape, start, stop)
    assert [i for box in found for i in at(tensor, box).flatten().tolist()] == list(range(start, stop))
    # At most a partial row before and after the whole rows, in each dim.
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "count"),
    [
        ((4, 6), 0, 24, 1),
        ((4, 6), 6, 18, 1),
        ((4, 6), 7, 11, 1),
        ((4, 6), 3, 9, 2),
        ((4, 6), 3, 23, 3),
        ((2, 3, 4), 1, 23, 4),
        ((3, 3, 4), 1, 35, 5),
    ],
)
def test_as_few_boxes_as_possible(shape, start, stop, count):
    assert len(boxes_of_range(shape, start, stop)) == count


def test_ranges_of_scalars_and_of_empty_tensors():
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    assert boxes_of_range((), 0, 0) == []
    assert boxes_of_range((3, 0), 0, 0) == []
    with pytest.raises(ValueError, match=r"within the 6 elements of shape \(2, 3\); found \[2, 7\)"):
        boxes_of_range((2, 3), 2, 7)


@given(shape_and_boxes(1), st.integers(0, 130))
@settings(deadline=None, max_examples=300)
def test_blocks_cover_a_box_once_in_order(case, max_numel):
    shape, (box,) = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    blocks = list(blocks_of(box, max_numel))
    assert [i for block in blocks for i in at(tensor, block).flatten().tolist()] == at(tensor, box).flatten().tolist()
    assert all(0 < block.numel <= max(1, max_numel) for block in blocks)


def test_blocks_cut_the_outer_dims_first():
    blocks = [block.size for block in blocks_of(Box((0, 0, 0), (5, 3, 4)), 24)]
    assert blocks == [(2, 3, 4), (2, 3, 4), (1, 3, 4)]
    assert [block.size for block in blocks_of(Box((0, 0, 0), (2, 3, 4)), 8)] == [(1, 2, 4), (1, 1, 4)] * 2
    assert [block.size for block in blocks_of(Box((0, 0), (1, 5)), 2)] == [(1, 2), (1, 2), (1, 1)]
    assert list(blocks_of(Box((), ()), 1)) == [Box((), ())]
    assert list(blocks_of(Box((1, 0), (0, 3)), 4)) == []


@given(shape_and_boxes(1), st.integers(1, 40), st.randoms())
@settings(deadline=None, max_examples=300)
def test_a_part_finds_its_elements_in_a_line_of_any_order(case, max_numel, random):
    """The local tensor lies in memory in any order of its dims, somewhere in a larger storage."""
    shape, (box,) = case
    order = list(range(len(shape)))
    random.shuffle(order)
    local = at(torch.arange(math.prod(shape)).view(shape), box)
    strides = [0] * len(shape)
    for dim, stride in zip(order, row_major([box.size[dim] for dim in order]), strict=True):
        strides[dim] = stride
    storage = torch.full((local.numel() + 7,), -1)
    line = storage[7:]
    part = whole("w", shape, box, strides)
    part.of(line).copy_(local)
    assert storage[:7].eq(-1).all()
    assert sorted(line.tolist()) == sorted(local.flatten().tolist())
    blocks = list(part.blocks(max_numel))
    assert all(block.name == "w" and block.shape == shape and block.box.numel <= max_numel for block in blocks)
    assert [i for block in blocks for i in block.of(line).flatten().tolist()] == local.flatten().tolist()
    for block in blocks:
        assert torch.equal(block.of(line), at(local, block.box.within(box)))


def test_a_whole_part_is_row_major_unless_told():
    line = torch.arange(10)
    part = whole("w", (9, 3), Box((2, 0), (2, 3)))
    assert part == Part("w", (9, 3), Box((2, 0), (2, 3)), 0, (3, 1))
    assert part.of(line).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert part.of(line[4:]).tolist() == [[4, 5, 6], [7, 8, 9]]
    assert whole("s", (), Box((), ())).of(line[3:]).item() == 3
