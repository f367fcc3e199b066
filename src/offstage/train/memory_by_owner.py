# SPDX-License-Identifier: Apache-2.0
"""`MemoryByOwner`: the device bytes of weights, gradients, state, slots and window at a moment.

Activations are the rest: on an accelerator, of the bytes that its allocator has handed out; on the CPU, whose allocator
counts nothing, of the tensors made since the iteration began (`Allocations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offstage import OffloadedOptimizer
from offstage.engine.engine import Engine
from offstage.memory.guarded import unguarded
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.dropped_gradient import DroppedGradient
from offstage.optimizer.overlap.left_gradient import LeftGradient
from offstage.tensors import local_of
from offstage.weights.host_weights import host_weight_of, host_weights_of

OWNERS = ("weights", "state", "slots", "window", "gradients", "activations")
"""The order in which figures stack them: those that change least first."""

Storages = dict[int, int]
"""Storage address → bytes: tensors may share a storage."""


class MemoryByOwner:
    """The storages of each owner on one device."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._gathers = any(isinstance(module, FSDPModule) for module in model.modules())
        self._weights = self._now(self._all_weights())
        self._state: Storages = {}
        self.refresh()

    def refresh(self) -> None:
        """Look up the state again, which changes in steps only."""
        self._state = self._now(_state(self._optimizer))

    def owned(self) -> dict[str, Storages]:
        """Storages of weights, gradients and state."""
        # FSDP2 gathers a layer's weights beside the shards while the layer runs.
        gathered = self._now(self._all_weights()) if self._gathers else {}
        return {
            "weights": self._weights | gathered | self._now(_copies(self._model)),
            "gradients": self._now(_gradients(self._model, self._optimizer)),
            "state": self._state,
        }

    def slots(self) -> tuple[int, int]:
        """Bytes of the ring's slots, and of the window beyond them."""
        ring = window = 0
        for engine in engines_of(self._optimizer):
            if _same(engine.device, self._device):
                pipeline = engine.transport.pipeline
                own = min(pipeline.device_bytes, pipeline.num_slots * (pipeline.slot_bytes + pipeline.gradient_bytes))
                ring, window = ring + own, window + pipeline.device_bytes - own
        return ring, window

    def _all_weights(self) -> Iterator[torch.Tensor]:
        """But for those that live on the host."""
        yield from (param for param in self._model.parameters() if host_weight_of(param) is None)
        yield from self._model.buffers()

    def _now(self, tensors: Iterable[torch.Tensor]) -> Storages:
        with unguarded():  # looking must not wait for late weights
            storages = [local_of(tensor).untyped_storage() for tensor in tensors]
        return {storage._cdata: storage.nbytes() for storage in storages if _same(storage.device, self._device)}


def engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    """The engines of an offloaded optimizer; none of another one."""
    return runtime_of(optimizer).engines if isinstance(optimizer, OffloadedOptimizer) else []


def _copies(model: nn.Module) -> Iterator[torch.Tensor]:
    """Layers whose weights live on the host, as far as they are on the device."""
    hosted = host_weights_of(model)
    yield from (layer.copy for layer in (hosted.layers if hosted is not None else ()) if layer.copy is not None)


def _gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for param in model.parameters():
        if isinstance(param.grad, LeftGradient):  # on the host, unless it has returned
            if param.grad.gradient.here is not None:
                yield param.grad.gradient.here
        elif param.grad is not None and not isinstance(param.grad, DroppedGradient):
            yield param.grad
    for engine in engines_of(optimizer):  # of updates that the caller's stream has not waited for
        for pending in list(engine.pending.values()):
            yield pending.update.grad


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    if isinstance(optimizer, OffloadedOptimizer):
        for held in runtime_of(optimizer).all_states():
            yield from held.resident.values()
        return
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _same(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and (device.index or 0) == (other.index or 0)


class Allocations(TorchDispatchMode):
    """CPU tensors that operations made while this mode was on and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, Any] = {}
        # A weak reference keeps the storage's address from being reused.
        self._left_out: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record the storages of its outputs."""
        made = func(*args, **(kwargs or {}))
        new = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if new:
            given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            for tensor in new:
                address = _address(tensor)
                if address is not None and address not in given and address not in self._made:  # not a view
                    self._made[address] = StorageWeakRef(local_of(tensor).untyped_storage())  # type: ignore[no-untyped-call]
        return made

    def leave_out(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`make`, with its tensors left out of `nbytes`."""

        def counted_elsewhere(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            storage = tensor.untyped_storage()
            self._left_out[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            return tensor

        return counted_elsewhere

    def nbytes(self, owned: Iterable[int]) -> int:
        """Bytes of all storages still alive, except those in `owned`."""
        without = {*owned, *self._left_out}
        total = 0
        for address, reference in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
            if storage is None:
                del self._made[address]
            elif address not in without:
                total += storage.nbytes()
        return total


def _address(tensor: torch.Tensor) -> int | None:
    """The address of its storage; `None` unless it is a plain CPU tensor."""
    local = local_of(tensor)
    if local.device.type != "cpu" or type(local) not in (torch.Tensor, nn.Parameter):
        return None
    return int(local.untyped_storage()._cdata)
