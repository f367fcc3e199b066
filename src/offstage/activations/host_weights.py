# SPDX-License-Identifier: Apache-2.0
"""`HostWeights`: the layers whose parameters live on the host. For `offload_activations(weights=True)`.

Forward fetches a layer's weights, and the next layer's meanwhile; backward does the same the other way round, in the
order that the last forward had. A layer's copies are dropped when it has run, or when backward has gone on to
another; if something asks for them once more, they are fetched once more.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from offstage.activations.hooks import after_backward, running_backward, uses_ddp
from offstage.activations.host_weight import HostWeight
from offstage.config import ActivationConfig, format_size
from offstage.errors import ConfigError, HostMemoryError, OffstageError
from offstage.lanes.lanes import Lanes
from offstage.lanes.link import link_for
from offstage.memory.arena import check_host_memory
from offstage.memory.claims import Claim
from offstage.rules.rule import has_state

_on_host: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Every parameter that lives on the host."""


def is_host_weight(param: torch.Tensor) -> bool:
    """Whether `offload_activations(weights=True)` has moved it."""
    return param in _on_host


class HostWeights:
    """The parameters of some layers."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], config: ActivationConfig) -> None:
        self.bytes_fetched = 0
        self.bytes_stored = 0
        self._prefetch = config.prefetch
        self._lanes: dict[torch.device, Lanes] = {}
        self._order: list[nn.Module] = []
        """Layers as they ran in the last forward."""
        self._running: list[nn.Module] = []
        """As they have run in this one."""
        self._reached: nn.Module | None = None
        """Where backward is."""
        self._here: dict[nn.Module, None] = {}
        """Layers whose weights are on the device, or on their way."""
        self._waits: list[HostWeight] = []
        """With gradients on their way."""
        self._task: int | None = None
        self._is_closed = False
        self._hooks: list[Any] = []
        self._hooked: set[HostWeight] = set()
        _refuse_ddp(uses_ddp(model))
        names = {param: name for name, param in model.named_parameters()}
        chosen = {layer: _movable(model, layer, config, names) for layer in layers}
        with _check_memory(chosen, config):
            self._weights = {
                layer: [HostWeight(names[param], param, self._lanes_of(param.device)) for param in params]
                for layer, params in chosen.items()
            }
        for weights in self._weights.values():
            _on_host.update({weight.param: True for weight in weights})

    def _lanes_of(self, device: torch.device) -> Lanes:
        if device not in self._lanes:
            self._lanes[device] = link_for(device).lanes()
        return self._lanes[device]

    @property
    def host_bytes(self) -> int:
        return sum(weight.host_bytes for weights in self._weights.values() for weight in weights)

    # Forward

    def begin(self) -> None:
        """The model's forward begins."""
        if running_backward() is not None:
            return
        _refuse_ddp(uses_ddp())
        self._clean_up()
        self._running = []
        for layer in self._order[: self._prefetch]:
            self._fetch(layer)

    def enter(self, layer: nn.Module) -> None:
        """A layer is about to run: its parameters are on the device."""
        if layer not in self._weights:
            return
        if (
            self._task is not None and running_backward() is None
        ):  # one has failed, and left copies of weights as they were then
            self._clean_up()
        self._hook(layer)
        for weight in self._weights[layer]:
            weight.adopt()
        if running_backward() is not None:  # a checkpoint runs it again
            self.reached(layer)
        else:
            self._running.append(layer)
            self._fetch(layer)
            for following in self._order[len(self._running) : len(self._running) + self._prefetch]:
                self._fetch(following)
        for weight in self._weights[layer]:
            weight.swap_in()
            weight.watch(functools.partial(_before_gradient, weakref.ref(self)))

    def leave(self, layer: nn.Module, *, in_forward: bool) -> None:
        """A layer has run, or raised: its parameters are on the host. `in_forward`: of the model."""
        for weight in self._weights.get(layer, ()):
            weight.swap_out()
        if layer in self._weights and running_backward() is None:
            self._drop(layer)
            if not in_forward:
                self._let_write()

    def end(self) -> None:
        """The model's forward is over."""
        if running_backward() is None:
            self._order = self._running
            for layer in list(self._here):
                self._drop(layer)
            self._let_write()

    def saved(self, storage: int, tensor: torch.Tensor) -> SavedWeight | None:
        """What autograd shall keep in place of `tensor`, if it is a weight of the layer that runs, or a view of it."""
        for layer in self._here:
            for weight in self._weights[layer]:
                if weight.storage == storage:
                    return SavedWeight(self, layer, weight, tensor)
        return None

    # Backward

    def copy_of(self, layer: nn.Module, weight: HostWeight) -> torch.Tensor:
        """Backward asks for a weight."""
        if self._is_closed:
            return weight.param.data
        self.reached(layer)
        return weight.here()

    def reached(self, layer: nn.Module) -> None:
        """Backward has come to `layer`: its weights are needed now, and those before it next."""
        self._notice_end()
        if self._reached is not layer:
            self._reached = layer
            number = self._order.index(layer) if layer in self._order else 0
            wanted = [layer, *reversed(self._order[max(0, number - self._prefetch) : number])]
            for other in [other for other in self._here if other not in wanted]:
                self._drop(other)
            for one in wanted:
                self._fetch(one)
        self._fetch(layer)

    def _hook(self, layer: nn.Module) -> None:
        """When it runs: a parameter that was frozen may not be so any more."""
        owner = weakref.ref(self)
        for weight in self._weights[layer]:
            hooks = weight.param._post_accumulate_grad_hooks or {}
            others = sum(not _is_ours(hook) for hook in hooks.values())
            if others:
                raise ConfigError(
                    f"Parameter {weight.name!r}, which lives on the host (weights=True), has {others} hooks for its "
                    "accumulated gradient (register_post_accumulate_grad_hook), which would see it before it is there; "
                    "expected none. Take them off, leave that layer out of layers, or use Tensor.register_hook."
                )
            if weight.param.requires_grad and weight not in self._hooked:
                self._hooked.add(weight)
                after = functools.partial(_after_gradient, owner, weight)
                self._hooks.append(weight.param.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def expected(self, weight: HostWeight) -> None:
        """A gradient is about to be accumulated."""
        if self._is_closed:
            return
        self._notice_end()
        weight.before_gradient()
        if weight not in self._waits:
            self._waits.append(weight)

    def arrived(self, weight: HostWeight) -> None:
        """A gradient is there."""
        for other in self._waits:
            other.let_gradient_go()
        self.bytes_stored += weight.take_gradient()

    def _notice_end(self) -> None:
        task = running_backward()
        if task not in (None, self._task):
            self._task = task
            after_backward(functools.partial(self._clean_up, task))

    def _clean_up(self, ended: int | None = None) -> None:
        """Every parameter is a host tensor with its gradient, and nothing is under way.

        `ended`: the backward that is over. Without it, all that is left is of one that did not come to its end.
        """
        self._task = self._reached = None
        for weights in self._weights.values():
            for weight in weights:
                weight.swap_out()
        for layer in list(self._here):
            self._drop(layer)
        self._let_write()
        for weight in self._waits if ended is None else [one for one in self._waits if one.task == ended]:
            weight.forget() if ended is None else weight.settle()
        self._waits = [weight for weight in self._waits if weight.task is not None]

    # Both

    def _fetch(self, layer: nn.Module) -> None:
        self._here[layer] = None
        for weight in self._weights[layer]:
            if weight.fetch():
                self.bytes_fetched += weight.nbytes

    def _drop(self, layer: nn.Module) -> None:
        self._here.pop(layer, None)
        for weight in self._weights[layer]:
            weight.drop()

    def _let_write(self) -> None:
        for weights in self._weights.values():
            for weight in weights:
                weight.let_write()

    def close(self) -> None:
        """The parameters are device tensors again."""
        self._clean_up()
        for hook in self._hooks:
            hook.remove()
        for weights in self._weights.values():
            for weight in weights:
                weight.bring_home()
                self._is_closed = True
                _on_host.pop(weight.param, None)  # type: ignore[no-untyped-call]


class SavedWeight:
    """What autograd keeps in place of a weight, or of a view of one."""

    __slots__ = ("_offset", "_size", "_stride", "_version", "layer", "owner", "weight")

    def __init__(self, owner: HostWeights, layer: nn.Module, weight: HostWeight, tensor: torch.Tensor) -> None:
        self.owner, self.layer, self.weight = owner, layer, weight
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._version = weight.param._version

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved."""
        param = self.weight.param
        if param._version != self._version:
            raise OffstageError(
                f"Parameter {self.weight.name!r} was changed in place after a forward whose backward still needs it "
                f"(version {param._version}, expected {self._version}). Call backward before the optimizer's step."
            )
        found = self.owner.copy_of(self.layer, self.weight)
        made = torch.empty(0, dtype=found.dtype, device=found.device)
        return made.set_(found.untyped_storage(), self._offset, self._size, self._stride)  # type: ignore[no-any-return]


def _is_ours(hook: Any) -> bool:
    """Our optimizers' hooks only note that a gradient has arrived, and do not read it."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("offstage.")


def _before_gradient(owner: weakref.ref[HostWeights], weight: HostWeight) -> None:
    if (weights := owner()) is not None:
        weights.expected(weight)


def _after_gradient(owner: weakref.ref[HostWeights], weight: HostWeight, param: torch.Tensor) -> None:
    if (weights := owner()) is not None:
        weights.arrived(weight)


def _movable(
    model: nn.Module, layer: nn.Module, config: ActivationConfig, names: dict[nn.Parameter, str]
) -> list[nn.Parameter]:
    """The layer's own parameters: what another module uses as well, under whatever name, stays."""
    inside = set(layer.modules())
    shared = [
        tensor
        for module in model.modules()
        for tensor in (
            *(module.parameters(recurse=False) if module not in inside else ()),
            *module.buffers(recurse=False),
        )
    ]
    others = {tensor.untyped_storage()._cdata for tensor in shared if type(tensor) in (torch.Tensor, nn.Parameter)}
    own = list(layer.parameters())
    found = []
    for param in own:
        if isinstance(param, DTensor):
            raise ConfigError(
                f"weights=True moves ordinary parameters; found a DTensor, {names[param]!r}. FSDP2 divides weights "
                "among ranks: use its CPUOffloadPolicy for them, or leave weights out."
            )
        storage = param.untyped_storage()
        alone = sum(other.untyped_storage()._cdata == storage._cdata for other in own) == 1
        dense = param.nbytes == storage.nbytes() and param.is_contiguous()
        if storage._cdata not in others and alone and dense and param.nbytes >= int(config.min_bytes):
            found.append(param)
    _refuse_optimizers(found, names)
    return found


def _refuse_optimizers(params: Sequence[nn.Parameter], names: dict[nn.Parameter, str]) -> None:
    """An optimizer of ours that was made before knows these parameters on the device."""
    if any(map(has_state, params)):
        gc.collect()  # an optimizer that was dropped
    for param in params:
        if has_state(param):
            raise ConfigError(
                f"weights=True moves {names[param]!r} to the host, and an offloaded optimizer was made for it on "
                f"{param.device}; expected the other order. Call offload_activations() first, then make the optimizer."
            )


def _refuse_ddp(found: bool) -> None:
    if found:
        raise ConfigError(
            "weights=True keeps parameters and gradients on the host, where DistributedDataParallel does not reduce "
            "them; expected a model without it. Use FSDP2 for many ranks, or leave weights out."
        )


def _check_memory(chosen: dict[nn.Module, list[nn.Parameter]], config: ActivationConfig) -> Claim:
    need = sum(2 * param.nbytes for params in chosen.values() for param in params)  # the weight and its gradient
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
    return check_host_memory(need, None, what="weights=True", remedy="Offload fewer layers, or free host memory.")
