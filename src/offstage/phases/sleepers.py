# SPDX-License-Identifier: Apache-2.0
"""The objects that can sleep: modules, offloaded optimizers, and optimizers of torch.

Their use is refused or delayed while their tensors are away: a module's forward by a hook of that module, an
optimizer's step by one of the optimizer, and what autograd adds to a gradient by a hook of the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from offstage.errors import ConfigError
from offstage.memory.guarded import guard_of
from offstage.modules import Hook
from offstage.optimizer.optimizer import OffloadedOptimizer, runtime_of
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.optimizer.runtime import Runtime, runtimes_with
from offstage.phases.parking import AWAY, ParkedStorage, Stage, asleep_error
from offstage.phases.sleeper import Item, Sleeper
from offstage.tensors import readable, reshard
from offstage.weights.host_weights import host_weight_of


class ModuleSleeper(Sleeper):
    """Parameters, their gradients, and buffers."""

    main_kind = "weights"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(type(model).__name__)
        self._model = weakref.ref(model)
        self._order: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        """Modules, in the order in which the last forward after a wake came to them."""
        self._order_now: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._used_by: weakref.WeakKeyDictionary[nn.Module, list[ParkedStorage]] = weakref.WeakKeyDictionary()
        """What each module's forward uses, of what is away."""

    def arranged(self) -> list[ParkedStorage]:
        last = len(self._order)
        first = {
            one: min((self._order.get(module, last) for item in items if (module := item.module)), default=last)
            for one, items in self.parked.items()
        }
        return sorted(self.parked, key=first.__getitem__)

    def items(self) -> Iterator[Item]:
        model = self._model()
        assert model is not None
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield Item("buffers", f"Buffer {prefix + name!r}", buffer, module)
            for name, param in module._parameters.items():
                if param is None:
                    continue
                label = repr(prefix + name)
                if host_weight_of(param) is None:
                    yield Item("weights", f"Parameter {label}", param, module)
                grad = param.grad
                if grad is not None and not isinstance(grad, (LeftGradient, DroppedGradient)):
                    yield Item("gradients", f"The gradient of {label}", grad, module, param)

    def runtimes(self) -> list[Runtime]:
        model = self._model()
        return runtimes_with(set(model.parameters())) if model is not None else []

    def drop_gradients(self) -> None:
        model = self._model()
        for param in model.parameters() if model is not None else ():
            param.grad = None

    def drain(self) -> None:
        super().drain()
        model = self._model()
        assert model is not None
        reshard(model)

    @property
    def waits_at_once(self) -> bool:
        model = self._model()
        if model is None:
            return True
        return any(
            isinstance(module, FSDPModule)  # gathers shards ahead of the module's forward, and on streams of its own
            or module._compiled_call_impl is not None  # runs the hooks that there were when it was compiled
            or hasattr(module, "_orig_mod")
            for module in model.modules()
        )

    def _guard(self) -> None:
        model = self._model()
        assert model is not None
        if self._order_now:
            self._order, self._order_now = self._order_now, weakref.WeakKeyDictionary()
        self._used_by = weakref.WeakKeyDictionary({model: []})
        for one in self.away:
            for item in self.parked[one]:
                module, param = item.module, item.param
                if item.kind != "gradients" and module is not None:
                    self._used_by.setdefault(module, []).append(one)
                elif param is not None:
                    trains = param.requires_grad
                    param.requires_grad_(True)  # a frozen one may not be so any more when backward comes
                    hook = Hook(self._before_gradient, one)
                    self._handles.append(param.register_hook(hook))  # type: ignore[no-untyped-call]
                    param.requires_grad_(trains)
        load = model.register_load_state_dict_pre_hook(Hook(self._before_load))  # type: ignore[no-untyped-call]
        self._handles.append(load)
        for module in list(self._used_by):
            if isinstance(module, _READS_CHILDREN):
                children = [child for child in module.modules() if child is not module]
                self._used_by[module] += [one for child in children for one in self._used_by.get(child, ())]
        _watch_steps()
        before = Hook(self._before_forward)
        self._handles += [module.register_forward_pre_hook(before, prepend=True) for module in self._used_by]

    def _before_forward(self, module: nn.Module, *_: Any) -> None:
        is_root = module is self._model()
        away = self.is_asleep if is_root else any(one.stage is Stage.AWAY for one in self._used_by[module])
        if away:
            raise asleep_error(self.title if is_root else f"{self.title}'s {type(module).__name__}", "forward()")
        self._order_now.setdefault(module, len(self._order_now))
        for one in self._used_by[module]:
            one.use("forward()")
        if is_root:
            self._forget_dropped()
        if not self._is_coming and not self.away:
            self.settle()

    def _before_load(self, *_: Any) -> None:
        self.use("load_state_dict()")

    def _forget_dropped(self) -> None:
        """Gradients that were zeroed while they came: their memory goes back."""
        for one in [one for one in self.parked if one.stage is Stage.COMING and not one.tensors]:
            one.back()
            del self.parked[one]

    def _before_gradient(self, one: ParkedStorage) -> None:
        if one.tensors:  # otherwise it was zeroed meanwhile
            one.use("backward()")

    def check(self) -> None:
        super().check()
        model = self._model()
        assert model is not None
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigError(
                    f"Module {name!r} is a ScriptModule, which takes no hooks; expected an ordinary one. Let it sleep "
                    "before it is scripted, or pass the modules beside it."
                )


_READS_CHILDREN = (
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""These read the weights of modules inside, whose own forward they may not call, and look at their classes."""
_steps: list[RemovableHandle] = []


def _watch_steps() -> None:
    """While a module sleeps or wakes: no optimizer begins a step with what is away, and each waits for what comes."""
    if not _steps:
        _steps.append(register_optimizer_step_pre_hook(_before_any_step))


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for param in _params_of(optimizer):
        for tensor in (param, param.grad):
            guard = None if tensor is None else guard_of(tensor)
            if isinstance(guard, AWAY) and tensor is not None:  # not weights that are only late: their step goes on
                guard.before_use(tensor, "step()")
    if not any(isinstance(one, ModuleSleeper) and one.is_watching for one in list(_sleepers.values())):
        while _steps:
            _steps.pop().remove()


class TorchOptimizerSleeper(Sleeper):
    """The state of an optimizer that is not offloaded."""

    main_kind = "state"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(type(optimizer).__name__)
        self._optimizer = weakref.ref(optimizer)

    def items(self) -> Iterator[Item]:
        optimizer = self._optimizer()
        assert optimizer is not None
        params = {param: number for number, param in enumerate(_params_of(optimizer))}
        for owner, values in optimizer.state.items():
            number = params.get(owner, "?") if isinstance(owner, torch.Tensor) else owner
            for name, tensor in _tensors_in(values, ()):
                yield Item("state", f"State {name!r} of parameter {number}", tensor)

    def _guard(self) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        self._handles.append(optimizer.register_step_pre_hook(Hook(self._before_step)))
        self._handles.append(optimizer.register_state_dict_post_hook(_read_from_host))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(Hook(self._before_load)))

    def _before_step(self, *_: Any) -> None:
        self.use("step()")

    def _before_load(self, *_: Any) -> None:
        self.use("load_state_dict()")


class OffloadedSleeper(Sleeper):
    """An optimizer of offstage: resident state, slots, and the window. What is on the host already does not move."""

    main_kind = "state"

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        super().__init__(f"OffloadedOptimizer[{type(runtime_of(optimizer).shell).__name__}]")
        self._runtime = weakref.ref(runtime_of(optimizer))

    @property
    def runtime(self) -> Runtime:
        found = self._runtime()
        assert found is not None
        return found

    def runtimes(self) -> list[Runtime]:
        runtime = self._runtime()
        return [runtime] if runtime is not None else []  # it may be dropped while it sleeps

    def items(self) -> Iterator[Item]:
        for state in self.runtime.all_states():
            for name, tensor in state.resident.items():
                yield Item("state", f"State {name!r} of {state.name!r}", tensor)

    def free_slots(self, device: torch.device) -> int:
        return self.runtime.free_slots(device)

    def _guard(self) -> None:
        self.runtime.rest = self

    def _forget_hooks(self) -> None:
        for runtime in self.runtimes():
            runtime.rest = None


def _read_from_host(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What is away is read from the host."""
    return {**state_dict, "state": {key: _readable(values) for key, values in state_dict["state"].items()}}


def _readable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return readable(value)
    if isinstance(value, Mapping):
        return {key: _readable(one) for key, one in value.items()}
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value


def _tensors_in(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors_in(one, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _tensors_in(one, (*path, str(number)))


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


_sleepers: weakref.WeakKeyDictionary[Any, Sleeper] = weakref.WeakKeyDictionary()


def parts_of(target: Any) -> list[Any]:
    """What sleeps where `target` is given: another engine's optimizer names those inside by `__offstage_sleeps__`."""
    inside = getattr(target, "__offstage_sleeps__", None)
    found = [target] if inside is None else list(inside())
    if not found:
        raise ConfigError(
            f"This {type(target).__name__} has no optimizer that could sleep; expected at least one. Leave it out "
            "where a rank trains no parameters."
        )
    return found


def sleeper_of(target: Any) -> Sleeper | None:
    """What `sleep()` has made for `target`, if it has been given it; raises for what can never sleep."""
    target = _unwrapped(target)
    _class_for(target)
    return _sleepers.get(target)


def sleeper_for(target: Any) -> Sleeper:
    """The sleeper of `target`; raises if it cannot sleep."""
    target = _unwrapped(target)
    made = _class_for(target)
    if target not in _sleepers:
        _sleepers[target] = made(target)
    return _sleepers[target]


def _unwrapped(target: Any) -> Any:
    """The optimizer that `target` hands everything on to, as accelerate's does."""
    while isinstance(target, torch.optim.Optimizer) and not hasattr(target, "_optimizer_step_pre_hooks"):
        if not isinstance(inner := getattr(target, "optimizer", None), torch.optim.Optimizer):
            raise ConfigError(
                f"{type(target).__name__} is an optimizer without the hooks that torch.optim.Optimizer makes; expected "
                "one that has called its __init__. Pass the optimizer that it wraps."
            )
        target = inner
    return target


def _class_for(target: Any) -> Callable[[Any], Sleeper]:
    if isinstance(target, OffloadedOptimizer):
        return OffloadedSleeper
    if isinstance(target, torch.optim.Optimizer):
        if getattr(target, "_offstage_consumed", False):
            raise ConfigError(
                "This optimizer was given to offstage.offload(), which took over its state; expected the one that "
                "offload() returned."
            )
        return TorchOptimizerSleeper
    if isinstance(target, nn.Module):
        return ModuleSleeper
    raise ConfigError(
        f"sleep(), wake() and asleep() take modules and optimizers; found {type(target).__name__}. Pass each by "
        "itself, as in offstage.sleep(model, optimizer)."
    )
