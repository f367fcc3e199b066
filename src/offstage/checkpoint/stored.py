# SPDX-License-Identifier: Apache-2.0
"""A `torch.distributed.checkpoint` folder opened for reading: any box of any tensor, straight from the files.

`offstage.checkpoint.save` or stock `dcp.save` wrote the folder, under any sharding. A box is read from the file into
its destination, through a block of host memory only where the two differ in layout, dtype or device. No code in the
folder is run, and what its files say is checked before memory is allocated for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offstage.checkpoint.files import OpenFiles
from offstage.checkpoint.items import Header, read_header, read_object
from offstage.checkpoint.manifest import METADATA
from offstage.checkpoint.metadata import Item, StoredBox, StoredTensor, read_metadata
from offstage.checkpoint.parts import Box, row_major, runs_of, span_of
from offstage.checkpoint.zips import memory_of
from offstage.errors import CheckpointError

BLOCK_BYTES = 4 * 1024 * 1024
"""The most that is read at once where it needs host memory of its own."""

_MAX_GAP_BYTES = 64 * 1024
"""Bytes that are read and not used, rather than reading twice. As long as a second call takes."""
_USE_ANOTHER = "Use another checkpoint."


class Stored:
    """The tensors and objects of a checkpoint folder. A context manager: files stay open until it is closed.

    Several threads may read at once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / METADATA
        self._tensors, self._objects, self.paths = read_metadata(self.folder)
        self._headers: dict[Item, Header] = {}
        self._files = OpenFiles(self.folder)
        self.names: list[str] = sorted([*self._tensors, *self._objects])
        """Every saved name, of tensors and of objects."""
        self.tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()
        }
        """Name → global shape and dtype."""

    @property
    def files(self) -> frozenset[str]:
        """The files that hold tensors or objects."""
        boxes = (chunk.item for tensor in self._tensors.values() for chunk in tensor.chunks)
        return frozenset(item.file for item in (*boxes, *self._objects.values()))

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Reading again opens them again."""
        self._files.clear()
        self._headers.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors or name in self._objects

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of the tensor `name`."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype the tensor `name` is stored in."""
        return self._tensor(name).dtype

    # Reading #

    def check(self, name: str, box: Box) -> None:
        """Raise what `read` would raise: that chunks are missing, files truncated, or headers not as they should be."""
        self._sources(name, box)

    def read(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copy the elements `box` of the tensor `name` to `into`: any strides, any dtype (it converts), any device."""
        if tuple(into.shape) != box.size:
            raise self._no_box(name, box, f"a tensor of shape {tuple(into.shape)}")
        # All headers are read before the first copy, so that an error leaves `into` unchanged.
        for chunk, wanted, header in self._sources(name, box):
            self._copy(chunk, header, wanted, _at(into, wanted.within(box)))

    def value(self, name: str) -> Any:
        """The saved object or the whole tensor `name`, on the host."""
        if name not in self._tensors:
            return self.object(name)
        shape, dtype = self.tensors[name]
        box = Box((0,) * len(shape), shape)
        # The chunks' headers say how many bytes there are; the metadata may say anything.
        headers = {chunk.item: header for chunk, _, header in self._sources(name, box)}
        if sum(header.nbytes for header in headers.values()) < box.numel * dtype.itemsize:
            raise CheckpointError(
                f"{self._path}: expected {name!r} with all of its elements, shape {shape}; found fewer bytes in its "
                f"chunks. {_USE_ANOTHER}"
            )
        try:
            into = torch.empty(shape, dtype=dtype, device="cpu")
            self.read(name, box, into)
        except CheckpointError:
            raise
        except RuntimeError as error:  # no memory, or a dtype for which torch lacks what is needed (quantized ones)
            raise CheckpointError(
                f"{self._path}: expected {name!r}, shape {shape} and {dtype}, as a tensor on this host; found that "
                f"torch cannot make it: {str(error).partition(chr(10))[0]}. {_USE_ANOTHER}"
            ) from error
        return into

    def object(self, name: str) -> Any:
        """The saved object `name`: what `torch.load(weights_only=True)` accepts without further classes."""
        item = self._objects.get(name)
        if item is None:
            raise CheckpointError(
                f"{self._path}: expected an object called {name!r}; found "
                f"{'a tensor' if name in self._tensors else 'nothing'} of that name. Read one of names."
            )
        try:
            return read_object(self._files[item.file], item.offset, item.length)
        except CheckpointError as error:
            raise CheckpointError(f"{name!r} cannot be loaded. {error}") from error

    def _copy(self, chunk: StoredBox, header: Header, box: Box, into: torch.Tensor) -> None:
        """Copy the elements `box`, all of which are in `chunk`, to `into`."""
        file = self._files[chunk.item.file]
        width = header.dtype.itemsize
        inside = box.within(chunk.box)
        # In the order of the file: the dim with the largest stride first.
        order = sorted(range(into.dim()), key=lambda dim: -header.strides[dim])
        strides = [header.strides[dim] for dim in order]
        inside = Box(tuple(inside.offset[dim] for dim in order), tuple(inside.size[dim] for dim in order))
        into = into.detach().permute(order)

        def position(first: Box) -> int:
            return header.data_offset + width * sum(i * step for i, step in zip(first.offset, strides, strict=True))

        if _is_host(into) and into.dtype == header.dtype and into.is_contiguous() and _is_dense(inside.size, strides):
            file.read_into(memory_of(into), position(inside))
            return
        max_span = max(1, BLOCK_BYTES // width)
        # One buffer for all blocks: the allocator would cache several of this size.
        buffer = torch.empty(min(max_span, span_of(inside.size, strides)), dtype=header.dtype, device="cpu")
        for block in runs_of(inside, strides, max_span, _MAX_GAP_BYTES // width):
            run = buffer[: span_of(block.size, strides)]
            file.read_into(memory_of(run), position(block))
            _at(into, block.within(inside)).copy_(run.as_strided(block.size, strides))

    # Finding #

    def _tensor(self, name: str) -> StoredTensor:
        found = self._tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self._path}: expected a tensor called {name!r}; found "
                f"{'an object' if name in self._objects else 'nothing'} of that name among {len(self.names)} names. "
                "Check that the checkpoint is one of this model and optimizer."
            )
        return found

    def _sources(self, name: str, box: Box) -> list[tuple[StoredBox, Box, Header]]:
        """The chunks that have the elements `box`, and which of them each has; the headers are checked."""
        tensor = self._tensor(name)
        if not box.is_inside(tensor.shape):
            raise self._no_box(name, box, "another box")
        sources: list[tuple[StoredBox, Box]] = []
        missing = [box] if box.numel else []
        for chunk in tensor.chunks:
            # Stored boxes may overlap (several ranks saved the tensor): every element is read once.
            sources += [(chunk, common) for rest in missing if (common := rest.overlap(chunk.box)) is not None]
            missing = [piece for rest in missing for piece in rest.without(chunk.box)]
        if missing:
            raise CheckpointError(
                f"{self._path}: expected chunks of {name!r}, shape {tensor.shape}, that cover {box}; found none for "
                f"{missing[0]}. What some rank held was not saved. {_USE_ANOTHER}"
            )
        return [(chunk, common, self._header(name, chunk)) for chunk, common in sources]

    def _no_box(self, name: str, box: Box, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: expected a box of {name!r}, which has the shape {self.shape(name)}, and a tensor of the "
            f"box's size to read it into; found {box} and {found}. Read a box that the tensor has."
        )

    def _header(self, name: str, chunk: StoredBox) -> Header:
        """Where the elements of `chunk` are; read once, and checked against the metadata."""
        header = self._headers.get(chunk.item)
        if header is None:
            file = self._files[chunk.item.file]
            header = read_header(file, chunk.item.offset, chunk.item.length)
            if (header.size, header.dtype) != (chunk.box.size, self.dtype(name)):
                raise CheckpointError(
                    f"{file.path}: expected a chunk of {name!r} with size {chunk.box.size} and {self.dtype(name)}, as "
                    f"{METADATA} says; found size {header.size} and {header.dtype}. The files are of two checkpoints, "
                    f"or damaged. {_USE_ANOTHER}"
                )
            self._headers[chunk.item] = header
        return header


def _at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of the elements `box` of `tensor`."""
    for dim, (first, length) in enumerate(zip(box.offset, box.size, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_dense(size: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements are one run of memory, in order."""
    dense = row_major(size)
    return all(length == 1 or stride == step for length, stride, step in zip(size, strides, dense, strict=True))
