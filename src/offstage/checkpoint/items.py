# SPDX-License-Identifier: Apache-2.0
"""Items as `torch.save` writes them, read: where a tensor is in its file, and objects.

An item is an uncompressed zip archive: a pickle, and a record for each storage that the pickle refers to. The pickle
is parsed as inert data, of which exactly what is listed here is made: tensors, and plain data as
`torch.load(weights_only=True)` accepts it. `torch.load` itself is not used: for a few bytes of a crafted item it
allocates any amount of memory (a compressed record, `bytearray(n)`, `torch.FloatTensor(n)`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offstage.checkpoint.files import Source
from offstage.checkpoint.metadata import dtype_of
from offstage.checkpoint.pickles import Made, Name, Pairs, Persistent, Refused, parse
from offstage.checkpoint.zips import Archive
from offstage.errors import CheckpointError

STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""The classes of storages in `torch`. Other dtypes are stored as bytes, and the pickle names the dtype."""

_MAX_TENSOR_PICKLE_BYTES = 64 * 1024  # torch writes about 300
_MAX_OBJECT_PICKLE_BYTES = 256 * 1024 * 1024
_MAX_DEPTH = 100  # of nested containers
_MAX_SHARED = 1_000_000  # containers and values more than the pickle has bytes, counting each reference to one anew
_MAX_INT = 2**63
_MAX_DIMS = 64


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


def read_header(source: Source, offset: int, length: int) -> Header:
    """The tensor in the item at `[offset, offset + length)` of `source`. Reads the pickle and the zip's headers."""
    with _damage(source, offset, length, "a tensor as torch.save writes it", "of another format"):
        archive = Archive(source, offset, length)
        archive.check_byte_order()
        tensor = _tensor(parse(archive.pickle(_MAX_TENSOR_PICKLE_BYTES), _is_known))
        start, nbytes = archive.place(f"data/{tensor.key}")
        skipped = tensor.offset * tensor.dtype.itemsize
        if tensor.end * tensor.dtype.itemsize > nbytes:
            raise Refused(f"{nbytes} bytes of data, of which the tensor needs {tensor.end * tensor.dtype.itemsize}")
        return Header(tensor.dtype, tensor.size, tensor.strides, offset + start + skipped, nbytes - skipped)


def read_object(source: Source, offset: int, length: int) -> Any:
    """The object in the item at `[offset, offset + length)` of `source`, its tensors on the host."""
    with _damage(source, offset, length, "plain data and tensors as torch.save writes them", "has other data"):
        archive = Archive(source, offset, length)
        data = archive.pickle(_MAX_OBJECT_PICKLE_BYTES)
        return _Objects(archive, len(data) + _MAX_SHARED).of(parse(data, _is_known), 0)


class _damage:
    """Turns `Refused` into the one error that names the item, what is expected there and what was found."""

    def __init__(self, source: Source, offset: int, length: int, expected: str, otherwise: str) -> None:
        self._otherwise = otherwise
        self._where = f"{source.name}: expected {expected} at bytes {offset} to {offset + length}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Refused):
            raise CheckpointError(
                f"{self._where}; found {error}. The file is damaged or {self._otherwise}: use another checkpoint."
            ) from error


# Tensors #

_V2, _V3 = Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Name("torch._utils", "_rebuild_parameter")
_UNTYPED = Name("torch.storage", "UntypedStorage")


class _Tensor(NamedTuple):
    """What the pickle says about a tensor, in elements."""

    key: str
    """Of the storage."""
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @property
    def end(self) -> int:
        """The elements of the storage up to the tensor's last."""
        if 0 in self.size:
            return self.offset
        steps = ((size - 1) * stride for size, stride in zip(self.size, self.strides, strict=True))
        return self.offset + 1 + sum(steps)


def _tensor(made: Any) -> _Tensor:
    if type(made) is Made and made.maker == _PARAMETER and len(made.arguments) == 3:
        made = made.arguments[0]
    if type(made) is not Made or made.maker not in (_V2, _V3) or len(made.arguments) < 6:
        raise Refused(f"an object of type {made.maker if type(made) is Made else type(made).__name__}")
    storage, offset, size, strides, requires_grad = made.arguments[:5]
    if type(storage) is not Persistent or type(storage.id) is not tuple or len(storage.id) != 5:
        raise Refused("a tensor without a storage")
    kind, storage_class, key, _, _ = storage.id
    dtype = dtype_of(made.arguments[6]) if made.maker == _V3 and len(made.arguments) > 6 else None
    if dtype is None and type(storage_class) is Name and storage_class.module == "torch":
        dtype = STORAGES.get(storage_class.name)
    if kind != "storage" or type(key) is not str or dtype is None or type(requires_grad) is not bool:
        raise Refused("a tensor without a storage")
    tensor = _Tensor(key, dtype, _ints((offset,))[0], _ints(size), _ints(strides), requires_grad)
    if len(tensor.size) != len(tensor.strides) or math.prod(max(1, size) for size in tensor.size) >= _MAX_INT:
        raise Refused("a tensor with sizes and strides that do not fit each other")
    return tensor


def _ints(value: Any) -> tuple[int, ...]:
    if type(value) is Made and value.maker == _SIZE and len(value.arguments) == 1:
        (value,) = value.arguments
    if type(value) is not tuple or len(value) > _MAX_DIMS:
        raise Refused("no sizes of a tensor")
    if not all(type(one) is int and 0 <= one < _MAX_INT for one in value):
        raise Refused("no sizes of a tensor")
    return value


# Objects #

_SIZE, _DEVICE, _LAYOUT = Name("torch", "Size"), Name("torch", "device"), Name("torch.serialization", "_get_layout")
_ORDERED, _COUNTER = Name("collections", "OrderedDict"), Name("collections", "Counter")
_ENCODE = Name("_codecs", "encode")
_SET, _COMPLEX, _BYTEARRAY = Name("builtins", "set"), Name("builtins", "complex"), Name("builtins", "bytearray")
_LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}


class _Objects:
    """Makes the objects of one item."""

    def __init__(self, archive: Archive, budget: int) -> None:
        self._archive = archive
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._room = archive.data_bytes()
        self._budget = budget
        """Values that may still be made. One that is referred to again counts again, with all that it contains: what
        compares or prints the object does that work for each reference."""
        self._made: dict[int, tuple[Any, int]] = {}
        """What was made of a node, and how many values that was."""

    def of(self, node: Any, depth: int) -> Any:
        if node is None or type(node) in (bool, int, float, str, bytes):
            self._spend(1)
            return node
        if id(node) in self._made:
            value, count = self._made[id(node)]
            self._spend(count)
            return value
        if depth > _MAX_DEPTH:  # or an object that contains itself
            raise Refused(f"data nested more than {_MAX_DEPTH} deep")
        before = self._budget
        self._spend(1)
        value = self._new(node, depth + 1)
        self._made[id(node)] = value, before - self._budget
        return value

    def _spend(self, count: int) -> None:
        self._budget -= count
        if self._budget < 0:
            raise Refused("data that refers to itself too often")

    def _new(self, node: Any, depth: int) -> Any:
        if type(node) in (list, tuple):
            return type(node)(self.of(one, depth) for one in node)
        if type(node) is Pairs:
            return self._filled({}, node, depth)
        if (dtype := dtype_of(node)) is not None:
            return dtype
        if type(node) is not Made or node.maker not in _MAKERS or node.state:
            raise Refused(f"an object of type {node.maker if type(node) is Made else type(node).__name__}")
        value = _MAKERS[node.maker](self, node, depth)
        if node.pairs is not None:
            if type(value) is not OrderedDict:
                raise Refused(f"a {node.maker} with items")
            self._filled(value, node.pairs, depth)
        return value

    def _filled(self, into: Any, pairs: Pairs, depth: int) -> Any:
        for key, value in pairs:
            into[self._key(key, depth)] = self.of(value, depth)
        return into

    def _key(self, node: Any, depth: int) -> Any:
        key = self.of(node, depth)
        # Larger integers can be chosen so that all have the same hash, which makes a dict slow.
        if type(key) is int and abs(key) >= _MAX_INT:
            raise Refused("a dict with a key that is too large")
        try:
            hash(key)
        except TypeError:
            raise Refused(f"a {type(key).__name__} as a key") from None
        return key

    # Each maker #

    def tensor(self, node: Made, depth: int) -> torch.Tensor:
        about = _tensor(node)
        if about.key not in self._storages:
            self._archive.check_byte_order()
            self._room -= self._archive.place(f"data/{about.key}")[1]
            if self._room < 0:
                raise Refused("records that share their bytes")
            self._storages[about.key] = self._archive.storage(about.key)
        storage = self._storages[about.key]
        # An element that is repeated by a stride of 0 counts like a value that is referred to again.
        self._spend(max(0, math.prod(about.size) - storage.nbytes()))
        if about.end * about.dtype.itemsize > storage.nbytes():
            raise Refused(f"{storage.nbytes()} bytes of data, of which a tensor needs {about.end} elements")
        try:
            tensor = torch.empty(0, dtype=about.dtype, device="cpu").set_(
                storage, about.offset, about.size, about.strides
            )
            return tensor.requires_grad_(about.requires_grad)
        except RuntimeError as error:  # a dtype that torch cannot make a tensor of
            raise Refused(f"a tensor of {about.dtype} ({str(error).partition(chr(10))[0]})") from error

    def parameter(self, node: Made, depth: int) -> torch.Tensor:
        if len(node.arguments) != 3 or type(node.arguments[1]) is not bool:
            raise Refused("a parameter without data")
        data = self.of(node.arguments[0], depth)
        if not isinstance(data, torch.Tensor) or (node.arguments[1] and not data.is_floating_point()):
            raise Refused("a parameter without data")
        return torch.nn.Parameter(data.detach(), node.arguments[1])

    def size(self, node: Made, depth: int) -> torch.Size:
        return torch.Size(_ints(node))

    def ordered(self, node: Made, depth: int) -> Any:
        self._expect(node, [])
        return OrderedDict()

    def counter(self, node: Made, depth: int) -> Any:
        (pairs,) = self._expect(node, [Pairs])
        return Counter(self._filled({}, pairs, depth))

    def set_of(self, node: Made, depth: int) -> Any:
        (items,) = self._expect(node, [list])
        return {self._key(one, depth) for one in items}

    def complex(self, node: Made, depth: int) -> complex:
        return complex(*self._expect(node, [float, float]))

    def encoded(self, node: Made, depth: int) -> bytes:
        text, encoding = self._expect(node, [str, str])
        if encoding != "latin1" or not all(ord(one) < 256 for one in text):
            raise Refused("bytes in another encoding")
        return bytes(text.encode("latin1"))

    def bytearray_of(self, node: Made, depth: int) -> bytearray:
        found = tuple(self.of(one, depth) for one in node.arguments)
        if found and [type(one) for one in found] != [bytes]:
            raise Refused("a bytearray of other than bytes")
        return bytearray(*found)

    def layout(self, node: Made, depth: int) -> torch.layout:
        (name,) = self._expect(node, [str])
        if name not in _LAYOUTS:
            raise Refused(f"a layout {name[:200]!r}")
        return _LAYOUTS[name]

    def device(self, node: Made, depth: int) -> torch.device:
        arguments = node.arguments
        if [type(one) for one in arguments] not in ([str], [str, int]):
            raise Refused("no device")
        try:
            return torch.device(*arguments)
        except (RuntimeError, ValueError, OverflowError) as error:
            raise Refused(f"a device that torch does not know ({arguments[0][:200]!r})") from error

    def _expect(self, node: Made, kinds: list[type]) -> tuple[Any, ...]:
        if [type(one) for one in node.arguments] != kinds:
            raise Refused(f"a {node.maker} of other arguments")
        return node.arguments


_MAKERS: dict[Name, Callable[[_Objects, Made, int], Any]] = {
    _V2: _Objects.tensor,
    _V3: _Objects.tensor,
    _PARAMETER: _Objects.parameter,
    _SIZE: _Objects.size,
    _ORDERED: _Objects.ordered,
    _COUNTER: _Objects.counter,
    _SET: _Objects.set_of,
    _COMPLEX: _Objects.complex,
    _ENCODE: _Objects.encoded,
    _BYTEARRAY: _Objects.bytearray_of,
    _LAYOUT: _Objects.layout,
    _DEVICE: _Objects.device,
}


def _is_known(name: Name) -> bool:
    is_storage = name == _UNTYPED or (name.module == "torch" and name.name in STORAGES)
    return name in _MAKERS or is_storage or dtype_of(name) is not None
