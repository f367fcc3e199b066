# SPDX-License-Identifier: Apache-2.0
"""`Job`: a model's parts, the loop that trains it and the machine; `Setting`: one way to run it. Numbers only.

A part is what lies before the layers, one layer, or what lies behind them. Forward passes the parts upwards, backward
downwards. State stays on the device for the first parts, whose gradients come last and whose weights are needed first;
weights live on the host for the last layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offstage.config import OffloadConfig
from offstage.planning.choices import Choice
from offstage.planning.host_weights import LAYERS_ON_DEVICE
from offstage.planning.loop import Loop
from offstage.planning.machine import Machine
from offstage.planning.plan import slot_bytes_for
from offstage.planning.predict import Rates, rates_of
from offstage.planning.sizes import ParamSize


@dataclass(frozen=True)
class Part:
    """The parameters of one part: bytes, if not said otherwise."""

    weights: int = 0
    movable: int = 0
    """Of them, what may live on the host."""
    trained: int = 0
    """Weights that get gradients."""
    state: int = 0
    small: int = 0
    """State of parameters that stay resident in any case."""
    params: int = 0
    """Elements that are trained."""
    sizes: tuple[int, ...] = ()
    """State of each parameter that may leave, in order."""

    @classmethod
    def of(cls, sizes: Sequence[ParamSize], min_bytes: int, *, is_layer: bool) -> Part:
        trained = [size for size in sizes if size.state_bytes or size.has_gradient]
        leaving = [size for size in trained if size.state_bytes >= max(1, min_bytes)]
        return cls(
            weights=sum(size.weight_bytes for size in sizes),
            movable=sum(size.weight_bytes for size in sizes if size.weight_bytes >= max(1, min_bytes)) * is_layer,
            trained=sum(size.weight_bytes for size in trained),
            state=sum(size.state_bytes for size in trained),
            small=sum(size.state_bytes for size in trained) - sum(size.state_bytes for size in leaving),
            params=sum(size.numel for size in trained),
            sizes=tuple(size.state_bytes for size in leaving),
        )


def part_numbers(sizes: Sequence[ParamSize], num_layers: int) -> list[int]:
    """Of each parameter: 0 lies before the layers, 1 is the first layer, the last one lies behind them."""
    positions = [i for i, size in enumerate(sizes) if size.layer is not None]
    first = positions[0] if positions else len(sizes)
    return [
        1 + size.layer if size.layer is not None else 0 if i < first else num_layers + 1 for i, size in enumerate(sizes)
    ]


def parts_of(sizes: Sequence[ParamSize], num_layers: int, min_bytes: int) -> tuple[Part, ...]:
    """What lies before the layers, each of `num_layers` layers, and what lies behind them."""
    members: list[list[ParamSize]] = [[] for _ in range(num_layers + 2)]
    for size, number in zip(sizes, part_numbers(sizes, num_layers), strict=True):
        members[number].append(size)
    return tuple(Part.of(found, min_bytes, is_layer=0 < number <= num_layers) for number, found in enumerate(members))


@dataclass(frozen=True)
class Setting:
    """One way to run a job: everything that is decided."""

    choices: tuple[Choice, ...]
    """Of each layer."""
    resident: int = 0
    """How many of the parameters whose state may leave keep it on the device: the first ones."""
    hosted: int = 0
    """How many layers' weights live on the host: the last ones."""
    host_share: float = 0.0
    """The share that the CPU updates, of the state that leaves."""
    overlap_forward: bool = False
    update_in_backward: bool = False

    @property
    def kind(self) -> str:
        """Settings of one kind are mispredicted alike."""
        names = {
            "overlap_forward": self.overlap_forward,
            "update_in_backward": self.update_in_backward,
            "update_on='host'": self.host_share > 0.0,
            "weights='host'": self.hosted > 0,
        }
        return ", ".join(name for name, is_on in names.items() if is_on) or "in step()"

    @property
    def memory_kind(self) -> str:
        """Settings of one such kind have the same things on the device at their peak."""
        # Those that are on the device at once are as many in all jobs with that many layers, or more, on the host.
        hosted = min(self.hosted, LAYERS_ON_DEVICE)
        where = f"weights of {hosted} or more layers on the host" if hosted else "weights on the device"
        return f"{where}, updates in backward" if self.update_in_backward else where


@dataclass(frozen=True, eq=False)
class Job:
    """What is to be run, and where."""

    sizes: tuple[ParamSize, ...]
    """Of the parameters, in the order of `param_groups`; they know their layers."""
    loop: Loop
    machine: Machine
    config: OffloadConfig
    """Formats and sizes of chunks: what is not decided here."""
    threads: int | None = None
    """For updates by the CPU; `None`: all that there are."""
    may_host_weights: bool = True
    may_update_on_host: bool = True
    may_overlap_forward: bool = True
    may_update_in_backward: bool = True
    may_offload_activations: bool = True
    may_move_state: bool = True
    """Otherwise all state streams: the host has no room for it twice while it moves."""
    notes: tuple[str, ...] = ()
    """What cannot be used, and why."""
    unseen_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """What the device had at its peak beyond what was predicted, by what lives where and is updated when."""
    slowdowns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Measured iterations over predicted ones, by the kind of setting that was measured."""
    watched_kind: str | None = None
    """The `memory_kind` of which so far only the watched iterations are known."""

    @property
    def num_layers(self) -> int:
        return len(self.loop.layers)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.sizes, self.num_layers, int(self.config.min_bytes))

    @functools.cached_property
    def rates(self) -> Rates:
        params = max(1, sum(part.params for part in self.parts))
        per_param = (2 * sum(part.state for part in self.parts) + 3 * sum(part.trained for part in self.parts)) / params
        return rates_of(self.machine, self.machine.ranks_on_host, self.threads, max(1.0, per_param))

    @functools.cached_property
    def state(self) -> int:
        """Of all parameters."""
        return sum(part.state for part in self.parts)

    @functools.cached_property
    def most_resident(self) -> int:
        """How many parameters have state that may leave."""
        return len(self._leaving)

    @functools.cached_property
    def largest_whole(self) -> int:
        """State of the largest parameter that chunks do not split."""
        return max((size.padded_bytes for size in self.sizes if not size.splits), default=0)

    @functools.cached_property
    def largest_gradient(self) -> int:
        """Of a layer's parameters."""
        trained = (size for size in self.sizes if size.state_bytes or size.has_gradient)
        return max((size.weight_bytes for size in trained if size.layer is not None), default=0)

    def unseen_of(self, setting: Setting) -> int:
        """What was measured for its kind. Other kinds are half as wrong as the worst of those that were measured.

        What the watched iterations took less than predicted is taken off by half where layers keep their tensors: there
        none did.
        """
        worst = max(self.unseen_bytes.values(), default=0)
        found = self.unseen_bytes.get(setting.memory_kind, max(0, worst) // 2)
        is_alike = setting.memory_kind != self.watched_kind or Choice.KEEP not in setting.choices
        return found if found >= 0 or is_alike else found // 2

    def slowdown_of(self, setting: Setting) -> float:
        """What was measured for its kind. Other kinds are half as wrong as those that were measured are on average."""
        if not self.slowdowns:
            return 1.0
        mean = sum(self.slowdowns.values()) / len(self.slowdowns)
        return self.slowdowns.get(setting.kind, (1.0 + mean) / 2)

    @functools.cached_property
    def _leaving(self) -> list[tuple[int, int]]:
        """Of each parameter whose state may leave, in order: its part, and that state."""
        numbers, least = part_numbers(self.sizes, self.num_layers), max(1, int(self.config.min_bytes))
        found = zip(numbers, self.sizes, strict=True)
        return [(number, size.state_bytes) for number, size in found if size.state_bytes >= least]

    def resident_below(self, hosted: int) -> int:
        """How many of them come before the first one of a layer whose weights live on the host."""
        first = 1 + self.num_layers - hosted
        away = (i for i, (number, _) in enumerate(self._leaving) if first <= number <= self.num_layers)
        return next(away, self.most_resident)

    def resident_bytes(self, resident: int) -> list[int]:
        """State of each part that stays on the device, if so many of the parameters keep theirs that may leave."""
        if resident not in self._kept:
            found = [part.small for part in self.parts]
            for number, nbytes in self._leaving[:resident]:
                found[number] += nbytes
            self._kept[resident] = found
        return self._kept[resident]

    @functools.cached_property
    def _kept(self) -> dict[int, list[int]]:
        """What `resident_bytes` has found."""
        return {}

    @functools.cached_property
    def _streaming_configs(self) -> tuple[OffloadConfig, OffloadConfig]:
        """With all weights on the device, and with some on the host: chunks differ."""
        plain = dataclasses.replace(self.config, weights="device")
        return plain, dataclasses.replace(plain, weights="host")

    def streaming_config(self, setting: Setting) -> OffloadConfig:
        return self._streaming_configs[bool(setting.hosted)]

    def slot_bytes(self, setting: Setting, streamed: float) -> int:
        """The size of a slot if so much state streams."""
        return slot_bytes_for(streamed, self.largest_whole, self.streaming_config(setting)) if streamed else 0

    # As settings #

    def overrides(self, setting: Setting) -> dict[str, object]:
        """The fields of `OffloadConfig` that make `setting`."""
        kept = sum(self.resident_bytes(setting.resident))
        if kept >= self.state and not setting.hosted:
            return {
                "fraction": 0.0,
                "device_budget": None,
                "weights": "device",
                "update_on": "device",
                "host_fraction": None,
                "threads": None,
                "slots": self.config.slots,
                "overlap_forward": False,
                "update_in_backward": False,
            }
        # Half a byte more than what stays: a share is not exact, and no parameter is as small.
        return {
            "fraction": 1.0 if kept >= self.state else max(0.0, 1.0 - (kept + 0.5) / self.state),
            "device_budget": None,
            "weights": self._weights_share(setting.hosted),
            "update_on": "device" if not setting.host_share else "host" if setting.host_share == 1.0 else "auto",
            "host_fraction": setting.host_share if 0.0 < setting.host_share < 1.0 else None,
            "threads": self.threads if setting.host_share else None,
            "slots": self.config.slots if setting.host_share < 1.0 else None,
            "overlap_forward": setting.overlap_forward,
            "update_in_backward": setting.update_in_backward,
        }

    def _weights_share(self, hosted: int) -> str | float:
        layers = self.parts[1:-1]
        everything = sum(part.movable for part in layers)
        stays = sum(part.movable for part in layers[: len(layers) - hosted])
        if not hosted or stays >= everything:
            return "device"
        return 1.0 - (stays + 0.5) / everything if stays else "host"
