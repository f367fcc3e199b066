# SPDX-License-Identifier: Apache-2.0
"""`MovingWeights`: a model's weights on their way to where they live, with the way back if something fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offstage.config import ActivationConfig, OffloadConfig, format_size
from offstage.engine.timer import StepTimer
from offstage.errors import ConfigError, HostMemoryError, OffloadIneffectiveError
from offstage.lanes.lanes import Lanes
from offstage.lanes.link import link_for
from offstage.memory.arena import check_host_memory
from offstage.memory.claims import Claim
from offstage.planning.sizes import layers_of_model
from offstage.rules.rule import has_state
from offstage.tensors import forget_home, home_of, set_home
from offstage.weights.choosing import Chosen, choose_weights, movable
from offstage.weights.host_layer import HostLayer
from offstage.weights.host_weights import HostWeights, host_weight_of, host_weights_of


class MovingWeights:
    """What of one model goes to the host, for the optimizer that updates it."""

    def __init__(
        self, model: nn.Module | None, config: OffloadConfig, turn: Any, there: HostWeights | None = None
    ) -> None:
        """`there`: those that live on the host already, for the same optimizer."""
        self.made: HostWeights | None = None
        self.returning: frozenset[torch.Tensor] = frozenset()
        """Parameters that live on the host now, and on the device when all is done."""
        self._config, self._turn, self._there = config, turn, there
        self._model, self._chosen, self._elsewhere = model, Chosen(), list[torch.Tensor]()
        if config.moves_weights:
            self._model = _checked(model, there, config)
            self._chosen = choose_weights(self._model, config)
            self._elsewhere = self._find_homes(self._model)

    def _find_homes(self, model: nn.Module) -> list[torch.Tensor]:
        """Parameters and buffers of a model that was built on the host, beside an accelerator: their home is there."""
        if not torch.accelerator.is_available():
            return []
        device = torch.device(
            torch.accelerator.current_accelerator().type,  # type: ignore[union-attr]
            torch.accelerator.current_device_index(),
        )
        found: list[torch.Tensor] = [
            tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu"
        ]
        for tensor in found:
            set_home(tensor, device)
        return found

    @property
    def layer_numbers(self) -> dict[torch.Tensor, int]:
        """The number of its layer for every parameter that is in one, and in no other module."""
        if not self._config.moves_weights or self._model is None:
            return {}
        names = layers_of_model(self._model)
        return {param: names[name] for name, param in self._model.named_parameters() if name in names}

    @property
    def devices(self) -> set[torch.device]:
        """Where the weights are used."""
        return {home_of(param) for params in self._chosen.values() for param in params.values()}

    def move(
        self,
        stay: Iterable[torch.Tensor],
        lanes: Mapping[torch.device, Lanes],
        timers: Mapping[torch.device, StepTimer],
    ) -> HostWeights | None:
        """Move everything to where it lives. `stay`: parameters whose weights stay where they are used."""
        chosen = self._leaving(stay)
        homes = _homes_of(chosen, self._config)
        # What is on the host already moves a layer at a time, and the memory it leaves is free again.
        there = sum(one.nbytes for params in chosen.values() for one in params.values() if one.device.type == "cpu")
        largest = max(sum(param.nbytes for param in params.values()) for params in chosen.values())
        assert self._model is not None
        with self._claim(self.host_bytes(stay) - max(0, there - largest)):
            self.made = HostWeights(
                self._model, chosen, lanes, homes, pin=self._config.pin_memory, turn=self._turn, timers=timers
            )
        for tensor in self._elsewhere:
            if not any(weight.param is tensor for weight in self.made.weights):
                tensor.data = tensor.data.to(home_of(tensor))
                forget_home(tensor)
        return self.made

    def _claim(self, need: int) -> Claim:
        return check_host_memory(
            need,
            None,  # the budget is for weights and state together
            what=f"weights={self._config.weights!r}",
            remedy="Keep more weights on the device (weights='40GiB'), or free host memory.",
        )

    def _leaving(self, stay: Iterable[torch.Tensor]) -> Chosen:
        staying = set(stay)
        chosen = {
            layer: {name: param for name, param in params.items() if param not in staying}
            for layer, params in self._chosen.items()
        }
        return {layer: params for layer, params in chosen.items() if params}

    def host_bytes(self, stay: Iterable[torch.Tensor], by_cpu: Iterable[torch.Tensor] = ()) -> int:
        """Host memory for the weights that leave, and for their gradients if these are not used at once.

        `by_cpu`: parameters that the CPU updates, which never uses gradients at once.
        """
        leaving = [param for params in self._leaving(stay).values() for param in params.values()]
        later = set(by_cpu) if self._config.update_in_backward else set(leaving)
        return sum((1 + (param in later)) * param.nbytes for param in leaving)

    def undo(self) -> None:
        """Everything is where it was."""
        if self.made is not None:
            self.made.undo()
        for tensor in self._elsewhere:
            forget_home(tensor)
            if tensor.device.type != "cpu":
                tensor.data = tensor.data.to("cpu")


class ReplannedWeights(MovingWeights):
    """A model's weights on their way from where they live to where other settings want them, in the middle of training.

    `move` takes to the host what goes there. State moves next, and the device has room again: then `bring_back` takes
    to the device what goes there. Both go layer by layer.
    """

    def __init__(self, model: nn.Module | None, config: OffloadConfig, turn: Any, there: HostWeights | None) -> None:
        super().__init__(model, config, turn, there)
        self._undo = contextlib.ExitStack()

    def _find_homes(self, model: nn.Module) -> list[torch.Tensor]:
        return []  # what was trained on the host goes on there

    def move(
        self,
        stay: Iterable[torch.Tensor],
        lanes: Mapping[torch.device, Lanes],
        timers: Mapping[torch.device, StepTimer],
    ) -> HostWeights | None:
        """Take weights to the host. `stay`: parameters whose weights must not be there."""
        chosen = self._leaving(stay)
        homes = _homes_of(chosen, self._config) if self._config.moves_weights else {}
        there = {layer.module: layer for layer in self._there.layers} if self._there is not None else {}
        changed = {one: new for one, new in chosen.items() if one not in there or not _has_just(there[one], new)}
        self.returning = frozenset(
            weight.param for one, layer in there.items() if one not in chosen for weight in layer.weights
        )
        need = sum(param.nbytes for params in changed.values() for param in params.values())
        with self._claim(need if self._config.update_in_backward else 2 * need):
            self.made = self._there
            if self.made is None and chosen:
                assert self._model is not None
                self.made = HostWeights(self._model, {}, lanes, {}, pin=self._config.pin_memory, turn=self._turn)
                self._undo.callback(self.made.close)
            for module, params in changed.items():
                assert self.made is not None
                if module in there:
                    self._release(self.made, module)
                self.made.add({module: params}, lanes, homes, timers)
                self._undo.callback(self.made.release, module)
        return self.made

    def _release(self, weights: HostWeights, module: nn.Module) -> None:
        self._undo.callback(weights.release(module))

    def bring_back(self) -> None:
        """Take weights to the device."""
        if self.made is None:
            return
        # Not a list of layers, which would keep their memory.
        for module in [layer.module for layer in self.made.layers if layer.weights[0].param in self.returning]:
            self._release(self.made, module)

    def end(self) -> HostWeights | None:
        """It has succeeded: those that live on the host now, if there are any."""
        self._undo.pop_all()
        if self.made is not None and not self.made.layers:
            self.made.close()
            return None
        return self.made

    def undo(self) -> None:
        """Everything is where it was."""
        self._undo.close()


def _has_just(layer: HostLayer, params: Mapping[str, nn.Parameter]) -> bool:
    return {id(weight.param) for weight in layer.weights} == {id(param) for param in params.values()}


def _checked(model: nn.Module | None, there: HostWeights | None, config: OffloadConfig) -> nn.Module:
    """`model`, if there is one whose weights the optimizer may move."""
    if model is None:
        raise ConfigError(
            f"weights={config.weights!r} needs the model, whose layers send for their weights; found no model. "
            "Call offload(optimizer, model, weights='host')."
        )
    if host_weights_of(model) is not there:
        raise ConfigError(
            f"weights={config.weights!r}: weights of this model live on the host already, because of "
            "offload_activations(weights=True) or of another optimizer; expected none. Leave weights=True out of "
            "offload_activations(), as offload(optimizer, model, weights='host') moves them; or close() the other "
            "optimizer first."
        )
    return model


def _homes_of(chosen: Chosen, config: OffloadConfig) -> dict[nn.Module, torch.device]:
    """The device of each layer. Raises if there is nothing to move, or a layer has several."""
    if not any(param.nbytes for params in chosen.values() for param in params.values()):
        raise OffloadIneffectiveError(
            f"weights={config.weights!r} moves no weight: expected some whose state streams, found none. "
            "Raise fraction, lower device_budget, or leave weights out."
        )
    homes = {layer: home_of(next(iter(params.values()))) for layer, params in chosen.items()}
    for layer, params in chosen.items():
        if {home_of(param) for param in params.values()} != {homes[layer]}:
            raise ConfigError(
                f"weights={config.weights!r}: the layer with {next(iter(params))!r} has weights on several "
                "devices; expected one. Put each layer on one device."
            )
    return homes


def weights_for_other_optimizers(
    model: nn.Module, layers: Sequence[nn.Module], config: ActivationConfig
) -> HostWeights:
    """Move the weights of `layers` to the host, for optimizers that are not offstage's."""
    if host_weights_of(model) is not None:
        raise ConfigError(
            "weights=True: weights of this model live on the host already, by offload(optimizer, model, weights=...); "
            "expected none. Leave weights=True out."
        )
    chosen = movable(model, layers, int(config.min_bytes))
    _refuse_own_optimizers(chosen)
    need = sum(2 * param.nbytes for params in chosen.values() for param in params.values())  # and its gradient
    if not need:
        raise ConfigError(
            f"weights=True: no parameter of {len(chosen)} layers can leave; expected some of at least min_bytes="
            f"{format_size(int(config.min_bytes))} that no other module uses. Lower min_bytes, or leave weights out."
        )
    budget = None if config.host_budget is None else int(config.host_budget)
    if budget is not None and need > budget:
        raise HostMemoryError(
            f"Weights and their gradients need {format_size(need, up=True)} of host memory; host_budget allows "
            f"{format_size(budget)}. Raise host_budget, or offload fewer layers."
        )
    homes = {layer: next(iter(params.values())).device for layer, params in chosen.items() if params}
    lanes = {device: link_for(device).lanes() for device in set(homes.values())}
    with check_host_memory(need, None, what="weights=True", remedy="Offload fewer layers, or free host memory."):
        made = HostWeights(model, chosen, lanes, homes, ahead=config.prefetch)
    made.serve_other_optimizers()
    return made


def refuse_host_weights(
    groups: Sequence[Mapping[str, Any]], model: nn.Module | None, names: Mapping[torch.Tensor, str]
) -> None:
    """Raise if parameters live on the host already; if the optimizer is gone that moved them there, they do no more."""
    there = host_weights_of(model) if model is not None else None
    if there is not None and there.is_orphaned:
        there.close(to_device=False)
    found = [param for group in groups for param in group["params"] if host_weight_of(param) is not None]
    if found:
        by_optimizer = there is not None and there.listener is not None
        why, remedy = (
            ("another optimizer of offstage's", "Call its close() first.")
            if by_optimizer
            else (
                "offload_activations(weights=True), which is for other optimizers",
                "Leave weights=True out, and call offload(optimizer, model, weights='host').",
            )
        )
        raise ConfigError(
            f"Parameter {names.get(found[0], '?')!r} lives on the host because of {why}; expected it on the device. "
            f"{remedy}"
        )


def _refuse_own_optimizers(chosen: Chosen) -> None:
    """An optimizer of ours that was made before knows these parameters on the device."""
    if any(has_state(param) for params in chosen.values() for param in params.values()):
        gc.collect()  # an optimizer that was dropped
    for params in chosen.values():
        for name, param in params.items():
            if has_state(param):
                raise ConfigError(
                    f"weights=True moves {name!r} to the host for other optimizers, and an offloaded optimizer was "
                    f"made for it on {param.device}. Leave weights=True out, and give that optimizer the setting: "
                    "offload(optimizer, model, weights='host')."
                )


def describe(weights: HostWeights) -> str:
    """One line, for logs."""
    return (
        f"weights: {format_size(weights.host_bytes)} on the host ({len(weights.layers)} layers), at most "
        f"{format_size(weights.most_device_bytes)} of them on the device at once"
    )
