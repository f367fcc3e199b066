# SPDX-License-Identifier: Apache-2.0
"""What there is to place: a model's parameters as `ParamSize`s, and one rank's share of them in a `World`. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.memory.arena import round_up
from offstage.modules import layers_of
from offstage.planning.layout import padded_bytes
from offstage.rules.adamw import AdamRule
from offstage.tensors import home_of, local_of

EXPERTS = r"(^|\.)experts(\.|$)"
"""Names of routed experts: ``experts`` between the dots. ``shared_experts`` do not match: every token uses them."""

_INT = frozenset({int})
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""The first number between the dots of a name: the layer's."""
NO_LAYER = -1
"""In `Columns`: the layer of a parameter that is in none, or in several."""


@dataclass(frozen=True)
class ParamSize:
    """One parameter as the planner sees it."""

    name: str
    device: str
    state_bytes: int
    """Bytes of state, without alignment."""
    padded_bytes: int
    """Bytes of state in the arenas or in a slot, with alignment."""
    splits: bool
    """Whether chunks may split it."""
    numel: int = 0
    weight_bytes: int = 0
    """Bytes of the parameter itself, which is on the device; its gradient is as large."""
    expert: bool = False
    """Belongs to a routed expert: `World` divides it differently, and its state moves only if it got a gradient."""
    layer: int | None = dataclasses.field(default=None, compare=False)
    """The number of its layer, if it is in one; known where weights may live on the host (`OffloadConfig.weights`)."""
    has_gradient: bool = False
    """Trained, also if without state."""

    def renamed(self, name: str, *, expert: bool) -> ParamSize:
        """A parameter of the same size. Four times as fast as `dataclasses.replace`: a plan may have a million."""
        made = object.__new__(ParamSize)
        made.__dict__.update(self.__dict__, name=name, expert=expert)
        return made


Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Columns:
    """The numbers of many `ParamSize`s as arrays: a sum over a million of them takes a millisecond."""

    state_bytes: Numbers
    padded_bytes: Numbers
    numel: Numbers
    weight_bytes: Numbers
    splits: Mask
    expert: Mask
    layer: Numbers

    @classmethod
    def of(cls, sizes: Sequence[ParamSize]) -> Columns:
        columns = {}
        for one in dataclasses.fields(cls):
            values: Iterable[int | None] = map(operator.attrgetter(one.name), sizes)
            if one.name == "layer":
                values = (NO_LAYER if layer is None else layer for layer in values)
            is_flag = one.name in ("splits", "expert")
            columns[one.name] = np.fromiter(values, dtype=bool if is_flag else np.int64, count=len(sizes))
        return cls(**columns)

    def summed(self) -> list[ParamSize]:
        """Two parameters as large as all trained ones together: the dense ones, and those of experts."""
        trained = self.state_bytes > 0
        return [
            ParamSize(
                "all",
                "",
                total(self.state_bytes, which),
                total(self.padded_bytes, which),
                splits=True,
                numel=total(self.numel, which),
                weight_bytes=total(self.weight_bytes, which),
                expert=expert,
            )
            for expert, which in ((False, trained & ~self.expert), (True, trained & self.expert))
        ]


def total(numbers: Numbers, which: Mask) -> int:
    """The sum of those that `which` selects."""
    return int(numbers.sum(where=which))


def largest(numbers: Numbers, which: Mask) -> int:
    """The largest that `which` selects; 0 if there is none."""
    return int(numbers.max(where=which, initial=0))


Shape = int | Sequence[int]
Source = nn.Module | Mapping[str, "torch.Tensor | Shape"] | Sequence[ParamSize]
"""What `make_plan` accepts."""


def param_sizes(
    source: Source,
    config: OffloadConfig | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    experts: str = EXPERTS,
) -> list[ParamSize]:
    """The size of each parameter of `source` with the state that AdamW keeps in the formats of `config`.

    `source` is a model (on any device, the meta device too), a state dict, or a mapping from names to shapes or numbers
    of elements, then of `dtype`, in the order of forward. Only shapes and formats are read. `ParamSize`s, for other
    optimizers, are returned as they are. `experts` is a pattern for the names of routed experts. Where `config` moves
    weights, sizes know their layers: the model's, or else those that names number.
    """
    config = config or OffloadConfig()
    rule = AdamRule(config, decoupled=True)
    is_expert = re.compile(experts).search
    if isinstance(source, nn.Module):
        sizes = [_size(name, tensor, rule, bool(is_expert(name))) for name, tensor in source.named_parameters()]
        return _in_layers(sizes, layers_of_model(source)) if config.moves_weights else sizes
    if isinstance(source, Mapping):
        with _collector_paused():
            sizes = list(_of_mapping(source, rule, dtype, is_expert))
        return _in_layers(sizes, _numbered(source)) if config.moves_weights else sizes
    if set(map(type, source)) <= {ParamSize}:
        sizes = list(source)
        known = not config.moves_weights or any(size.layer is not None for size in sizes)
        return sizes if known else _in_layers(sizes, _numbered([size.name for size in sizes]))
    raise ConfigError(
        "make_plan expects a model, a state dict, ParamSizes, or a mapping from names to shapes or numbers of "
        f"elements; found a {type(source).__name__} of {', '.join(sorted({type(one).__name__ for one in source}))}."
        " Pass dict(model.named_parameters()), or {'layers.0.weight': (4096, 4096), ...}."
    )


def _of_mapping(
    source: Mapping[str, torch.Tensor | Shape],
    rule: AdamRule,
    dtype: torch.dtype,
    is_expert: Callable[[str], object],
) -> Iterator[ParamSize]:
    seen = set()
    alike: dict[tuple[object, ...], ParamSize] = {}  # by shape: a million names have few
    for name, given in source.items():
        dims = tuple(given) if type(given) in (tuple, list) else (given,)  # type: ignore[arg-type]
        known = alike.get(dims) if _INT.issuperset(map(type, dims)) else None
        if known is not None:
            yield known.renamed(name, expert=bool(is_expert(name)))
        elif not isinstance(given, torch.Tensor):
            alike[dims] = _size(name, _stand_in(name, given, dtype), rule, bool(is_expert(name)))
            yield alike[dims]
        elif given.is_floating_point():  # integers in a state dict are buffers, which are not trained
            storage = (given.untyped_storage()._cdata, given.storage_offset(), tuple(given.shape))
            if storage not in seen:  # tied parameters appear under two names
                seen.add(storage)
                yield _size(name, given, rule, bool(is_expert(name)))


def _stand_in(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    dims = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if isinstance(shape, bool) or not all(isinstance(dim, int) and dim >= 0 for dim in dims):
        raise ConfigError(
            f"A plan from plain sizes expects a number of elements or a shape for each name; found {shape!r} for "
            f"{name!r}. Write {{{name!r}: (4096, 4096)}}."
        )
    return torch.empty(dims, dtype=dtype, device="meta")


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the search for cycles, which a million new objects without any would set off again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _size(name: str, tensor: torch.Tensor, rule: AdamRule, expert: bool) -> ParamSize:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    device = home_of(tensor)
    tensor = local_of(tensor)  # a plan is for one rank
    keys = () if frozen else rule.keys(tensor, {"amsgrad": False})
    itemsize = {key.name: key.dtype.itemsize for key in keys}
    return ParamSize(
        name,
        str(device),
        state_bytes=tensor.numel() * sum(itemsize.values()),
        padded_bytes=padded_bytes(dict.fromkeys(itemsize, tensor.numel()), itemsize) if itemsize else 0,
        splits=rule.splits(device),
        numel=tensor.numel(),
        weight_bytes=tensor.nbytes,
        expert=expert,
    )


# Layers #


def _in_layers(sizes: Sequence[ParamSize], layer_of: Mapping[str, int]) -> list[ParamSize]:
    return [dataclasses.replace(size, layer=layer_of.get(size.name)) for size in sizes]


def layers_of_model(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter that no other module uses, by name."""
    layers = dict.fromkeys(layers_of(model, None))
    layer_of = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    users: dict[nn.Parameter, set[int | None]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            users.setdefault(param, set()).add(layer_of.get(module))
    found = ((name, users[param]) for name, param in model.named_parameters())
    return {name: layer for name, (layer, *others) in found if layer is not None and not others}


def _numbered(names: Iterable[str]) -> dict[str, int]:
    """The layers of names such as ``layers.3.weight``: those of the list with the most numbers."""
    lists: dict[str, dict[str, int]] = {}
    for name in names:
        if match := _LAYER.search(name):
            lists.setdefault(name[: match.start(1)], {})[name] = int(match[1])
    return max(lists.values(), key=lambda one: len(set(one.values())), default={})


# One rank's share #


@dataclass(frozen=True, eq=False)
class RankShare:
    """One rank's share of a model."""

    sizes: tuple[ParamSize, ...]
    """What this rank updates."""
    weight_bytes: int
    """Weights on its device: more than it updates where ranks divide only the state."""
    gradient_bytes: int
    stage: str
    """The layers of its pipeline stage, in words."""
    columns: Columns = dataclasses.field(repr=False)
    """The numbers of `sizes`."""


@dataclass(frozen=True, kw_only=True)
class World:
    """How ranks divide a model. There are `data` x `tensor` x `pipeline` ranks."""

    data: int = 1
    """Number of ranks that see different data."""
    tensor: int = 1
    """Number of ranks that divide every dense parameter."""
    pipeline: int = 1
    """Number of stages, each of consecutive layers."""
    expert: int = 1
    """Number of ranks, of the data x tensor ranks of a stage, that divide the experts. Each has whole experts."""
    ranks_per_host: int = 1
    """Ranks on one host. Each has a device and a link; they share host memory, its bandwidth and the threads evenly."""
    shard_state: bool = True
    """Ranks with the same weights divide their optimizer state (a distributed optimizer, ZeRO-1 and up, FSDP2)."""
    shard_weights: bool = False
    """Ranks with the same weights divide weights and gradients too (ZeRO-3, FSDP2)."""

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "expert", "ranks_per_host"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"World expects a whole number of at least 1 for {name}; found {value!r}.")
        if self.data * self.tensor % self.expert:
            raise ConfigError(
                f"World expects `expert` to divide the {self.data * self.tensor} ranks of a stage (data x tensor); "
                f"found expert={self.expert}. Use one of its divisors."
            )
        if self.shard_weights and not self.shard_state:
            raise ConfigError(
                "shard_weights=True divides the state too, which contradicts shard_state=False. Leave it out."
            )

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def share_of(self, sizes: Sequence[ParamSize]) -> RankShare:
        """The share of a rank in the stage with the most state. Sizes are rounded up."""
        chosen, stage = self._stage(sizes)
        if self.ranks == self.expert == 1:
            columns = Columns.of(chosen)
            trained = total(columns.weight_bytes, columns.state_bytes > 0)
            return RankShare(tuple(chosen), int(columns.weight_bytes.sum()), trained, stage, columns)
        here, weights, gradients = [], 0, 0
        for size in chosen:
            here.append(_divide(size, self._parts(size, self.shard_state)))
            on_device = -(-size.weight_bytes // self._parts(size, self.shard_weights))
            weights += on_device
            gradients += on_device if size.state_bytes else 0  # frozen parameters get no gradient
        return RankShare(tuple(here), weights, gradients, stage, Columns.of(here))

    def _parts(self, size: ParamSize, sharded: bool) -> int:
        """The number of ranks of a stage that divide `size`."""
        divided = self.expert if size.expert else self.tensor
        return self.data * self.tensor if sharded else divided

    def _stage(self, sizes: Sequence[ParamSize]) -> tuple[Sequence[ParamSize], str]:
        """The pipeline stage with the most state per rank, and its layers in words."""
        if self.pipeline == 1:
            return sizes, ""
        numbers = [int(match[1]) if (match := _LAYER.search(size.name)) else None for size in sizes]
        layers = sorted({number for number in numbers if number is not None})
        if len(layers) < self.pipeline:
            raise ConfigError(
                f"pipeline={self.pipeline} expects names with the numbers of at least as many layers, such as "
                f"'layers.0.weight'; found {len(layers)}. Use fewer stages, or name the layers."
            )
        per_stage = -(-len(layers) // self.pipeline)
        stage_of = {layer: position // per_stage for position, layer in enumerate(layers)}
        first, last = next(i for i, number in enumerate(numbers) if number is not None), stage_of[layers[-1]]
        stages: dict[int, list[ParamSize]] = {}
        for i, (size, number) in enumerate(zip(sizes, numbers, strict=True)):
            # Parameters before the layers belong to the first stage, those after them to the last.
            edge = 0 if i < first else last
            stages.setdefault(edge if number is None else stage_of[number], []).append(size)
        most = max(stages, key=lambda stage: (self._state_bytes(stages[stage]), -stage))
        mine = [layer for layer in layers if stage_of[layer] == most]
        return stages[most], f"layers {mine[0]} to {mine[-1]}"

    def _state_bytes(self, sizes: Sequence[ParamSize]) -> float:
        return sum(size.state_bytes / self._parts(size, self.shard_state) for size in sizes)


def _divide(size: ParamSize, parts: int) -> ParamSize:
    if parts == 1:
        return size
    state = -(-size.state_bytes // parts)
    padded = -(-size.padded_bytes // parts)
    return ParamSize(
        size.name,
        size.device,
        state_bytes=state,
        padded_bytes=round_up(max(state, padded)),
        splits=size.splits,
        numel=-(-size.numel // parts),
        weight_bytes=-(-size.weight_bytes // parts),
        expert=size.expert,
        layer=size.layer,
    )
