# SPDX-License-Identifier: Apache-2.0
"""What there is to place: a model's parameters as `ParamSize`s, and one rank's share of them in a `World`. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.memory.arena import round_up
from offstage.planning.layout import padded_bytes
from offstage.rules.adamw import AdamRule
from offstage.tensors import local_of

EXPERTS = r"(^|\.)experts(\.|$)"
"""Names of routed experts: ``experts`` between the dots. ``shared_experts`` do not match: every token uses them."""

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""The first number between the dots of a name: the layer's."""


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
    optimizers, are returned as they are. `experts` is a pattern for the names of routed experts.
    """
    if isinstance(source, nn.Module):
        named: Iterable[tuple[str, torch.Tensor]] = source.named_parameters()
    elif isinstance(source, Mapping):
        named = _of_mapping(source, dtype)
    elif all(isinstance(size, ParamSize) for size in source):
        return list(source)
    else:
        raise ConfigError(
            "make_plan expects a model, a state dict, ParamSizes, or a mapping from names to shapes or numbers of "
            f"elements; found a {type(source).__name__} of {', '.join(sorted({type(one).__name__ for one in source}))}."
            " Pass dict(model.named_parameters()), or {'layers.0.weight': (4096, 4096), ...}."
        )
    rule = AdamRule(config or OffloadConfig(), decoupled=True)
    return [_size(name, tensor, rule, bool(re.search(experts, name))) for name, tensor in named]


def _of_mapping(source: Mapping[str, torch.Tensor | Shape], dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
    seen = set()
    for name, given in source.items():
        if not isinstance(given, torch.Tensor):
            yield name, _stand_in(name, given, dtype)
        elif given.is_floating_point():  # integers in a state dict are buffers, which are not trained
            storage = (given.untyped_storage()._cdata, given.storage_offset(), tuple(given.shape))
            if storage not in seen:  # tied parameters appear under two names
                seen.add(storage)
                yield name, given


def _stand_in(name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if isinstance(shape, bool) or not all(isinstance(dim, int) and dim >= 0 for dim in dims):
        raise ConfigError(
            f"A plan from plain sizes expects a number of elements or a shape for each name; found {shape!r} for "
            f"{name!r}. Write {{{name!r}: (4096, 4096)}}."
        )
    return torch.empty(dims, dtype=dtype, device="meta")


def _size(name: str, tensor: torch.Tensor, rule: AdamRule, expert: bool) -> ParamSize:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    tensor = local_of(tensor)  # a plan is for one rank
    keys = () if frozen else rule.keys(tensor, {"amsgrad": False})
    itemsize = {key.name: key.dtype.itemsize for key in keys}
    return ParamSize(
        name,
        str(tensor.device),
        state_bytes=tensor.numel() * sum(itemsize.values()),
        padded_bytes=padded_bytes(dict.fromkeys(itemsize, tensor.numel()), itemsize) if itemsize else 0,
        splits=rule.splits(tensor.device),
        numel=tensor.numel(),
        weight_bytes=tensor.nbytes,
        expert=expert,
    )


# One rank's share #


@dataclass(frozen=True)
class RankShare:
    """One rank's share of a model."""

    sizes: tuple[ParamSize, ...]
    """What this rank updates."""
    weight_bytes: int
    """Weights on its device: more than it updates where ranks divide only the state."""
    gradient_bytes: int
    stage: str = ""
    """The layers of its pipeline stage, in words."""


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
        here, weights, gradients = [], 0, 0
        for size in chosen:
            here.append(_divide(size, self._parts(size, self.shard_state)))
            on_device = -(-size.weight_bytes // self._parts(size, self.shard_weights))
            weights += on_device
            gradients += on_device if size.state_bytes else 0  # frozen parameters get no gradient
        return RankShare(tuple(here), weights, gradients, stage)

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
    return dataclasses.replace(
        size,
        state_bytes=state,
        padded_bytes=round_up(max(state, padded)),
        numel=-(-size.numel // parts),
        weight_bytes=-(-size.weight_bytes // parts),
    )
