# SPDX-License-Identifier: Apache-2.0
"""torchtitan: its `OptimizersContainer` over offloaded optimizers, with the settings as fields of its `Config`.

torchtitan's override mechanism puts it in place of a job's own:
`--override.imports 'offstage.integrations.torchtitan.offload={"fraction": 0.5}'`. With `device_peak` in place of
`fraction` the one model part of a job on one rank is given to `fit()`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from torch import nn

from offstage import ConfigError, OffloadConfig, OffloadedOptimizer
from offstage.config import documents
from offstage.integrations.packages import require
from offstage.integrations.settings import Settings

require(
    "torchtitan.components.optimizer",
    package="torchtitan",
    at_least="0.3",
    below="0.4",
    why="offstage.integrations.torchtitan",
)

from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402

__all__ = ["OffloadedOptimizersContainer", "offload"]

_SETTINGS = tuple(field.name for field in dataclasses.fields(OffloadConfig))
_MASTER = ".master_weight"
_CLIPS = "torchtitan's train_step() clips gradients behind it, with a function of its own"


def _config_of(config: Any) -> OffloadConfig:
    return OffloadConfig(**{name: getattr(config, name) for name in _SETTINGS})


def _check(config: Any) -> None:
    """The `Config` is made: raise if its fields contradict each other, or torchtitan's loop."""
    if _config_of(config).update_in_backward:
        raise ConfigError(
            "update_in_backward=True drops gradients in backward; torchtitan's train_step() clips all of them after "
            "it, with a function of its own. Use update_in_backward=False, with window='all' where activations fill "
            "the device."
        )
    if config.implementation == "fused_opt_states_bf16":
        raise ConfigError(
            "implementation='fused_opt_states_bf16' fills the state of torch.optim's classes before their first step; "
            "here the state is offstage's. Use implementation='fused' and state_dtype='bfloat16'."
        )


def _make_config() -> Any:
    """torchtitan's `Config`, with the fields of `OffloadConfig` beside its own."""
    hints = get_type_hints(OffloadConfig)
    fields: list[Any] = [
        (field.name, hints[field.name], dataclasses.field(default=field.default))
        for field in dataclasses.fields(OffloadConfig)
    ]
    fields.append(("plan", str | None, dataclasses.field(default=None)))
    fields.append(("plain_checkpoint", bool, dataclasses.field(default=False)))
    made = dataclasses.make_dataclass(
        "Config",
        fields,
        bases=(OptimizersContainer.Config,),
        namespace={
            "__module__": __name__,
            "__qualname__": "OffloadedOptimizersContainer.Config",
            "__post_init__": _check,
            "__doc__": "torchtitan's fields and `plain_checkpoint`: the first checkpoint to be loaded was saved by "
            "plain AdamW from 16-bit weights, without masters, which then come from the weights. With `device_peak` "
            "the job is given to `fit()`, and `plan` is the JSON of a plan that it has made before. And these fields "
            "of `OffloadConfig`:",
        },
        kw_only=True,
        slots=True,
    )
    return documents(OffloadConfig)(made)


class OffloadedOptimizersContainer(OptimizersContainer):  # type: ignore[misc, type-arg]
    """Each optimizer that torchtitan makes is offloaded with the settings in `config`, and checkpoints stay its own."""

    Config = _make_config()

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        _check_budgets(_config_of(config), len(self.optimizers))
        settings = Settings.of(_config_of(config), {"plan": config.plan})
        self.optimizers: list[OffloadedOptimizer] = [
            settings.take(optimizer, _part_of(optimizer, model_parts), _CLIPS) for optimizer in self.optimizers
        ]
        self._without_masters = config.plain_checkpoint
        """Until state is loaded or a step is made."""

    def step(self, closure: Any = None) -> None:
        self._without_masters = False
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """As torchtitan's: flat, by name. It is also what DCP looks for in a checkpoint."""
        flat: dict[str, Any] = super().state_dict()
        if self._without_masters:
            return {name: value for name, value in flat.items() if not name.endswith(_MASTER)}
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._without_masters = False


def _check_budgets(settings: OffloadConfig, count: int) -> None:
    """Sizes are those of one optimizer: with several, each would take as much."""
    sizes = [name for name in ("device_budget", "device_peak", "host_budget") if getattr(settings, name) is not None]
    if sizes and count > 1:
        raise ConfigError(
            f"{' and '.join(sizes)} would hold for each of {count} optimizers, one per model part and class; expected "
            "one optimizer with a setting in bytes. Use fraction, which is a share of each."
        )


def _part_of(optimizer: Any, model_parts: list[nn.Module]) -> nn.Module:
    """The model part whose parameters `optimizer` updates."""
    first = optimizer.param_groups[0]["params"][0]
    return next(part for part in model_parts if any(param is first for param in part.parameters()))


@override(target=OptimizersContainer.Config, description="Optimizer state off the device (offstage)")
def offload(config: OptimizersContainer.Config, **settings: Any) -> Any:
    """`config` of a job's optimizers, with offstage's `settings`; names are those of `OffloadConfig`."""
    if type(config) is not OptimizersContainer.Config:
        raise ConfigError(
            f"offload() takes the place of torchtitan's OptimizersContainer; found a config of {type(config)._owner}, "
            "whose own code would be lost. Use OptimizersContainer.Config, or one of the two."
        )
    known = {field.name for field in dataclasses.fields(OffloadedOptimizersContainer.Config)}
    if unknown := sorted(settings.keys() - known):
        raise ConfigError(
            f"offload() has no settings {unknown}; expected some of {', '.join(_SETTINGS)}, plan or plain_checkpoint. "
            "Correct the names in override.imports."
        )
    return derive(config, OffloadedOptimizersContainer.Config, **settings)
