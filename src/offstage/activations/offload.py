# SPDX-License-Identifier: Apache-2.0
"""`offload_activations`: tensors that autograd saves in forward leave for host memory, and return before backward.

Read this first. While the model's forward runs, autograd hands every tensor that it saves to `_pack`; what belongs to a
chosen layer and is worth it leaves at once on the store lane, and its device memory is let go a little later, when the
copy has probably arrived. When backward asks for a tensor it finds it on its way back (`_unpack`), and sends for those
that it will ask for next (`traffic.py`). What one storage does on this way is in `storage.py`; what is remade instead,
in `remaking.py`. Nothing is done while evaluating: autograd saves nothing then.

[Note: whose tensor is it] A layer that is checkpointed saves only its inputs, just before it runs, or (reentrant
checkpointing) just after. So what is saved between two layers waits until the next one begins, or the forward ends, and
leaves if it is an input of one of the two and that one is chosen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import nn

from offstage.activations.device import DeviceActivations
from offstage.activations.forward_pass import ForwardPass, frames
from offstage.activations.idle import IdleWatch
from offstage.activations.layers import (
    ORDINARY,
    GraphLifetime,
    LayerCall,
    checked_choices,
    choices_of,
    storages_of,
)
from offstage.activations.observer import LayerObserver
from offstage.activations.receipt import ActivationReceipt, renamed
from offstage.activations.remaking import RemadeStorage, TriedStorage, remakable_storage
from offstage.activations.storage import Saved, SavedStorage, Storage
from offstage.activations.traffic import Traffic
from offstage.config import ActivationConfig, ActivationSettings, documents
from offstage.errors import ConfigError, OffstageError
from offstage.lanes.lanes import Lanes
from offstage.modules import (
    LayerHook,
    ModelAnchor,
    Recomputing,
    Stayed,
    is_recomputed,
    layers_of,
    num_layers_of,
    refuse_other_hooks,
    running_backward,
    size_of,
)
from offstage.planning.choices import Choice
from offstage.weights.host_weights import HostWeights, host_weights_of, running_again
from offstage.weights.moving import weights_for_other_optimizers
from offstage.weights.saved_weight import SavedWeight

logger = logging.getLogger("offstage")


def offloads_activations(model: nn.Module) -> bool:
    """Whether `offload_activations` was called for the model or a part of it."""
    return any(_offload_of(module) is not None for module in model.modules())


@documents(ActivationConfig)
def offload_activations(
    model: nn.Module, config: ActivationConfig | None = None, **overrides: Unpack[ActivationSettings]
) -> ActivationOffload:
    """Let saved tensors of `model`'s layers wait for backward in host memory. Returns a handle: `remove()` ends it.

    Gradients are the same, bit for bit. `overrides` are these fields of `ActivationConfig`:
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"offload_activations() expects a torch.nn.Module; found {type(model).__name__}. Pass the model."
        )
    chosen = ActivationConfig.build(config, overrides)
    if offloads_activations(model):
        raise ConfigError(
            "The activations of this model, or of a part of it, are offloaded already; expected once. Call remove() on "
            "the handle that the first call returned."
        )
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:  # by torch.compile(model), model.compile()
        raise ConfigError(
            f"offload_activations() works layer by layer; found a {type(model).__name__} that is compiled as a whole. "
            "Compile its layers one by one instead (model.layers[i] = torch.compile(model.layers[i])), then call this."
        )
    return ActivationOffload(model, chosen)


def lanes_of(model: nn.Module) -> list[Lanes]:
    """Those on which saved tensors of `model` move."""
    offload = _offload_of(model)
    return [] if offload is None else [device.lanes for device in offload._devices.values()]


def _offload_of(module: nn.Module) -> ActivationOffload | None:
    anchor: ModelAnchor | None = getattr(module, "_offstage_activations", None)
    return None if anchor is None else anchor.offload


class ActivationOffload:
    """What `offload_activations()` returns. A context manager: leaving it removes the hooks."""

    # Initialization

    def __init__(self, model: nn.Module, config: ActivationConfig) -> None:
        self.config = config
        self.bytes_offloaded = 0
        self.bytes_returned = 0
        self.bytes_remade = 0
        self.observer: LayerObserver | None = None
        """Told what the layers do. Set it between forwards."""
        self._model = weakref.ref(model)
        self._layers = layers_of(model, config.layers)
        self._num_layers = num_layers_of(model, self._layers)
        self._sizes = {layer: size_of(layer) for layer in self._layers}
        self._places: dict[nn.Module, list[int]] = {}
        """A layer that is called several times may be several."""
        for number, layer in enumerate(self._layers):
            self._places.setdefault(layer, []).append(number)
        self._choices = choices_of(self._layers, config)
        self._devices: dict[torch.device, DeviceActivations] = {}
        self._reached: LayerCall | None = None
        """Where backward is, until the next forward."""
        self._num_calls = 0
        """Of layers, in the last forward."""
        self._largest = 0
        """Bytes that one layer has sent away in the last forward, at most."""
        self._running = threading.local()
        """Forwards under way in each thread: a model may call itself."""
        self._saving_now: set[ForwardPass] = set()
        """Those, of all threads, whose tensors come here."""
        self._turn = threading.RLock()
        """A forward that begins, a backward that asks for a tensor and `remove()` may be in three threads."""
        self._in_flight: weakref.WeakSet[GraphLifetime] = weakref.WeakSet()
        """Forwards whose backward is still to come."""
        self._num_forwards = 0
        self._idle = IdleWatch(config, len(self._layers))
        self.may_be_idle = False
        """Whether it is no error that nothing moves."""
        self.is_lean = False
        """From the next forward on: whether what moves waits for each other, so that little is on its way at once."""
        self._last: ForwardPass | None = None
        self._handles: list[Any] = []
        self._recomputing: list[Recomputing] = []
        """Nothing, unless a layer is to be recomputed."""
        self._weights = self._move_weights(model) if config.weights else None
        with self._turn:  # a forward that begins meanwhile, in another thread, has all of the hooks or none
            self._bind(model)
        model._offstage_activations = ModelAnchor(self)  # type: ignore[assignment]
        logger.info("activations: %d layers", len(self._layers))

    bytes_left = renamed("bytes_left", "bytes_offloaded")

    def _move_weights(self, model: nn.Module) -> HostWeights:
        chosen = [layer for layer, choice in zip(self._layers, self._choices, strict=True) if choice is Choice.OFFLOAD]
        return weights_for_other_optimizers(model, list(dict.fromkeys(chosen)), self.config)

    def _bind(self, model: nn.Module) -> None:
        """Hooks know this object weakly: the model keeps it alive by its anchor, and copies of the model do not."""
        self._handles.append(model.register_forward_pre_hook(LayerHook(self._begin), prepend=True))
        self._handles.append(model.register_forward_hook(LayerHook(self._end), always_call=True))
        for layer in self._places:
            self._handles.append(layer.register_forward_pre_hook(LayerHook(self._enter), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(LayerHook(self._leave), always_call=True))

    def _bind_recomputing(self, is_wanted: bool) -> None:
        if not is_wanted:
            for wrapper in self._recomputing:
                wrapper.remove()
            self._recomputing.clear()
        elif not self._recomputing:
            around = functools.partial(running_again, self._model)
            self._recomputing = [Recomputing(layer, self._recomputes, around) for layer in self._places]

    def remove(self) -> None:
        """Take the hooks off and give host memory back, after the last copy. Forwards that wait for backward go on.

        Waits for the device.
        """
        with self._turn:
            self._remove()

    def _remove(self) -> None:
        if self._weights is not None and running_backward() is not None:
            raise OffstageError(
                "remove() was called in backward, which needs weights that live on the host; expected it before or "
                "after. Call it when backward is over."
            )
        self._refuse_in_forward("remove")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._bind_recomputing(False)
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        model = self._model()
        if model is not None:
            model._offstage_activations = None  # type: ignore[assignment]
        for device in self._devices.values():
            device.trim()
        with contextlib.ExitStack() as all_devices:  # each, whatever another one raises
            for device in self._devices.values():
                all_devices.callback(device.proofs.look_at_all)

    def _refuse_in_forward(self, method: str) -> None:
        self._forget_interrupted()
        if self._saving_now:
            raise OffstageError(
                f"{method}() was called while a forward of the model was running, in this thread or in another one; "
                "expected it before or after. Call it when the forward has returned."
            )

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def host_bytes(self) -> int:
        """Host memory of the pool, and of weights."""
        of_weights = self._weights.host_bytes if self._weights is not None else 0
        return of_weights + sum(device.pool.nbytes for device in list(self._devices.values()))

    @property
    def _here_bytes(self) -> int:
        """On the devices, of what layers have saved."""
        return sum(device.here_bytes for device in self._devices.values())

    # What the layers do

    @property
    def layers(self) -> list[nn.Module]:
        """In the order in which they run."""
        return list(self._layers)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What each of `layers` does in the next forward."""
        return self._choices

    def replan(self, choices: Sequence[Choice]) -> None:
        """Have each of `layers` do something else from the next forward on. Those that wait for their backward keep to
        the choices that they began with."""
        found = checked_choices(choices, self._layers)
        with self._turn:
            self._refuse_in_forward("replan")
            if not self._handles:
                raise OffstageError(
                    "replan() was called after remove(), when the layers do nothing any more; expected it before. Call "
                    "offload_activations(model) again."
                )
            if not self.config.activations and any(choice is not Choice.KEEP for choice in found):
                raise ConfigError(
                    "replan() was given choices for saved tensors, which stay with activations=False; expected "
                    "Choice.KEEP for all. Leave out activations=False."
                )
            self._bind_recomputing(Choice.RECOMPUTE in found)
            if found != self._choices:
                self._choices, self._largest = found, 0  # what a layer sends away is not known yet
                self._idle.restart(self._num_forwards, self.bytes_offloaded + self.bytes_remade)

    def receipt(self) -> ActivationReceipt:
        """What was really moved."""
        last, weights = self._last, self._weights
        return ActivationReceipt(
            passes=self._num_forwards,
            bytes_offloaded=last.offloaded_bytes if last is not None else 0,
            bytes_stayed=last.seen_bytes - last.offloaded_bytes if last is not None else 0,
            bytes_remade=last.remade_bytes if last is not None else 0,
            total_bytes_offloaded=self.bytes_offloaded,
            total_bytes_returned=self.bytes_returned,
            weight_bytes_fetched=weights.bytes_fetched if weights is not None else 0,
            gradient_bytes_stored=weights.bytes_stored if weights is not None else 0,
            host_bytes=self.host_bytes,
            choices=tuple(last.choices) if last is not None else (),
        )

    # Forward

    @property
    def _forwards(self) -> list[ForwardPass]:
        if not hasattr(self._running, "forwards"):
            self._running.forwards = []
        return self._running.forwards  # type: ignore[no-any-return]

    @property
    def _saving(self) -> ForwardPass | None:
        """The forward under way in this thread; `None` also while evaluating."""
        forward = self._forwards[-1] if self._forwards else None
        return None if forward is None or forward.hooks is None else forward

    def begin_late(self) -> None:
        """The model's forward has begun, and has not yet called a layer; its hooks were collected before these were."""
        self._begin()

    def _begin(self, *_: Any) -> None:
        """The model's forward begins."""
        with self._turn:
            if self._handles:  # not removed while this forward was beginning: its end would not be seen
                self._begin_forward()

    def _begin_forward(self) -> None:
        self._forget_interrupted()
        forward = ForwardPass(self._choices, self._traffic())
        self._forwards.append(forward)  # first: whatever raises below, `_end` is called
        if not torch.is_grad_enabled() or is_recomputed(self):
            return
        if not self.may_be_idle:
            self._idle.check(self._choices, self._num_forwards, self.bytes_offloaded + self.bytes_remade, self._last)
        for device in self._devices.values():
            device.run_releases()
            device.refuse_capture()
            forward.has_new_proofs |= device.proofs.look(device.lanes)
        self._reached = None
        self._in_flight.add(forward.lifetime)
        if self.observer is not None:
            forward.observer = self.observer
            self.observer.begin_forward(len(self._in_flight))
            forward.choices, forward.traffic = self._choices, self._traffic()  # it may have called `replan`
        model = self._model()
        assert model is not None
        forward.weights = storages_of(model)
        forward.host_weights = host_weights_of(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, forward), self._unpack)
        hooks.__enter__()
        forward.hooks = hooks
        self._saving_now.add(forward)
        self._num_forwards += 1

    def _traffic(self) -> Traffic:
        num_calls = self._num_calls or len(self._choices)
        return Traffic(
            self._choices,
            self.config,
            self._num_layers,
            largest=self._largest,
            num_calls=num_calls,
            lean=self.is_lean,
        )

    def _forget_interrupted(self) -> None:
        """Torch calls no hooks after KeyboardInterrupt and the like: such a forward is not on the stack any more."""
        under_way = {id(frame) for frame in frames()}  # not the frames: they would keep all their variables alive
        while self._forwards and id(self._forwards[-1].frame) not in under_way:
            self._end()

    def _end(self, *of_hook: Any) -> None:
        """The model's forward ends, or has raised."""
        if not self._forwards:  # it began before these hooks were there
            return
        forward = self._forwards.pop()
        del forward.frame
        if forward.hooks is not None:
            forward.hooks.__exit__(None, None, None)  # first: whatever fails, other models' tensors must not come here
            forward.hooks = None
            self._saving_now.discard(forward)
            if of_hook and of_hook[-1] is not None:  # it has a result: reentrant checkpointing saved inputs of the last
                self._claim_between(forward, None)
                forward.traffic.forward_is_over()
            forward.unclaimed.clear()
            forward.storages.clear()
            self._num_calls, self._largest = forward.num_calls, forward.traffic.largest
            forward.call = forward.previous = None
            del forward.lifetime
            self._last = forward
            if forward.has_new_proofs:
                for device in self._devices.values():
                    device.trim()
            if forward.observer is not None:
                forward.observer.end_forward()

    def _enter(self, module: nn.Module, *arguments: Any) -> None:
        forward = self._saving
        if forward is None:
            return
        refuse_other_hooks(module, self)
        forward.weights |= storages_of(module)  # FSDP2 has gathered them just now
        places = self._places[module]
        layer = places[forward.calls_of[module] % len(places)]
        forward.calls_of[module] += 1
        kind = (type(module), self._sizes[module], module.training)
        call = LayerCall(forward.lifetime, forward.num_calls, layer, forward.choices[layer], kind, arguments)
        forward.num_calls += 1
        forward.call = call
        self._claim_between(forward, call)
        if forward.observer is not None:
            forward.observer.enter(layer, self._here_bytes)

    def _claim_between(self, forward: ForwardPass, call: LayerCall | None) -> None:
        """What was saved since the last layer's call leaves or stays: `call` begins, or `None`, the forward ends."""
        unclaimed, forward.unclaimed = forward.unclaimed, {}
        for handle, storage in unclaimed.items():
            for owner in (call, forward.previous):
                if owner is not None and handle in owner.inputs:
                    self._claim(forward, owner, storage, (call or owner).number)
                    break

    def _recomputes(self) -> bool:
        """Whether the layer that is about to run shall be checkpointed."""
        call = self._forwards[-1].call if self._forwards else None
        is_chosen = call is not None and call.choice is Choice.RECOMPUTE
        return is_chosen and torch.is_grad_enabled() and not is_recomputed(self)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        forward = self._saving
        if forward is None:
            return
        call, forward.call = forward.call, None
        forward.previous = call
        if call is not None:
            forward.traffic.call_is_over(call.number)
        if call is not None and forward.observer is not None:
            forward.observer.leave(call.layer, self._here_bytes)

    def _pack(self, forward: ForwardPass, tensor: torch.Tensor) -> Any:
        """Autograd calls this for every tensor that it saves, and keeps what is returned in its place."""
        if forward.host_weights is not None and tensor.layout == torch.strided and type(tensor) in ORDINARY:
            weight = forward.host_weights.saved(tensor)
            if weight is not None:
                return weight
        is_movable = self.config.activations and self._is_movable(forward, tensor)
        call = forward.call
        if call is not None:
            call.follow(tensor, is_movable=is_movable)
        if not is_movable:
            return Stayed(tensor)
        handle = tensor.untyped_storage()._cdata
        storage = forward.storages.get(handle)
        if storage is None or not storage.holds(tensor):
            storage = forward.storages[handle] = self._storage(forward, tensor)
        saved = storage.saved(tensor)
        if isinstance(storage, SavedStorage) and not storage.is_claimed:
            storage.is_claimed = storage.is_worth_it
            if call is None:
                forward.unclaimed[handle] = storage
            elif storage.is_claimed:
                self._claim(forward, call, storage, call.number)
        return saved

    def _storage(self, forward: ForwardPass, tensor: torch.Tensor) -> Storage:
        """For a storage that is saved for the first time: one that leaves or stays, or one that is remade."""
        call, device = forward.call, self._device(tensor.device)
        if call is None:
            return SavedStorage(device, tensor)
        found = None
        if call.choice in (Choice.OFFLOAD, Choice.REMAKE) and self.config.fraction:
            found = remakable_storage(device, tensor, call, self._back)
        if not isinstance(found, RemadeStorage):
            stored = SavedStorage(device, tensor) if found is None else found
            self._own(forward, call, stored)
            return stored
        forward.remade_bytes += found.nbytes
        self.bytes_remade += found.nbytes
        if forward.observer is not None:
            forward.observer.saved(call.layer, found.nbytes, is_remade=True)
        return found

    def _own(self, forward: ForwardPass, call: LayerCall, storage: SavedStorage) -> None:
        """`call` has saved it, or a checkpoint around it has."""
        storage.belongs_to(call)
        if forward.observer is not None:
            forward.observer.saved(call.layer, storage.nbytes, is_remade=False)

    def _is_movable(self, forward: ForwardPass, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
            return False  # a parameter, a DTensor, something sparse
        if tensor.is_conj() or tensor.is_neg():
            return False  # its numbers are not those in memory
        storage = tensor.untyped_storage()
        if not tensor._is_view() and tensor.nbytes < storage.nbytes():
            return False  # a part with a version counter of its own, as by unsafe_chunk(): the others may still change
        return storage.nbytes() >= int(self.config.min_bytes) and storage._cdata not in forward.weights

    def _claim(self, forward: ForwardPass, owner: LayerCall, storage: SavedStorage, call: int) -> None:
        """`storage`, which `owner` has saved, leaves or stays, while call number `call` begins or runs."""
        if storage.call is None:
            self._own(forward, owner, storage)
        if owner.choice in (Choice.KEEP, Choice.REMAKE) or not storage.is_claimed:
            return
        forward.seen_bytes += storage.nbytes
        # Over the whole forward: a tensor that is larger than a layer's share leaves when enough layers had theirs.
        if forward.offloaded_bytes + storage.nbytes > self.config.fraction * forward.seen_bytes:
            return
        storage.leave()
        forward.traffic.left(storage, call)
        forward.offloaded_bytes += storage.nbytes
        self.bytes_offloaded += storage.nbytes

    def _device(self, device: torch.device) -> DeviceActivations:
        if device not in self._devices:
            self._devices[device] = DeviceActivations(device, self.config)
        return self._devices[device]

    # Backward

    def _unpack(self, kept: Any) -> torch.Tensor:
        with self._turn:
            found = self._back(kept)
            if isinstance(kept, Saved) and isinstance(kept.storage, TriedStorage):
                kept.storage.try_once(found, self._back)
            return found

    def _back(self, kept: Any) -> torch.Tensor:
        """The tensor as it was saved."""
        if not isinstance(kept, Saved):
            assert isinstance(kept, (SavedWeight, Stayed))
            return kept.tensor()
        storage, device = kept.storage, kept.storage.device
        if storage.call is not self._reached:
            self._reached = storage.call
            device.run_releases()
        if storage.send_for is not None:
            self.bytes_returned += storage.send_for()
        if self.observer is not None:
            layer = None if storage.call is None else storage.call.layer
            self.observer.in_backward(layer, self._here_bytes)
        return kept.tensor()
