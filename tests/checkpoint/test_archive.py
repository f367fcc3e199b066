# SPDX-License-Identifier: Apache-2.0
"""Archives: what is written here torch loads, and what torch writes is found here."""

import io
import math
import os
import pickle
import struct
import sys
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.utils import _create_file_view

from offstage.checkpoint.archive import ALIGN, pickled, unpickled, write_tensor
from offstage.checkpoint.files import Bytes, RegularFile
from offstage.checkpoint.items import Header, read_header
from offstage.errors import CheckpointError
from tests.support.refusals import Runs

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
]
OTHER_ORDER = b"big" if sys.byteorder == "little" else b"little"
SIZES = [(3, 4), (7,), (), (1, 1, 1), (0,), (0, 3), (5, 0, 2), (2, 3, 4, 5)]


def make(dtype: torch.dtype, size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    count = math.prod(size) * dtype.itemsize
    limit = 2 if dtype == torch.bool else 120  # no NaNs: 120 is an ordinary number in every format
    return torch.randint(0, limit, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(size)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and bytes_of(found) == bytes_of(expected)


def from_header(content: bytes, header: Header) -> torch.Tensor:
    if math.prod(header.size) == 0:
        return torch.empty(header.size, dtype=header.dtype)
    data = bytearray(content[header.data_offset : header.data_offset + header.nbytes])
    return torch.frombuffer(data, dtype=header.dtype).as_strided(header.size, header.strides)


class OneWay:
    """A pipe that takes little at a time: no position, no way back."""

    def __init__(self, most: int) -> None:
        self.most, self.content = most, bytearray()

    def write(self, data) -> int:
        taken = bytes(data[: self.most])
        self.content += taken
        return len(taken)


# Writing #


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torch_loads_what_is_written(dtype, size):
    tensor = make(dtype, size)
    file = io.BytesIO()
    assert write_tensor(file, dtype, size, [bytes_of(tensor)]) == len(file.getvalue())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(loaded, tensor)
    assert loaded.stride() == tensor.stride()
    assert not loaded.requires_grad


@given(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.data())
@settings(deadline=None)
def test_blocks_may_be_cut_anywhere(size, dtype, data):
    tensor = make(dtype, size)
    content = bytes_of(tensor)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    kind = data.draw(st.sampled_from([bytes, bytearray, memoryview]))
    blocks = [kind(content[a:b]) for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    whole, pipe = io.BytesIO(), OneWay(data.draw(st.integers(1, 90)))
    write_tensor(whole, dtype, size, [content])
    assert write_tensor(pipe, dtype, size, iter(blocks)) == len(pipe.content)
    assert bytes(pipe.content) == whole.getvalue()  # the same bytes every time: no time, no random number in them


def test_blocks_may_be_arrays_of_any_type():
    tensor = torch.arange(12.0).view(3, 4)
    file = io.BytesIO()
    write_tensor(file, tensor.dtype, tensor.shape, [tensor[:1].numpy(), tensor[1:1].numpy(), tensor[1:].numpy()])
    file.seek(0)
    assert same(torch.load(file, weights_only=True), tensor)


@pytest.mark.parametrize("blocks", [[], [b"x" * 15], [b"x" * 17], [b"x" * 16, b"x"], [b"x" * 8] * 3])
def test_another_number_of_bytes_raises(blocks, tmp_path):
    with (tmp_path / "a.distcp").open("wb") as file, pytest.raises(CheckpointError) as raised:
        write_tensor(file, torch.float32, (2, 2), blocks)
    assert "a.distcp" in str(raised.value)
    assert "16 bytes" in str(raised.value)
    assert str(sum(map(len, blocks))) in str(raised.value)


def test_the_archive_is_one_that_torch_would_write():
    """The same records with the same content, except the random id; checksums of all but the data; aligned data."""
    tensor = make(torch.bfloat16, (5, 6))
    ours, theirs = io.BytesIO(), io.BytesIO()
    write_tensor(ours, tensor.dtype, tensor.shape, [bytes_of(tensor)])
    torch.save(tensor, theirs)
    our_zip, their_zip = zipfile.ZipFile(ours), zipfile.ZipFile(theirs)
    assert set(our_zip.namelist()) == set(their_zip.namelist()) - {"archive/.data/serialization_id"}
    for name in our_zip.namelist():
        if name != "archive/data/0":
            assert our_zip.read(name) == their_zip.read(name)
    assert all(info.compress_type == zipfile.ZIP_STORED for info in our_zip.infolist())
    assert our_zip.getinfo("archive/data/0").CRC == 0


@pytest.mark.parametrize("how", ["file", "mmap", "slice"])
def test_torch_reads_an_item_inside_a_file(how, tmp_path):
    """As a file of its own, mapped, and as DCP reads it: a slice of a file with other items around it."""
    tensor = make(torch.float32, (50, 20))
    path = tmp_path / "items"
    offset = 0 if how != "slice" else 2 * ALIGN
    with path.open("wb") as file:
        file.write(b"\xff" * offset)
        length = write_tensor(file, tensor.dtype, tensor.shape, [bytes_of(tensor)])
        if how == "slice":
            write_tensor(file, torch.int64, (), [bytes(8)])
    if how == "mmap":
        loaded = torch.load(path, mmap=True, weights_only=True)
        assert loaded.data_ptr() % ALIGN == 0
        assert same(loaded, tensor)
        return
    with path.open("rb") as file:
        view = _create_file_view(file, offset, length) if how == "slice" else file
        assert same(torch.load(view, map_location="cpu", weights_only=True), tensor)


class Sparse:
    """A file in which blocks of a MiB or more are holes: 4 GiB of zeros without writing them."""

    def __init__(self, file) -> None:
        self.file = file

    def write(self, data) -> int:
        if len(data) < 2**20:
            return self.file.write(data)
        self.file.seek(len(data), os.SEEK_CUR)
        return len(data)


@pytest.mark.parametrize("beyond", [-4096, -256, 0, 4096])
def test_around_4_gib(beyond, tmp_path):
    """Where the zip format's 32-bit fields end: all fit, the directory's place does not, the size does not."""
    path = tmp_path / "large"
    numel = (2**32 + beyond) // 4
    zeros = memoryview(bytes(2**26))
    blocks = [zeros] * (numel * 4 // len(zeros) - 1)
    rest = numel * 4 - len(blocks) * len(zeros)
    tail = struct.pack("<f", 7.0)
    head = rest - len(tail) - 1024
    with path.open("wb") as file:
        length = write_tensor(Sparse(file), torch.float32, (numel,), [*blocks, bytes(head), bytes(1024), tail])
    assert path.stat().st_size == length
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (numel,)
    assert loaded[-3:].tolist() == [0.0, 0.0, 7.0]
    assert loaded[0] == 0.0
    header = read_header(RegularFile(tmp_path, path.name), 0, length)
    with path.open("rb") as file:
        assert (header.dtype, header.size, header.nbytes) == (torch.float32, (numel,), numel * 4)
        file.seek(header.data_offset + header.nbytes - 4)
        assert file.read(4) == tail


# Objects #


def objects():
    tensor = torch.arange(6.0).view(2, 3)
    shared = [1, 2]
    yield {"a": None, "b": [True, -1, 2**40, -(2**70), 1.5, "größer"], 3: (1, (2,)), 2.5: ()}
    yield [{1, "x"}, 1 - 2j, b"\x00\xff", bytearray(b"\x80a"), torch.Size((2, 3)), Counter("abca")]
    yield [torch.float8_e4m3fn, torch.device("cuda", 1), torch.device("cpu"), torch.strided, OrderedDict(b=1, a=2)]
    yield [tensor, tensor.t(), tensor[1], torch.tensor(3), torch.empty(0, 4), nn.Parameter(torch.ones(2))]
    yield [torch.ones(3, dtype=torch.float8_e5m2), torch.tensor([True]), torch.ones(2, dtype=torch.uint16)]
    yield [torch.ones(2, requires_grad=True), torch.tensor(2.0).expand(4, 5), torch.ones(2, dtype=torch.complex64)]
    yield [shared, shared, {"x": shared}]
    yield {"1" * 300: "2" * 70_000}


def described(value):
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return type(value), value.dtype, tuple(value.shape), value.stride(), value.requires_grad, content
    if isinstance(value, dict):
        return type(value), [(key, described(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(inner) for inner in value]
    return type(value), value


@pytest.mark.parametrize("value", list(objects()), ids=range(8))
def test_objects_are_what_torch_loads(value):
    content = pickled("x", value)
    assert described(unpickled(content)) == described(torch.load(io.BytesIO(content), weights_only=True))


def test_references_to_one_object_stay_one():
    first, second, inner = unpickled(saved([(shared := [1, 2]), shared, {"x": shared}]))
    assert first is second is inner["x"]
    one, other = unpickled(saved([(tensor := torch.zeros(4)), tensor[1:]]))
    one[1] = 5
    assert other[0] == 5


def test_records_in_the_place_of_others_are_refused():
    """One record's bytes, to which several entries of the directory lead."""
    tensors = [torch.full((4096,), float(number)) for number in range(4)]
    content = pickled("x", tensors)
    directory = content.rindex(b"archive/data/0") - 46
    place = content[directory + 42 : directory + 46]
    changed = bytearray(content)
    for number in (1, 2, 3):
        at = content.rindex(f"archive/data/{number}".encode()) - 46
        changed[at + 42 : at + 46] = place
    with pytest.raises(CheckpointError, match="not where the directory says"):
        unpickled(bytes(changed))


# Reading #


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("writer", ["offstage", "torch"])
def test_headers_of_items_in_a_file(dtype, writer):
    """Several items one after another, written by torch or by offstage."""
    file = io.BytesIO()
    items = []
    for size in SIZES:
        tensor = make(dtype, size)
        file.write(bytes(-file.tell() % ALIGN))
        offset = file.tell()
        if writer == "torch":
            torch.save(tensor, file)
        else:
            write_tensor(file, dtype, size, [bytes_of(tensor)])
        items.append((tensor, offset, file.tell() - offset))
    for tensor, offset, length in items:
        header = read_header(Bytes(file.getvalue()), offset, length)
        assert same(from_header(file.getvalue(), header), tensor)
        assert header.data_offset % ALIGN == 0


def test_headers_of_views_and_of_files_with_their_own_name(tmp_path):
    base = torch.arange(40.0).view(5, 8)
    channels_last = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (base.t(), base[2:4], base[1:, 3:5], base[:, ::2], channels_last, torch.tensor(2.0).expand(3, 2)):
        path = tmp_path / "model.pt"
        torch.save(tensor, path)
        header = read_header(RegularFile(tmp_path, path.name), 0, path.stat().st_size)
        assert header.strides == tensor.stride()
        assert same(from_header(path.read_bytes(), header), tensor)


def saved(obj, **options) -> bytes:
    file = io.BytesIO()
    torch.save(obj, file, **options)
    return file.getvalue()


def zipped(content: bytes, how: int, changes: dict[str, bytes] | None = None) -> bytes:
    """The same archive, its records compressed or not, with another content for some of them."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", how) as new:
        for name in old.namelist():
            new.writestr(name, (changes or {}).get(name, old.read(name)))
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (lambda path: saved({"a": 1}), "of type Pairs"),
        (lambda path: saved([torch.ones(2)]), "object of type list"),
        (lambda path: saved(torch.ones(3), _use_new_zipfile_serialization=False), "no zip archive"),
        (lambda path: zipped(saved(torch.ones(300)), zipfile.ZIP_DEFLATED), "compressed"),
        (
            lambda path: zipped(saved(torch.ones(3)), zipfile.ZIP_STORED, {"archive/byteorder": OTHER_ORDER}),
            f"{OTHER_ORDER.decode()}-endian",
        ),
        (
            lambda path: zipped(saved(torch.ones(3)), zipfile.ZIP_STORED, {"archive/data/0": bytes(8)}),
            "8 bytes of data",
        ),
        (lambda path: saved([torch.ones(2), Runs(path / "ran")]), "not part of the format"),
        (lambda path: pickle.dumps(Runs(path / "ran")), "no zip archive"),
        (lambda path: b"", "no zip archive"),
    ],
)
def test_what_is_not_a_tensor_is_refused_by_name(content, found, tmp_path):
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(bytes(64) + content(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        read_header(RegularFile(tmp_path, path.name), 64, path.stat().st_size - 64)
    for fragment in (str(path), "expected a tensor", found, "use another checkpoint"):
        assert fragment in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("writer", ["offstage", "torch"])
def test_damage_raises_or_leaves_a_header_inside_the_item(writer):
    """Truncations raise. A flipped bit may change what the headers say, but not lead outside the item."""
    tensor = torch.arange(6.0)
    file = io.BytesIO()
    torch.save(tensor, file) if writer == "torch" else write_tensor(file, tensor.dtype, (6,), [bytes_of(tensor)])
    content = file.getvalue()
    for length in range(0, len(content), 5):
        with pytest.raises(CheckpointError):
            read_header(Bytes(content[:length]), 0, length)
    raised = 0
    for bit in range(0, 8 * len(content), 11):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            header = read_header(Bytes(damaged), 0, len(content))
        except CheckpointError:
            raised += 1
            continue
        assert 0 <= header.data_offset <= header.data_offset + header.nbytes <= len(content)
        assert all(stride >= 0 for stride in header.strides)
        if math.prod(header.size):
            last = sum((size - 1) * stride for size, stride in zip(header.size, header.strides, strict=True))
            assert (last + 1) * header.dtype.itemsize <= header.nbytes
    assert raised > 20
