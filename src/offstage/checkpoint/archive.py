# SPDX-License-Identifier: Apache-2.0
"""Items as `torch.save` writes them: a tensor, streamed; where a tensor is in its file; an object as bytes.

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
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from offstage.checkpoint.parts import row_major
from offstage.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # of collections.abc from Python 3.12 on

ALIGN = 64
"""The tensor's bytes begin at a multiple of this in the item; items that begin at one in their file stay aligned."""

_DATA = "archive/data/0"
_UTF8 = 0x800  # the flag for names in UTF-8, which torch sets
_ZIP64_FROM = 0xFFFFFFFF
_EXTRA_ZIP64, _EXTRA_PADDING = 0x0001, 0x4246  # the latter is "FB", the id that torch uses for padding
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_ZIP64_END = struct.Struct("<4sQ2H2I4Q")
_ZIP64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")

# Other dtypes (8-bit floats, unsigned integers) are stored as bytes, and the pickle names the dtype.
_TYPED_STORAGES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


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
            f"{_name(file)}: the blocks of a tensor expect to have {nbytes} bytes in all, as its size and dtype say; "
            f"found {written}{' and more' if written > nbytes else ''}. The item in the file is not a tensor: "
            "write it again to a new file."
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
        header = _LOCAL.size + len(name) + len(extra) + 4
        padding = -(begins_at + header) % ALIGN
        extra += struct.pack("<2H", _EXTRA_PADDING, padding) + bytes(padding)
    short = min(nbytes, _ZIP64_FROM)
    version = 45 if short == _ZIP64_FROM else 20
    header_fields = (version, _UTF8, 0, 0, 0, crc, short, short, len(name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *header_fields) + name.encode() + extra


def _central(name: str, crc: int, nbytes: int, begins_at: int) -> bytes:
    """The directory's entry for a record."""
    extra = _zip64(nbytes)
    short = min(nbytes, _ZIP64_FROM)
    version = 45 if short == _ZIP64_FROM else 20
    fields = (version, version, _UTF8, 0, 0, 0, crc, short, short, len(name), len(extra), 0, 0, 0, 0, begins_at)
    return _CENTRAL.pack(b"PK\x01\x02", *fields) + name.encode() + extra


def _zip64(nbytes: int) -> bytes:
    return struct.pack("<2H2Q", _EXTRA_ZIP64, 16, nbytes, nbytes) if nbytes >= _ZIP64_FROM else b""


def _end(num_entries: int, entries_bytes: int, begins_at: int) -> bytes:
    """The records after the directory. The 64-bit ones are always written, as torch does."""
    counts = (num_entries, num_entries, entries_bytes, begins_at)
    short = (num_entries, num_entries, entries_bytes, min(begins_at, _ZIP64_FROM))
    return (
        _ZIP64_END.pack(b"PK\x06\x06", _ZIP64_END.size - 12, 45, 45, 0, 0, *counts)
        + _ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, begins_at + entries_bytes, 1)
        + _END.pack(b"PK\x05\x06", 0, 0, *short, 0)
    )


# Reading #


@dataclass(frozen=True)
class Header:
    """Where the tensor of an item is in its file."""

    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    data_offset: int
    """The position of the tensor's first element in the file."""
    nbytes: int
    """From there to the end of the record, which contains all of the tensor's elements."""


def read_header(file: BinaryIO, offset: int, length: int) -> Header:
    """The tensor in the item at `[offset, offset + length)` of `file`, written by `write_tensor` or `torch.save`.

    Reads the pickle and the headers, not the data, and runs no code from the file.
    """
    view = FileView(file, offset, length)
    try:
        with zipfile.ZipFile(view) as archive:
            record = _data_record(archive, view)
            view.seek(0)  # torch.load reads from the current position
            tensor = torch.load(cast(BinaryIO, view), map_location="meta", weights_only=True)
            return _header_of(tensor, record, view)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged item can fail anywhere in zipfile, torch's reader or the unpickler
        raise _damaged(view, f"found {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _data_record(archive: zipfile.ZipFile, view: FileView) -> zipfile.ZipInfo:
    """The record of the tensor's bytes; raises unless they can be read as they are."""
    for info in archive.infolist():
        # Before torch loads the item: swapping the bytes of a tensor on "meta" ends the process (torch 2.13).
        if info.filename.endswith("/byteorder") and (found := archive.read(info).decode()) != sys.byteorder:
            raise _damaged(view, f"found {found}-endian data on a {sys.byteorder}-endian machine")
    records = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    if len(records) != 1:
        raise _damaged(view, f"found {len(records)} records of data")
    if records[0].compress_type != zipfile.ZIP_STORED:
        raise _damaged(view, "found compressed data")
    return records[0]


def _header_of(tensor: Any, record: zipfile.ZipInfo, view: FileView) -> Header:
    if not isinstance(tensor, torch.Tensor):
        raise _damaged(view, f"found an object of type {type(tensor).__name__}")
    view.seek(record.header_offset + _LOCAL.size - 4)
    name_bytes, extra_bytes = struct.unpack("<2H", view.read(4))
    skipped = int(tensor.storage_offset()) * tensor.dtype.itemsize
    data_offset = record.header_offset + _LOCAL.size + name_bytes + extra_bytes + skipped
    nbytes = record.file_size - skipped
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    need = span * tensor.dtype.itemsize if tensor.numel() else 0
    if need > nbytes or data_offset + nbytes > view.length:
        raise _damaged(view, f"found {nbytes} bytes of data, of which the tensor needs {need}, in {view.length} bytes")
    return Header(tensor.dtype, tuple(tensor.shape), tensor.stride(), view.offset + data_offset, nbytes)


def _damaged(view: FileView, found: str) -> CheckpointError:
    return CheckpointError(
        f"{view.name}: expected a tensor as torch.save writes it at bytes {view.offset} to "
        f"{view.offset + view.length}; {found}. The file is damaged or of another format: use another checkpoint."
    )


class FileView(io.RawIOBase):
    """Bytes `[offset, offset + length)` of a file as a separate file. Moves the position of the underlying file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self.file, self.offset, self.length = file, offset, length
        self.name = _name(file)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        if origin + offset < 0:
            raise OSError(f"seek to {origin + offset}, before the start of the item")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self.length - self._position)]
        self.file.seek(self.offset + self._position)
        count = cast(Any, self.file).readinto(wanted)
        self._position += count
        return cast(int, count)


def _name(file: Any) -> str:
    return str(getattr(file, "name", "the file"))


# Objects #


def pickled(name: str, value: Any) -> bytes:
    """`value` as `torch.save` writes it. Raises if `torch.load(weights_only=True)` could not load it again."""
    buffer = io.BytesIO()
    try:
        torch.save(_plain(value), buffer)
        unpickled(buffer.getvalue())
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name!r} is a {type(value).__name__} that torch.load(weights_only=True) could not load again "
            f"({str(error).splitlines()[0]}); expected tensors, numbers, strings, and lists, tuples and dicts of them. "
            "Save its content as such data."
        ) from error
    return buffer.getvalue()


def unpickled(data: bytes) -> Any:
    """A new object of the same value."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _plain(value: Any) -> Any:
    """Convert numpy's numbers to Python's: learning rate schedules often produce them."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict or (isinstance(value, Mapping) and type(value).__module__ == "builtins"):
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(inner) for inner in value)
    return value
