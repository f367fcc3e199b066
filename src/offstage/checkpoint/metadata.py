# SPDX-License-Identifier: Apache-2.0
"""`.metadata`: which tensors and objects a `torch.distributed.checkpoint` folder has, and where they are.

The file is a pickle of torch's `Metadata`. It is parsed as inert data, and exactly the classes of the format are
understood: no class of torch is instantiated, so a crafted file can change or call none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from offstage.checkpoint.files import read_whole
from offstage.checkpoint.manifest import METADATA
from offstage.checkpoint.parts import Box
from offstage.checkpoint.pickles import Made, Name, Pairs, Refused, parse
from offstage.errors import CheckpointError

MAX_BYTES = 256 * 1024 * 1024
"""The largest file that is read. A chunk of a tensor takes about 170 bytes: this is room for 1.5 million."""

_MAX_DIMS = 64  # of a tensor in torch
_MAX_PATH = 100  # keys and positions that lead to a value
_MAX_FIELDS = 16  # of a class of the format
_MAX_TEXT = 4096  # names and paths
_MAX_INT = 2**63

_DCP = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_METADATA, _INDEX = Name(_DCP, "Metadata"), Name(_DCP, "MetadataIndex")
_TENSOR, _BYTES = Name(_DCP, "TensorStorageMetadata"), Name(_DCP, "BytesStorageMetadata")
_CHUNK, _PROPERTIES = Name(_DCP, "ChunkStorageMetadata"), Name(_DCP, "TensorProperties")
_INFO, _SIZE = Name(_FILES, "_StorageInfo"), Name("torch", "Size")
_KNOWN = frozenset(
    {
        *(_METADATA, _INDEX, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INFO, _SIZE),
        Name(_DCP, "StorageMeta"),
        Name(_DCP, "_MEM_FORMAT_ENCODING"),
        Name(_FILES, "_StoragePrefix"),
        Name("torch.serialization", "_get_layout"),
        Name("collections", "OrderedDict"),
        Name("builtins", "getattr"),  # some Python versions pickle enum members with it
        # The path the checkpoint was saved to.
        *(
            Name(module, kind)
            for module in ("pathlib", "pathlib._local")
            for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        ),
    }
)


class Item(NamedTuple):
    """Where one stored box or object is: a range of bytes of a file."""

    file: str
    offset: int
    length: int


class StoredBox(NamedTuple):
    """A box of a tensor, and where it is stored."""

    box: Box
    item: Item


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's global shape, its dtype, and the boxes of it that are stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredBox, ...]


class Content(NamedTuple):
    """What the folder has, by name."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]
    """The place of each name in the nested state dict, where the file says so."""


def read_metadata(folder: Path) -> Content:
    """Read and check `.metadata`; the files that it names are not looked at."""
    path = folder / METADATA
    try:
        return _content(parse(read_whole(folder, METADATA, MAX_BYTES), _is_known))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: expected the metadata of a torch.distributed.checkpoint folder; found no such file. Check the "
            "folder's name; if it is right, the save was interrupted: use another checkpoint."
        ) from None
    except (OSError, Refused) as error:
        found = error if isinstance(error, Refused) else error.strerror or error
        raise CheckpointError(
            f"{path}: expected the metadata of a torch.distributed.checkpoint folder, with its classes only; found "
            f"{found}. The file is damaged or of another format. Use another checkpoint."
        ) from error


def _is_known(name: Name) -> bool:
    return name in _KNOWN or dtype_of(name) is not None


def dtype_of(name: Any) -> torch.dtype | None:
    """The dtype that a pickle names; `None` for any other value."""
    if type(name) is not Name or name.module != "torch":
        return None
    # Not getattr: torch imports some of its modules on attribute access.
    found = vars(torch).get(name.name)
    return found if isinstance(found, torch.dtype) else None


def _content(saved: Any) -> Content:
    fields = _fields(saved, _METADATA)
    stored = _storage(_pairs(fields.get("storage_data"), "storage_data"))
    _check_disjoint(stored.values())
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Item] = {}
    boxes = _Boxes()
    for key, entry in _pairs(fields.get("state_dict_metadata"), "state_dict_metadata"):
        name = _text(key, "a name")
        if name in tensors or name in objects:
            raise Refused(f"{name!r} twice")
        if type(entry) is Made and entry.maker == _TENSOR:
            tensors[name] = _tensor(name, entry, stored, boxes)
        else:
            _fields(entry, _BYTES)
            objects[name] = _found(stored, name, None)
    return Content(tensors, objects, dict(_paths(fields.get("planner_data"))))


def _paths(planner_data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """What the planner of stock torch writes there. Others may write what they like, which is passed over."""
    for name, path in planner_data if type(planner_data) is Pairs else ():
        is_path = type(path) is tuple and len(path) <= _MAX_PATH and all(type(step) in (str, int) for step in path)
        if type(name) is str and is_path:
            yield name, path


def _tensor(name: str, entry: Made, stored: Mapping[_Key, Item], boxes: _Boxes) -> StoredTensor:
    fields = _fields(entry, _TENSOR)
    shape = _sizes(fields.get("size"))
    properties = fields.get("properties")
    state = properties.state if type(properties) is Made and properties.maker == _PROPERTIES else None
    dtype = dtype_of(state[0]) if type(state) is tuple and state else None
    if dtype is None:
        raise Refused(f"{name!r} without a dtype")
    chunks = []
    for box in boxes.of(fields.get("chunks")):
        if not box.is_inside(shape):
            raise Refused(f"{name!r} of shape {shape} with a chunk {box}")
        chunks.append(StoredBox(box, _found(stored, name, box.offset)))
    return StoredTensor(shape, dtype, tuple(chunks))


class _Boxes:
    """The boxes of a list of chunks that are not empty. A list that many tensors share is converted once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Box, ...]] = {}

    def of(self, chunks: Any) -> tuple[Box, ...]:
        if type(chunks) is not list:
            raise Refused(f"{_short(chunks)} in place of a list of chunks")
        if id(chunks) not in self._made:
            boxes: dict[Box, None] = {}
            for chunk in chunks:
                fields = _fields(chunk, _CHUNK)
                box = Box(_sizes(fields.get("offsets")), _sizes(fields.get("sizes")))
                # A rank without elements of a tensor may list an empty box, for which nothing is stored.
                if box.numel:
                    boxes[box] = None
            self._made[id(chunks)] = tuple(boxes)
        return self._made[id(chunks)]


_Key = tuple[str, tuple[int, ...] | None]
"""Name, and for a tensor the offset of the box."""


def _storage(pairs: Pairs) -> dict[_Key, Item]:
    stored: dict[_Key, Item] = {}
    for index, info in pairs:
        fields = _fields(index, _INDEX)
        offset = fields.get("offset")
        key = _text(fields.get("fqn"), "a name"), None if offset is None else _sizes(offset)
        if key in stored:
            raise Refused(f"{key[0]!r} stored twice")
        stored[key] = _item(_fields(info, _INFO))
    return stored


def _item(fields: Mapping[str, Any]) -> Item:
    name = _text(fields.get("relative_path"), "a file")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise Refused(f"{name!r}, a file outside the folder")
    if transformed := fields.get("transform_descriptors"):
        kinds = transformed[:5] if type(transformed) in (list, tuple) else [transformed]
        raise Refused(f"{name!r} with data that extensions have transformed: {', '.join(map(_short, kinds))}")
    offset, length = _sizes((fields.get("offset"), fields.get("length")))
    return Item(str(path), offset, length)


def _check_disjoint(items: Iterable[Item]) -> None:
    """Raise if two names share bytes of a file: no writer does that, and reading would take more than the files."""
    before = Item("", 0, 0)
    for item in sorted(items):
        if item.file == before.file and item.offset < before.offset + before.length:
            raise Refused(f"two entries for byte {item.offset} of {item.file!r}")
        before = item


def _found(stored: Mapping[_Key, Item], name: str, offset: tuple[int, ...] | None) -> Item:
    item = stored.get((name, offset))
    if item is None:
        raise Refused(f"{name!r}{'' if offset is None else f' at {offset}'} without the place where it is stored")
    return item


# Values #


def _fields(value: Any, maker: Name) -> dict[str, Any]:
    """The attributes of an object of the class `maker`."""
    if type(value) is not Made or value.maker != maker or value.arguments != () or value.pairs is not None:
        raise Refused(f"{_short(value)} in place of {maker.name}")
    pairs = _pairs(Pairs() if value.state is None else value.state, maker.name)
    if len(pairs) > _MAX_FIELDS or not all(type(key) is str for key, _ in pairs):
        raise Refused(f"a {maker.name} with other attributes")
    return dict(pairs)


def _pairs(value: Any, what: str) -> Pairs:
    # Some writers keep an OrderedDict.
    if type(value) is Made and value.maker == Name("collections", "OrderedDict") and not value.arguments:
        value = Pairs() if value.pairs is None else value.pairs
    if type(value) is not Pairs:
        raise Refused(f"{_short(value)} in place of a dict ({what})")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is Made and value.maker == _SIZE and len(value.arguments) == 1:
        (value,) = value.arguments
    if type(value) not in (tuple, list) or len(value) > _MAX_DIMS:
        raise Refused(f"{_short(value)} in place of sizes")
    for one in value:
        if type(one) is not int or not 0 <= one < _MAX_INT:
            raise Refused(f"{_short(one)} in place of a size")
    return tuple(value)


def _text(value: Any, what: str) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT or not _is_unicode(value):
        raise Refused(f"{_short(value)} in place of {what}")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    """A description of bounded length: the value may be of any size, and contain itself."""
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if type(value) is str:
        return repr(value[:200])
    return repr(value) if type(value) is Made else f"a {type(value).__name__}"
