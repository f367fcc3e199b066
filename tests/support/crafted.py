# SPDX-License-Identifier: Apache-2.0
"""Crafted content for files of a checkpoint: pickles, zip archives and manifests that no writer makes."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

METADATA = ".metadata"
Bytes = dict[str, bytes]


def text(value: str) -> bytes:
    """The instruction for a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def call(module: str, name: str, argument: bytes) -> bytes:
    """The instructions that call a function with one argument."""
    return f"c{module}\n{name}\n".encode() + argument + b"\x85R"


def build_on(module: str, name: str, attribute: str) -> bytes:
    """The instructions that set an attribute of a class (as one of its slots), and leave nothing on the stack."""
    return f"c{module}\n{name}\nN}}".encode() + text(attribute) + text("changed") + b"s\x86b0"


CLASSES = [
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "PureWindowsPath"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
]
"""Classes that occur in a `.metadata`."""


def pickles(sentinel: Path) -> Bytes:
    """Whole pickles, for any place where one is read."""
    run = text(f"touch {sentinel}")
    two = b"\x80\x02"
    made: Bytes = {
        "os.system": two + call("os", "system", run) + b".",
        "posix.system": two + call("posix", "system", run) + b".",
        "subprocess": two + call("subprocess", "getoutput", run) + b".",
        "eval": two + call("builtins", "eval", text(f"open({str(sentinel)!r}, 'w')")) + b".",
        "python 2's eval": two + call("__builtin__", "eval", text("1")) + b".",
        "stack global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + run + b"\x85R.",
        "stack global of a tuple": b"\x80\x04))\x93.",
        "new object": two + b"cos\nsystem\n" + run + b"\x85\x81.",
        "new object, keywords": b"\x80\x04cos\nsystem\n" + run + b"\x85}\x92.",
        "INST": two + b"(" + run + b"ios\nsystem\n.",
        "OBJ": two + b"(cos\nsystem\n" + run + b"o.",
        "EXT1": two + b"\x82\x01.",
        "EXT4": two + b"\x84\x01\x00\x00\x00.",
        "persistent": two + b"Pos.system\n.",
        "persistent binary": two + text("os") + b"Q.",
        "getattr chain": two + b"cbuiltins\ngetattr\ncpathlib\nPosixPath\n" + text("touch") + b"\x86R.",
        "nested name": b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.touch\x93.",
        "lazy attribute of torch": two + b"ctorch\n_dynamo\n.",
        "called result": two + call("torch", "Size", b")") + b")R.",
        "called string": two + text("x") + b")R.",
        "memo of 2 GiB": two + b"Nr\xff\xff\xff\x07.",
        "memo of 4 GiB": two + b"Nr\xff\xff\xff\xff0N.",
        "memo by text": two + b"Np9999999999\n.",
        "memo read": two + b"j\xff\xff\xff\xff.",
        "long of 2 GiB": two + b"\x8b\xff\xff\xff\x7f.",
        "long of negative length": two + b"\x8b\xff\xff\xff\xff.",
        "long of 1 MiB": two + b"\x8b\x00\x00\x10\x00" + b"\x7f" * 2**20 + b".",
        "long by text": two + b"L" + b"9" * 100_000 + b"L\n.",
        "string of 4 GiB": two + b"X\xff\xff\xff\xffx.",
        "string of 8 EiB": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fx.",
        "bytes of 8 EiB": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fx.",
        "bytearray of 8 EiB": b"\x80\x05\x96" + b"\xff" * 7 + b"\x7fx.",
        "buffer": b"\x80\x05\x97.",
        "frame of 8 EiB": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f}.",
        "bad text": two + b"X\x02\x00\x00\x00\xff\xfe.",
        "lists, 100,000 deep": two + b"]" * 100_000 + b"a" * 99_999 + b".",
        "tuples, 100,000 deep": two + b")" + b"\x85" * 100_000 + b".",
        "tuples as a key": two + b"}" + b")" + b"\x85" * 100_000 + b"Ns.",
        "dicts, 50,000 deep": two + b"}" + b"N}" * 50_000 + b"s" * 50_000 + b".",
        "states, 50,000 deep": two + b"ctorch\nSize\n)R" * 50_000 + b"b" * 49_999 + b".",
        "a list in itself": two + b"]q\x00h\x00a.",
        "a list as a key": two + b"}]Ns.",
        "references, doubled 60 times": two + b"]q\x00" + b"".join(_doubled(n) for n in range(60)) + b".",
        "marks": two + b"(" * 100_000 + b".",
        "two objects": two + b"NN.",
        "nothing on the stack": two + b".",
        "reduce of nothing": two + b"R.",
        "tuple beyond a mark": two + b"N(\x85.",
        "items beyond a mark": two + b"](Na.",
        "odd items": two + b"}(NNNu.",
        "append to a dict": two + b"}Na.",
        "no end": two + b"}",
        "no protocol": b"}.",
        "protocol 0": b"(dp0\n.",
        "protocol 6": b"\x80\x06}.",
        "empty": b"",
        "None": two + b"N.",
        "NaN": two + b"G\x7f\xf8\x00\x00\x00\x00\x00\x00.",
        "numbers": two + b"](K\x01M\x01\x00J\xff\xff\xff\xff\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00e.",
    }
    made |= {f"state of {name}": two + build_on(module, name, "x")[:-1] + b"." for module, name in CLASSES}
    return made


def _doubled(number: int) -> bytes:
    return b"](" + bytes([ord("h"), number]) * 2 + b"eq" + bytes([number + 1])


def metadata_with(before: bytes) -> Callable[[bytes], bytes]:
    """A right `.metadata`, in which other instructions come first."""
    return lambda content: content[:2] + before + content[11:]  # without the frame's length


# Right metadata with single wrong statements #


def statements() -> dict[str, Callable[[Metadata], None]]:
    """Changes of an unpickled `.metadata`."""
    changes: dict[str, Callable[[Metadata], None]] = {}
    paths = [
        "../x",
        "/etc/passwd",
        "",
        ".",
        "a\0b",
        "x" * 300,
        "y" * 5000,
        ".metadata",
        "sub/../../x",
        "nowhere",
        "é\ud800",
    ]
    for number, path in enumerate(paths):
        changes[f"path {number}"] = lambda saved, path=path: _info(saved, relative_path=path)
    for key in ("offset", "length"):
        for value in (-1, 0, 1, 63, 2**31, 2**62, 2**63, 2**64, 2**2000, 1.5, float("nan"), "1", None, True, [1]):
            changes[f"{key} {str(value)[:24]}"] = lambda saved, key=key, value=value: _info(saved, **{key: value})
        for step in (-64, -1, 1, 64):
            changes[f"{key} by {step}"] = lambda saved, key=key, step=step: _move(saved, key, step)
    for size in (
        (),
        (1,),
        (0, 0),
        (2**62, 2**62),
        (2**63, 1),
        (-1, 6),
        (5, 6, 1),
        [5, 6],
        "56",
        None,
        (1,) * 65,
        2**40,
        (True, 6),
    ):
        changes[f"size {str(size)[:24]}"] = lambda saved, size=size: setattr(_tensor(saved), "size", size)
        changes[f"sizes {str(size)[:24]}"] = lambda saved, size=size: setattr(_tensor(saved).chunks[0], "sizes", size)
        changes[f"offsets {str(size)[:24]}"] = lambda saved, size=size: setattr(
            _tensor(saved).chunks[0], "offsets", size
        )
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.quint8, torch.bits8, torch.complex64):
        changes[f"dtype {dtype}"] = lambda saved, dtype=dtype: setattr(_tensor(saved).properties, "dtype", dtype)
    changes |= {
        "no chunks": lambda saved: _tensor(saved).chunks.clear(),
        "chunks None": lambda saved: setattr(_tensor(saved), "chunks", None),
        "a chunk twice": lambda saved: _tensor(saved).chunks.append(_tensor(saved).chunks[0]),
        "20,000 chunks": lambda saved: _tensor(saved).chunks.extend([_tensor(saved).chunks[0]] * 20_000),
        "no properties": lambda saved: setattr(_tensor(saved), "properties", None),
        "no storage": lambda saved: saved.storage_data.clear(),
        "storage None": lambda saved: setattr(saved, "storage_data", None),
        "storage a list": lambda saved: setattr(saved, "storage_data", []),
        "names None": lambda saved: setattr(saved, "state_dict_metadata", None),
        "no names": lambda saved: saved.state_dict_metadata.clear(),
        "a number as a name": lambda saved: saved.state_dict_metadata.update({4: BytesStorageMetadata()}),
        "a long name": lambda saved: saved.state_dict_metadata.update({"n" * 2**20: BytesStorageMetadata()}),
        "an entry None": lambda saved: saved.state_dict_metadata.update({_name(saved): None}),
        "not a tensor": lambda saved: saved.state_dict_metadata.update({_name(saved): BytesStorageMetadata()}),
        "transformed": lambda saved: _info(saved, transform_descriptors=["zstd"]),
        "all in one place": _in_one_place,
    }
    return changes


def _name(saved: Metadata) -> str:
    """The first tensor's name."""
    return next(n for n, entry in saved.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata))


def _tensor(saved: Metadata) -> Any:
    return saved.state_dict_metadata[_name(saved)]


def _first_info(saved: Metadata) -> Any:
    return next(info for index, info in saved.storage_data.items() if index.fqn == _name(saved))


def _info(saved: Metadata, **fields: Any) -> None:
    for key, value in fields.items():
        setattr(_first_info(saved), key, value)


def _move(saved: Metadata, key: str, step: int) -> None:
    _info(saved, **{key: getattr(_first_info(saved), key) + step})


def _in_one_place(saved: Metadata) -> None:
    for index in saved.storage_data:
        saved.storage_data[index] = _first_info(saved)


# Items #


def zipped(records: Bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in ({"version": b"3\n"} | records).items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _lying(declared: int) -> bytes:
    """A compressed pickle of few bytes that says that it has many."""
    content = zipped({"data.pkl": bytes(1000)}, zipfile.ZIP_DEFLATED)
    for mark, place in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        at = content.index(mark) + place
        content = content[:at] + struct.pack("<I", declared) + content[at + 4 :]
    return content


def tensor_item(
    *,
    data: bytes | None = bytes(120),
    offset: int = 0,
    size: bytes = b"K\x05K\x06\x86",
    strides: bytes = b"K\x06K\x01\x86",
    method: int = zipfile.ZIP_STORED,
    byteorder: bytes = sys.byteorder.encode(),
) -> bytes:
    """A tensor of shape (5, 6), or whatever the instructions for its sizes and strides say."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x1etQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    number = b"\x8a\x09" + offset.to_bytes(9, "little", signed=True)
    arguments = b"(" + storage + number + size + strides + b"\x89" + hooks + b"t"
    records = {"data.pkl": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R.", "byteorder": byteorder}
    return zipped(records if data is None else records | {"data/0": data}, method)


def items(sentinel: Path) -> Bytes:
    """Whole items, for the place of a tensor or of an object."""
    two, long = b"\x80\x02", b"\x8a\x08" + b"\xff" * 7 + b"\x3f"  # 2**62 - 1
    tib = b"\x8a\x06\0\0\0\0\0\x01"
    made = {name: zipped({"data.pkl": content}) for name, content in pickles(sentinel).items()}
    made |= {
        "bytearray of 1 TiB": zipped({"data.pkl": two + call("builtins", "bytearray", tib) + b"."}),
        "tensor of 1 TiB": zipped({"data.pkl": two + call("torch", "FloatTensor", tib) + b"."}),
        "compressed": zipped({"data.pkl": pickle.dumps(1, 2)}, zipfile.ZIP_DEFLATED),
        "compressed, said to have 4 GiB": _lying(0xFFFFFFF0),
        "compressed tensor": tensor_item(method=zipfile.ZIP_DEFLATED),
        "no pickle": zipped({"data/0": bytes(120)}),
        "two pickles": zipped({"data.pkl": pickle.dumps(1, 2), "x/data.pkl": pickle.dumps(2, 2)}),
        "no storage": tensor_item(data=None),
        "storage too small": tensor_item(data=b"12"),
        "offset beyond": tensor_item(offset=2**61),
        "offset negative": tensor_item(offset=-8),
        "strides of 0": tensor_item(size=b"M\xff\xffM\xff\xff\x86", strides=b"K\x00K\x00\x86"),
        "size of 2**62": tensor_item(size=long + long + b"\x86", strides=b"K\x00K\x00\x86"),
        "strides of 2**62": tensor_item(strides=long + long + b"\x86"),
        "negative strides": tensor_item(strides=b"J\xff\xff\xff\xffK\x01\x86"),
        "other number of strides": tensor_item(strides=b"K\x01\x85"),
        "other endian": tensor_item(byteorder=b"big"),
        "a list": saved([torch.ones(5, 6)]),
        "sparse": saved(torch.eye(5).to_sparse()),
        "meta": saved(torch.empty(5, 6, device="meta")),
        "old format": _old(torch.ones(5, 6)),
        "no zip": b"x" * 300,
        "an end only": b"PK\x05\x06" + bytes(18),
        "a directory of 4 GiB": b"PK\x05\x06" + bytes(8) + b"\xff" * 8 + bytes(2),
    }
    return made


def _old(value: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def put_item(folder: Path, name: str, content: bytes) -> None:
    """Append an item to a file, and let `.metadata` say that `name` is there."""
    saved = pickle.loads((folder / METADATA).read_bytes())
    info = next(info for index, info in saved.storage_data.items() if index.fqn == name)
    path = folder / info.relative_path
    info.offset, info.length = path.stat().st_size, len(content)
    path.write_bytes(path.read_bytes() + content)
    (folder / METADATA).write_bytes(pickle.dumps(saved))


# Manifests #


def sealed(content: dict[str, Any]) -> bytes:
    """A manifest with the right checksum of itself."""
    rest = {key: value for key, value in content.items() if key != "crc32"}
    own = zlib.crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps(rest | {"crc32": own}).encode()


def manifests(right: bytes) -> Bytes:
    content = json.loads(right)
    first = next(iter(content["files"]))

    def edited(**changes: Any) -> bytes:
        return sealed(content | changes)

    def entry(value: Any) -> bytes:
        return sealed(content | {"files": content["files"] | {first: value}})

    made = {
        "empty": b"",
        "an object": b"{}",
        "a list": b"[]",
        "null": b"null",
        "a number": b"1e999",
        "NaN": b"NaN",
        "no text": b"\xff\xfe\x00",
        "UTF-16": right.decode().encode("utf-16"),
        "100,000 deep": b"[" * 100_000,
        "100,000 deep in an object": b'{"a":' * 100_000,
        "a number of 100,000 digits": b'{"crc32": ' + b"9" * 100_000 + b"}",
        "keys twice": right.replace(b'"version"', b'"version": 1, "version"', 1),
        "cut": right[:-5],
        "grown": right + b"{}",
        "spaces": right + b"  \n",
        "another checksum": right.replace(b'"crc32"', b'"crc33"'),
        "another format": edited(format="other"),
        "another version": edited(version=2),
        "version NaN": edited(version=float("nan")),
        "files a list": edited(files=[]),
        "files null": edited(files=None),
        "a file outside": edited(files=content["files"] | {"../x": {"bytes": 1, "crc32": 0}}),
        "a file of the system": edited(files=content["files"] | {"/etc/passwd": {"bytes": 1, "crc32": 0}}),
        "a file that is not there": edited(files=content["files"] | {"gone": {"bytes": 1, "crc32": 0}}),
        "a file without a size": entry({"crc32": 0}),
        "a size of 10**400": entry({"bytes": 10**400, "crc32": 0}),
        "a negative size": entry({"bytes": -1, "crc32": 0}),
        "a size NaN": entry({"bytes": float("nan"), "crc32": 0}),
        "a size as text": entry({"bytes": "1", "crc32": 0}),
        "a file null": entry(None),
    }
    # What the manifest itself has to refuse: see `PENDING` in the fuzzer.
    made |= {
        "no files": edited(files={}),
        "no version": sealed({key: value for key, value in content.items() if key != "version"}),
        "a name with a null": edited(files=content["files"] | {"a\0b": {"bytes": 1, "crc32": 0}}),
        "a name that is no text": edited(files=content["files"] | {"\ud800": {"bytes": 1, "crc32": 0}}),
        "a checksum as text": entry({"bytes": content["files"][first]["bytes"], "crc32": "x"}),
    }
    return made
