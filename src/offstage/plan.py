# SPDX-License-Identifier: Apache-2.0
"""Which parameter's state lives where. Pure: sizes and configuration in, plan out, the same answer every time."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from offstage.config import OffloadConfig, format_size
from offstage.errors import ConfigError, OffloadIneffectiveError


class Placement(enum.Enum):
    """Where a parameter's state lives and is updated."""

    RESIDENT = "resident"  # lives and updates on the device
    STREAMED = "streamed"  # lives on the host, updates on the device


@dataclass(frozen=True)
class ParamSize:
    """A parameter as the planner sees it."""

    name: str
    device: str
    state_bytes: int
    """Bytes of state, without alignment."""
    padded_bytes: int
    """The same with alignment: what it takes in the arenas or in a slot."""
    splits: bool
    """Whether chunks may split it."""


@dataclass(frozen=True)
class Plan:
    """The placement of every parameter, and the slots. Printable; equal for equal input."""

    sizes: tuple[ParamSize, ...]
    placements: tuple[Placement, ...]
    slots: int
    chunk_bytes: int
    slot_bytes: int
    """At most this much per slot: `chunk_bytes`, the largest unsplittable parameter, or all there is."""

    def bytes_of(self, placement: Placement) -> int:
        return sum(s.state_bytes for s, p in zip(self.sizes, self.placements, strict=True) if p is placement)

    @property
    def host_bytes(self) -> int:
        return sum(s.padded_bytes for s, p in zip(self.sizes, self.placements, strict=True) if p is Placement.STREAMED)

    @property
    def device_bytes(self) -> int:
        """State on the device: resident state and slots."""
        return self.bytes_of(Placement.RESIDENT) + self.slots * self.slot_bytes

    def summary(self) -> str:
        """One line, for `repr(optimizer)` and logs."""
        count = {p: self.placements.count(p) for p in Placement}
        return (
            f"state: {format_size(self.bytes_of(Placement.RESIDENT))} resident ({count[Placement.RESIDENT]} parameters)"
            f", {format_size(self.bytes_of(Placement.STREAMED))} streamed ({count[Placement.STREAMED]}) through "
            f"{self.slots} slots of {format_size(self.slot_bytes)}"
        )

    def __str__(self) -> str:
        rows = [f"{'parameter':<40} {'state':>12}  placement"]
        for size, placement in zip(self.sizes, self.placements, strict=True):
            rows.append(f"{size.name:<40} {format_size(size.state_bytes):>12}  {placement.value}")
        return "\n".join([*rows, self.summary()])


def plan_placements(sizes: Sequence[ParamSize], config: OffloadConfig) -> Plan:
    """Decide, for one device, which parameters stay: the small ones, then the first ones as far as they may.

    The first layers' state is the best to keep: their gradients come last in backward and their weights are needed
    first in the next forward.
    """
    chunk_bytes = int(config.chunk_bytes)
    everything = sum(size.state_bytes for size in sizes)
    off = config.fraction == 0.0 or everything == 0
    small = {i for i, size in enumerate(sizes) if size.state_bytes < max(1, int(config.min_bytes))}
    candidates = [] if off else [i for i in range(len(sizes)) if i not in small]
    slot_bytes = _slot_bytes([sizes[i] for i in candidates], chunk_bytes)
    room = _room_for_resident(sizes, small, slot_bytes, everything, config)
    resident = set(range(len(sizes))) - set(candidates)
    used = sum(sizes[i].state_bytes for i in resident)
    for i in candidates:
        if used + sizes[i].state_bytes <= room:
            resident.add(i)
            used += sizes[i].state_bytes
    streamed = [size for i, size in enumerate(sizes) if i not in resident]
    placements = tuple(Placement.RESIDENT if i in resident else Placement.STREAMED for i in range(len(sizes)))
    slots = config.slots if streamed else 0
    plan = Plan(tuple(sizes), placements, slots, chunk_bytes, _slot_bytes(streamed, chunk_bytes))
    _refuse_idle(plan, config, off=config.fraction == 0.0, everything=everything)
    return plan


def _slot_bytes(streamed: Sequence[ParamSize], chunk_bytes: int) -> int:
    largest_whole = max((size.padded_bytes for size in streamed if not size.splits), default=0)
    return max(largest_whole, min(chunk_bytes, sum(size.padded_bytes for size in streamed)))


def _room_for_resident(
    sizes: Sequence[ParamSize], small: set[int], slot_bytes: int, everything: int, config: OffloadConfig
) -> float:
    """How many bytes of state may stay resident, small parameters included."""
    wanted = (1.0 - config.fraction) * everything if config.fraction is not None else 0.0
    if config.device_budget is None:
        return wanted
    budget = int(config.device_budget)
    if everything <= budget and config.fraction is None:
        return everything
    staging = config.slots * slot_bytes
    kept = sum(sizes[i].state_bytes for i in small)
    need = staging + kept
    if need > budget:
        raise ConfigError(
            f"device_budget of {format_size(budget)} cannot hold {config.slots} slots of {format_size(slot_bytes)} "
            f"and {format_size(kept)} of small parameters' state. Raise it to {format_size(need)}, or lower "
            "chunk_bytes or slots."
        )
    if config.fraction is None:
        return budget - staging
    if wanted + staging > budget:
        raise ConfigError(
            f"fraction={config.fraction} keeps {format_size(wanted)} of state on the device, which with {config.slots} "
            f"slots of {format_size(slot_bytes)} contradicts device_budget={format_size(budget)}. Raise device_budget "
            f"to {format_size(wanted + staging)}, raise fraction, or leave one of the two out."
        )
    return wanted


def _refuse_idle(plan: Plan, config: OffloadConfig, *, off: bool, everything: int) -> None:
    """Asked to offload, nothing to offload: say so now rather than after a week."""
    if off or Placement.STREAMED in plan.placements:
        return
    if config.fraction is None and config.device_budget is not None and 0 < everything <= int(config.device_budget):
        return  # the budget is met by keeping everything
    if everything == 0:
        reason = "this optimizer keeps no state (SGD without momentum?). Use it without offstage, or with momentum."
    else:
        largest = max(size.state_bytes for size in plan.sizes)
        reason = (
            f"the largest parameter has {format_size(largest)} of state, less than min_bytes="
            f"{format_size(int(config.min_bytes))}. Lower min_bytes (0 offloads everything), or use fraction=0.0."
        )
    raise OffloadIneffectiveError(f"Nothing would be offloaded: {reason}")
