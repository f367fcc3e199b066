# SPDX-License-Identifier: Apache-2.0
"""`replan`: move all state to another plan between two steps, bit for bit. Behind `OffloadedOptimizer.replan`.

The new places are built and filled next to the old ones, parameter by parameter, and taken into use when everything is
there: whatever fails before leaves the optimizer as it was. Resident state that stays resident is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offstage.config import OffloadConfig, format_size, parse_size
from offstage.errors import ConfigError
from offstage.optimizer.places import Places
from offstage.planning.group_slots import with_slots

if TYPE_CHECKING:
    from offstage.optimizer.optimizer import OffloadedOptimizer

_MAY_CHANGE = frozenset(
    {
        "fraction",
        "device_budget",
        "host_budget",
        "min_bytes",
        "update_on",
        "host_fraction",
        "threads",
        "chunk_bytes",
        "slots",
        "pin_memory",
    }
)


def replanned_config(optimizer: OffloadedOptimizer, changes: Mapping[str, Any]) -> OffloadConfig:
    """The config with `changes`; raises for what cannot be changed in the middle of training."""
    config, changes = optimizer.config, dict(changes)
    if changes.get("device_peak") is not None and config.window != "auto":
        changes["device_budget"] = budget_under(parse_size(changes.pop("device_peak"), "device_peak"), optimizer)
    built = OffloadConfig.build(config, _complete(config, changes))
    fixed = sorted(name for name in changes if name not in _MAY_CHANGE and changes[name] != getattr(config, name))
    if fixed:
        raise ConfigError(
            f"replan() moves state; expected changes of {', '.join(sorted(_MAY_CHANGE))}, found {', '.join(fixed)}. "
            "Formats, rule and cues are those of offload(): build a new optimizer and load its state_dict()."
        )
    return built


def _complete(config: OffloadConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """One way of saying how much leaves takes the place of the other; the same for who updates."""
    complete = dict(changes)
    if changes.get("device_budget") is not None:
        complete.setdefault("fraction", None)
    if changes.get("fraction") is not None:
        complete.setdefault("device_budget", None)
    if changes.get("update_on") is not None:
        complete.setdefault("host_fraction", None)
    if changes.get("host_fraction") is not None and config.update_on == "host":
        complete.setdefault("update_on", "auto")
    return complete


def budget_under(peak: int, optimizer: OffloadedOptimizer) -> int:
    """The `device_budget` that keeps the process under `peak` bytes, from what it has had at most so far."""
    engine = max(optimizer.engines, key=lambda engine: engine.peak_bytes)
    used = optimizer.device_state_bytes(engine.device)
    if optimizer.steps == 0 or not engine.peak_bytes:
        raise ConfigError(
            "replan(device_peak=...) looks at the peak of the steps so far; found none on an accelerator. Train a few "
            "steps first, or give device_budget."
        )
    budget = peak - (engine.peak_bytes - used)
    if budget <= 0:
        raise ConfigError(
            f"device_peak={format_size(peak)} is less than the {format_size(engine.peak_bytes - used)} that training "
            f"has taken on {engine.device} without any state. Raise it, or lower the batch."
        )
    return budget


def moved_places(optimizer: OffloadedOptimizer, old: Places, config: OffloadConfig) -> Places:
    """All state of `old` in new places. The lanes have been drained."""
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    new = Places(optimizer.rule, with_slots(config, optimizer.model), old.names)
    resident = {param: held.resident_tensors() for param, held in old.held.items()}
    try:
        new.place(groups, resident, like=old)
        for param, group in optimizer.group_of().items():
            new.held[param].adopt(old.held[param], group)
    except BaseException:
        new.close()
        raise
    for device, engine in new.engines.items():
        if device in old.engines:
            engine.carry_on(old.engines[device])
    return new
