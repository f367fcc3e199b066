# SPDX-License-Identifier: Apache-2.0
"""`replan`: the config that changes give, or why they cannot be had in the middle of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offstage.config import OffloadConfig, format_size, parse_size
from offstage.errors import ConfigError
from offstage.optimizer.runtime import Runtime

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


def replanned_config(runtime: Runtime, changes: Mapping[str, Any]) -> OffloadConfig:
    """The config with `changes`; raises for what cannot be changed in the middle of training."""
    config, changes = runtime.config, dict(changes)
    if changes.get("device_peak") is not None and config.window != "auto":
        changes["device_budget"] = budget_under(parse_size(changes.pop("device_peak"), "device_peak"), runtime)
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
    # What has no effect where updates are made from now on goes.
    if changes.get("update_on") == "device" and changes.get("host_fraction") is None:
        complete.setdefault("threads", None)
    if changes.get("update_on") == "host":
        complete.setdefault("slots", None)
    if changes.get("host_fraction") is not None and config.update_on == "host":
        complete.setdefault("update_on", "auto")
    return complete


def budget_under(peak: int, runtime: Runtime) -> int:
    """The `device_budget` that keeps the process under `peak` bytes, from what it has had at most so far."""
    engine = max(runtime.engines, key=lambda engine: engine.transport.lanes.peak_bytes())
    found = engine.transport.lanes.peak_bytes()
    if runtime.steps == 0 or not found:
        raise ConfigError(
            "replan(device_peak=...) looks at the peak of the steps so far; found none on an accelerator. Train a few "
            "steps first, or give device_budget."
        )
    without_state = found - runtime.device_state_bytes(engine.device)
    if peak <= without_state:
        raise ConfigError(
            f"device_peak={format_size(peak)} is less than the {format_size(without_state)} that training "
            f"has taken on {engine.device} without any state. Raise it, or lower the batch."
        )
    return peak - without_state
