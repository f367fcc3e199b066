# SPDX-License-Identifier: Apache-2.0
"""`HostWeights`: the layers of a model whose weights live on the host; which of them are on the device, and when.

Forward sends for a layer's weights, and for the next layer's meanwhile; backward does the same the other way round, in
the order that the last forward had. At most the layer that ran before, the one that runs and those sent for are there.
If something asks for another, it is sent for once more.

The optimizer that updates the weights is the `Listener`: it makes updates that were left to this forward when a layer
is sent for, waits for them when the layer runs, and gives what is due to the lanes before the layer leaves. Without one
(`offload_activations(weights=True)`) gradients go to the host, where another optimizer finds them (`ForeignGradient`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from offstage.engine.timer import StepTimer
from offstage.errors import ConfigError
from offstage.lanes.lanes import Lanes
from offstage.modules import (
    LayerHook,
    ModelAnchor,
    Stayed,
    after_backward,
    has_saved_tensor_hooks,
    is_ours,
    is_recomputed,
    running_backward,
    uses_ddp,
)
from offstage.planning.host_weights import LAYERS_BEHIND
from offstage.tensors import forget_home, set_home
from offstage.weights.foreign_gradient import ForeignGradient
from offstage.weights.host_layer import HostLayer, HostWeight
from offstage.weights.saved_weight import SavedWeight, unpack

_on_host: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Every parameter that lives on the host."""


def host_weight_of(param: torch.Tensor) -> HostWeight | None:
    """What `param` is on the host, if it lives there."""
    return _on_host.get(param)  # type: ignore[no-any-return,no-untyped-call]


def host_weights_of(model: nn.Module) -> HostWeights | None:
    """Those of `model`, if some of its weights live on the host."""
    anchor: ModelAnchor | None = getattr(model, "_offstage_weights", None)
    return None if anchor is None else anchor.offload


@contextlib.contextmanager
def running_again(model: weakref.ref[nn.Module], layer: nn.Module) -> Iterator[None]:
    """Within: backward runs `layer`'s forward again, without its hooks. Its weights are on the device."""
    found = model()
    weights = None if found is None else host_weights_of(found)
    if weights is None or not weights.moves(layer):
        yield
        return
    weights.enter(layer)
    try:
        yield
    finally:
        weights.leave(layer)


class Listener(Protocol):
    """The optimizer that updates the weights."""

    def weights_coming(self, params: Sequence[torch.Tensor]) -> None:
        """A layer has been sent for, in forward."""

    def has_late(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether updates of a layer were left to the next forward."""

    def weights_needed(self, params: Sequence[torch.Tensor]) -> None:
        """A layer is about to run, in forward or again in backward."""

    def weights_leaving(self, params: Sequence[torch.Tensor]) -> None:
        """A layer's copy is about to be dropped."""

    def backward_is_over(self) -> None:
        """What is due of the layers on the device can begin."""


class HostWeights:
    """The layers of one model."""

    # Initialization

    def __init__(
        self,
        model: nn.Module,
        chosen: Mapping[nn.Module, Mapping[str, nn.Parameter]],
        lanes: Mapping[torch.device, Lanes],
        homes: Mapping[nn.Module, torch.device],
        *,
        ahead: int = 1,
        pin: bool = True,
        turn: Any = None,
        timers: Mapping[torch.device, StepTimer] | None = None,
    ) -> None:
        """`chosen`: the parameters of each layer that live on the host from now on, by name. `homes`: where a layer's
        weights are used. `ahead`: how many layers are sent for before they are needed."""
        self.bytes_fetched = 0
        self.bytes_stored = 0
        """Gradients, for other optimizers."""
        self.listener: weakref.ref[Listener] | None = None
        self.may_reuse = False
        """Copies may wait for the next forward: other code calls `synchronize()` before it writes weights."""
        self._ahead, self._turn = ahead, threading.RLock() if turn is None else turn
        self._lanes, self._pin = dict(lanes), pin
        self._layers: dict[nn.Module, HostLayer] = {}
        self._order: list[nn.Module] = []
        """Layers as they ran in the last forward."""
        self._running: list[nn.Module] = []
        """As they have run in this one."""
        self._late: deque[nn.Module] = deque()
        """Layers that this forward still has to update: the next one is sent for when the one before it runs."""
        self._is_open = False
        """The model's forward runs."""
        self._hooks: Any = None
        """On the tensors that autograd saves, while the model's forward runs."""
        self._alone: list[tuple[nn.Module, Any]] = []
        """Layers that run outside the model's forward, with the same hooks."""
        self._reached: nn.Module | None = None
        """Where backward is."""
        self._here: dict[nn.Module, None] = {}
        """Layers whose weights are on the device, or on their way."""
        self._task: int | None = None
        """The backward that runs."""
        self._loop_thread: int | None = None
        """The thread that ran the last forward with gradients: it calls backward, and waits for its end."""
        self._is_closed = False
        self._gradients: dict[HostWeight, ForeignGradient] = {}
        self._waits: list[ForeignGradient] = []
        """With gradients on their way."""
        self._hooked: set[ForeignGradient] = set()
        self._handles: list[Any] = []
        self._layer_handles: dict[nn.Module, list[Any]] = {}
        self._model = weakref.ref(model)
        self.add(chosen, lanes, homes, timers)
        self._order = list(self._layers)
        self._handles.append(model.register_forward_pre_hook(LayerHook(self.begin), prepend=True))
        self._handles.append(model.register_forward_hook(LayerHook(self.end), always_call=True))
        model._offstage_weights = ModelAnchor(self)  # type: ignore[assignment]

    def add(
        self,
        chosen: Mapping[nn.Module, Mapping[str, nn.Parameter]],
        lanes: Mapping[torch.device, Lanes],
        homes: Mapping[nn.Module, torch.device],
        timers: Mapping[torch.device, StepTimer] | None = None,
    ) -> None:
        """Move more layers to the host, one after the other, between steps. As in `__init__`."""
        added: list[HostLayer] = []
        try:
            for module, params in chosen.items():
                home = homes[module] if params else None
                timer = None if timers is None or home is None else timers[home]
                if home is not None:
                    added.append(HostLayer(module, dict(params), home, lanes[home], pin=self._pin, timer=timer))
        except BaseException:  # there is not as much memory as there seemed to be: all weights are where they were
            for layer in added:
                layer.close(layer.came_from)
            raise
        for layer in added:
            self._adopt(layer)

    def _adopt(self, layer: HostLayer) -> None:
        module = layer.module
        self._layers[module] = layer
        self._link(layer)
        for weight in layer.weights:
            _on_host[weight.param] = weight
            set_home(weight.param, layer.device)
        self._layer_handles[module] = [
            module.register_forward_pre_hook(LayerHook(self.enter), prepend=True),
            module.register_forward_hook(LayerHook(self.leave), always_call=True),
        ]
        model = self._model()
        assert model is not None
        self._order = [one for one in model.modules() if one in self._layers]  # the next forward says it better

    def _link(self, layer: HostLayer) -> None:
        layer.link(functools.partial(_bring, weakref.ref(self), layer.module))

    def link_again(self) -> None:
        """The garbage collector, which calls `__del__`, has cleared the weak references that layers and weights use."""
        for layer in self._layers.values():
            self._link(layer)

    def release(self, module: nn.Module) -> Callable[[], None]:
        """The weights of one layer are ordinary tensors again, on their device; or it fails, and nothing has changed.

        Returns what takes them to the host again.
        """
        with self._turn:
            self._drop(module)
            layer = self._layers[module]
            again = layer.made_again()
            layer.close(layer.device)
            del self._layers[module]
            for handle in self._layer_handles.pop(module):
                handle.remove()
            self._order = [one for one in self._order if one is not module]
            self._reached = None
            _forget(layer)
            return lambda: self._adopt(again())

    def serve_other_optimizers(self) -> None:
        """There is no listener: gradients go to the host, and the host's weights may be written between uses."""
        self._gradients = {weight: ForeignGradient(weight, self._lanes[weight.layer.device]) for weight in self.weights}

    def moves(self, module: nn.Module) -> bool:
        """Whether weights of that layer live on the host."""
        return module in self._layers

    @property
    def weights(self) -> list[HostWeight]:
        return [weight for layer in self._layers.values() for weight in layer.weights]

    @property
    def layers(self) -> list[HostLayer]:
        return list(self._layers.values())

    @property
    def host_bytes(self) -> int:
        """Weights; and gradients, for other optimizers."""
        of_gradients = sum(gradient.host_bytes for gradient in self._gradients.values())
        return of_gradients + sum(layer.host_bytes for layer in self._layers.values())

    @property
    def device_bytes(self) -> int:
        """What is on the device of them now."""
        return sum(layer.nbytes for layer in self._layers.values() if layer.copy is not None)

    @property
    def most_device_bytes(self) -> int:
        """What is there at most, if layers run one after the other: see `_keep`."""
        largest = max((layer.nbytes for layer in self._layers.values()), default=0)
        return min(len(self._layers), self._ahead + 1 + LAYERS_BEHIND) * largest

    # Forward

    def begin(self, *_: Any) -> None:
        """The model's forward begins."""
        with self._turn:
            if self._hooks is not None and running_backward() is None:  # of a forward that was interrupted
                self._end_interrupted()
            self._close_hooks()
            if running_backward() is not None:
                return
            refuse_ddp(uses_ddp())
            self._clean_up_failed()
            self._note_thread()
            self._running, self._is_open = [], True
            first = self._order[: self._ahead + 1]
            self._keep([one for one in first if self.may_reuse and self._layers[one].is_current])
            self._open_hooks()
            self._late = deque(one for one in self._order if self._is_late(one))
            for layer in (*self._order[: self._ahead], *self._next_late()):
                self._fetch(layer)

    def _open_hooks(self) -> None:
        """What autograd saves of a copy is kept as a reference to its weight, unless the activations' hooks do that."""
        model = self._model()
        anchor = getattr(model, "_offstage_activations", None)
        if not torch.is_grad_enabled() or (anchor is not None and anchor.offload is not None):
            return
        if not is_recomputed(self):
            self._hooks = self._new_hooks()

    def _new_hooks(self) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        hooks.__enter__()
        return hooks

    def _close_hooks(self) -> None:
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> SavedWeight | Stayed:
        if tensor.layout == torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
            with self._turn:
                found = self.saved(tensor)
            if found is not None:
                return found
        return Stayed(tensor)

    def enter(self, module: nn.Module, *_: Any) -> None:
        """A layer is about to run: its parameters are on the device."""
        with self._turn:
            layer = self._layers[module]
            if running_backward() is None:
                self._clean_up_failed()
                self._note_thread()
            self._hook(layer)
            for weight in layer.weights if not layer.calls else ():
                weight.adopt()
            if running_backward() is not None:  # a checkpoint runs it again
                self.reached(module)
            else:
                before, position = self._advance(module)
                following = [*self._order[position : position + self._ahead], *self._next_late()]
                self._keep([one for one in (*before, module, *following) if self._layers[one].is_current])
                for one in (module, *following):
                    self._fetch(one)
            self._tell("weights_needed", layer)
            if torch.is_grad_enabled() and not has_saved_tensor_hooks():  # it runs alone, or again in backward
                self._alone.append((module, self._new_hooks()))
            layer.await_copy(layer.weights)
            layer.calls += 1
            for weight in layer.weights:
                weight.swap_in()
                if weight in self._gradients:
                    self._gradients[weight].watch(functools.partial(_before_gradient, weakref.ref(self)))

    def _note_thread(self) -> None:
        if torch.is_grad_enabled():
            self._loop_thread = threading.get_ident()

    def _advance(self, module: nn.Module) -> tuple[list[nn.Module], int]:
        """The layer that ran before `module`, and the place of the next one in the order of the last forward."""
        if not self._is_open:  # not in the model's forward: in the order that it had
            number = self._order.index(module) if module in self._order else 0
            return self._order[max(0, number - 1) : number], number + 1
        before = self._running[-1:]
        self._running.append(module)
        while module in self._late:  # and layers before it that do not run this time
            self._late.popleft()
        return before, len(self._running)

    def _next_late(self) -> list[nn.Module]:
        return [self._late[0]] if self._late and self._is_open else []

    def _is_late(self, module: nn.Module) -> bool:
        listener = self.listener() if self.listener is not None else None
        return listener is not None and listener.has_late([weight.param for weight in self._layers[module].weights])

    def leave(self, module: nn.Module, *_: Any) -> None:
        """A layer has run, or raised: its parameters are on the host."""
        with self._turn:
            if self._alone and self._alone[-1][0] is module:
                self._alone.pop()[1].__exit__(None, None, None)
            layer = self._layers[module]
            layer.calls = max(0, layer.calls - 1)
            for weight in layer.weights if not layer.calls else ():
                weight.swap_out()
            if self._gradients and not self._is_open and running_backward() is None:  # another optimizer may come next
                self._keep(())
                self._let_write()

    def end(self, *_: Any) -> None:
        """The model's forward is over."""
        with self._turn:
            self._close_hooks()
            self._is_open = False
            if running_backward() is not None:
                return
            self._order = self._running or self._order
            # Backward begins with the last layer.
            self._keep(self._order[-1 - self._ahead :] if torch.is_grad_enabled() else ())
            self._let_write()

    def saved(self, tensor: torch.Tensor) -> SavedWeight | None:
        """What autograd shall keep in place of `tensor`, if it is of a copy that is on the device."""
        storage = tensor.untyped_storage()._cdata
        for module in self._here:
            layer = self._layers[module]
            if layer.copy is not None and layer.copy.untyped_storage()._cdata == storage:
                byte = int(tensor.storage_offset()) * tensor.itemsize
                weight = next((one for one in layer.weights if one.holds(byte)), None)
                return None if weight is None else SavedWeight(self, weight, tensor)
        return None

    # Backward

    def copy_of(self, weight: HostWeight) -> torch.Tensor:
        """Backward asks for a weight: the layer's copy."""
        with self._turn:
            self.reached(weight.layer.module)
            weight.layer.await_copy([weight])
            assert weight.layer.copy is not None
            return weight.layer.copy

    def reached(self, module: nn.Module) -> None:
        """Backward has come to a layer: its weights are needed now, and those before it next."""
        self._notice_end()
        if self._reached is not module:
            self._reached = module
            number = self._order.index(module) if module in self._order else 0
            before = self._order[max(0, number - self._ahead) : number]
            behind = LAYERS_BEHIND if self.listener is not None else 1
            self._keep([*self._order[number + 1 : number + 1 + behind], module, *before])
            for one in (module, *reversed(before)):
                self._fetch(one)
        self._fetch(module)

    def _hook(self, layer: HostLayer) -> None:
        """When it runs: a parameter that was frozen may not be so any more."""
        owner = weakref.ref(self)
        for weight in layer.weights:
            gradient = self._gradients.get(weight)
            hooks = weight.param._post_accumulate_grad_hooks or {}
            others = sum(not is_ours(hook) for hook in hooks.values())
            if others:
                raise ConfigError(
                    f"Parameter {weight.name!r}, which lives on the host, has {others} hooks for its "
                    "accumulated gradient (register_post_accumulate_grad_hook), which would see it before it is there; "
                    "expected none. Take them off, keep that weight on the device, or use Tensor.register_hook."
                )
            if gradient is not None and weight.param.requires_grad and gradient not in self._hooked:
                self._hooked.add(gradient)
                after = functools.partial(_after_gradient, owner, gradient)
                self._handles.append(weight.param.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def expected(self, gradient: ForeignGradient) -> None:
        """A gradient is about to be accumulated."""
        if self._is_closed:
            return
        with self._turn:
            self._notice_end()
            gradient.before_gradient()
            if gradient not in self._waits:
                self._waits.append(gradient)

    def arrived(self, gradient: ForeignGradient) -> None:
        """A gradient is there."""
        with self._turn:
            for other in self._waits:
                other.let_go()
            self.bytes_stored += gradient.take()

    def _notice_end(self) -> None:
        task = running_backward()
        if task not in (None, self._task):
            self._task = task
            after_backward(functools.partial(self._clean_up, task))

    def _clean_up_failed(self) -> None:
        """A forward begins. If it is the loop's, the backward before is over; if that was not seen, it has failed."""
        if self._task is not None and threading.get_ident() == self._loop_thread:
            self._end_interrupted()
            self._clean_up()

    def _clean_up(self, ended: int | None = None) -> None:
        """Every parameter is a host tensor, and layers leave the device, or wait there for the next forward.

        `ended`: the backward that is over. Without it, all that is left is of one that did not come to its end.
        """
        with self._turn:
            self._task = self._reached = None
            listener = self.listener() if self.listener is not None else None
            if ended is not None and listener is not None:
                # The next forward begins with them. Until then nothing has to wait for their stores.
                listener.backward_is_over()
                for layer in [self._layers[module] for module in self._here]:
                    for weight in layer.weights if not layer.calls else ():
                        weight.swap_out()
            else:
                self._keep(())
            self._let_write()
            for gradient in self._waits if ended is None else [one for one in self._waits if one.task == ended]:
                gradient.forget() if ended is None else gradient.settle()
            self._waits = [gradient for gradient in self._waits if gradient.task is not None]

    # Both

    def _fetch(self, module: nn.Module) -> None:
        layer = self._layers[module]
        self._here[module] = None
        try:
            self.bytes_fetched += layer.fetch()
        except Exception:
            if layer.updated is not None:
                self._tell("weights_needed", layer)  # if its update has failed, that says so
            raise
        if running_backward() is None:
            self._tell("weights_coming", layer)

    def bring(self, module: nn.Module) -> None:
        """An update is about to be made: the layer's weights are on the device, or on their way."""
        if self._layers[module].copy is None:
            self._keep(list(self._here)[-1 - self._ahead :])
            self._here[module] = None
            self.bytes_fetched += self._layers[module].fetch()

    def _keep(self, wanted: Iterable[nn.Module]) -> None:
        """Drop the copies of all other layers."""
        kept = set(wanted)
        for module in [one for one in self._here if one not in kept and not self._layers[one].calls]:
            self._drop(module)

    def _drop(self, module: nn.Module) -> None:
        layer = self._layers[module]
        if layer.copy is not None:  # otherwise the CPU updates it, and has let go of it
            self._tell("weights_leaving", layer)
            layer.drop()
        self._here.pop(module, None)

    def _tell(self, what: str, layer: HostLayer) -> None:
        listener = self.listener() if self.listener is not None else None
        if listener is not None:
            getattr(listener, what)([weight.param for weight in layer.weights])

    def note_versions(self) -> None:
        """A step is made: copies on the device have its weights, or will have when their updates are done."""
        for module in self._here:
            self._layers[module].note_versions()

    def _end_interrupted(self) -> None:
        """Torch calls no hooks after KeyboardInterrupt and the like: forwards that ran then do not run any more."""
        for layer in self._layers.values():
            layer.calls = 0

    def forget_copies(self) -> None:
        """Copies are not what they should be: not even those of layers that another thread runs are used again."""
        for module in list(self._here):
            self._drop(module)

    def forget_written(self, *, unseen: bool) -> None:
        """A step begins: weights that other code has written since they were fetched are fetched again.

        `unseen`: it may have done so in a way that leaves no trace (`.data`).
        """
        for module in list(self._here):
            if unseen or not self._layers[module].is_current:
                self._drop(module)

    def settle(self) -> None:
        """The host waits until its weights are the newest, and may be written."""
        self._keep(())
        for layer in self._layers.values():
            layer.let_write()

    def _let_write(self) -> None:
        if self._gradients:
            for layer in self._layers.values():
                layer.let_write()

    def use(self, lanes: Mapping[torch.device, Lanes], timers: Mapping[torch.device, StepTimer]) -> None:
        """Other lanes from now on: state has moved. Nothing is under way."""
        self.forget_copies()
        for layer in self._layers.values():
            layer.use(lanes[layer.device], timers[layer.device])

    def add_spare(self, params: Iterable[torch.Tensor]) -> None:
        """A second set of host memory for `params`, which speculative updates write; other layers need none."""
        wanted = set(params)
        for layer in self._layers.values():
            if speculative := [weight for weight in layer.weights if weight.param in wanted]:
                layer.add_spare(speculative)
            else:
                layer.drop_spare()

    def drop_spare(self) -> None:
        for layer in self._layers.values():
            layer.drop_spare()

    def undo(self) -> None:
        """Everything is where it was before."""
        self._close([layer.came_from for layer in self._layers.values()])

    def close(self, *, to_device: bool = True) -> None:
        """The parameters are ordinary tensors again: on the device, or on the host."""
        self._close([layer.device if to_device else torch.device("cpu") for layer in self._layers.values()])

    def _close(self, devices: Sequence[torch.device]) -> None:
        with self._turn:
            self._clean_up()
            self._close_hooks()
            for handle in (*self._handles, *(one for handles in self._layer_handles.values() for one in handles)):
                handle.remove()
            self._handles.clear()
            self._layer_handles.clear()
            for layer, device in zip(self._layers.values(), devices, strict=True):
                layer.close(device)
                self._is_closed = True
                _forget(layer)
            model = self._model()
            if model is not None:
                model._offstage_weights = None  # type: ignore[assignment]

    @property
    def is_orphaned(self) -> bool:
        """Whether the optimizer that updated the weights is gone."""
        return self.listener is not None and self.listener() is None

    def has(self, weight: HostWeight) -> bool:
        """Whether `weight` lives on the host still, by its layer of now."""
        return not self._is_closed and host_weight_of(weight.param) is weight


def _forget(layer: HostLayer) -> None:
    """Its parameters do not live on the host any more."""
    for weight in layer.weights:
        _on_host.pop(weight.param, None)  # type: ignore[no-untyped-call]
        forget_home(weight.param)


def _bring(owner: weakref.ref[HostWeights], module: nn.Module) -> None:
    weights = owner()
    assert weights is not None
    weights.bring(module)


def _before_gradient(owner: weakref.ref[HostWeights], gradient: ForeignGradient) -> None:
    if (weights := owner()) is not None:
        weights.expected(gradient)


def _after_gradient(owner: weakref.ref[HostWeights], gradient: ForeignGradient, param: torch.Tensor) -> None:
    if (weights := owner()) is not None:
        weights.arrived(gradient)


def refuse_ddp(found: bool) -> None:
    """Raise if DistributedDataParallel reduces the gradients of weights that live on the host."""
    if found:
        raise ConfigError(
            "Weights on the host have gradients that leave for the host, where DistributedDataParallel does not reduce "
            "them; expected a model without it. Use FSDP2, which has a policy of its own for weights on the host "
            "(CPUOffloadPolicy), or leave the weights on the device."
        )
