# SPDX-License-Identifier: Apache-2.0
"""The catalogue: what a checkpoint holds of a model and its optimizer, and where each element is.

Names are those of `torch.distributed.checkpoint` for `{"model": get_model_state_dict(model), "optim":
get_optimizer_state_dict(model, optimizer)}`, so that either can load what the other has saved. Making a catalogue reads
no tensor and sends nothing to other ranks: shapes and offsets come from meshes and placements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from offstage.checkpoint.archive import pickled, unpickled
from offstage.checkpoint.fused import Fused, Splitter, fused_parts, split_name
from offstage.checkpoint.parts import Box, Part, whole
from offstage.checkpoint.readers import (
    Reader,
    SnapshotReader,
    TensorReader,
    ZeroReader,
    joined_master,
    weight_as_master,
    without_sign,
)
from offstage.engine.snapshot import Snapshot
from offstage.errors import CheckpointError, ConfigError
from offstage.memory.arena import ALIGN_BYTES, Arena
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from offstage.rules.rule import MASTER_KEY, MASTER_LOW_KEY, ParamState
from offstage.tensors import as_param, flat_like, local_box, local_of, readable, reshard

MODEL, OPTIM, GROUPS, EXTRA = "model", "optim", "optim.param_groups", "extra"
SHARD_SCALARS = "offstage.shard_scalars"
ABSENT_SHARDS = "offstage.absent_shards"
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Name components added by torch.compile, activation checkpointing and FSDP1."""


@dataclass(frozen=True)
class Entry:
    """A tensor, or this rank's part of one, saved under one name."""

    part: Part
    dtype: torch.dtype
    reader: Reader


@dataclass
class Catalogue:
    """What one rank saves."""

    entries: list[Entry] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Everything that is not a tensor, already pickled: a later change of the object is not saved."""
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """The place of each name in the nested state dict, as `torch.distributed.checkpoint` records it."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's parameter groups, with parameters by name."""
    scalars: dict[str, list[tuple[Box, dict[str, Any]]]] = field(default_factory=dict)
    """State kept once per parameter, for each of this rank's boxes of a saved name. Ranks may differ where experts have
    their own mesh."""
    fillers: dict[str, tuple[str, list[Box]]] = field(default_factory=dict)
    """Entries for state that this rank lacks: the parameter's saved name, and the boxes without any state."""

    def add(self, entry: Entry, path: tuple[str | int, ...]) -> None:
        self.entries.append(entry)
        self.paths[entry.part.name] = path

    def add_object(self, path: tuple[str | int, ...], value: Any) -> None:
        name = ".".join(map(str, path))
        self.objects[name], self.paths[name] = pickled(name, value), path


class Layouts:
    """How parameters are cut into saved tensors: by shards, and fused ones by their metadata."""

    def __init__(self, model: nn.Module, splitter: Splitter) -> None:
        reshard(model)
        self.named: dict[str, torch.Tensor] = {
            clean_name(model, name): param for name, param in model.named_parameters()
        }
        self.name_of = {param: name for name, param in self.named.items()}
        self._fused = {
            name: fused for name, param in self.named.items() if (fused := splitter(name, param)) is not None
        }
        self._check_names({clean_name(model, name) for name, _ in model.named_buffers()})

    def _check_names(self, buffers: set[str]) -> None:
        """Raise if two tensors would be saved under one name."""
        owners = dict.fromkeys(buffers, "a buffer")
        for name in self.named:
            for saved in self.saved_names(name):
                if saved in owners:
                    raise ConfigError(
                        f"{name!r} would be saved as {saved!r}, and so would {owners[saved]}; expected a name each. "
                        "Give the parts of the fused parameter other names in split_as()."
                    )
                owners[saved] = repr(name)

    def fused(self, name: str) -> Fused | None:
        return self._fused.get(name)

    def saved_names(self, name: str) -> list[str]:
        """The names under which the parameter `name` is saved."""
        fused = self.fused(name)
        return [name] if fused is None else [split_name(name, part) for part, _ in fused.parts]

    def parts(self, name: str, tensor: torch.Tensor) -> list[Part]:
        """The parts of `tensor`, a parameter or a tensor of its shape, under the parameter's saved names."""
        part = part_of(name, tensor)
        fused = self.fused(name)
        return [part] if fused is None else fused_parts(name, fused, part)


def clean_name(model: nn.Module, name: str) -> str:
    """`name` without the components that wrappers add: the name `torch.distributed.checkpoint` uses."""
    kept, module = [], model
    for part in name.split("."):
        wraps = part in _WRAPPERS or (part == "module" and isinstance(module, DistributedDataParallel))
        if not wraps:
            kept.append(part)
        inner = getattr(module, part, None)
        module = inner if isinstance(inner, nn.Module) else module
    return ".".join(kept)


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """This rank's elements of `tensor`, in memory order."""
    local = readable(local_of(tensor))
    offset, size = local_box(tensor)
    strides = as_param(torch.empty(local.numel(), dtype=local.dtype, device="meta"), local.to("meta")).stride()
    return whole(name, tuple(tensor.shape), Box(offset, size), strides)


def checked_optimizer(optimizer: torch.optim.Optimizer | None) -> OffloadedOptimizer | None:
    """`optimizer`; raises if `offload()` did not return it."""
    if optimizer is not None and not isinstance(optimizer, OffloadedOptimizer):
        raise ConfigError(
            f"offstage.checkpoint expects the optimizer that offload() returned; found {type(optimizer).__name__}. "
            "Save it with torch.distributed.checkpoint (get_optimizer_state_dict), or offload it with fraction=0.0: "
            "the formats are the same."
        )
    return optimizer


def turn_of(optimizer: torch.optim.Optimizer | None) -> contextlib.AbstractContextManager[Any]:
    """Held while the optimizer is saved or loaded: another thread that trains with it waits."""
    return runtime_of(optimizer).turn if isinstance(optimizer, OffloadedOptimizer) else contextlib.nullcontext()


def synchronize_devices(model: nn.Module) -> None:
    """Wait for the devices of `model`: the threads that read or write its tensors use other streams."""
    for device in {param.device for param in model.parameters()}:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def catalogue_of(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    extra: Mapping[str, Any],
    splitter: Splitter,
    staging: Staging,
) -> Catalogue:
    """Everything to save. `staging` decides which tensors are copied now and which are read later."""
    layouts = Layouts(model, splitter)
    catalogue = Catalogue()
    weights = _add_model(catalogue, model, layouts, staging)
    if optimizer is not None:
        _add_optimizer(catalogue, optimizer, layouts, weights, staging)
    for path, value in _leaves((EXTRA,), extra):
        if isinstance(value, torch.Tensor):
            catalogue.add(_entry(part_of(".".join(map(str, path)), value), value, staging), path)
        else:
            catalogue.add_object(path, value)
    return catalogue


class Staging:
    """Reads tensors in place: for a blocking save, during which nothing changes."""

    nbytes = 0

    def reader(self, flat: torch.Tensor) -> Reader:
        """The reader of a tensor that training may overwrite."""
        return TensorReader(flat)

    def state_reader(self, held: ParamState, key: str) -> Reader:
        """The reader of state that lives in an arena."""
        return TensorReader(held.raw(key))


class CountingStaging(Staging):
    """Adds up what `SnapshotStaging` will copy."""

    def __init__(self) -> None:
        self.needed: dict[torch.device, int] = {}
        self._seen: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def reader(self, flat: torch.Tensor) -> Reader:
        if self._seen.setdefault(_identity(flat), flat) is flat:  # tied weights have two names; this keeps the address
            self.needed[flat.device] = self.needed.get(flat.device, 0) + _padded(flat.nbytes)
        return TensorReader(flat)


class SnapshotStaging(Staging):
    """For a save in the background: arenas are read through snapshots, all other tensors are copied now."""

    def __init__(self, snapshots: Mapping[int, Snapshot], needed: Mapping[torch.device, int], *, pin: bool) -> None:
        """`snapshots` by the identity of the host state they are of; `needed` bytes of copies from each device."""
        self._snapshots = snapshots
        # An arena has exactly the size asked for, unlike torch's pinned memory, and is faster to allocate.
        self._arenas = {device: Arena(nbytes, torch.uint8, device, pin=pin) for device, nbytes in needed.items()}
        self._room = {device: arena.flat for device, arena in self._arenas.items()}
        self.nbytes = sum(arena.nbytes for arena in self._arenas.values())
        self._copies: dict[tuple[int, int, torch.dtype], Reader] = {}
        self._sources: list[torch.Tensor] = []
        """Referenced until the copies are made, so that no other tensor gets the same address."""

    def reader(self, flat: torch.Tensor) -> Reader:
        key = _identity(flat)
        if key not in self._copies:
            room = self._room[flat.device]
            copy, self._room[flat.device] = room[: flat.nbytes].view(flat.dtype), room[_padded(flat.nbytes) :]
            copy.copy_(flat, non_blocking=True)
            self._copies[key] = TensorReader(copy)
            self._sources.append(flat)
        return self._copies[key]

    def settle(self) -> None:
        """Wait until the copies are made."""
        for device in {source.device for source in self._sources} - {torch.device("cpu")}:
            torch.accelerator.current_stream(device).synchronize()
        self._sources.clear()
        self._copies.clear()

    def close(self) -> None:
        """Free the copies: the save has ended."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._room.clear()

    def state_reader(self, held: ParamState, key: str) -> Reader:
        assert held.home is not None
        if id(held.home) not in self._snapshots:
            raise ConfigError("async_save() expects an open optimizer; found one that was closed. Use save().")
        return SnapshotReader(self._snapshots[id(held.home)], held.index, key)


def _add_model(catalogue: Catalogue, model: nn.Module, layouts: Layouts, staging: Staging) -> dict[str, Reader]:
    """Add parameters and buffers; return the readers of the parameters."""
    readers: dict[str, Reader] = {}
    for name, value in get_model_state_dict(model).items():
        if not isinstance(value, torch.Tensor):
            _add_extra_state(catalogue, name, value, staging)
            continue
        local = local_of(value)
        reader = readers[name] = staging.reader(flat_like(local, local))
        for part in layouts.parts(name, value):
            renamed = part.renamed(f"{MODEL}.{part.name}")
            catalogue.add(Entry(renamed, value.dtype, reader), (MODEL, part.name))
    return readers


def _add_extra_state(catalogue: Catalogue, name: str, value: Any, staging: Staging) -> None:
    """Add what a module returns as its extra state: whole, as it is, and where stock torch looks for it.

    `torch.distributed.checkpoint` saves each value of a dict, and of a list with tensors, under a name of its own. Keys
    that are not strings, empty dicts and types are lost there.
    """
    catalogue.add_object((MODEL, name), value)
    leaves, paths = flatten_state_dict({MODEL: {name: value}})
    for one, leaf in leaves.items():
        if one in catalogue.objects:
            continue
        if isinstance(leaf, torch.Tensor):
            catalogue.add(_entry(part_of(one, leaf), leaf, staging), paths[one])
        else:
            catalogue.add_object(paths[one], leaf)


def _add_optimizer(
    catalogue: Catalogue,
    optimizer: OffloadedOptimizer,
    layouts: Layouts,
    weights: Mapping[str, Reader],
    staging: Staging,
) -> None:
    runtime = runtime_of(optimizer)
    if shared := runtime.rule.shared(runtime.own_state):
        raise CheckpointError(
            f"{runtime.rule.title} keeps {sorted(map(str, shared))} for all parameters together; expected state of "
            "parameters, which is all that a checkpoint folder holds. Save optimizer.state_dict() with torch.save."
        )
    for held in runtime.all_states():
        name = name_in(layouts, held)
        readers = state_readers(held, weights[name], staging)
        for shaped in (key for key in held.keys if key.shape is not None and key.name in held.present):
            assert shaped.shape is not None
            value = held.raw(shaped.name).view(shaped.shape)
            path: tuple[str, ...] = (OPTIM, "state", name, shaped.name)
            catalogue.add(_entry(part_of(".".join(path), value), value, staging), path)
        parts = layouts.parts(name, held.param)
        for key, (reader, dtype) in readers.items():
            for part in parts:
                renamed = part.renamed(f"{OPTIM}.state.{part.name}.{key}")
                catalogue.add(Entry(renamed, dtype, reader), (OPTIM, "state", part.name, key))
                if not held.present or isinstance(reader, ZeroReader):
                    _, absent = catalogue.fillers.setdefault(renamed.name, (part.name, []))
                    absent += [] if held.present else [part.box]
        numbers = {key: _number(value) for key, value in held.scalars.items()}
        for part in parts if numbers else ():
            catalogue.scalars.setdefault(part.name, []).append((part.box, numbers))
    for group in optimizer.param_groups:
        names = [saved for p in group["params"] for saved in layouts.saved_names(name_in(layouts, runtime.state_of(p)))]
        options = {option: value for option, value in group.items() if option not in ("params", "param_names")}
        for option, value in options.items():
            # A copy: a scheduler may change the value later.
            options[option] = unpickled(pickled(f"param_groups: {option}", value))
        catalogue.groups.append({**options, "params": names})


def name_in(layouts: Layouts, held: ParamState) -> str:
    """The parameter's name in the model; raises if it has none."""
    name = layouts.name_of.get(held.param)
    if name is None:
        raise ConfigError(
            f"Parameter {held.name!r} of the optimizer is not in the model; expected the model that it trains. Pass "
            "the whole model."
        )
    return name


def state_readers(held: ParamState, weight: Reader, staging: Staging) -> dict[str, tuple[Reader, torch.dtype]]:
    """The state of one parameter under its public names.

    State that a shard lacks is saved as zeros: other ranks may have it for their shards, and a tensor is saved whole.
    """
    present, is_shard = held.present, held.local is not held.param
    if not present and not is_shard:
        return {}
    kept = {key.name: _key_reader(held, key.name, key.dtype, staging) for key in held.keys if key.shape is None}
    readers: dict[str, tuple[Reader, torch.dtype]] = {}
    for key in (key for key in held.keys if key.shape is None):
        if key.name == MASTER_LOW_KEY:
            ours = MASTER_LOW_KEY in present and held.rule.wrote(held, flat_like(held.local, held.local))
            squares = kept["exp_avg_sq"]
            readers[MASTER_KEY] = (
                (joined_master(weight, kept[key.name], squares) if ours else weight_as_master(weight)),
                torch.float32,
            )
        elif key.name == MASTER_KEY and MASTER_KEY not in present:
            readers[MASTER_KEY] = weight_as_master(weight), torch.float32
        elif key.name in present or is_shard:
            split = key.name == "exp_avg_sq" and MASTER_LOW_KEY in kept
            readers[key.name] = (without_sign(kept[key.name]) if split else kept[key.name]), key.dtype
    return readers


def _number(value: Any) -> Any:
    """A 0-d tensor as a number and its dtype, which ranks can send to each other."""
    return (value.item(), value.dtype) if isinstance(value, torch.Tensor) else (value, None)


def _identity(flat: torch.Tensor) -> tuple[int, int, torch.dtype]:
    return flat.data_ptr(), flat.numel(), flat.dtype


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _key_reader(held: ParamState, key: str, dtype: torch.dtype, staging: Staging) -> Reader:
    if key not in held.present:
        return ZeroReader(dtype)
    return staging.reader(held.raw(key)) if held.home is None else staging.state_reader(held, key)


def _entry(part: Part, value: torch.Tensor, staging: Staging) -> Entry:
    local = local_of(value)
    return Entry(part, value.dtype, staging.reader(flat_like(local, local)))


def _leaves(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The values of nested dicts and their paths. A list, an empty dict and a dict with number keys are one value."""
    within = len(path) > 1
    if isinstance(value, Mapping) and value and not (within and any(not isinstance(key, str) for key in value)):
        for key, inner in value.items():
            if not isinstance(key, str) or not key or "." in key:
                raise ConfigError(
                    f"extra has the key {key!r}; expected strings without dots, because dots separate the keys of "
                    "nested dicts in a checkpoint. Rename it."
                )
            yield from _leaves((*path, key), inner)
    else:
        yield path, value


def merged_groups(of_ranks: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The parameter groups of all ranks: groups with the same position and options become one."""
    merged: list[dict[str, Any]] = []
    positions: list[int] = []
    for groups in of_ranks:
        for position, group in enumerate(groups):
            options = {name: value for name, value in group.items() if name != "params"}
            for there, place in zip(merged, positions, strict=True):
                if place == position and same_options(there, options):
                    there["params"].update(dict.fromkeys(group["params"]))
                    break
            else:
                merged.append({**options, "params": dict.fromkeys(group["params"])})
                positions.append(position)
    return [{**group, "params": list(group["params"])} for group in merged]


def same_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether `options` are those of `group`."""
    names = {name for name in group if name != "params"}
    return names == options.keys() and all(_same(options[name], group[name]) for name in names)


def _same(left: Any, right: Any) -> bool:
    if left is right:  # a NaN is not equal to itself
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)
