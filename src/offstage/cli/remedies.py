# SPDX-License-Identifier: Apache-2.0
"""What would fit, where a plan does not: other settings, more devices, another machine. Each has been planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from offstage import ConfigError, HostMemoryError, Machine, OffloadConfig, Workload, World, make_plan
from offstage.planning.presets import MACHINES, Preset
from offstage.planning.sizes import Source

_FORMATS = (
    {"master_weights": "split"},
    {"master_weights": "split", "state_dtype": "bfloat16"},
)
_BUDGET = 0.9
"""Of the device's memory, for a budget."""
_MOST_DEVICES = 64


@dataclasses.dataclass(frozen=True)
class Asked:
    """What `make_plan` was asked."""

    sizes: Source
    machine: Machine
    config: OffloadConfig
    world: World
    workload: Workload | None

    def fits(self) -> bool:
        """Whether there is a plan that gets through all iterations, the first one too."""
        try:
            plan = make_plan(self.sizes, self.machine, self.config, world=self.world, workload=self.workload)
        except (ConfigError, HostMemoryError):
            return False
        return not any("more than the device's" in note for note in plan.notes)  # of the first iteration's peak


def what_fits(asked: Asked, preset: Preset | None) -> str:
    """The end of a message about a plan that does not fit: flags with which one does. Empty if none was found."""
    found = [*_settings(asked), *_devices(asked, preset), *(_machines(asked) if preset else ())]
    known = asked.workload is not None and asked.workload.other_bytes
    counted = "" if known else " (activations are not counted: give their bytes with --workload.other-bytes)"
    return f" Each of these would fit{counted}: {', or '.join(found)}." if found else ""


def _settings(asked: Asked) -> Iterator[str]:
    """More state on the device; weights on the host; each with the first change of formats that is enough."""
    most = int(_BUDGET * asked.machine.device_bytes) >> 30
    if asked.config.device_peak is None and asked.config.device_budget is None and most:
        yield from _changed(asked, f"--budget {most}GiB", {"device_peak": most << 30})
    yield from _first(asked, "", {}, _FORMATS)
    if not asked.config.moves_weights:
        yield from _first(asked, "--weights host", {"weights": "host"}, ({}, *_FORMATS))


def _first(asked: Asked, flag: str, change: Mapping[str, object], formats: Sequence[Mapping[str, object]]) -> list[str]:
    """`flag`, which makes `change`, with the first of `formats` with which that is enough."""
    for also in formats:
        words = [flag] * bool(flag) + [f"--offload.{name.replace('_', '-')} {value}" for name, value in also.items()]
        if found := list(_changed(asked, " ".join(words), {**change, **also})):
            return found
    return []


def _changed(asked: Asked, words: str, changes: Mapping[str, object]) -> Iterator[str]:
    """`words` if `changes` are enough."""
    try:
        config = OffloadConfig.build(asked.config, changes)
    except ConfigError:  # they contradict another setting
        return
    if config != asked.config and dataclasses.replace(asked, config=config).fits():
        yield words


def _devices(asked: Asked, preset: Preset | None) -> Iterator[str]:
    """The fewest devices, a power of two, if they divide weights and state."""
    world = asked.world
    if world.tensor * world.pipeline > 1 or not world.shard_state:
        return
    data, most = 2 * world.data, preset.host.devices if preset else 8
    while data <= _MOST_DEVICES:
        ranks = min(data, most)
        more = dataclasses.replace(world, data=data, ranks_per_host=ranks, shard_weights=True)
        machine = preset.machine(ranks) if preset else asked.machine
        if dataclasses.replace(asked, world=more, machine=machine).fits():
            yield f"--devices {data}"
            return
        data *= 2


def _machines(asked: Asked) -> Iterator[str]:
    """The one with the least device memory."""
    for preset in MACHINES.values():
        machine = preset.machine(min(asked.world.ranks_per_host, preset.host.devices))
        if dataclasses.replace(asked, machine=machine).fits():
            yield f"--machine {preset.name}"
            return
