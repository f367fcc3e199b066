# SPDX-License-Identifier: Apache-2.0
"""`Settings`: what a user of another engine has asked for: `offload()` with a config, or `fit()` with a `device_peak`.

`fit` changes what an optimizer does between steps. What an adapter must ask of one is therefore here, too: what it
does now, and what it may do later.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import offstage
from offstage import ConfigError, FitPlan, Machine, OffloadConfig, OffloadedOptimizer
from offstage.config import OffloadSettings
from offstage.fitting.fitted import Fitted
from offstage.optimizer.optimizer import runtime_of

logger = logging.getLogger("offstage")


class EngineSettings(OffloadSettings, total=False):
    """The fields of `OffloadConfig`, and with `device_peak` the arguments of `fit`."""

    plan: FitPlan | str | None
    machine: Machine | None
    update_on_host: bool
    weights_on_host: bool
    activations: bool


@dataclass(frozen=True)
class Settings:
    """How the optimizers of an engine are taken over."""

    config: OffloadConfig | None
    """For `offload()`; `None`: those that are not offloaded already stay as they are, unless `fit` is given."""
    fit: Mapping[str, Any] | None = None
    """The arguments of `fit()`, where that is asked for."""
    given: bool = False
    """Whether the user has asked for anything."""

    @classmethod
    def of(cls, config: OffloadConfig | None, settings: Mapping[str, Any]) -> Settings:
        """From what an adapter was given. `device_peak` or `plan` asks for `fit()`, unless a window has the peak."""
        given = config is not None or bool(settings)
        wanted = {**_changed(config), **{name: value for name, value in settings.items() if value is not None}}
        if not asks_for_fit(wanted):
            plain = {name: value for name, value in settings.items() if (name, value) != ("plan", None)}
            return cls(OffloadConfig.build(config, plain), given=given)
        return cls(None, wanted, given)

    @property
    def takes(self) -> bool:
        """Whether optimizers that are not offloaded yet are taken over."""
        return self.config is not None or self.fit is not None

    def take(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, not_in_backward: str | None = None
    ) -> OffloadedOptimizer:
        """Take over `optimizer`. `not_in_backward`: why `fit()` must not update weights there, if it must not."""
        if self.fit is None:
            assert self.config is not None
            return offstage.offload(optimizer, model, self.config)
        if model is None:
            raise ConfigError(
                "device_peak is for a model and its optimizer together; expected both, found an optimizer whose model "
                "the engine has not prepared. Prepare them in one call: accelerator.prepare(model, optimizer)."
            )
        is_compiled = hasattr(model, "_orig_mod") or model._compiled_call_impl is not None
        self.refuse_compiled(is_compiled, f"a {type(model).__name__}")  # fit() would say so too late
        wanted = dict(self.fit)
        if not_in_backward is not None and wanted.get("update_in_backward", True):
            logger.info("fit: weights are not updated in backward: %s", not_in_backward)
            wanted["update_in_backward"] = False
        return offstage.fit(model, optimizer, **wanted)

    def refuse_ranks(self, count: int, found: str) -> None:
        """Raise if `fit()` is asked for on `count` devices, before anything has moved. `found`: what says so."""
        if self.fit is not None and count > 1:
            raise ConfigError(
                f"device_peak makes fit() decide for one device, and those of one job would decide differently; "
                f"expected one, found {found}. Use the same fraction, weights and other settings on every rank; "
                "make_plan(..., world=World(...)) finds them."
            )

    def refuse_compiled(self, is_compiled: bool, found: str) -> None:
        """Raise if `fit()` is asked for and would find a compiled model, `found`."""
        if self.fit is not None and is_compiled:
            raise ConfigError(
                f"device_peak is met layer by layer; expected a model whose layers have their own forwards, found "
                f"{found} compiled by torch.compile. Leave the engine's torch_compile or dynamo settings out, and "
                "compile layers one by one: model.layers[i] = torch.compile(model.layers[i])."
            )


def asks_for_fit(settings: Mapping[str, Any]) -> bool:
    """Whether `settings` name what only `fit()` can keep to."""
    asks = settings.get("device_peak") is not None or settings.get("plan") is not None
    return asks and settings.get("window") != "auto"


def _changed(config: OffloadConfig | None) -> dict[str, Any]:
    """The fields of `config` that are not the default."""
    if config is None:
        return {}
    built, default = OffloadConfig.build(config, {}), OffloadConfig()
    names = (field.name for field in dataclasses.fields(OffloadConfig))
    return {name: getattr(built, name) for name in names if getattr(built, name) != getattr(default, name)}


# What an optimizer does #


def is_fitted(optimizer: OffloadedOptimizer) -> bool:
    """Whether `fit()` decides what it does."""
    return isinstance(runtime_of(optimizer).watcher, Fitted)


def updates_in_backward(optimizer: OffloadedOptimizer) -> bool:
    """Whether backward updates weights now."""
    return optimizer.config.update_in_backward and not runtime_of(optimizer).hold_updates


def may_update_in_backward(optimizer: OffloadedOptimizer) -> bool:
    """Whether backward updates weights, or will if `fit()` decides so: its gradients are clipped by the optimizer."""
    watcher = runtime_of(optimizer).watcher
    if isinstance(watcher, Fitted):  # which watches with all gradients leaving, whatever it may decide
        return watcher.job.may_update_in_backward
    return optimizer.config.update_in_backward


def may_overlap_forward(optimizer: OffloadedOptimizer) -> bool:
    """Whether weights may be old behind `step()`, or will if `fit()` decides so."""
    watcher = runtime_of(optimizer).watcher
    allows = isinstance(watcher, Fitted) and watcher.job.may_overlap_forward
    return optimizer.config.overlap_forward or allows
