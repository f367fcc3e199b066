# SPDX-License-Identifier: Apache-2.0
"""The catalogue: what of a model and its optimizer a checkpoint holds, and where each element is. Used by `saving.py`.

Names are those of `torch.distributed.checkpoint` for `{"model": get_model_state_dict(model), "optim":
get_optimizer_state_dict(model, optimizer)}`, so that either can load what the other has saved. Nothing is read here,
and nothing asked of other ranks: shapes and offsets come from meshes and placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from offstage.checkpoint.fused import Fused, Splitter, fused_parts, split_name
from offstage.checkpoint.names import clean_name, named_parameters
from offstage.checkpoint.objects import pickled, unpickled
from offstage.checkpoint.parts import Box, Part, whole
from offstage.checkpoint.readers import Joined, Kept, Line, Plain, Unsigned, Widened, Zeros
from offstage.engine.snapshot import Snapshot
from offstage.errors import ConfigError
from offstage.memory.arena import ALIGN_BYTES, Arena
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from offstage.rules.rule import MASTER_KEY, MASTER_LOW_KEY, ParamState
from offstage.tensors import as_param, flat_like, local_box, local_of, reshard

MODEL, OPTIM, GROUPS, EXTRA = "model", "optim", "optim.param_groups", "extra"


@dataclass(frozen=True)
class Entry:
    """A tensor, or this rank's part of one, that is saved under one name."""

    part: Part
    dtype: torch.dtype
    line: Line


@dataclass
class Catalogue:
    """What one rank saves."""

    entries: list[Entry] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Everything that is no tensor, as `torch.save` writes it: a later change of the object does not count."""
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Where in the nested state dict each name belongs, as `torch.distributed.checkpoint` notes it."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's parameter groups, with parameters by name."""
    scalars: dict[str, list[tuple[Box, dict[str, Any]]]] = field(default_factory=dict)
    """What is kept once per parameter, for each of this rank's boxes of a saved name. Ranks may differ where experts
    are on a mesh of their own."""
    fillers: dict[str, tuple[str, list[Box]]] = field(default_factory=dict)
    """Entries for state that this rank has not: the saved name of the parameter, and the boxes without any state."""

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
        self.named = dict(named_parameters(model))
        self.name_of = {param: name for name, param in self.named.items()}
        self._fused = {
            name: fused for name, param in self.named.items() if (fused := splitter(name, param)) is not None
        }
        self._check_names({clean_name(model, name) for name, _ in model.named_buffers()})

    def _check_names(self, buffers: set[str]) -> None:
        """Raise if two things would be saved under one name."""
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
        """The parts of `tensor`, a parameter or something of its shape, under the names of its parameter."""
        part = part_of(name, tensor)
        fused = self.fused(name)
        return [part] if fused is None else fused_parts(name, fused, part)


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """What this rank has of `tensor`, in the order of its own memory."""
    local = local_of(tensor)
    offset, size = local_box(tensor)
    strides = as_param(torch.empty(local.numel(), device="meta"), local.to("meta")).stride()
    return whole(name, tuple(tensor.shape), Box(offset, size), strides)


def catalogue_of(
    model: nn.Module,
    optimizer: OffloadedOptimizer | None,
    extra: Mapping[str, Any],
    splitter: Splitter,
    staging: Staging,
) -> Catalogue:
    """Everything to save. `staging` decides what is copied now and what is read later."""
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
    """How tensors outside the arenas are read: where they are, because nothing changes until the save is over."""

    nbytes = 0

    def line(self, flat: torch.Tensor) -> Line:
        """The line of a tensor that training may overwrite."""
        return Plain(flat)

    def kept(self, held: ParamState, key: str) -> Line:
        """The line of state that lives in an arena."""
        return Plain(held.raw(key))


class CountingStaging(Staging):
    """Adds up what `SnapshotStaging` will copy."""

    def __init__(self) -> None:
        self.needed: dict[torch.device, int] = {}
        self._seen: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def line(self, flat: torch.Tensor) -> Line:
        if self._seen.setdefault(_identity(flat), flat) is flat:  # tied weights have two names; it keeps its address
            self.needed[flat.device] = self.needed.get(flat.device, 0) + _padded(flat.nbytes)
        return Plain(flat)


class SnapshotStaging(Staging):
    """For a save that goes on while training does: arenas are read through snapshots, all else is copied now."""

    def __init__(self, snapshots: Mapping[int, Snapshot], needed: Mapping[torch.device, int], *, pin: bool) -> None:
        """`snapshots` by the identity of the host state they are of; `needed` bytes of copies from each device."""
        self._snapshots = snapshots
        # Unlike torch's own pinned memory it is exact, and fast to get.
        self._arenas = {device: Arena(nbytes, torch.uint8, device, pin=pin) for device, nbytes in needed.items()}
        self._room = {device: arena.flat for device, arena in self._arenas.items()}
        self.nbytes = sum(arena.nbytes for arena in self._arenas.values())
        self._copies: dict[tuple[int, int, torch.dtype], Line] = {}
        self._sources: list[torch.Tensor] = []
        """Kept until the copies are made: until then nothing else may have their addresses."""

    def line(self, flat: torch.Tensor) -> Line:
        key = _identity(flat)
        if key not in self._copies:
            room = self._room[flat.device]
            copy, self._room[flat.device] = room[: flat.nbytes].view(flat.dtype), room[_padded(flat.nbytes) :]
            copy.copy_(flat, non_blocking=True)
            self._copies[key] = Plain(copy)
            self._sources.append(flat)
        return self._copies[key]

    def settle(self) -> None:
        """Return when the copies are made."""
        for device in {source.device for source in self._sources} - {torch.device("cpu")}:
            torch.accelerator.current_stream(device).synchronize()
        self._sources.clear()
        self._copies.clear()

    def close(self) -> None:
        """Give the copies' memory back: the save is over."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self._room.clear()

    def kept(self, held: ParamState, key: str) -> Line:
        assert held.home is not None
        if id(held.home) not in self._snapshots:
            raise ConfigError(
                "async_save() expects an optimizer that trains on, and reads its state meanwhile; found one that was "
                "closed. Use save()."
            )
        return Kept(self._snapshots[id(held.home)], held.index, key)


def _add_model(catalogue: Catalogue, model: nn.Module, layouts: Layouts, staging: Staging) -> dict[str, Line]:
    """Parameters and buffers; returns the lines of the parameters."""
    lines: dict[str, Line] = {}
    for name, value in get_model_state_dict(model).items():
        if not isinstance(value, torch.Tensor):
            catalogue.add_object((MODEL, name), value)
            continue
        local = local_of(value)
        line = lines[name] = staging.line(flat_like(local, local))
        for part in layouts.parts(name, value):
            renamed = _renamed(part, f"{MODEL}.{part.name}")
            catalogue.add(Entry(renamed, value.dtype, line), (MODEL, part.name))
    return lines


def _add_optimizer(
    catalogue: Catalogue,
    optimizer: OffloadedOptimizer,
    layouts: Layouts,
    weights: Mapping[str, Line],
    staging: Staging,
) -> None:
    for held in runtime_of(optimizer).all_states():
        name = name_in(layouts, held)
        lines = state_lines(held, weights[name], staging)
        for shaped in (key for key in held.keys if key.shape is not None and key.name in held.present):
            assert shaped.shape is not None
            value = held.raw(shaped.name).view(shaped.shape)
            path: tuple[str, ...] = (OPTIM, "state", name, shaped.name)
            catalogue.add(_entry(part_of(".".join(path), value), value, staging), path)
        parts = layouts.parts(name, held.param)
        for key, (line, dtype) in lines.items():
            for part in parts:
                renamed = _renamed(part, f"{OPTIM}.state.{part.name}.{key}")
                catalogue.add(Entry(renamed, dtype, line), (OPTIM, "state", part.name, key))
                if not held.present or isinstance(line, Zeros):
                    _, absent = catalogue.fillers.setdefault(renamed.name, (part.name, []))
                    absent += [] if held.present else [part.box]
        numbers = {key: _number(value) for key, value in held.scalars.items()}
        for part in parts if numbers else ():
            catalogue.scalars.setdefault(part.name, []).append((part.box, numbers))
    for group in optimizer.param_groups:
        names = [
            saved
            for p in group["params"]
            for saved in layouts.saved_names(name_in(layouts, runtime_of(optimizer).state_of(p)))
        ]
        options = {option: value for option, value in group.items() if option not in ("params", "param_names")}
        for option, value in options.items():
            options[option] = unpickled(pickled(f"param_groups: {option}", value))  # a scheduler may write to it later
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


def state_lines(held: ParamState, weight: Line, staging: Staging) -> dict[str, tuple[Line, torch.dtype]]:
    """The state of one parameter under its public names.

    What a shard has not yet is saved as zeros: other ranks may have it for theirs, and a tensor is saved whole.
    """
    present, is_shard = held.present, held.local is not held.param
    if not present and not is_shard:
        return {}
    kept = {key.name: _kept(held, key.name, key.dtype, staging) for key in held.keys if key.shape is None}
    lines: dict[str, tuple[Line, torch.dtype]] = {}
    for key in (key for key in held.keys if key.shape is None):
        if key.name == MASTER_LOW_KEY:
            ours = MASTER_LOW_KEY in present and held.rule.wrote(held, flat_like(held.local, held.local))
            squares = kept["exp_avg_sq"]
            lines[MASTER_KEY] = (Joined(weight, kept[key.name], squares) if ours else Widened(weight)), torch.float32
        elif key.name == MASTER_KEY and MASTER_KEY not in present:
            lines[MASTER_KEY] = Widened(weight), torch.float32
        elif key.name in present or is_shard:
            split = key.name == "exp_avg_sq" and MASTER_LOW_KEY in kept
            lines[key.name] = (Unsigned(kept[key.name]) if split else kept[key.name]), key.dtype
    return lines


def _number(value: Any) -> Any:
    """A 0-d tensor as a number and its dtype; ranks tell these to each other."""
    return (value.item(), value.dtype) if isinstance(value, torch.Tensor) else (value, None)


def _identity(flat: torch.Tensor) -> tuple[int, int, torch.dtype]:
    return flat.data_ptr(), flat.numel(), flat.dtype


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _kept(held: ParamState, key: str, dtype: torch.dtype, staging: Staging) -> Line:
    if key not in held.present:
        return Zeros(dtype)
    return staging.line(held.raw(key)) if held.home is None else staging.kept(held, key)


def _entry(part: Part, value: torch.Tensor, staging: Staging) -> Entry:
    local = local_of(value)
    return Entry(part, value.dtype, staging.line(flat_like(local, local)))


def _renamed(part: Part, name: str) -> Part:
    return Part(name, part.shape, part.box, part.start, part.strides)


def _leaves(path: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The values of nested dicts and their paths; a list is one value, and so is a dict that is empty or of numbers."""
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


def merged_groups(everyone: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The parameter groups of all ranks: those with the same position and options are one, whoever holds its parts."""
    merged: list[dict[str, Any]] = []
    positions: list[int] = []
    for groups in everyone:
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
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return left is right or bool(left == right)  # a NaN is not equal to itself
