# SPDX-License-Identifier: Apache-2.0
"""`FitSettings`: how much memory a run may take, where `fit` decides the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offstage import ConfigError, OffloadConfig
from offstage.config import exact_size, parse_size
from offstage.train.settings import checked

PASSED_ON = ("min_bytes", "rule", "master_weights", "state_dtype", "chunk_bytes", "slots", "pin_memory")
"""Settings of the section `offload` that stay the user's: formats, and how state moves."""


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How much memory the run may take: state, weights and activations are then placed by measurement."""

    device_peak: int | str | None = None
    """The most device memory of the whole run, such as 24GiB. The run measures itself for two steps and goes over to
    the fastest placement of state, weights and activations that fits, with the same bits."""

    host_budget: int | str | None = None
    """With device_peak: the most host memory for state, weights and activations. Without it: what the host has, less
    5%."""

    def __post_init__(self) -> None:
        checked(self, "")
        for name in ("device_peak", "host_budget"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_size(getattr(self, name), name))
        if self.device_peak is not None and not self.device_peak:
            raise ConfigError("device_peak expects more than 0 bytes; found 0. Leave it out for settings of your own.")
        if self.host_budget is not None and self.device_peak is None:
            raise ConfigError(
                f"host_budget={exact_size(int(self.host_budget))} is a limit beside device_peak; found no device_peak. "
                "Give both, or use offload.host_budget."
            )

    @property
    def decides(self) -> bool:
        """Whether `fit` decides."""
        return self.device_peak is not None

    @property
    def peak_bytes(self) -> int:
        assert self.device_peak is not None
        return int(self.device_peak)


def passed_on(offload: OffloadConfig) -> dict[str, Any]:
    """The settings for `fit`: those that are not as they are by default."""
    return {name: value for name, value in _changed(offload) if name in PASSED_ON}


def check_decided(fit: FitSettings, offload: OffloadConfig, **others: tuple[Any, Any]) -> None:
    """Raise if settings are given that `fit` decides. `others`: further ones, as (value, default) by section_name."""
    if not fit.decides:
        return
    found = [(f"offload.{name}", value) for name, value in _changed(offload) if name not in PASSED_ON]
    found += [(name.replace("_", ".", 1), given) for name, (given, default) in others.items() if given != default]
    if found:
        listed = ", ".join(f"{name}={value!r}" for name, value in found)
        own = (
            "; for the host's memory use host_budget" if any(name == "offload.host_budget" for name, _ in found) else ""
        )
        raise ConfigError(
            f"device_peak={exact_size(fit.peak_bytes)} lets the run decide by itself where state, weights and "
            f"activations live and when they move, which contradicts {listed}. Leave that out, or leave device_peak "
            f"out and give all such settings yourself{own}."
        )


def _changed(offload: OffloadConfig) -> Iterator[tuple[str, Any]]:
    default = OffloadConfig()
    for one in dataclasses.fields(OffloadConfig):
        value = getattr(offload, one.name)
        if value != getattr(default, one.name):
            yield one.name, value
