# SPDX-License-Identifier: Apache-2.0
"""Stored: any box of a folder that stock DCP or offstage's archives make up, from its files, running no code."""

import functools
import io
import itertools
import math
import os
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from offstage.checkpoint import stored
from offstage.checkpoint.archive import ALIGN, write_tensor
from offstage.checkpoint.files import RegularFile
from offstage.checkpoint.parts import Box
from offstage.checkpoint.stored import Stored
from offstage.errors import CheckpointError
from tests.support import crafted, refusals
from tests.support.refusals import Runs

refused = functools.partial(refusals.refused, CheckpointError)
DATA = "__0_0.distcp"


def full_box(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(box.offset, box.size, strict=True))]


def read(folder: Stored, name: str) -> torch.Tensor:
    into = torch.empty(folder.shape(name), dtype=folder.dtype(name))
    folder.read(name, full_box(into), into)
    return into


def save_stock(folder: Path, tensors) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def load_stock(folder: Path, tensors) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)


def write_folder(folder: Path, tensors, cuts, objects=(), files: int = 2) -> Path:
    """A folder written by hand: `cuts` maps a name to the boxes of it that are stored, dealt to `files` files."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, storage = {}, {}
    opened = [(folder / f"__{number}_0.distcp").open("wb") for number in range(files)]
    turns = itertools.cycle(opened)

    def put(write):
        file = next(turns)
        file.write(bytes(-file.tell() % ALIGN))
        offset = file.tell()
        write(file)
        return _StorageInfo(Path(file.name).name, offset, file.tell() - offset)

    for name, tensor in tensors.items():
        chunks = []
        for box in cuts.get(name, [full_box(tensor)]):
            content = at(tensor, box).contiguous().view(-1).view(torch.uint8).numpy()
            info = put(lambda file, c=content, b=box, t=tensor: write_tensor(file, t.dtype, b.size, [c]))
            chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)))
            storage[MetadataIndex(name, box.offset)] = info
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for name, value in dict(objects).items():
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = put(lambda file, value=value: torch.save(value, file))
    for file in opened:
        file.close()
    saved = Metadata(entries, planner_data={name: (name,) for name in entries}, storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(saved))
    return folder


def edit_metadata(folder: Path, change) -> Path:
    path = folder / ".metadata"
    saved = pickle.loads(path.read_bytes())
    change(saved)
    path.write_bytes(pickle.dumps(saved))
    return folder


STOCK = {
    "plain": torch.arange(24.0).view(4, 6),
    "odd": torch.arange(7, dtype=torch.int8),  # what follows does not lie at a multiple of its size in the file
    "transposed": torch.arange(40.0, dtype=torch.float64).view(5, 8).t(),
    "view": torch.arange(60.0).view(6, 10)[1:4, 2:9],
    "channels_last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "half": torch.arange(12.0).view(3, 4).to(torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "step": torch.tensor(7.0),
    "count": torch.tensor(2**40),
    "empty": torch.empty(0, 3),
}
OBJECTS = {"lr": 0.1, "betas": (0.9, 0.95), "name": "adamw", "foreach": None}


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    return save_stock(tmp_path_factory.mktemp("stock") / "folder", {**STOCK, "objects": OBJECTS})


# What stock DCP writes #


def test_a_stock_folder(stock):
    with Stored(stock) as folder:
        assert set(STOCK) <= set(folder.names)
        assert folder.names == sorted(folder.names)
        assert dict(folder.tensors) == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in STOCK.items()}
        for name, tensor in STOCK.items():
            assert name in folder
            assert torch.equal(read(folder, name), tensor)
        assert set(folder.names) - set(STOCK) == {f"objects.{name}" for name in OBJECTS}
        for name, value in OBJECTS.items():
            assert folder.object(f"objects.{name}") == value
        assert "objects.none" not in folder


def test_data_lies_anywhere(stock):
    """Data at a multiple of its size in the file and data elsewhere: the folder above has both."""
    with Stored(stock) as folder:
        for name in STOCK:
            read(folder, name)
        aligned = {header.data_offset % header.dtype.itemsize == 0 for header in folder._headers.values()}
    assert aligned == {True, False}


@given(st.sampled_from([name for name, tensor in STOCK.items() if tensor.numel()]), st.data())
@settings(deadline=None, max_examples=150)
def test_any_box_into_any_tensor(stock, name, data):
    """Boxes, strides of the target, its dtype; at once or, as to a device, in blocks of any size."""
    tensor = STOCK[name]
    offset = [data.draw(st.integers(0, size)) for size in tensor.shape]
    size = [data.draw(st.integers(0, most - first)) for first, most in zip(offset, tensor.shape, strict=True)]
    box = Box(tuple(offset), tuple(size))
    dtype = data.draw(st.sampled_from([tensor.dtype, torch.float32, torch.float64, torch.bfloat16]))
    order = data.draw(st.permutations(range(tensor.dim())))
    gap = data.draw(st.integers(1, 2))
    memory = torch.full([size[dim] * gap for dim in order], -1.0).to(dtype)
    into = memory[tuple(slice(None, None, gap) for _ in order)].permute([order.index(dim) for dim in range(len(order))])
    assert tuple(into.shape) == box.size
    with pytest.MonkeyPatch.context() as patch, Stored(stock) as folder:
        patch.setattr(stored, "BLOCK_BYTES", data.draw(st.sampled_from([8, 64, 2**24])))
        patch.setattr(stored, "_MAX_GAP_BYTES", data.draw(st.sampled_from([0, 8, 2**16])))
        if data.draw(st.booleans()):
            patch.setattr(stored, "_is_host", lambda tensor: False)
        folder.read(name, box, into)
    assert torch.equal(into, at(tensor, box).to(dtype))
    if gap == 2 and memory.numel() and memory.dim() and dtype != torch.bool:
        untouched = torch.ones(memory.shape, dtype=torch.bool)
        untouched[tuple(slice(None, None, gap) for _ in order)] = False
        assert memory[untouched].eq(-1).all()


def test_a_tensor_that_requires_grad_can_be_read_into(stock):
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    with Stored(stock) as folder:
        folder.read("plain", full_box(weight), weight)
    assert torch.equal(weight.detach(), STOCK["plain"])


def test_plain_adamw_under_fsdp2(process_group, tmp_path):
    """A folder of the stock stack: sharded parameters, moments and steps under their names, groups as objects."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=tmp_path / "folder")
    with Stored(tmp_path / "folder") as folder:
        for name, param in model.named_parameters():
            state = optimizer.state[param]
            assert torch.equal(read(folder, f"model.{name}"), param.full_tensor())
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(read(folder, f"optim.state.{name}.{key}"), state[key].full_tensor())
            assert read(folder, f"optim.state.{name}.step").item() == 2.0
        objects = set(folder.names) - set(folder.tensors)
        assert objects
        assert 0.01 in [folder.object(name) for name in objects]


# What offstage's archives make up #


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    """Chunks along every dim, in two files, and one tensor that two ranks saved parts of twice."""
    tensors = {
        "rows": torch.arange(35.0).view(7, 5),
        "grid": torch.arange(48, dtype=torch.int64).view(6, 8),
        "overlapping": torch.arange(10.0).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
    }
    cuts = {
        "rows": [Box((0, 0), (3, 5)), Box((3, 0), (1, 5)), Box((4, 0), (3, 5))],
        "grid": [Box((r, c), (3, 4)) for c in (4, 0) for r in (0, 3)],
        "overlapping": [Box((0,), (6,)), Box((4,), (6,)), Box((2,), (3,))],
    }
    folder = tmp_path_factory.mktemp("chunked") / "folder"
    return write_folder(folder, tensors, cuts, {"groups": {"lr": 1e-3}}), tensors


def test_every_box_over_chunks(chunked):
    folder, tensors = chunked
    with Stored(folder) as opened:
        for name, tensor in tensors.items():
            starts = itertools.product(*(range(size) for size in tensor.shape))
            for offset in starts:
                size = tuple(max(1, (most - first) * 2 // 3) for first, most in zip(offset, tensor.shape, strict=True))
                into = torch.empty(size, dtype=tensor.dtype)
                opened.read(name, Box(offset, size), into)
                assert torch.equal(into, at(tensor, Box(offset, size)))
            assert torch.equal(read(opened, name), tensor)
        assert opened.object("groups") == {"lr": 1e-3}


def test_stock_dcp_loads_such_a_folder(chunked):
    folder, tensors = chunked
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name != "overlapping"}
    load_stock(folder, into)
    for name, tensor in into.items():
        assert torch.equal(tensor, tensors[name])


def test_threads_may_read_at_once(chunked):
    folder, tensors = chunked
    with Stored(folder) as opened, ThreadPoolExecutor(8) as pool:
        for name, found in pool.map(lambda name: (name, read(opened, name)), list(tensors) * 20):
            assert torch.equal(found, tensors[name])


def test_a_closed_folder_lets_go_of_its_files(chunked):
    folder, tensors = chunked

    def is_open() -> bool:
        return any(str(folder) in os.path.realpath(one) for one in Path("/proc/self/fd").iterdir())

    with Stored(folder) as opened:
        assert not is_open()
        assert torch.equal(read(opened, "rows"), tensors["rows"])
        assert is_open()
    assert not is_open()
    assert torch.equal(read(opened, "rows"), tensors["rows"])  # opens again
    opened.close()


def test_reading_warns_of_nothing(stock, recwarn):
    with Stored(stock) as folder:
        read(folder, "plain")
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["as it is", "converted"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
def test_reading_takes_no_memory_of_its_own(shift, dtype, stock, tmp_path):
    """A tensor of 48 MiB: nothing anonymous beyond a block, and that only where it is converted."""
    tensor = torch.arange(12 * 2**20, dtype=torch.int32)
    folder = write_folder(tmp_path / "folder", {"large": tensor}, {}, files=1)
    if shift:
        (folder / DATA).write_bytes(b"x" + (folder / DATA).read_bytes())

        def move(saved):
            for info in saved.storage_data.values():
                info.offset += 1

        edit_metadata(folder, move)
    into = torch.zeros_like(tensor, dtype=dtype) + 1  # its pages are there before the count begins
    with Stored(stock) as warm:
        read(warm, "plain")  # what torch allocates once
    before, peak = _anonymous_bytes(), 0
    with Stored(folder) as opened:
        with pytest.MonkeyPatch.context() as patch:
            read_into = RegularFile.read_into

            def watched(*arguments):
                nonlocal peak
                read_into(*arguments)
                peak = max(peak, _anonymous_bytes())

            patch.setattr(RegularFile, "read_into", watched)
            opened.read("large", full_box(into), into)
        peak = max(peak, _anonymous_bytes())
    assert torch.equal(into, tensor.to(dtype))
    assert peak > 0
    assert peak - before < (stored.BLOCK_BYTES if dtype != tensor.dtype else 0) + 4 * 2**20


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_a_tensor_that_torch_cannot_make_is_one_error(tmp_path):
    folder = write_folder(tmp_path / "folder", {"w": torch.zeros(3, dtype=torch.uint8)}, {}, files=1)
    edit_metadata(folder, lambda saved: setattr(saved.state_dict_metadata["w"].properties, "dtype", torch.quint8))
    item = io.BytesIO()
    write_tensor(item, torch.quint8, (3,), [bytes(3)])
    crafted.put_item(folder, "w", item.getvalue())
    with Stored(folder) as opened:
        refused(lambda: opened.value("w"), "'w'", "torch.quint8", "torch cannot make it")


# What is wrong is refused #


def test_names_that_are_not_there(chunked):
    folder, _ = chunked
    with Stored(folder) as opened:
        for ask in (opened.shape, opened.dtype, lambda name: opened.read(name, Box((), ()), torch.empty(()))):
            refused(lambda ask=ask: ask("lost"), ".metadata", "a tensor called 'lost'", "found nothing")
        refused(lambda: opened.shape("groups"), "a tensor called 'groups'", "found an object")
        refused(lambda: opened.object("lost"), "an object called 'lost'", "found nothing")
        refused(lambda: opened.object("rows"), "an object called 'rows'", "found a tensor")


@pytest.mark.parametrize(
    ("box", "size"),
    [
        (Box((0, 0), (7, 6)), (7, 6)),
        (Box((6, 0), (2, 5)), (2, 5)),
        (Box((-1, 0), (2, 5)), (2, 5)),
        (Box((0,), (7,)), (7,)),
        (Box((0, 0), (7, 5)), (7, 4)),
        (Box((0, 0), (7, 5)), (35,)),
    ],
)
def test_boxes_that_do_not_fit(chunked, box, size):
    with Stored(chunked[0]) as opened:
        refused(lambda: opened.read("rows", box, torch.empty(size)), "'rows'", "(7, 5)", str(box), str(size))


def test_chunks_that_do_not_cover(tmp_path):
    tensor = torch.arange(35.0).view(7, 5)
    folder = write_folder(tmp_path / "folder", {"w": tensor}, {"w": [Box((0, 0), (3, 5)), Box((4, 0), (3, 5))]})
    into = torch.full((7, 5), -1.0)
    with Stored(folder) as opened:
        refused(lambda: opened.read("w", full_box(into), into), "'w'", str(Box((3, 0), (1, 5))))
        assert into.eq(-1).all()
        opened.read("w", Box((4, 1), (3, 2)), into[:3, :2])
    assert torch.equal(into[:3, :2], tensor[4:, 1:3])


def test_files_that_are_missing_or_truncated(tmp_path):
    tensors = {"a": torch.arange(100.0), "b": torch.arange(100.0)}
    folder = write_folder(tmp_path / "folder", tensors, {"a": [Box((0,), (50,)), Box((50,), (50,))]})
    path = folder / "__1_0.distcp"
    content = path.read_bytes()
    into = torch.full((100,), -1.0)
    for length in (0, 1, 500, len(content) - 1):
        path.write_bytes(content[:length])
        with Stored(folder) as opened:
            refused(lambda: opened.read("a", full_box(into), into), str(path), "truncated", str(length))
    path.unlink()
    with Stored(folder) as opened:
        refused(lambda: opened.read("a", full_box(into), into), str(path), "No such file")
        assert torch.equal(read(opened, "b"), tensors["b"])  # which is in the other file
    assert into.eq(-1).all()


def test_a_chunk_that_is_not_what_the_metadata_says(tmp_path):
    folder = write_folder(tmp_path / "folder", {"w": torch.ones(4, 3), "v": torch.ones(3, 4)}, {})

    def swap(saved):
        one, other = MetadataIndex("w", (0, 0)), MetadataIndex("v", (0, 0))
        saved.storage_data[one], saved.storage_data[other] = saved.storage_data[other], saved.storage_data[one]

    with Stored(edit_metadata(folder, swap)) as opened:
        refused(lambda: read(opened, "w"), "distcp", "'w'", "(4, 3)", "found size (3, 4)")


def test_objects_that_are_not_plain_data(tmp_path):
    folder = write_folder(tmp_path / "folder", {}, {}, {"bad": Runs(tmp_path / "ran")}, files=1)
    with Stored(folder) as opened:
        refused(lambda: opened.object("bad"), DATA, "'bad'", "not part of the format", "plain data")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["alone", "in the planner's data", "as a size"])
def test_metadata_runs_no_code(where, tmp_path):
    folder = write_folder(tmp_path / "folder", {"w": torch.ones(3)}, {})
    bad = Runs(tmp_path / "ran")

    def put(saved):
        if where == "as a size":
            saved.state_dict_metadata["w"].size = bad
        else:
            saved.planner_data = bad

    if where == "alone":
        (folder / ".metadata").write_bytes(pickle.dumps(bad))
    else:
        edit_metadata(folder, put)
    refused(lambda: Stored(folder), ".metadata", "pathlib.Path", "not part of the format")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nload\n", b"ctorch\nhub\n"])
def test_metadata_finds_no_other_functions(name, tmp_path):
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + name + b"(X\x04\x00\x00\x00truetR.")
    refused(lambda: Stored(tmp_path), str(tmp_path / ".metadata"), "not part of the format")


def test_metadata_of_other_systems_and_pythons(tmp_path):
    """Paths as other Pythons and systems pickle them, and enum members pickled by name."""
    folder = write_folder(tmp_path / "folder", {"w": torch.ones(3)}, {})
    saved = pickle.loads((folder / ".metadata").read_bytes())
    saved.planner_data = Path("/somewhere")
    text = pickle.dumps(saved, protocol=2)
    for module, kind in ((b"pathlib", b"PosixPath"), (b"pathlib._local", b"PosixPath"), (b"pathlib", b"WindowsPath")):
        changed = text.replace(b"cpathlib\nPosixPath\n", b"c" + module + b"\n" + kind + b"\n")
        assert (changed == text) == ((module, kind) == (b"pathlib", b"PosixPath"))
        (folder / ".metadata").write_bytes(changed)
        with Stored(folder) as opened:
            assert torch.equal(read(opened, "w"), torch.ones(3))
    member = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    by_value = re.search(re.escape(member) + rb"q.K\x00\x85q.R", text)
    assert by_value
    puts = [bytes([put]) for put in by_value[0][len(member) :] if put > 2 and put not in b"qKR\x85"]
    # The same number of objects are numbered: getattr, its class, the call's result.
    by_name = b"cbuiltins\ngetattr\n" + member + b"q" + puts[0] + b"X\x17\x00\x00\x00TORCH_CONTIGUOUS_FORMAT"
    (folder / ".metadata").write_bytes(text.replace(by_value[0], by_name + b"\x86q" + puts[1] + b"R"))
    with Stored(folder) as opened:
        assert torch.equal(read(opened, "w"), torch.ones(3))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda saved: setattr(saved, "storage_data", None), "None in place of a dict (storage_data)"),
        (lambda saved: saved.storage_data.clear(), "without the place where it is stored"),
        (lambda saved: setattr(next(iter(saved.storage_data.values())), "relative_path", "../x"), "outside"),
        (lambda saved: setattr(next(iter(saved.storage_data.values())), "relative_path", "/x"), "outside"),
        (lambda saved: setattr(next(iter(saved.storage_data.values())), "offset", -8), "-8 in place of a size"),
        (lambda saved: setattr(next(iter(saved.storage_data.values())), "transform_descriptors", ["zstd"]), "zstd"),
        (lambda saved: setattr(saved.state_dict_metadata["w"], "size", (2,)), "with a chunk"),
        (lambda saved: setattr(saved.state_dict_metadata["w"].properties, "dtype", "float"), "without a dtype"),
        (lambda saved: saved.state_dict_metadata.update(w=3), "3 in place of BytesStorageMetadata"),
        (lambda saved: saved.state_dict_metadata.update({4: BytesStorageMetadata()}), "4 in place of a name"),
    ],
)
def test_metadata_that_makes_no_sense(change, found, tmp_path):
    folder = edit_metadata(write_folder(tmp_path / "folder", {"w": torch.ones(3)}, {}), change)
    refused(lambda: Stored(folder), str(folder), found)


def test_folders_without_metadata(tmp_path):
    refused(lambda: Stored(tmp_path), str(tmp_path / ".metadata"), "no such file", "interrupted")
    refused(lambda: Stored(tmp_path / "nowhere"), "no such file")
    (tmp_path / ".metadata").mkdir()
    refused(lambda: Stored(tmp_path), "found a folder")


def test_damaged_metadata_raises_one_error_or_still_reads(chunked, tmp_path):
    """Every truncation is refused. A flipped bit may pass here (the manifest sees it), but nothing else escapes."""
    folder, _ = chunked
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = (folder / ".metadata").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / ".metadata").write_bytes(content[:length])
        refused(lambda: Stored(tmp_path), ".metadata")
    raised = 0
    for bit in range(0, 8 * len(content), 41):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / ".metadata").write_bytes(damaged)
        try:
            with Stored(tmp_path) as opened:
                for name, (shape, _) in opened.tensors.items():
                    if math.prod(shape) < 10_000:
                        read(opened, name)
        except CheckpointError:
            raised += 1
    assert raised > 60
