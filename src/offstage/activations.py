# SPDX-License-Identifier: Apache-2.0
"""`offload_activations`: tensors that autograd saves in forward leave for host memory, and return before backward.

Read this first. While the model's forward runs, autograd hands every tensor that it saves to `_pack`; what belongs to a
chosen layer and is worth it leaves at once on the store lane, and its device memory is let go a layer later, when the
copy has probably arrived. When backward reaches a layer it finds its tensors on their way back (`_unpack`), and sends
for those of the layer before it. What one storage does on this way is in `saved_storage.py`; host memory comes from
`host_pool.py`. Nothing is done while evaluating: autograd saves nothing then.

[Note: whose tensor is it] A layer that is checkpointed saves only its inputs, and saves them just before it runs. So
what is saved between two layers waits until the next one begins, and counts as that one's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offstage.config import ActivationConfig
from offstage.errors import ConfigError, OffstageError
from offstage.host_pool import HostPool
from offstage.lanes import Lanes, lanes_for
from offstage.saved_storage import Saved, SavedStorage

logger = logging.getLogger("offstage")


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
    if any(getattr(module, "_offstage_activations", None) is not None for module in model.modules()):
        raise ConfigError(
            "The activations of this model, or of a part of it, are offloaded already; expected once. Call remove() on "
            "the handle that the first call returned."
        )
    return ActivationOffload(model, chosen)


class Visit:
    """One call of a layer in one forward, and what was saved in it."""

    def __init__(self, number: int, chosen: bool) -> None:
        self.number, self.chosen = number, chosen
        self.away: list[weakref.ref[SavedStorage]] = []
        self.before: Visit | None = None
        """The chosen visit before this one: backward needs it next."""


class _Pass:
    """One forward of the model. Several may wait for their backward at once: micro-batches of a pipeline."""

    def __init__(self) -> None:
        self.seen_bytes = 0
        """Saved by chosen layers so far."""
        self.left_bytes = 0
        self.visits = 0
        self.current: Visit | None = None
        self.last: Visit | None = None
        self.leaving: deque[Visit] = deque()
        self.unclaimed: list[SavedStorage] = []
        self.storages: dict[int, SavedStorage] = {}
        self.weights: set[int] = set()


class ActivationOffload:
    """What `offload_activations()` returns. A context manager: leaving it removes the hooks."""

    # Initialization

    def __init__(self, model: nn.Module, config: ActivationConfig) -> None:
        self.config = config
        self.bytes_left = 0
        self.bytes_returned = 0
        self.bytes_stayed = 0
        """Saved by chosen layers and not worth moving, or not movable."""
        self._model = weakref.ref(model)
        layers = layers_of(model, config.layers)
        self._chosen, self._num_layers = _chosen(layers, config), len(layers)
        self._sides: dict[torch.device, _Side] = {}
        self._reached: Visit | None = None
        """Where backward is."""
        self._running = threading.local()
        """Forwards under way in each thread: a model may call itself."""
        self._handles: list[Any] = []
        self._bind(model, layers)
        model._offstage_activations = weakref.ref(self)  # type: ignore[assignment]
        logger.info("activations: %d of %d layers", len(self._chosen), len(layers))

    def _bind(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        # Hooks know this object weakly: dropping it without remove() leaves hooks that do nothing.
        owner = weakref.ref(self)
        begin, end = functools.partial(_call, owner, "_begin"), functools.partial(_call, owner, "_end")
        self._handles.append(model.register_forward_pre_hook(begin, prepend=True))
        self._handles.append(model.register_forward_hook(end, always_call=True))
        for layer in dict.fromkeys(layers):
            enter, leave = functools.partial(_call, owner, "_enter"), functools.partial(_call, owner, "_leave")
            self._handles.append(layer.register_forward_pre_hook(enter))
            self._handles.append(layer.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks off and give host memory back, after the last copy. Forwards that wait for backward go on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        model = self._model()
        if model is not None:
            model._offstage_activations = None  # type: ignore[assignment]

    def __enter__(self) -> ActivationOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def host_bytes(self) -> int:
        """Host memory of the pool."""
        return sum(side.pool.nbytes for side in self._sides.values())

    # Forward

    @property
    def _passes(self) -> list[tuple[_Pass, Any]]:
        if not hasattr(self._running, "passes"):
            self._running.passes = []
        return self._running.passes  # type: ignore[no-any-return]

    def _begin(self, *_: Any) -> None:
        """The model's forward begins."""
        started = _Pass()
        self._passes.append((started, None))  # first: whatever raises below, `_end` is called
        if not torch.is_grad_enabled():
            return
        for side in self._sides.values():
            side.bury()
            if side.lanes.capturing():
                raise OffstageError(
                    "A graph is being captured, and activations are offloaded: its replays would copy from and to host "
                    "memory that is used for something else by then. Capture the model without offload_activations()."
                )
        model = self._model()
        assert model is not None
        started.weights = _storages(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, started), self._unpack)
        hooks.__enter__()
        self._passes[-1] = (started, hooks)

    def _end(self, *_: Any) -> None:
        """It ends, or has raised."""
        started, hooks = self._passes.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)
        started.unclaimed.clear()
        started.storages.clear()
        started.current = None

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not self._passes or self._passes[-1][1] is None:
            return  # evaluation, or a layer that runs again in backward for a checkpoint
        started = self._passes[-1][0]
        started.weights |= _storages(module)  # FSDP2 has gathered them just now
        # By the order of calls: a layer that is called several times is several.
        visit = Visit(started.visits, started.visits % self._num_layers in self._chosen)
        started.visits += 1
        started.current = visit
        unclaimed, started.unclaimed = started.unclaimed, []
        for storage in unclaimed:
            self._claim(started, visit, storage)

    def _leave(self, *_: Any) -> None:
        if not self._passes or self._passes[-1][1] is None:
            return
        started = self._passes[-1][0]
        visit, started.current = started.current, None
        if visit is None or not visit.away:
            return
        visit.before, started.last = started.last, visit
        started.leaving.append(visit)
        while len(started.leaving) > self.config.prefetch:
            for reference in started.leaving.popleft().away:
                if (storage := reference()) is not None:
                    storage.let_go()

    def _pack(self, started: _Pass, tensor: torch.Tensor) -> Any:
        """Called by autograd for every tensor that it saves; what is returned is kept in its place."""
        if not self._movable(started, tensor):
            return tensor
        side = self._side(tensor.device)
        handle = tensor.untyped_storage()._cdata
        storage = started.storages.get(handle)
        if storage is None or not storage.holds(tensor):
            storage = started.storages[handle] = SavedStorage(side, tensor)
            if started.current is not None:
                self._claim(started, started.current, storage)
            else:
                started.unclaimed.append(storage)
        return storage.saved(tensor)

    def _movable(self, started: _Pass, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
            return False  # a parameter, a DTensor, something sparse
        storage = tensor.untyped_storage()
        if storage.nbytes() < int(self.config.min_bytes) or storage._cdata in started.weights:
            return False
        return 2 * tensor.nbytes >= storage.nbytes() or 0 in tensor.stride()  # not for a small part of something large

    def _claim(self, started: _Pass, visit: Visit, storage: SavedStorage) -> None:
        """`storage` was saved by `visit`: it leaves, or it stays."""
        if not visit.chosen:
            return
        started.seen_bytes += storage.nbytes
        # Over the whole forward: a tensor that is larger than a layer's share leaves when enough layers had theirs.
        if started.left_bytes + storage.nbytes > self.config.fraction * started.seen_bytes:
            self.bytes_stayed += storage.nbytes
            return
        storage.leave(visit)
        started.left_bytes += storage.nbytes
        visit.away.append(weakref.ref(storage))
        self.bytes_left += storage.nbytes

    def _side(self, device: torch.device) -> _Side:
        if device not in self._sides:
            self._sides[device] = _Side(device, self.config)
        return self._sides[device]

    # Backward

    def _unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, Saved):
            return kept  # type: ignore[no-any-return]
        visit = kept.storage.visit
        if visit is not None and visit is not self._reached:
            self._reached = visit
            kept.storage.side.bury()
            self._send_for(visit)
        return kept.tensor()

    def _send_for(self, visit: Visit | None) -> None:
        """Backward has come to `visit`: its tensors, and those of the visits that come next, return."""
        for _ in range(1 + self.config.prefetch):
            if visit is None:
                return
            for reference in reversed(visit.away):
                if (storage := reference()) is not None and storage.come_back():
                    self.bytes_returned += storage.nbytes
            visit = visit.before


class _Side:
    """Lanes and host memory for the activations of one device."""

    def __init__(self, device: torch.device, config: ActivationConfig) -> None:
        self.lanes: Lanes = lanes_for(device)
        self.pool = HostPool(device, None if config.host_budget is None else int(config.host_budget))
        self._dead: deque[Any] = deque()

    def lay_out(self, remains: Any) -> None:
        """What a storage that nobody needs has left. Called by the garbage collector: nothing else may be done."""
        self._dead.append(remains)

    def bury(self) -> None:
        """Give back what the dead have left."""
        with contextlib.suppress(IndexError):
            while True:
                taken, after, memory = self._dead.popleft()
                if memory is not None:  # a copy from or into this memory may be under way
                    self.lanes.wait(after, "bury: the copy that nobody needed is done")
                    self.lanes.touch(writes=[memory])
                self.pool.give_back(taken)


def _call(owner: weakref.ref[ActivationOffload], method: str, *arguments: Any) -> None:
    offload = owner()
    if offload is not None and not torch.compiler.is_compiling():
        getattr(offload, method)(*arguments)


def _storages(module: nn.Module) -> set[int]:
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter)}


def layers_of(model: nn.Module, layers: Any) -> list[nn.Module]:
    """The model's layers: those given, or the children of its longest `ModuleList`."""
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        known = set(model.modules())
        for layer in layers:
            if layer not in known:
                raise ConfigError(
                    f"layers names a {type(layer).__name__} that is not part of the model; expected modules of the "
                    f"{type(model).__name__} given. Pass them as list(model.layers)."
                )
        return list(layers)
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    if not lists or not any(len(one) for one in lists):
        raise ConfigError(
            f"{type(model).__name__} has no ModuleList whose children could be its layers; expected one. Name them "
            "yourself, as in offload_activations(model, layers=[...])."
        )
    return list(max(lists, key=len))


def _chosen(layers: Sequence[nn.Module], config: ActivationConfig) -> frozenset[int]:
    """The numbers of the layers whose tensors leave, spread evenly: the link is busy all through forward."""
    if isinstance(config.layers, Sequence):
        return frozenset(range(len(layers)))
    movable = max(0, len(layers) - config.keep_last)
    count = movable if config.layers is None else config.layers
    if count >= len(layers) and config.layers is not None:
        raise ConfigError(
            f"layers={count}: the model has {len(layers)} layers, and backward needs the last one at once; expected a "
            f"number from 0 to {len(layers) - 1}. Leave it out for all but the last."
        )
    count = min(count, movable)
    return frozenset(number * movable // count for number in range(count)) if count else frozenset()
