# SPDX-License-Identifier: Apache-2.0
"""Items as `torch.save` writes them, written: a tensor, streamed; an object as bytes.

The format is an uncompressed zip archive: a pickle that rebuilds the tensor, a few small records, and the tensor's
bytes. `torch.save` needs the whole tensor in one storage; `write_tensor` writes its bytes block by block, straight into
the file.

[Note: no checksum of the data] The zip format has a CRC for each record. Torch's reader does not check it, the
manifest has a checksum of the whole file, and a second pass over the data would cost as much as writing it. So the data
record's CRC is 0; those of the small records are right. Tools that check it (`unzip`, `zipfile`) list such an archive
and refuse to extract `data/0`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from offstage.checkpoint.files import Bytes
from offstage.checkpoint.items import STORAGES, read_object
from offstage.checkpoint.parts import row_major
from offstage.checkpoint.zips import CENTRAL, END, EXTRA_ZIP64, LOCAL, ZIP64_END, ZIP64_FROM, ZIP64_LOCATOR
from offstage.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # of collections.abc from Python 3.12 on

ALIGN = 64
"""The tensor's bytes begin at a multiple of this in the item; items that begin at one in their file stay aligned."""

_DATA = "archive/data/0"
_UTF8 = 0x800  # the flag for names in UTF-8, which torch sets
_EXTRA_PADDING = 0x4246  # "FB", the id that torch uses for padding

_TYPED_STORAGES: dict[torch.dtype, type] = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}


# Writing #


def write_tensor(file: BinaryIO, dtype: torch.dtype, size: Sequence[int], blocks: Iterable[Buffer]) -> int:
    """Append a contiguous tensor of `dtype` and `size` as `torch.load(weights_only=True)` reads it; bytes written.

    `blocks` are the tensor's bytes in order, cut anywhere. The file is written strictly in sequence, so it may be a
    pipe; its position should be a multiple of `ALIGN`.
    """
    nbytes = math.prod(size) * dtype.itemsize
    small = {
        "archive/data.pkl": _pickle_of(dtype, size),
        "archive/.format_version": b"1",
        "archive/.storage_alignment": str(ALIGN).encode(),
        "archive/byteorder": sys.byteorder.encode(),
        "archive/version": b"3\n",
    }
    position = 0
    directory = []
    # The small records come first, so that only the tensor's own directory entry may need 64-bit fields.
    for name, content in small.items():
        crc = zlib.crc32(content)
        directory.append(_central(name, crc, len(content), position))
        position += _write(file, _local(name, crc, len(content)) + content)
    directory.append(_central(_DATA, 0, nbytes, position))
    position += _write(file, _local(_DATA, 0, nbytes, begins_at=position))
    position += _write_blocks(file, blocks, nbytes)
    entries = b"".join(directory)
    return position + _write(file, entries + _end(len(directory), len(entries), position))


def _write_blocks(file: BinaryIO, blocks: Iterable[Buffer], nbytes: int) -> int:
    written = 0
    for block in blocks:
        view = memoryview(block)
        if written + view.nbytes <= nbytes:
            _write(file, view)
        written += view.nbytes
        if written > nbytes:
            break
    if written != nbytes:
        raise CheckpointError(
            f"{getattr(file, 'name', 'the file')}: the blocks of a tensor expect to have {nbytes} bytes in all, as its "
            f"size and dtype say; found {written}{' and more' if written > nbytes else ''}. The item in the file is "
            "not a tensor: write it again to a new file."
        )
    return written


def _write(file: BinaryIO, data: Buffer) -> int:
    """Write all of `data`: an unbuffered file takes at most 2 GiB per call."""
    view = memoryview(data)
    if view.nbytes == 0:
        return 0
    rest = view.cast("B")
    while len(rest):
        rest = rest[file.write(rest) :]
    return view.nbytes


class _Storage:
    """Stands for the tensor's storage while it is pickled; the pickle refers to the record `data/0` instead."""


class _Rebuilt:
    """Stands for the tensor while it is pickled: the call that rebuilds it."""

    def __init__(self, dtype: torch.dtype, size: Sequence[int]) -> None:
        self.call: Any = _rebuild_tensor_v2
        strides = row_major([max(1, length) for length in size])  # as torch does for empty tensors
        self.arguments: tuple[Any, ...] = (_Storage(), 0, tuple(size), strides, False, OrderedDict())
        if dtype not in _TYPED_STORAGES:
            self.call = _rebuild_tensor_v3
            self.arguments = (*self.arguments, dtype)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


class _Pickler(pickle.Pickler):
    """Writes what `torch.save` writes for a tensor on the CPU."""

    def __init__(self, file: BinaryIO, dtype: torch.dtype, numel: int) -> None:
        super().__init__(file, protocol=2)  # the protocol of torch's weights_only unpickler
        typed = _TYPED_STORAGES.get(dtype)
        count = numel if typed else numel * dtype.itemsize
        self._storage = ("storage", typed or torch.UntypedStorage, "0", "cpu", count)

    def persistent_id(self, obj: Any) -> Any:
        return self._storage if isinstance(obj, _Storage) else None


def _pickle_of(dtype: torch.dtype, size: Sequence[int]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, dtype, math.prod(size)).dump(_Rebuilt(dtype, size))
    return file.getvalue()


# The zip format's records #


def _local(name: str, crc: int, nbytes: int, begins_at: int | None = None) -> bytes:
    """The header before a record; padded, if it `begins_at` a known position, so that the content is aligned."""
    extra = _zip64(nbytes)
    if begins_at is not None:
        header = LOCAL.size + len(name) + len(extra) + 4
        padding = -(begins_at + header) % ALIGN
        extra += struct.pack("<2H", _EXTRA_PADDING, padding) + bytes(padding)
    short = min(nbytes, ZIP64_FROM)
    version = 45 if short == ZIP64_FROM else 20
    header_fields = (version, _UTF8, 0, 0, 0, crc, short, short, len(name), len(extra))
    return LOCAL.pack(b"PK\x03\x04", *header_fields) + name.encode() + extra


def _central(name: str, crc: int, nbytes: int, begins_at: int) -> bytes:
    """The directory's entry for a record."""
    extra = _zip64(nbytes)
    short = min(nbytes, ZIP64_FROM)
    version = 45 if short == ZIP64_FROM else 20
    fields = (version, version, _UTF8, 0, 0, 0, crc, short, short, len(name), len(extra), 0, 0, 0, 0, begins_at)
    return CENTRAL.pack(b"PK\x01\x02", *fields) + name.encode() + extra


def _zip64(nbytes: int) -> bytes:
    return struct.pack("<2H2Q", EXTRA_ZIP64, 16, nbytes, nbytes) if nbytes >= ZIP64_FROM else b""


def _end(num_entries: int, entries_bytes: int, begins_at: int) -> bytes:
    """The records after the directory. The 64-bit ones are always written, as torch does."""
    counts = (num_entries, num_entries, entries_bytes, begins_at)
    short = (num_entries, num_entries, entries_bytes, min(begins_at, ZIP64_FROM))
    return (
        ZIP64_END.pack(b"PK\x06\x06", ZIP64_END.size - 12, 45, 45, 0, 0, *counts)
        + ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, begins_at + entries_bytes, 1)
        + END.pack(b"PK\x05\x06", 0, 0, *short, 0)
    )


# Objects #


def pickled(name: str, value: Any) -> bytes:
    """`value` as `torch.save` writes it. Raises if it could not be loaded again."""
    buffer = io.BytesIO()
    try:
        torch.save(_plain(value), buffer)
        unpickled(buffer.getvalue())
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError, CheckpointError) as error:
        found = error.__cause__ if isinstance(error, CheckpointError) else error
        raise ConfigError(
            f"{name!r} is a {type(value).__name__} that torch.load(weights_only=True) could not load again "
            f"({str(found).partition(chr(10))[0]}); expected tensors, numbers, strings, and lists, tuples and dicts of "
            "them. Save its content as such data."
        ) from error
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    """A new object of the same value, its tensors on the host."""
    return read_object(Bytes(data), 0, len(data))


def _plain(value: Any) -> Any:
    """Convert numpy's numbers to Python's: learning rate schedules often produce them."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict or (isinstance(value, Mapping) and type(value).__module__ == "builtins"):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(inner) for inner in value)
    return value
