# SPDX-License-Identifier: Apache-2.0
"""A `torch.distributed.checkpoint` folder opened for reading: any box of any tensor, straight from the mapped files.

`offstage.checkpoint.save` or stock `dcp.save` wrote the folder, under any sharding. Its files are mapped read-only, and
a box is copied from the mapping to its destination, so loading takes no memory of its own beside the page cache. No
code in the folder is run: `.metadata` is read by an unpickler that knows the classes of the format and no others,
everything else with `weights_only=True`.
"""

from __future__ import annotations

import collections
import ctypes
import io
import mmap
import os
import pathlib
import pickle
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout

from offstage.checkpoint.archive import FileView, Header, read_header
from offstage.checkpoint.manifest import METADATA
from offstage.checkpoint.parts import Box, blocks_of
from offstage.errors import CheckpointError

BLOCK_BYTES = 4 * 1024 * 1024
"""The most that is copied at once where a copy needs host memory: to a device, or from data that is not aligned."""

_USE_ANOTHER = "Use another checkpoint."


class Item(NamedTuple):
    """Where one stored box or object is: a range of bytes of a file."""

    file: str
    offset: int
    length: int


class StoredBox(NamedTuple):
    """A box of a tensor, and where it is stored."""

    box: Box
    item: Item


class Stored:
    """The tensors and objects of a checkpoint folder. A context manager: the files stay mapped until it is closed.

    Several threads may read at once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / METADATA
        saved = _read_metadata(self._path)
        self._chunks: dict[str, list[StoredBox]] = {}
        self._objects: dict[str, Item] = {}
        self._headers: dict[Item, Header] = {}
        self._files: dict[str, _Mapped] = {}
        self._lock = threading.Lock()
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        try:
            self.names: list[str] = sorted(_checked(name, str) for name in saved.state_dict_metadata)
            """Every saved name, of tensors and of objects."""
            for name, entry in saved.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    tensors[name] = _ints(entry.size), _checked(entry.properties.dtype, torch.dtype)
                    self._chunks[name] = self._chunks_of(name, entry, saved.storage_data)
                else:
                    _checked(entry, BytesStorageMetadata)
                    self._objects[name] = self._item(saved.storage_data[MetadataIndex(name)])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._path}: expected the metadata of a torch.distributed.checkpoint folder; found "
                f"{type(error).__name__}: {error}. The file is damaged or of another format. {_USE_ANOTHER}"
            ) from error
        paths = getattr(saved, "planner_data", None)
        self.paths: Mapping[str, Any] = paths if isinstance(paths, dict) else {}
        """Name → its place in the nested state dict, as the file says, unchecked."""
        self.tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = tensors
        """Name → global shape and dtype."""

    @property
    def files(self) -> frozenset[str]:
        """The files that hold tensors or objects."""
        boxes = (chunk.item for chunks in self._chunks.values() for chunk in chunks)
        return frozenset(item.file for item in (*boxes, *self._objects.values()))

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files. Reading again maps them again."""
        with self._lock:
            self._files.clear()
            self._headers.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._chunks or name in self._objects

    def shape(self, name: str) -> tuple[int, ...]:
        """The global shape of the tensor `name`."""
        return self._tensor(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype the tensor `name` is stored in."""
        return self._tensor(name)[1]

    # Reading #

    def read(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copy the elements `box` of the tensor `name` to `into`: any strides, any dtype (it converts), any device."""
        shape = self.shape(name)
        if tuple(into.shape) != box.size or not _inside(box, shape):
            raise CheckpointError(
                f"{self._path}: expected a box of {name!r}, which has the shape {shape}, and a tensor of the box's "
                f"size to read it into; found {box} and a tensor of shape {tuple(into.shape)}. Read a box that the "
                "tensor has."
            )
        sources: list[tuple[StoredBox, Box]] = []
        missing = [box] if box.numel else []
        for chunk in self._chunks[name]:
            # Stored boxes may overlap (several ranks saved the tensor): every element is read once.
            sources += [(chunk, common) for rest in missing if (common := rest.overlap(chunk.box)) is not None]
            missing = [piece for rest in missing for piece in rest.without(chunk.box)]
        if missing:
            raise CheckpointError(
                f"{self._path}: expected chunks of {name!r}, shape {shape}, that cover {box}; found none for "
                f"{missing[0]}. What some rank held was not saved. {_USE_ANOTHER}"
            )
        # Read all headers before the first copy, so that an error leaves `into` unchanged.
        headers = [self._header(name, chunk) for chunk, _ in sources]
        for (chunk, wanted), header in zip(sources, headers, strict=True):
            self._copy(chunk, header, wanted, _at(into, wanted.within(box)))

    def object(self, name: str) -> Any:
        """The saved object `name`, by `torch.load(weights_only=True)`."""
        item = self._objects.get(name)
        if item is None:
            raise CheckpointError(
                f"{self._path}: expected an object called {name!r}; found "
                f"{'a tensor' if name in self._chunks else 'nothing'} of that name. Read one of names."
            )
        try:
            mapped = self._mapped(item.file)
            mapped.check(item)
            with mapped.open() as file:
                view = cast(BinaryIO, FileView(file, item.offset, item.length))
                return torch.load(view, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # a damaged item can fail anywhere in torch's reader or in the unpickler
            raise CheckpointError(
                f"{self.folder / item.file}: expected {name!r} as torch.save writes it, with nothing in it that "
                f"torch.load(weights_only=True) refuses; found {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}. The file is damaged, or the object is not plain data: use "
                "another checkpoint, or save plain data."
            ) from error

    def _copy(self, chunk: StoredBox, header: Header, box: Box, into: torch.Tensor) -> None:
        """Copy the elements `box`, all of which are in `chunk`, to `into`."""
        file = self._mapped(chunk.item.file)
        inside = box.within(chunk.box)
        width = header.dtype.itemsize
        aligned = header.data_offset % width == 0
        with torch.no_grad():
            if aligned and _is_host(into):
                into.copy_(_at(file.tensor(header), inside))
                return
            # One buffer for all blocks: the allocator would cache several of this size.
            buffer = torch.empty(
                0 if aligned else min(BLOCK_BYTES, inside.numel * width), dtype=torch.uint8, device="cpu"
            )
            for block in blocks_of(inside, BLOCK_BYTES // width):
                source = _at(file.tensor(header), block) if aligned else file.aligned(header, block, buffer)
                _at(into, block.within(inside)).copy_(source)

    # Finding #

    def _tensor(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        found = self.tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self._path}: expected a tensor called {name!r}; found "
                f"{'an object' if name in self._objects else 'nothing'} of that name among {len(self.names)} names. "
                "Check that the checkpoint is one of this model and optimizer."
            )
        return found

    def _chunks_of(
        self, name: str, entry: TensorStorageMetadata, storage: Mapping[MetadataIndex, Any]
    ) -> list[StoredBox]:
        shape = _ints(entry.size)
        chunks = []
        for saved in entry.chunks:
            box = Box(_ints(saved.offsets), _ints(saved.sizes))
            if not _inside(box, shape):
                raise ValueError(f"{name!r} of shape {shape} has a chunk {box}")
            # A rank without elements of a tensor may list an empty box, for which nothing is stored.
            if box.numel:
                chunks.append(StoredBox(box, self._item(storage[MetadataIndex(name, saved.offsets)])))
        return chunks

    def _item(self, info: Any) -> Item:
        _checked(info, filesystem._StorageInfo)
        path = PurePosixPath(_checked(info.relative_path, str))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{info.relative_path!r} is a file outside the folder")
        if info.transform_descriptors:
            raise CheckpointError(
                f"{self.folder / path}: expected data as torch.save writes it; found data transformed by "
                f"{', '.join(map(str, info.transform_descriptors))}. Save without extensions."
            )
        offset, length = _ints((info.offset, info.length))
        return Item(str(path), offset, length)

    def _header(self, name: str, chunk: StoredBox) -> Header:
        """Where the elements of `chunk` are; read once, and checked against the metadata."""
        header = self._headers.get(chunk.item)
        if header is None:
            file = self._mapped(chunk.item.file)
            file.check(chunk.item)
            with file.open() as opened:
                header = read_header(opened, chunk.item.offset, chunk.item.length)
            if (header.size, header.dtype) != (chunk.box.size, self.dtype(name)):
                raise CheckpointError(
                    f"{file.path}: expected a chunk of {name!r} with size {chunk.box.size} and {self.dtype(name)}, as "
                    f"{METADATA} says; found size {header.size} and {header.dtype}. The files are of two checkpoints, "
                    f"or damaged. {_USE_ANOTHER}"
                )
            self._headers[chunk.item] = header
        return header

    def _mapped(self, name: str) -> _Mapped:
        with self._lock:
            if name not in self._files:
                self._files[name] = _Mapped(self.folder / name)
            return self._files[name]


class _Mapped:
    """One file, mapped read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                # An empty file cannot be mapped and contains no item.
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if self.nbytes else None
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected a file of the checkpoint; found {error.strerror or error}. The checkpoint is "
                f"incomplete, or not readable from this machine. {_USE_ANOTHER}"
            ) from error
        self._bytes = _as_bytes(self._map) if self._map is not None else torch.empty(0, dtype=torch.uint8, device="cpu")

    def open(self) -> BinaryIO:
        """The file itself, for reading and seeking headers."""
        return self.path.open("rb", buffering=0)

    def check(self, item: Item) -> None:
        """Raise if the file ends before the item does: reading past the end of a mapping ends the process."""
        if item.offset + item.length > self.nbytes:
            raise CheckpointError(
                f"{self.path}: expected at least {item.offset + item.length} bytes, as {METADATA} says; found "
                f"{self.nbytes}. The file is truncated. {_USE_ANOTHER}"
            )

    def tensor(self, header: Header) -> torch.Tensor:
        """The whole chunk as a view of the mapping."""
        stop = header.data_offset + header.nbytes // header.dtype.itemsize * header.dtype.itemsize
        line = self._bytes[header.data_offset : stop].view(header.dtype)
        return line.as_strided(header.size, header.strides)

    def aligned(self, header: Header, box: Box, buffer: torch.Tensor) -> torch.Tensor:
        """The elements `box` of the chunk, copied to `buffer`: for data that is not at a multiple of its size.

        `torch.save` aligns data within an item, and stock DCP puts items anywhere. Bytes can be read from anywhere.
        """
        width = header.dtype.itemsize
        strides = [stride * width for stride in header.strides]
        start = header.data_offset + sum(i * stride for i, stride in zip(box.offset, strides, strict=True))
        copy = buffer[: box.numel * width]
        copy.view(*box.size, width).copy_(self._bytes.as_strided((*box.size, width), (*strides, 1), start))
        return copy.view(header.dtype).view(box.size)


def _as_bytes(mapping: mmap.mmap) -> torch.Tensor:
    """The mapping as a tensor of bytes that keeps it mapped.

    Made from its address, because torch warns about read-only buffers. Nothing here writes to it, and a private
    writable mapping would have to fit into memory.
    """
    array = np.frombuffer(mapping, dtype=np.uint8)
    buffer = (ctypes.c_uint8 * len(mapping)).from_address(array.ctypes.data)
    buffer.mapping = array  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of the elements `box` of `tensor`."""
    for dim, (first, length) in enumerate(zip(box.offset, box.size, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box.offset) == len(box.size) == len(shape) and all(
        first >= 0 and length >= 0 and first + length <= size
        for first, length, size in zip(box.offset, box.size, shape, strict=True)
    )


# The metadata file #


def _get_mem_format(owner: Any, name: str) -> Any:
    """`getattr` restricted to the one enum of the format: some Python versions pickle enum members with it."""
    if owner is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"getattr of {owner!r}")
    return owner[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, known.__name__): known
        for known in (
            Metadata,
            MetadataIndex,
            TensorStorageMetadata,
            BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    (filesystem.__name__, "_StoragePrefix"): filesystem._StoragePrefix,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "getattr"): _get_mem_format,
    # The path the checkpoint was saved to: read as a pure path on any system.
    **{
        (module, kind): pathlib.PureWindowsPath if "Windows" in kind else PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    """Finds the classes of the format and no others: a pickle can name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        if (known := _ALLOWED.get((module, name))) is not None:
            return known
        # Not getattr: torch imports some of its modules on attribute access.
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name}, which is not part of the format")


def _read_metadata(path: Path) -> Metadata:
    try:
        # Read at once: the unpickler reads many small pieces.
        saved = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: expected the metadata of a torch.distributed.checkpoint folder; found no such file. Check the "
            "folder's name; if it is right, the save was interrupted: use another checkpoint."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path}: expected the metadata of a torch.distributed.checkpoint folder, with its classes only; found "
            f"{type(error).__name__}: {error}. The file is damaged or of another format. {_USE_ANOTHER}"
        ) from error
    if not (
        isinstance(saved, Metadata)
        and isinstance(getattr(saved, "state_dict_metadata", None), dict)
        and isinstance(getattr(saved, "storage_data", None), dict)
    ):
        raise CheckpointError(
            f"{path}: expected a Metadata object with the tensors and the files they are in; found "
            f"{type(saved).__name__}. The file is damaged or of another format. {_USE_ANOTHER}"
        )
    return saved


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"{values!r} in place of sizes")
    return tuple(values)
