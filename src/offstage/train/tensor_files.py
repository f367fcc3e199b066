# SPDX-License-Identifier: Apache-2.0
"""Files in the safetensors format, read and written block by block: no file is ever in memory as a whole.

A file is the length of its header (8 bytes), the header (JSON: name → dtype, shape, range of bytes) and the bytes of
all tensors. Files are read with `pread` and not mapped: a mapped file that another process cuts off ends this process.
What a header says is checked against the file before any tensor is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from offstage.checkpoint.zips import memory_of
from offstage.train.reading import MOST_OBJECT_BYTES, BadFileError, opened, parse_object, read_object

FORMATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK_BYTES = 4 * 2**20
"""The most host memory of its own that a thread takes while it reads or writes a tensor."""
Found = TypeVar("Found")
_LENGTH_BYTES = 8
_ALIGN_BYTES = 8
_MOST_FILE_BYTES = 2**63 - 1


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# Reading #


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the file, or of the files that the index names, by name. `BadFileError`s name the file."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return _named(folder / SINGLE, _tensors_in)
    placed = _named(folder / INDEX, _weight_map)
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(placed.values())):
        for tensor, stored in _named(folder / name, _tensors_in).items():
            if tensor in found:
                raise BadFileError(f"{folder / name}: {tensor!r} is in {found[tensor].file.name} too; expected it once")
            found[tensor] = stored
    wrong = [tensor for tensor, name in placed.items() if tensor not in found or found[tensor].file.name != name]
    if wrong:
        raise BadFileError(
            f"{folder / INDEX}: expected {wrong[0]!r} in {placed[wrong[0]]}; found that this file does not have it "
            f"({len(wrong)} such tensors)"
        )
    return found


def _named(path: Path, read: Callable[[Path], dict[str, Found]]) -> dict[str, Found]:
    """What `read` returns; its errors name the file."""
    try:
        return read(path)
    except FileNotFoundError:
        raise BadFileError(f"{path}: expected a file; found none") from None
    except (BadFileError, OSError) as error:
        raise BadFileError(f"{path}: {error}") from error


def _weight_map(path: Path) -> dict[str, str]:
    placed = read_object(_real(path)).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise BadFileError("expected an object 'weight_map' from tensors to files; found none")
    for name in placed.values():
        # A name with a folder in it, or an absolute one, would lead out of this folder.
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise BadFileError(f"expected names of .safetensors files of this folder; found {str(name)[:80]!r}")
    return placed


def _tensors_in(path: Path) -> dict[str, StoredTensor]:
    with open_file(path) as (descriptor, size):
        header, begin = _header(descriptor, size)
        found = {
            name: _tensor(path, name, about, begin, size) for name, about in header.items() if name != "__metadata__"
        }
    end = begin
    for name, tensor in sorted(found.items(), key=lambda one: (one[1].start, one[1].nbytes)):
        if tensor.start != end:
            raise BadFileError(f"expected {name!r} at byte {end}; found it at {tensor.start}")
        end += tensor.nbytes
    if end != size:
        raise BadFileError(f"expected {end:,} bytes, which its header describes; found {size:,}")
    return found


def _header(descriptor: int, size: int) -> tuple[dict[str, Any], int]:
    """The header, and the first byte after it."""
    length = int.from_bytes(_read(descriptor, 0, min(size, _LENGTH_BYTES)), "little")
    if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
        raise BadFileError(f"expected a header of {length:,} bytes, as its first bytes say; found a file of {size:,}")
    if length > MOST_OBJECT_BYTES:
        raise BadFileError(f"expected a header of at most {MOST_OBJECT_BYTES:,} bytes; found {length:,}")
    return parse_object(_read(descriptor, _LENGTH_BYTES, length)), _LENGTH_BYTES + length


def _tensor(path: Path, name: str, about: Any, begin: int, size: int) -> StoredTensor:
    about = about if isinstance(about, dict) else {}
    shape, offsets, dtype = about.get("shape"), about.get("data_offsets"), about.get("dtype")
    if not isinstance(dtype, str) or dtype not in FORMATS:
        raise BadFileError(f"expected {name!r} in one of {', '.join(FORMATS)}; found {str(dtype)[:40]!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise BadFileError(f"expected the shape and the bytes of {name!r}; found {str(about)[:120]}")
    found = StoredTensor(path, FORMATS[dtype], tuple(shape), begin + offsets[0])
    if begin + offsets[1] > size:
        raise BadFileError(
            f"expected {name!r} to end at byte {begin + offsets[1]:,}; found that the file ends at {size:,}"
        )
    if found.nbytes != offsets[1] - offsets[0]:
        raise BadFileError(f"expected {found.nbytes:,} bytes for {name!r}; found {offsets[1] - offsets[0]:,}")
    return found


def _real(path: Path) -> Path:
    """Links are followed: those of a download cache lead out of the folder."""
    return Path(os.path.realpath(path, strict=True))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and one >= 0 for one in values)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[tuple[int, int]]:
    """The descriptor and the size of a regular file."""
    with opened(_real(path), _MOST_FILE_BYTES) as (file, size):
        yield file.fileno(), size


def read_tensor(descriptor: int, stored: StoredTensor, first: int, into: torch.Tensor) -> None:
    """Copy elements from number `first` on to `into` (flat, contiguous; any dtype and device) until it is full."""
    position = stored.start + first * stored.dtype.itemsize
    if into.device.type == "cpu" and into.dtype == stored.dtype:
        _read_into(descriptor, position, memory_of(into), stored.file)
        return
    step = BLOCK_BYTES // stored.dtype.itemsize
    block = torch.empty(min(step, into.numel()), dtype=stored.dtype, device="cpu")
    for begin in range(0, into.numel(), step):
        piece = into[begin : begin + step]
        part = block[: piece.numel()]
        _read_into(descriptor, position + begin * stored.dtype.itemsize, memory_of(part), stored.file)
        piece.copy_(part)  # without non_blocking: the block is used again


def _read(descriptor: int, position: int, length: int) -> bytes:
    data = bytearray(length)
    _read_into(descriptor, position, memoryview(data), None)
    return bytes(data)


def _read_into(descriptor: int, position: int, memory: memoryview, file: Path | None) -> None:
    while len(memory):
        count = os.preadv(descriptor, [memory], position)
        if not count:
            where, size = "" if file is None else f"{file}: ", os.fstat(descriptor).st_size
            raise BadFileError(
                f"{where}expected {len(memory):,} bytes from byte {position:,} on; found that the file ends at {size:,}"
            )
        memory, position = memory[count:], position + count


# Writing #


@dataclass(frozen=True)
class Outgoing:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]
    """Its elements in order, as contiguous host tensors of its dtype. A block may reuse the memory of the last."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, tensors: Sequence[Outgoing], most_bytes: int) -> None:
    """Write `tensors` to one file, or to several of at most `most_bytes` (or one tensor) and an index."""
    shards: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + tensor.nbytes > most_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    write_synced(folder / INDEX, [json.dumps(index, indent=2).encode()])


def write_file(path: Path, tensors: Sequence[Outgoing]) -> None:
    """Write one new file."""
    names = {dtype: name for name, dtype in FORMATS.items()}
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in tensors:
        offsets = [end, end := end + one.nbytes]
        header[one.name] = {"dtype": names[one.dtype], "shape": list(one.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    blocks = (memory_of(block) for one in tensors for block in one.blocks())
    write_synced(path, (len(text).to_bytes(_LENGTH_BYTES, "little"), text), blocks)


def write_synced(path: Path, *groups: Iterable[bytes | memoryview]) -> None:
    """Write a new file that is on the disk, and not only in memory, when this returns."""
    with open(path, "xb") as file:
        for group in groups:
            for piece in group:
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
