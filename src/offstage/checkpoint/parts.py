# SPDX-License-Identifier: Apache-2.0
"""Boxes of saved tensors, and where their elements are in this rank's memory. Pure index arithmetic.

A rank holds its share of a parameter (or of one of its state tensors) as a flat run: a 1-D tensor, in memory order. A
checkpoint stores boxes: an offset and a size in a tensor's global shape. A `Part` maps one to the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """The elements `offset[d] <= i_d < offset[d] + size[d]` of a global tensor; `Box((), ())` is a 0-d tensor's one."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box | None:
        """The elements in both; `None` where there are none."""
        offset, size = [], []
        for start, length, other_start, other_length in zip(
            self.offset, self.size, other.offset, other.size, strict=True
        ):
            first = max(start, other_start)
            last = min(start + length, other_start + other_length)
            if first >= last:
                return None
            offset.append(first)
            size.append(last - first)
        return Box(tuple(offset), tuple(size))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` has all of the elements."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            first >= 0 and length >= 0 and first + length <= size
            for first, length, size in zip(self.offset, self.size, shape, strict=True)
        )

    def within(self, origin: Box) -> Box:
        """The same elements, counted from the first element of `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin.offset, strict=True)), self.size)

    def without(self, other: Box) -> list[Box]:
        """The elements that are not in `other`, as disjoint boxes."""
        common = self.overlap(other)
        if common is None:
            return [self] if self.numel else []
        rest = []
        offset, size = list(self.offset), list(self.size)
        for dim in range(len(size)):
            # Cut off the elements before and after along this dim; later dims cut only the middle.
            start, stop = common.offset[dim], common.offset[dim] + common.size[dim]
            for first, last in ((offset[dim], start), (stop, offset[dim] + size[dim])):
                if first < last:
                    rest.append(
                        Box((*offset[:dim], first, *offset[dim + 1 :]), (*size[:dim], last - first, *size[dim + 1 :]))
                    )
            offset[dim], size[dim] = start, stop - start
        return rest


@dataclass(frozen=True)
class Part:
    """A box of a saved tensor, and where its elements are in the flat run."""

    name: str
    """The saved tensor's name; each part of a fused parameter has its own."""
    shape: tuple[int, ...]
    """The saved tensor's global shape."""
    box: Box
    start: int
    """The box's first element is element `start` of the flat run."""
    strides: tuple[int, ...]
    """Element (i, j, …) of the box is element `start + i * strides[0] + j * strides[1] + …` of the run."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the box's elements, in row-major order, are contiguous in the flat run."""
        inner = 1
        for length, stride in zip(reversed(self.box.size), reversed(self.strides), strict=True):
            if length != 1 and stride != inner:
                return False
            inner *= length
        return True

    @property
    def span(self) -> int:
        """Elements of the flat run from the box's first to its last, both included."""
        return span_of(self.box.size, self.strides)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The box's elements, in the box's shape: a view of `flat`."""
        return flat.as_strided(self.box.size, self.strides, flat.storage_offset() + self.start)

    def inner(self, box: Box) -> Part:
        """The part for `box`, which is inside this part's box."""
        moved = box.within(self.box).offset
        start = self.start + sum(i * stride for i, stride in zip(moved, self.strides, strict=True))
        return dataclasses.replace(self, box=box, start=start)

    def renamed(self, name: str) -> Part:
        """The same elements, of a saved tensor with another name."""
        return dataclasses.replace(self, name=name)

    def blocks(self, max_numel: int) -> Iterator[Part]:
        """Parts of at most `max_numel` elements (and at least one), in row-major order, outer dims cut first."""
        for box in blocks_of(self.box, max_numel):
            yield self.inner(box)


def whole(name: str, shape: Sequence[int], box: Box, strides: Sequence[int] | None = None) -> Part:
    """The part whose box is the whole flat run, row-major unless `strides` is given."""
    return Part(name, tuple(shape), box, 0, row_major(box.size) if strides is None else tuple(strides))


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `size`."""
    return tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))


def blocks_of(box: Box, max_numel: int) -> Iterator[Box]:
    """`box` in boxes of at most `max_numel` elements (and at least one), in row-major order; nothing if it is empty."""
    # Cut the outermost dim of which a single row fits; the dims before it advance one element at a time.
    dim = 0
    while dim < len(box.size) - 1 and math.prod(box.size[dim + 1 :]) > max_numel:
        dim += 1
    return _cut(box, dim, max(1, max_numel // max(1, math.prod(box.size[dim + 1 :]))))


def runs_of(box: Box, strides: Sequence[int], max_span: int, max_gap: int) -> Iterator[Box]:
    """`box` in boxes that are close together in memory, in row-major order; nothing if it is empty.

    `strides` fall from the first dim to the last. From the first to the last element of a box there are at most
    `max_span` elements, and nowhere in between more than `max_gap` in a row that are not of the box.
    """
    dims = len(box.size)
    spans = [span_of(box.size[dim:], strides[dim:]) for dim in range(dims + 1)]
    gaps = [stride - span for stride, span in zip(strides, spans[1:], strict=True)]
    dim = 0
    while dim < dims - 1 and (spans[dim + 1] > max_span or max(gaps[dim + 1 :]) > max_gap):
        dim += 1
    rows = 1
    if dims and gaps[dim] <= max_gap:
        rows = 1 + max(0, max_span - spans[dim + 1]) // strides[dim] if strides[dim] else box.size[dim]
    return _cut(box, dim, max(1, rows))


def span_of(size: Sequence[int], strides: Sequence[int]) -> int:
    """Elements in memory from the first to the last, both included."""
    return 1 + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))


def _cut(box: Box, dim: int, rows: int) -> Iterator[Box]:
    """`box` in boxes of `rows` along `dim` and of one element along the dims before it."""
    if box.numel == 0:
        return
    if not box.size:
        yield box
        return
    ranges = [range(first, first + length) for first, length in zip(box.offset, box.size, strict=True)]
    for outer in itertools.product(*ranges[:dim]):
        for first in ranges[dim][::rows]:
            length = min(rows, ranges[dim].stop - first)
            yield Box(
                (*outer, first, *box.offset[dim + 1 :]),
                (*(1 for _ in outer), length, *box.size[dim + 1 :]),
            )


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements `[start, stop)` of a row-major tensor of `shape`, as few boxes as possible, in order."""
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(
            f"expected a range within the {numel} elements of shape {tuple(shape)}; found [{start}, {stop})"
        )
    return list(_boxes(tuple(shape), start, stop)) if start < stop else []


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """A partial first row, whole rows, a partial last row; the partial ones the same way, one dim further in."""
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(start, inner), divmod(stop, inner)
    if skipped and first == last:
        yield from _in_row(shape, first, skipped, rest)
        return
    if skipped:
        yield from _in_row(shape, first, skipped, inner)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if rest:
        yield from _in_row(shape, last, 0, rest)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in _boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.size))
