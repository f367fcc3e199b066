# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizers with an offloaded one inside: what of their methods looks at main parameters or at state.

`take_over` gives an existing optimizer one of these classes. Everything that is not here is Megatron's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

import offstage
from offstage import ConfigError, OffloadedOptimizer
from offstage.integrations.megatron.inner import MASTER, first_state, initialise, step_of
from offstage.integrations.megatron.reduction import FetchUnderReduction
from offstage.optimizer.optimizer import runtime_of


class _Offloaded(MegatronOptimizer):  # type: ignore[misc]
    """What all of them do alike: the cues of an iteration, and phases without training.

    Its base is theirs: only so can an object of theirs get a class that has this one.
    """

    optimizer: OffloadedOptimizer
    fetching: FetchUnderReduction | None
    """Where there is a window."""
    saves_state_itself = True
    """Whether `sharded_state_dict` has the tensors of the state, and not copies."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.fetching is not None:
            self.fetching.begin()
        super().zero_grad(set_to_none)

    def prepare_grads(self) -> bool:
        if self.fetching is not None:
            self.fetching.fetch()
        found_inf: bool = super().prepare_grads()
        return found_inf

    def step_with_ready_grads(self) -> bool:
        """When it returns, updates have ended before whatever the caller's stream does next: copies and gathers."""
        if self.fetching is not None:
            self.fetching.stepped()
        done: bool = super().step_with_ready_grads()
        if self.optimizer.config.window in (0, "all"):  # the peak is in forward and backward, where nothing streams
            runtime_of(self.optimizer).return_slots()
        for param in self.get_parameters():
            param.grad = None  # part of DDP's buffer, which sleep() of the model would take for the model's own
        return done

    def _copy_main_params_to_model_params(self) -> None:
        """The update has written the weights."""

    def offload_to_cpu(self) -> None:
        """What of the state is on the device leaves it, at the link's speed: `offstage.sleep`."""
        offstage.sleep(self.optimizer)

    def restore_from_cpu(self) -> None:
        if offstage.asleep(self.optimizer):
            offstage.wake(self.optimizer)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, with tensors of their own: it may write later, and in a forked process without our arenas."""
        result = super().sharded_state_dict(*args, **kwargs)
        for one in nested_values(result) if self.saves_state_itself else ():
            if isinstance(one, (ShardedTensor, ShardedTensorFactory)) and one.data is not None:
                one.data = one.data.detach().to("cpu", copy=True)
        return result

    def __offstage_sleeps__(self) -> Iterator[OffloadedOptimizer]:
        yield self.optimizer

    def _set_master(self, view: torch.Tensor, value: torch.Tensor) -> None:
        """The fp32 master of `view` is `value` from now on."""
        state = self.optimizer.state
        if view in state:
            state[view] = {**state[view], MASTER: value.detach().to("cpu", torch.float32)}
        elif not torch.equal(view.detach().to(value.device, torch.float32), value.detach().to(torch.float32)):
            state[view] = {**first_state(self.optimizer, view), MASTER: value.detach().to("cpu", torch.float32)}


class OffloadedFP32(_Offloaded, FP32Optimizer):  # type: ignore[misc]
    """The parameters of the model are those of the inner optimizer, as they were."""


class OffloadedFloat16(_Offloaded, Float16OptimizerWithFloat16Params):  # type: ignore[misc]
    """Masters are in the inner optimizer's state; in checkpoints they are where Megatron has them."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        assert state_dict is None, "as Megatron's: main parameters come from the model"
        for group in self.fp32_from_float16_groups:
            for view in group:
                self._set_master(view, view)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        if is_loading:
            self.init_state_fn(self.optimizer, self.config)
        inner = self.optimizer.state_dict()
        keys = [group["params"] for group in inner["param_groups"]]
        masters = [
            [
                inner["state"].get(key, {}).pop(MASTER, None) if is_low else None
                for key, is_low in zip(*one, strict=True)
            ]
            for one in zip(keys, self._low(), strict=True)
        ]
        result: dict[str, Any] = {"optimizer": inner}
        if self.grad_scaler:
            result["grad_scaler"] = self.grad_scaler.state_dict()
        result["fp32_from_fp16_params"] = [
            [
                view.detach().to("cpu").to(torch.float32) if master is None else master
                for view, master, is_low in zip(group["params"], there, low, strict=True)
                if is_low
            ]
            for group, there, low in zip(self.optimizer.param_groups, masters, self._low(), strict=True)
        ]
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inner_name = "optimizer" if "optimizer" in state_dict else "optimizer_state_dict"
        masters_name = "fp32_from_fp16_params" if "fp32_from_fp16_params" in state_dict else "fp32_from_fp16"
        inner = dict(state_dict[inner_name])
        inner["state"] = dict(inner["state"])
        saved = zip(inner["param_groups"], self.optimizer.param_groups, state_dict[masters_name], strict=True)
        for (saved_group, group, masters), low in zip(saved, self._low(), strict=True):
            waiting = iter(masters)
            for key, view, is_low in zip(saved_group["params"], group["params"], low, strict=True):
                if is_low:
                    first = inner["state"].get(key) or first_state(self.optimizer, view)
                    inner["state"][key] = {**first, MASTER: next(waiting).detach()}
        super().load_state_dict({**state_dict, inner_name: inner, masters_name: []})

    def _low(self) -> list[list[bool]]:
        """Which parameters of each group are views of 16-bit weights."""
        views = {view for group in self.fp32_from_float16_groups for view in group}
        return [[param in views for param in group["params"]] for group in self.optimizer.param_groups]


class OffloadedDistributed(_Offloaded, DistributedOptimizer):  # type: ignore[misc]
    """Shards: those of 16-bit weights have their masters in the inner optimizer's state."""

    saves_state_itself = False
    view_of: dict[torch.Tensor, torch.Tensor]
    """By parameter of the model, of which this rank has a part."""

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        step = step_of(self.optimizer)
        result: dict[str, Any] = {"optimizer": {"param_groups": [{**group, "step": step} for group in groups]}}
        if self.grad_scaler:
            result["grad_scaler"] = self.grad_scaler.state_dict()
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        initialise(self.optimizer)  # on the host; Megatron would allocate all state on the device
        super().load_state_dict(state_dict)

    def load_parameter_state_from_dp_zero_legacy(self, state_dict: dict[str, Any]) -> None:
        """It copies main parameters into what the groups have: here 16-bit views, which would lose their low bits."""
        raise ConfigError(
            "update_legacy_format=True loads parameter state in the format of old Megatron versions, which writes to "
            "fp32 main parameters; expected the present format, as they are offstage's here. Load it once into plain "
            "Megatron and save it again, then load that."
        )

    def _view(self, model_param: torch.Tensor) -> torch.Tensor:
        """Found by the groups of views: Megatron's own map of places is wrong where a group has 16-bit and fp32."""
        if not self.view_of:
            for models, views in (
                (self.model_float16_groups, self.shard_fp32_from_float16_groups),
                (self.model_fp32_groups, self.shard_fp32_groups),
            ):
                for model_group, view_group in zip(models, views, strict=True):
                    self.view_of.update(zip(model_group, view_group, strict=True))
        return self.view_of[model_param]

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        view = self._view(model_param)
        if view not in self.optimizer.state:
            initialise(self.optimizer)
        state = self.optimizer.state[view]
        main = state.get(MASTER, view)
        tensors = {"param": main, **{name: state[name] for name in self.optimizer_state_keys}}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        view = self._view(model_param)
        state = self.optimizer.state
        first = state[view] if view in state else first_state(self.optimizer, view)
        values = {**first, **{name: tensors[name] for name in self.optimizer_state_keys if name in tensors}}
        if view.dtype is torch.float32:
            with torch.no_grad():
                view.copy_(tensors["param"])
        else:
            values[MASTER] = tensors["param"]
        state[view] = values

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        given = None if state_dict is None else self._build_model_param_to_state_dict_param_map(state_dict)
        for model_groups, view_groups in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, view_group in zip(model_groups, view_groups, strict=True):
                for model_param, view in zip(model_group, view_group, strict=True):
                    values = view
                    if given is not None:
                        own = self._get_model_param_range_map(model_param)["param"]
                        values = given[model_param].detach().view(-1)[own.start : own.end]
                    self._reload(view, values)

    def _reload(self, view: torch.Tensor, values: torch.Tensor) -> None:
        if view.dtype is not torch.float32:
            self._set_master(view, values)
        elif values is not view:
            with torch.no_grad():
                view.copy_(values)


class OffloadedChain(ChainedOptimizer):  # type: ignore[misc]
    """A chain of these."""

    def __offstage_sleeps__(self) -> Iterator[OffloadedOptimizer]:
        for one in self.chained_optimizers:
            if isinstance(one, _Offloaded):
                yield from one.__offstage_sleeps__()


OFFLOADED: dict[type, type] = {
    FP32Optimizer: OffloadedFP32,
    Float16OptimizerWithFloat16Params: OffloadedFloat16,
    DistributedOptimizer: OffloadedDistributed,
}
"""By Megatron's class."""
