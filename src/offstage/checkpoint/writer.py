# SPDX-License-Identifier: Apache-2.0
"""Planner and storage writer for `torch.distributed.checkpoint`: a catalogue goes to files, block by block.

The protocol is DCP's own: every rank describes what it holds, the coordinator removes duplicates and makes the
metadata, every rank writes its files. Items are in the format of `torch.save`, which any reader of DCP folders reads.
"""

from __future__ import annotations

import dataclasses
import io
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from offstage.checkpoint.archive import ALIGN, pickled, write_tensor
from offstage.checkpoint.catalogue import ABSENT_SHARDS, GROUPS, OPTIM, SHARD_SCALARS, Catalogue, Entry, merged_groups
from offstage.checkpoint.manifest import FileSum, sync_folder
from offstage.checkpoint.parts import Box, whole
from offstage.checkpoint.readers import TensorReader
from offstage.checkpoint.threads import in_threads
from offstage.engine.snapshot import Snapshot
from offstage.errors import CheckpointError

_BLOCK_BYTES = 16 * 1024 * 1024


class Planner(DefaultSavePlanner):
    """Describes a catalogue to DCP."""

    def __init__(self, catalogue: Catalogue, num_ranks: int) -> None:
        super().__init__()
        self._catalogue, self._num_ranks = catalogue, num_ranks
        self.entries: dict[MetadataIndex, Entry] = {}
        self._objects = dict(catalogue.objects)
        self._scalars: list[Entry] = []

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Everything comes from the catalogue, not from `state_dict`."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Describe what this rank holds, without communication."""
        items = []
        for entry in self._catalogue.entries:
            part = entry.part
            if part.box.numel == 0 and 0 not in part.shape:
                continue  # an empty shard; a tensor without elements is saved, for its name
            item = _item(entry)
            self.entries[item.index] = entry
            items.append(item)
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        self.plan = SavePlan(items, planner_data=_RankInfo(self._catalogue))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: merge the ranks' parameter groups and scalars into objects that it writes itself."""
        if len(all_plans) != self._num_ranks:  # DCP continues with one rank where it finds no process group
            raise CheckpointError(f"{self._num_ranks} ranks began this save; found a plan of {len(all_plans)}.")
        infos: list[_RankInfo] = [plan.planner_data for plan in all_plans]
        _check_alike(all_plans)
        all_plans = _without_absent(all_plans)
        objects = _group_objects(merged_groups(one.groups for one in infos))
        unequal = self._add_scalars(infos)
        if unequal:
            objects[SHARD_SCALARS] = unequal
        if absent := _absent_shards(all_plans):
            objects[ABSENT_SHARDS] = absent
        self._objects |= {name: pickled(name, value) for name, value in objects.items()}
        paths = {name: path for one in reversed(infos) for name, path in one.paths.items()}
        paths |= {entry.part.name: _state_path(entry.part.name) for entry in self._scalars}
        added = {name: tuple(_path(name)) for name in self._objects if name not in paths}
        plans = [dataclasses.replace(plan, planner_data=paths | added) for plan in all_plans]
        new = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in added]
        new += [_item(entry) for entry in self._scalars]
        plans[0] = dataclasses.replace(plans[0], items=[*plans[0].items, *new])  # the coordinator's own
        global_plan, metadata = super().create_global_plan(plans)
        return [dataclasses.replace(plan, planner_data=None) for plan in global_plan], metadata

    def _add_scalars(self, infos: Sequence[_RankInfo]) -> dict[str, list[Any]]:
        """Save one value per name, of the shard with most updates. Returns the shards of names whose values differ."""
        found: dict[str, dict[Box, dict[str, Any]]] = defaultdict(dict)
        for one in infos:
            for name, shards in one.scalars.items():
                found[name].update(shards)
        unequal = {}
        for name, by_box in found.items():
            most = max(by_box.values(), key=lambda scalars: scalars.get("step", (0, None))[0])
            for key, (value, dtype) in most.items():
                path = f"{OPTIM}.state.{name}.{key}"
                if dtype is None:
                    self._objects[path] = pickled(path, value)
                    continue
                entry = Entry(
                    whole(path, (), Box((), ())), dtype, TensorReader(torch.tensor([value], dtype=dtype, device="cpu"))
                )
                self.entries[MetadataIndex(path, ())] = entry
                self._scalars.append(entry)
            if any(scalars != most for scalars in by_box.values()):
                unequal[name] = [
                    [list(box.offset), list(box.size), {key: value for key, (value, _) in scalars.items()}]
                    for box, scalars in by_box.items()
                ]
        return unequal

    def resolve_data(self, write_item: WriteItem) -> io.BytesIO:  # type: ignore[override]
        """Objects only: `Writer` reads tensors block by block."""
        return io.BytesIO(self._objects[write_item.index.fqn])


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """Raise if two ranks use one name for different tensors."""
    seen: dict[str, tuple[Any, Any]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            kind = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
            if seen.setdefault(item.index.fqn, kind) != kind:
                raise CheckpointError(
                    f"Ranks keep different tensors under the name {item.index.fqn!r}: {seen[item.index.fqn]} and, on "
                    f"rank {rank}, {kind}. Expected one tensor per name. Give the modules of each rank different names."
                )


def _item(entry: Entry) -> WriteItem:
    part = entry.part
    chunk = ChunkStorageMetadata(torch.Size(part.box.offset), torch.Size(part.box.size))
    data = TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(part.shape))
    kind = WriteItemType.TENSOR if part.box.size == part.shape else WriteItemType.SHARD
    return WriteItem(MetadataIndex(part.name, part.box.offset), kind, tensor_data=data)


def _state_path(name: str) -> tuple[str, ...]:
    param, _, key = name.removeprefix(f"{OPTIM}.state.").rpartition(".")
    return OPTIM, "state", param, key


class _RankInfo:
    """What a rank sends to the coordinator beside its items."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.paths, self.groups, self.scalars = catalogue.paths, catalogue.groups, catalogue.scalars
        self.fillers = catalogue.fillers


def _without_absent(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Without state that no rank has yet, so that loading leaves it absent."""
    real = {item.index.fqn for plan in plans for item in plan.items if item.index.fqn not in plan.planner_data.fillers}
    return [dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn in real]) for plan in plans]


def _absent_shards(plans: Sequence[SavePlan]) -> dict[str, list[Any]]:
    """Shards without state, of parameters that have some on other ranks; the files contain zeros for them."""
    found: dict[str, list[Any]] = defaultdict(list)
    for plan in plans:
        names = {item.index.fqn for item in plan.items}
        for entry, (name, boxes) in plan.planner_data.fillers.items():
            for box in boxes if entry in names else ():
                if [list(box.offset), list(box.size)] not in found[name]:
                    found[name].append([list(box.offset), list(box.size)])
    return {name: boxes for name, boxes in found.items() if boxes}


def _group_objects(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {f"{GROUPS}.{n}.{option}": value for n, group in enumerate(groups) for option, value in group.items()}


def _path(name: str) -> Iterator[str | int]:
    if name.startswith(f"{OPTIM}.state."):
        yield from _state_path(name)
    elif name.startswith(GROUPS):
        number, option = name.removeprefix(f"{GROUPS}.").split(".", 1)
        yield from GROUPS.split(".")
        yield int(number)
        yield option
    else:
        yield name


class Writer(FileSystemWriter):
    """Writes the entries of a `Planner`, a file per thread, and computes each file's checksum on the way."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(folder, overwrite=True)
        self.sums: dict[str, FileSum] = {}
        self.nbytes = 0
        self._folder, self._threads = folder, threads
        self._stop = False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's share of the global plan."""
        assert isinstance(planner, Planner)
        _announce(planner, plan.items)
        files = _bins(plan.items, self._threads)
        names = [f"{plan.storage_data.prefix}{number}.distcp" for number in range(len(files))]
        named = list(zip(names, files, strict=True))
        written = in_threads(lambda one: self._write_file(*one, planner), named, self._threads, stop=self._give_up)
        sync_folder(self._folder)
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for results in written for result in results])
        return future

    def _give_up(self) -> None:
        self._stop = True

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: Planner) -> list[WriteResult]:
        results: list[WriteResult] = []
        with open(self._folder / name, "wb") as raw:
            file = _SummedFile(raw)
            for item in items:
                if self._stop:
                    return results
                file.pad()
                offset = file.nbytes
                if item.type is WriteItemType.BYTE_IO:
                    file.write(planner.resolve_data(item).getbuffer())
                else:
                    entry = planner.entries[item.index]
                    write_tensor(file, entry.dtype, entry.part.box.size, _blocks(entry))  # type: ignore[arg-type]
                    for snapshot, index in entry.reader.snapshots():
                        snapshot.finished(index)
                place = _StorageInfo(name, offset, file.nbytes - offset)
                results.append(WriteResult(item.index, file.nbytes - offset, place))
            raw.flush()
            os.fsync(raw.fileno())
        self.sums[name] = FileSum(file.nbytes, file.crc32)
        return results


class _SummedFile:
    """A file written in sequence, and its checksum."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.nbytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._raw.write(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        self.nbytes += len(view)
        return len(view)

    def pad(self) -> None:
        self.write(bytes(-self.nbytes % ALIGN))


def _announce(planner: Planner, items: Sequence[WriteItem]) -> None:
    """Tell each snapshot which parameters will be read, so that it keeps no others."""
    readers: dict[Snapshot, Counter[int]] = defaultdict(Counter)
    for entry in planner.entries.values():
        for snapshot, _ in entry.reader.snapshots():
            readers[snapshot]  # an entry for each, even if other ranks write all of its parameters
    for item in items:
        if item.type is not WriteItemType.BYTE_IO:
            for snapshot, index in planner.entries[item.index].reader.snapshots():
                readers[snapshot][index] += 1
    for snapshot, counts in readers.items():
        snapshot.expect(counts)


def _bins(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """Divide `items` into at most `count` files of about equal size, in order."""
    sizes = [item.tensor_storage_size() or 1 for item in items]
    target = max(1, -(-sum(sizes) // count))
    bins: list[list[WriteItem]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if room <= 0:
            bins.append([])
            room = target
        bins[-1].append(item)
        room -= size
    return bins


def _blocks(entry: Entry) -> Iterator[Any]:
    """The bytes of an entry, in row-major order."""
    part = entry.part
    max_numel = max(1, _BLOCK_BYTES // entry.dtype.itemsize)
    if part.is_contiguous:
        for block in part.blocks(max_numel):
            yield bytes_of(entry.reader.read(block.start, block.start + block.box.numel))
    elif all(block.span <= 4 * block.box.numel for block in part.blocks(max_numel)):
        for block in part.blocks(max_numel):  # columns of a wider tensor: a block spans few other elements
            read = entry.reader.read(block.start, block.start + block.span)
            yield bytes_of(dataclasses.replace(block, start=0).of(read).contiguous())
    elif part.box.numel:  # another order than in memory: a block may need any element
        read = entry.reader.read(part.start, part.start + part.span)
        moved = dataclasses.replace(part, start=0)
        for block in moved.blocks(max_numel):
            yield bytes_of(block.of(read).contiguous())


def bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous host tensor."""
    return tensor.view(-1).view(torch.uint8).numpy()
