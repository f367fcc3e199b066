# SPDX-License-Identifier: Apache-2.0
"""The inner optimizer: a torch optimizer with the options and the state of Megatron's, and its first state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from offstage import ConfigError, OffloadedOptimizer
from offstage.integrations.megatron.views import Views
from offstage.optimizer.optimizer import runtime_of

MASTER = "master_weight"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_fused(inner: torch.optim.Optimizer) -> bool:
    """Whether it is one of Transformer Engine or Apex."""
    return type(inner).__name__ in _FROM_FUSED


def torch_twin(inner: torch.optim.Optimizer, views: Views) -> torch.optim.Optimizer:
    """A torch optimizer over `views` with the options, hooks and state of `inner`, which stays as it is."""
    groups = [{**group, "params": params} for group, params in zip(inner.param_groups, views.params, strict=True)]
    if is_fused(inner):
        twin = _FROM_FUSED[type(inner).__name__](inner, groups)
    else:
        kind = type(inner)
        twin = kind.__new__(kind)
        vars(twin).update({name: value for name, value in vars(inner).items() if name != "step"})
        twin.param_groups = groups
    twin.state = defaultdict(dict, _state(inner, views))
    return twin


def _state(inner: torch.optim.Optimizer, views: Views) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that `inner` has, by view, with the masters that Megatron has kept beside it."""
    result = {}
    for group, params in zip(inner.param_groups, views.params, strict=True):
        for param in params:
            state: dict[str, Any] = dict(inner.state.get(views.before.get(param, param), {}))
            if state and "step" not in state and "step" in group:  # Transformer Engine counts once for a group
                state["step"] = torch.tensor(float(group["step"]), dtype=torch.float32, device="cpu")
            master = views.master_of(param)
            if master is not None and (state or not torch.equal(master, param.detach().to(master.dtype))):
                state = {**_zeros(inner, param), **state, MASTER: master}
            if state:
                result[param] = state
    return result


def _zeros(inner: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, Any]:
    """The state before a first step of `inner`. It takes no memory: every element is the same one."""
    if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and type(inner).__name__ != "FusedAdam":
        return {}
    zero = torch.zeros((), dtype=torch.float32, device="cpu")
    return {"step": zero.clone(), **{name: zero.expand(param.shape) for name in _MOMENTS}}


def first_state(inner: OffloadedOptimizer, param: torch.Tensor) -> dict[str, Any]:
    """The state of `param` before its first step, or nothing where its class needs none."""
    return _zeros(runtime_of(inner).shell, param)


def initialise(inner: OffloadedOptimizer) -> None:
    """Give every parameter without state the one before its first step: where it lives, nothing new on the device."""
    for param in (param for group in inner.param_groups for param in group["params"]):
        if param not in inner.state and (first := first_state(inner, param)):
            inner.state[param] = first


def init_state_fn(inner: OffloadedOptimizer, config: Any = None) -> None:
    """Megatron calls it before it loads a checkpoint."""
    initialise(inner)


# FusedAdam and FusedSGD, of Transformer Engine or Apex


def _adam(inner: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    for group in groups:
        if not group.get("bias_correction", True):
            raise ConfigError(
                "FusedAdam(bias_correction=False) has no counterpart in torch.optim; expected bias_correction=True. "
                "Build the optimizer with it."
            )
    if getattr(inner, "master_weights", None) not in (None, False):
        raise ConfigError(
            "FusedAdam(master_weights=True) owns its masters; expected Megatron's. Build the optimizer with "
            "use_precision_aware_optimizer=False."
        )
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if inner.adam_w_mode else torch.optim.Adam
    return kind(_taken(groups), **_options(inner, "lr", "betas", "eps", "weight_decay"), **_fused(groups))


def _sgd(inner: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if getattr(inner, "wd_after_momentum", False):
        raise ConfigError(
            "FusedSGD(wd_after_momentum=True) has no counterpart in torch.optim; expected False. Build the optimizer "
            "without it."
        )
    options = _options(inner, "lr", "momentum", "dampening", "weight_decay", "nesterov")
    return torch.optim.SGD(_taken(groups), **options, **_fused(groups))


_FROM_FUSED: dict[str, Callable[[Any, list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "FusedAdam": _adam,
    "FusedSGD": _sgd,
}


def _options(inner: torch.optim.Optimizer, *names: str) -> dict[str, Any]:
    return {name: inner.defaults[name] for name in names}


def _taken(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without `step`, which is kept per parameter here."""
    return [{name: value for name, value in group.items() if name != "step"} for group in groups]


def _fused(groups: list[dict[str, Any]]) -> dict[str, Any]:
    on_device = any(param.device.type != "cpu" for group in groups for param in group["params"])
    return {"fused": True} if on_device else {}


# `step`, which Transformer Engine and Megatron's checkpoints keep once for a group


def step_of(inner: OffloadedOptimizer) -> int:
    """How many steps have been made."""
    counts = (state.scalars.get("step", 0) for state in runtime_of(inner).all_states())
    return max(map(int, counts), default=0)


def _steps_to_params(inner: OffloadedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Before a load: a `step` of a group is that of its parameters."""
    if not any("step" in group for group in state_dict["param_groups"]):
        return state_dict
    state, groups = dict(state_dict["state"]), []
    for group in state_dict["param_groups"]:
        groups.append({name: value for name, value in group.items() if name != "step"})
        for key in group["params"] if group.get("step") is not None else ():
            if state.get(key):
                state[key] = {
                    **state[key],
                    "step": torch.tensor(float(group["step"]), dtype=torch.float32, device="cpu"),
                }
    return {**state_dict, "state": state, "param_groups": groups}


def _steps_to_groups(inner: OffloadedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """After a save in place of FusedAdam: as it saves."""
    groups = [{**group, "step": step_of(inner)} for group in state_dict["param_groups"]]
    state = {
        key: {name: value for name, value in one.items() if name != "step"} if isinstance(key, int) else one
        for key, one in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def keep_step_format(inner: OffloadedOptimizer, *, fused: bool) -> None:
    """Let `inner` load `step` in Megatron's formats, and save it in that of the optimizer it stands for."""
    inner.register_load_state_dict_pre_hook(_steps_to_params)  # type: ignore[arg-type]
    if fused:
        inner.register_state_dict_post_hook(_steps_to_groups)  # type: ignore[arg-type]
