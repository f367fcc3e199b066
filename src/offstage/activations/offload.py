# SPDX-License-Identifier: Apache-2.0
"""`offload_activations`: tensors that autograd saves in forward leave for host memory, and return before backward.

Read this first. While the model's forward runs, autograd hands every tensor that it saves to `_pack`; what belongs to a
chosen layer and is worth it leaves at once on the store lane, and its device memory is let go a little later, when the
copy has probably arrived. When backward asks for a tensor it finds it on its way back (`_unpack`), and sends for those
that it will ask for next (`activation_traffic.py`). What one storage does on this way is in `saved_storage.py`; what is
made again instead, in `remade_storage.py`; host memory comes from `host_pool.py`. Nothing is done while evaluating:
autograd saves nothing then.

[Note: whose tensor is it] A layer that is checkpointed saves only its inputs, just before it runs, or (reentrant
checkpointing) just after. So what is saved between two layers waits until the next one begins, and leaves if it is an
input of one of the two and that one is chosen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from typing import Any

import torch
from torch import nn

from offstage.activations.device import Side
from offstage.activations.forward_pass import ORDINARY, Flight, Pass, Visit, frames, storages_of
from offstage.activations.hooks import Hook, Kept, Recomputing
from offstage.activations.host_weight import SavedWeight
from offstage.activations.host_weights import HostWeights
from offstage.activations.layers import choices_of, layers_of, num_layers_of, size_of
from offstage.activations.measuring import Learner
from offstage.activations.plan import ActivationPlan, Choice
from offstage.activations.proofs import Trial
from offstage.activations.receipt import ActivationReceipt
from offstage.activations.recipe import recipe_of
from offstage.activations.remaking import RemadeStorage, join_factors
from offstage.activations.saved_tensor_hooks import is_recomputed, refuse_other_hooks
from offstage.activations.storage import Saved, SavedStorage, Stayed
from offstage.activations.traffic import Traffic
from offstage.config import ActivationConfig, format_size
from offstage.errors import ConfigError, OffloadIneffectiveError, OffstageError
from offstage.lanes.lanes import Lanes

logger = logging.getLogger("offstage")

_IDLE_PASSES = 3
"""Forwards after which something must have moved."""


def offload_activations(
    model: nn.Module, config: ActivationConfig | None = None, **overrides: Any
) -> ActivationOffload:
    """Let saved tensors of `model`'s layers wait for backward in host memory. Returns a handle: `remove()` ends it.

    `overrides` are fields of `ActivationConfig`. Gradients are the same, bit for bit.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"offload_activations() expects a torch.nn.Module; found {type(model).__name__}. Pass the model."
        )
    chosen = ActivationConfig.build(config, overrides)
    if any(_is_offloaded(module) for module in model.modules()):
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


def _is_offloaded(module: nn.Module) -> bool:
    kept = getattr(module, "_offstage_activations", None)
    return kept is not None and kept.offload is not None


class ActivationOffload:
    """What `offload_activations()` returns. A context manager: leaving it removes the hooks."""

    # Initialization

    def __init__(self, model: nn.Module, config: ActivationConfig) -> None:
        self.config = config
        self.bytes_left = 0
        self.bytes_returned = 0
        self.bytes_remade = 0
        self._model = weakref.ref(model)
        self._layers = layers_of(model, config.layers)
        self._num_layers = num_layers_of(model, self._layers)
        self._sizes = {layer: size_of(layer) for layer in self._layers}
        self._choices = choices_of(self._layers, config)
        self._sides: dict[torch.device, Side] = {}
        self._reached: Visit | None = None
        """Where backward is, until the next forward."""
        self._num_visits = 0
        """Layers that ran in the last forward."""
        self._largest = 0
        """Bytes that one layer has sent away in the last forward, at most."""
        self._running = threading.local()
        """Forwards under way in each thread: a model may call itself."""
        self._in_flight: weakref.WeakSet[Flight] = weakref.WeakSet()
        """Forwards whose backward is still to come; counted for the plan."""
        self._num_passes = 0
        self._last_pass: Pass | None = None
        self._handles: list[Any] = []
        self._learner = Learner(model, self._layers, config, self._any_side) if config.layers == "auto" else None
        self._weights = self._move_weights() if config.weights else None
        self._bind(model)
        model._offstage_activations = Kept(self)  # type: ignore[assignment]
        logger.info("activations: %d layers", len(self._layers))

    def _move_weights(self) -> HostWeights:
        chosen = [layer for layer, choice in zip(self._layers, self._choices, strict=True) if choice is Choice.OFFLOAD]
        model = self._model()
        assert model is not None
        return HostWeights(model, list(dict.fromkeys(chosen)), self.config)

    def _bind(self, model: nn.Module) -> None:
        owner = weakref.ref(self)  # the model keeps this object, and copies of the model do not
        self._handles.append(model.register_forward_pre_hook(Hook(owner, "_begin"), prepend=True))
        self._handles.append(model.register_forward_hook(Hook(owner, "_end"), always_call=True))
        for layer in dict.fromkeys(self._layers):
            self._handles.append(layer.register_forward_pre_hook(Hook(owner, "_enter"), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(Hook(owner, "_leave"), always_call=True))
            if self._learner is not None:
                self._handles.append(Recomputing(layer, owner))

    def remove(self) -> None:
        """Take the hooks off and give host memory back, after the last copy. Forwards that wait for backward go on.

        Waits for the device.
        """
        if self._weights is not None and torch._C._current_graph_task_id() != -1:
            raise OffstageError(
                "remove() was called in backward, which needs weights that live on the host; expected it before or "
                "after. Call it when backward is over."
            )
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget_broken_passes()
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        model = self._model()
        if model is not None:
            model._offstage_activations = None  # type: ignore[assignment]
        for side in self._sides.values():
            side.trim()
        with contextlib.ExitStack() as all_sides:  # each, whatever another one raises
            for side in self._sides.values():
                all_sides.callback(side.proofs.look_at_all)

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def host_bytes(self) -> int:
        """Host memory of the pool, and of weights."""
        return sum(side.pool.nbytes for side in self._sides.values()) + (
            self._weights.host_bytes if self._weights is not None else 0
        )

    @property
    def plan(self) -> ActivationPlan | None:
        """What `layers="auto"` has decided, and why; `None` until it has."""
        return self._learner.plan if self._learner is not None else None

    def receipt(self) -> ActivationReceipt:
        """What was really moved."""
        last, weights = self._last_pass, self._weights
        return ActivationReceipt(
            passes=self._num_passes,
            bytes_left=last.left_bytes if last is not None else 0,
            bytes_stayed=last.seen_bytes - last.left_bytes if last is not None else 0,
            bytes_remade=last.remade_bytes if last is not None else 0,
            total_bytes_left=self.bytes_left,
            total_bytes_returned=self.bytes_returned,
            weight_bytes_fetched=weights.bytes_fetched if weights is not None else 0,
            gradient_bytes_stored=weights.bytes_stored if weights is not None else 0,
            host_bytes=self.host_bytes,
            plan=self.plan,
        )

    # Forward

    @property
    def _passes(self) -> list[tuple[Pass, Any]]:
        if not hasattr(self._running, "passes"):
            self._running.passes = []
        return self._running.passes  # type: ignore[no-any-return]

    @property
    def visit(self) -> Visit | None:
        """The call of a layer that is under way in this thread."""
        return self._passes[-1][0].current if self._passes else None

    def _begin(self, *_: Any) -> None:
        """The model's forward begins."""
        self._forget_broken_passes()
        started = Pass(self._choices, self._traffic())
        self._passes.append((started, None))  # first: whatever raises below, `_end` is called
        if self._weights is not None:
            self._weights.begin()
        if not torch.is_grad_enabled() or is_recomputed(self):
            return
        self._check_working()
        for side in self._sides.values():
            side.bury()
            side.refuse_capture()
            started.has_learnt |= side.proofs.look(side.lanes)
        self._reached = None
        if self._learner is not None:
            self._in_flight.add(started.flight)
            self._learner.begin_pass(self._any_lanes(), len(self._in_flight))
            self._choices = self._learner.choices()
            started.choices, started.traffic = self._choices, self._traffic()
        model = self._model()
        assert model is not None
        started.weights = storages_of(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, started), self._unpack)
        hooks.__enter__()
        self._passes[-1] = (started, hooks)
        self._num_passes += 1

    def _traffic(self) -> Traffic:
        return Traffic(
            self._choices,
            self.config,
            self._num_layers,
            largest=self._largest,
            num_visits=self._num_visits or len(self._choices),
        )

    def _forget_broken_passes(self) -> None:
        """Torch calls no hooks after KeyboardInterrupt and the like: such a forward is not on the stack any more."""
        under_way = {id(frame) for frame in frames()}  # kept, frames would keep all that they know alive
        while self._passes and id(self._passes[-1][0].frame) not in under_way:
            self._end()

    def _end(self, *_: Any) -> None:
        """It ends, or has raised."""
        started, hooks = self._passes.pop()
        del started.frame
        if hooks is not None:  # first: whatever fails, nobody else's tensors may come here
            hooks.__exit__(None, None, None)
            started.unclaimed.clear()
            started.storages.clear()
            self._num_visits, self._largest = started.visits, started.traffic.largest
            started.current = started.previous = None
            del started.flight
            self._last_pass = started
            if started.has_learnt:
                for side in self._sides.values():
                    side.trim()
        if self._weights is not None:
            self._weights.end()

    def _check_working(self) -> None:
        """Enabled and idle is an error: nobody should find out after a week."""
        wanted = any(choice is not Choice.KEEP for choice in self._choices) and self.config.fraction > 0
        wanted = wanted and self.config.activations
        is_idle = self._num_passes == _IDLE_PASSES and not self.bytes_left and not self.bytes_remade
        last = self._last_pass
        if not is_idle or not wanted or self._learner is not None or last is None:
            return
        if not last.visits:
            why = "the forward of none of them was seen. Name the modules that run, as in layers=[...]"
        elif last.seen_bytes:
            why = f"fraction={self.config.fraction} of what they save is less than any tensor of it. Raise fraction"
        elif int(self.config.min_bytes):
            why = f"what they save is smaller than min_bytes={format_size(int(self.config.min_bytes))}. Lower min_bytes"
        else:
            why = "they save nothing but parameters and tensor subclasses. Name other modules, as in layers=[...]"
        raise OffloadIneffectiveError(
            f"offload_activations() has moved nothing in {_IDLE_PASSES} forwards of {len(self._layers)} layers: {why}, "
            "or leave out offload_activations()."
        )

    def _enter(self, module: nn.Module, *arguments: Any) -> None:
        if not self._passes:
            if self._weights is not None:
                self._weights.enter(module)  # a layer that runs again in backward for a checkpoint, or on its own
            return
        started, hooks = self._passes[-1]
        if self._weights is not None:
            self._weights.enter(module)
        if hooks is None:
            return  # evaluation
        refuse_other_hooks(module, self)
        started.weights |= storages_of(module)  # FSDP2 has gathered them just now
        # By the order of calls: a layer that is called several times is several.
        number = started.visits % len(self._layers)
        kind = (type(module), self._sizes[module], module.training)
        visit = Visit(started.flight, started.visits, number, started.choices[number], kind, arguments)
        started.visits += 1
        started.current = visit
        unclaimed, started.unclaimed = started.unclaimed, {}
        for handle, storage in unclaimed.items():
            for owner in (visit, started.previous):
                if owner is not None and handle in owner.inputs:
                    self._claim(started, visit, storage, owner.choice)
                    break
        if self._learner is not None:
            self._learner.enter(number, self._any_lanes())

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._weights is not None:
            self._weights.leave(module, in_pass=bool(self._passes))
        if not self._passes or self._passes[-1][1] is None:
            return
        started = self._passes[-1][0]
        visit, started.current = started.current, None
        started.previous = visit
        if visit is not None and self._learner is not None:
            self._learner.leave(visit.layer, self._any_lanes())
        if visit is not None:
            started.traffic.layer_is_over(visit.number)

    def _pack(self, started: Pass, tensor: torch.Tensor) -> Any:
        """Called by autograd for every tensor that it saves; what is returned is kept in its place."""
        if self._weights is not None and tensor.layout == torch.strided and type(tensor) in ORDINARY:
            weight = self._weights.saved(tensor.untyped_storage()._cdata, tensor)
            if weight is not None:
                return weight
        is_movable = self.config.activations and self._movable(started, tensor)
        if (visit := started.current) is not None:
            visit.follow(tensor, is_movable=is_movable)
        if not is_movable:
            return Stayed(tensor)
        handle = tensor.untyped_storage()._cdata
        storage = started.storages.get(handle)
        if storage is None or not storage.holds(tensor):
            storage = started.storages[handle] = self._storage(started, tensor)
        saved = storage.saved(tensor)
        if isinstance(storage, SavedStorage) and not storage.is_claimed and storage.is_worth_it:
            storage.is_claimed = True
            if started.current is not None:
                self._claim(started, started.current, storage, started.current.choice)
            else:
                started.unclaimed[handle] = storage
        return saved

    def _storage(self, started: Pass, tensor: torch.Tensor) -> SavedStorage | RemadeStorage:
        """For a storage that is saved for the first time: one that leaves or stays, or one that is made again."""
        visit, side = started.current, self._side(tensor.device)
        if visit is None or visit.choice not in (Choice.OFFLOAD, Choice.REMAKE) or not self.config.fraction:
            return SavedStorage(side, tensor)
        recipe = recipe_of(tensor, also_dear=started.traffic.link_is_limit)
        if recipe is None or (recipe.is_dear and not side.is_made_faster(recipe)):
            return SavedStorage(side, tensor)
        if recipe.has_factors:
            join_factors(recipe.inputs)
        key = (*visit.kind, visit.path, recipe.name)
        is_same = side.proofs.verdict(key)
        if is_same:
            remade = RemadeStorage(side, tensor, visit, key, recipe, self._back)
            started.traffic.remade(remade.nbytes, visit.number)
            started.remade_bytes += remade.nbytes
            self.bytes_remade += remade.nbytes
            if self._learner is not None:
                self._learner.saved(visit.layer, remade.nbytes, is_remade=True)
            return remade
        storage = SavedStorage(side, tensor)
        storage.trial = Trial(key, recipe) if is_same is None else None
        return storage

    def _movable(self, started: Pass, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
            return False  # a parameter, a DTensor, something sparse
        if tensor.is_conj() or tensor.is_neg():
            return False  # its numbers are not those in memory
        storage = tensor.untyped_storage()
        if not tensor._is_view() and tensor.nbytes < storage.nbytes():
            return False  # a part whose versions are counted apart, as by unsafe_chunk(): the others may still change
        return storage.nbytes() >= int(self.config.min_bytes) and storage._cdata not in started.weights

    def _claim(self, started: Pass, visit: Visit, storage: SavedStorage, choice: Choice) -> None:
        """`storage` was saved in `visit`: it leaves, or it stays."""
        if self._learner is not None:
            self._learner.saved(visit.layer, storage.nbytes)
        storage.visit = visit
        if choice in (Choice.KEEP, Choice.REMAKE):
            return
        started.seen_bytes += storage.nbytes
        # Over the whole forward: a tensor that is larger than a layer's share leaves when enough layers had theirs.
        if started.left_bytes + storage.nbytes > self.config.fraction * started.seen_bytes:
            return
        storage.leave()
        started.traffic.left(storage, visit.number)
        started.left_bytes += storage.nbytes
        self.bytes_left += storage.nbytes

    def _side(self, device: torch.device) -> Side:
        if device not in self._sides:
            self._sides[device] = Side(device, self.config)
        return self._sides[device]

    def _any_lanes(self) -> Lanes | None:
        return next((side.lanes for side in self._sides.values()), None)

    def _any_side(self) -> Side:
        return next(iter(self._sides.values()))

    # Backward

    def _unpack(self, kept: Any) -> torch.Tensor:
        found = self._back(kept)
        storage = kept.storage if isinstance(kept, Saved) else None
        if isinstance(storage, SavedStorage) and storage.trial is not None:
            trial, storage.trial = storage.trial, None
            storage.side.proofs.compare(trial, found, self._back)
        if isinstance(kept, Saved) and kept.factors is not None:
            found = kept.factors.asked(kept, found)
        return found

    def _back(self, kept: Any) -> torch.Tensor:
        """The tensor as it was saved."""
        if not isinstance(kept, Saved):
            assert isinstance(kept, (SavedWeight, Stayed))
            return kept.tensor()
        storage, side = kept.storage, kept.storage.side
        if storage.visit is not self._reached:
            self._reached = storage.visit
            side.bury()
        if storage.traffic is not None:
            self.bytes_returned += storage.traffic.send_for(storage)
        if self._learner is not None:
            layer = None if storage.visit is None else storage.visit.layer
            self._learner.in_backward(layer, side.lanes, side.here_bytes)
        return kept.tensor()
