# SPDX-License-Identifier: Apache-2.0
"""`HostWeights`: layers whose parameters live on the host, and come to the device for their forward and backward.

Between uses a parameter is a host tensor: that is what optimizers, clipping and state dicts see. When its layer runs,
`param.data` is a device tensor whose storage is given memory, filled by the fetch lane and emptied again afterwards;
views of it that autograd has saved find the weight back in the same storage when backward has sent for it. Gradients
arrive on the device, leave on the store lane, and are the parameters' own at the end of backward, when the host has
waited for them.

| buffer | written by | read by | separated by |
|---|---|---|---|
| host weight | the optimizer, on the host | fetch | the host waits for each fetch before the weight is dropped |
| device weight | fetch | the caller | a mark when it gets memory, `fetched` |
| gradient | the caller | store | a mark when it has arrived; whoever reuses its memory comes after `stored` |
| host gradient | store, then the host | the host | the host waits for `stored` at the end of backward |
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from offstage.config import ActivationConfig, format_size
from offstage.copies import copy_work
from offstage.errors import ConfigError, HostMemoryError
from offstage.host_memory import Arena, check_host_memory
from offstage.lanes import Lane, Lanes, Mark, lanes_for

logger = logging.getLogger("offstage")


class HostWeight:
    """One parameter."""

    def __init__(self, param: nn.Parameter, lanes: Lanes) -> None:
        self.param = param
        self._lanes = lanes
        self._arena = Arena(param.numel(), param.dtype, param.device, pin=True)
        self._host = self._arena.tensor(0, param.numel()).view(param.shape)
        self._host.copy_(param.data)
        self._device = param.data.detach()
        self._is_here = True
        self._fetched: Mark = None
        self._read: Mark = None
        """Behind the last fetch, until the host has waited for it."""
        self._grad: torch.Tensor | None = None
        """What has accumulated so far, while the parameter is a device tensor."""
        self._coming: tuple[torch.Tensor, torch.Tensor, Mark] | None = None
        """The gradient on the device, the host memory that it goes to, and the mark behind the copy."""
        self._spare: Arena | None = None
        self._spare_storage: StorageWeakRef | None = None

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def host_bytes(self) -> int:
        return self._arena.nbytes + (0 if self._spare is None else self._spare.nbytes)

    def fetch(self) -> bool:
        """AWAY → COMING. Returns whether anything had to move."""
        if self._is_here:
            return False
        self._device.untyped_storage().resize_(self.nbytes)
        target = _flat(self._device)
        self._lanes.touch(writes=[target])
        self._fetched = self._lanes.submit(
            Lane.FETCH,
            copy_work([(target, self._arena.flat)]),
            after={"weights: the memory is free": self._lanes.mark()},
            reads=[self._arena.flat],
            writes=[target],
        )
        self._lanes.announce(self._fetched)
        self._read, self._is_here = self._fetched, True
        return True

    def use(self) -> None:
        """COMING → HERE: the parameter is a device tensor."""
        if self._fetched is not None:
            self._lanes.wait(self._fetched, "weights: the weight is here")
            self._lanes.touch(reads=[_flat(self._device)])
        if self.param.grad is not None and self.param.data_ptr() == self._host.data_ptr():
            self._grad, self.param.grad = self.param.grad, None  # of an earlier micro-batch, on the host
        self.param.data = self._device

    def drop(self) -> None:
        """HERE → AWAY: the parameter is a host tensor."""
        if not self._is_here:
            return
        if self._fetched is not None:  # sent for, and maybe not used
            self._lanes.wait(self._fetched, "weights: the fetch is over")
        self._lanes.touch(writes=[_flat(self._device)])
        self.param.data = self._host
        self._device.untyped_storage().resize_(0)  # reused in the order of the caller's stream, which has waited
        self._is_here, self._fetched = False, None
        if self._grad is not None and self._coming is None:
            self.param.grad, self._grad = self._grad, None

    def let_write(self) -> None:
        """The host waits until nobody reads the host's weight."""
        if self._read is not None:
            self._lanes.wait_on_host(self._read, "weights: the optimizer may write")
            self._lanes.touch_on_host(writes=[self._arena.flat])
            self._read = None

    def take_gradient(self) -> int:
        """Autograd has made the gradient: it leaves. Returns its bytes."""
        grad = self.param.grad
        if grad is None or grad.device != self._device.device or self.param.data_ptr() == self._host.data_ptr():
            return 0
        self.param.grad = None
        if self._coming is not None:  # a part of it came before: they are added where autograd would have
            self.settle()
        grad = grad.contiguous()
        host = self._memory_for(grad)
        source, target = _flat(grad), host.view(-1)
        self._lanes.touch(writes=[source])
        stored = self._lanes.submit(
            Lane.STORE,
            copy_work([(target, source)]),
            after={"weights: the gradient is made": self._lanes.mark()},
            reads=[source],
            writes=[target],
        )
        self._coming = (grad, host, stored)
        return grad.nbytes

    def let_gradient_go(self) -> None:
        """The gradient's device memory may be used for something else, behind its copy."""
        if self._coming is not None and self._coming[0].numel():
            grad, host, stored = self._coming
            self._lanes.wait(stored, "weights: the gradient has left")
            self._lanes.touch(writes=[_flat(grad)])
            self._coming = (grad.new_empty(0), host, stored)

    def settle(self) -> None:
        """The gradient is the parameter's own, on the host."""
        if self._coming is None:
            return
        _, host, stored = self._coming
        self._lanes.wait_on_host(stored, "weights: the gradient is on the host")
        self._lanes.touch_on_host(reads=[host])
        self._coming = None
        if self._grad is None:
            self._grad = host
        else:
            self._grad.add_(host)  # one rounding, as on the device
        if not self._is_here:
            self.param.grad, self._grad = self._grad, None

    def _memory_for(self, grad: torch.Tensor) -> torch.Tensor:
        """Host memory for a gradient: that of the last one, unless somebody still holds it."""
        held = self._spare_storage is not None and not self._spare_storage.expired()  # type: ignore[no-untyped-call]
        if self._spare is None or held or self._spare.dtype != grad.dtype:
            self._spare = Arena(grad.numel(), grad.dtype, grad.device, pin=True)
        made = self._spare.tensor(0, grad.numel()).view(grad.shape)
        self._spare_storage = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
        return made

    def bring_home(self) -> None:
        """The parameter is a device tensor from now on."""
        self.fetch()
        self.use()
        grad, self._grad = self._grad, None
        if grad is not None:
            self.param.grad = grad.to(self._device.device)


class HostWeights:
    """The parameters of some layers."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], config: ActivationConfig) -> None:
        self.bytes_fetched = 0
        self.bytes_stored = 0
        self._prefetch = config.prefetch
        self._lanes: dict[torch.device, Lanes] = {}
        self._order: list[nn.Module] = []
        """Layers as they ran last: forward sends for the next one, backward for the one before."""
        self._used: deque[nn.Module] = deque()
        """Layers whose weights are here in backward."""
        self._waits: list[HostWeight] = []
        """With gradients on their way."""
        self._in_backward = False
        chosen = {layer: _movable(model, layer, config) for layer in layers}
        _check_memory(chosen, config)
        self._weights = {
            layer: [HostWeight(param, self._lanes_of(param.device)) for param in params]
            for layer, params in chosen.items()
        }
        self._hooks: list[Any] = []
        for layer, weights in self._weights.items():
            for weight in weights:
                gradient = functools.partial(_arrived, weakref.ref(self), weight)
                self._hooks.append(weight.param.register_post_accumulate_grad_hook(gradient))  # type: ignore[no-untyped-call]
            self._drop(layer)

    def _lanes_of(self, device: torch.device) -> Lanes:
        if device not in self._lanes:
            self._lanes[device] = lanes_for(device)
        return self._lanes[device]

    @property
    def host_bytes(self) -> int:
        return sum(weight.host_bytes for weights in self._weights.values() for weight in weights)

    # Forward

    def begin(self) -> None:
        """The model's forward begins."""
        if torch._C._current_graph_task_id() == -1:
            self._clean_up()  # of a backward that failed
        self._order_now: list[nn.Module] = []
        for layer in self._order[: self._prefetch]:
            self._fetch(layer)

    def enter(self, layer: nn.Module) -> None:
        """A layer is about to run."""
        if layer not in self._weights:
            return
        self._fetch(layer)
        for weight in self._weights[layer]:
            weight.use()
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint runs it again
        self._order_now.append(layer)
        number = len(self._order_now)
        for following in self._order[number : number + self._prefetch]:
            self._fetch(following)

    def leave(self, layer: nn.Module, output: Any) -> None:
        """It has run."""
        if layer not in self._weights:
            return
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if outputs and torch.is_grad_enabled():
            reached = functools.partial(_reached, weakref.ref(self), layer)
            torch.autograd.graph.register_multi_grad_hook(outputs, reached, mode="any")
        if torch._C._current_graph_task_id() == -1:
            self._drop(layer)

    def end(self) -> None:
        """The model's forward is over."""
        if torch._C._current_graph_task_id() == -1:
            self._order = self._order_now
            for layer in self._weights:
                self._drop(layer)
            self._let_write()

    # Backward

    def reached(self, layer: nn.Module) -> None:
        """Backward has come to `layer`'s output."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        for one in [one for one in self._used if one is not layer]:
            if all(not weight.param.requires_grad or weight._coming is not None for weight in self._weights[one]):
                self._used.remove(one)
                self._drop(one)
        self._fetch(layer)
        for weight in self._weights[layer]:
            weight.use()
        if layer not in self._used:
            self._used.append(layer)
        if layer in self._order:
            number = self._order.index(layer)
            for before in self._order[max(0, number - self._prefetch) : number]:
                self._fetch(before)

    def arrived(self, weight: HostWeight) -> None:
        """A gradient is there."""
        nbytes = weight.take_gradient()
        if nbytes:
            self.bytes_stored += nbytes
            for other in self._waits:
                other.let_gradient_go()
            self._waits.append(weight)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._clean_up()

    def _clean_up(self) -> None:
        """Every parameter is a host tensor with its gradient."""
        self._in_backward = False
        self._used.clear()
        for layer in self._weights:
            self._drop(layer)
        self._let_write()
        for weight in self._waits:
            weight.settle()
        self._waits.clear()

    # Both

    def _fetch(self, layer: nn.Module) -> None:
        for weight in self._weights[layer]:
            if weight.fetch():
                self.bytes_fetched += weight.nbytes

    def _drop(self, layer: nn.Module) -> None:
        for weight in self._weights[layer]:
            weight.drop()

    def _let_write(self) -> None:
        """The host waits for the last fetch: an optimizer may write to the host's weights now."""
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
        self._weights = {}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _reached(owner: weakref.ref[HostWeights], layer: nn.Module, *_: Any) -> None:
    if (weights := owner()) is not None:
        weights.reached(layer)


def _arrived(owner: weakref.ref[HostWeights], weight: HostWeight, *_: Any) -> None:
    if (weights := owner()) is not None:
        weights.arrived(weight)


def _movable(model: nn.Module, layer: nn.Module, config: ActivationConfig) -> list[nn.Parameter]:
    """The layer's own parameters: what another module uses as well stays."""
    inside = set(layer.modules())
    others = {param for module in model.modules() if module not in inside for param in module.parameters(recurse=False)}
    found = []
    for param in layer.parameters():
        if isinstance(param, DTensor):
            raise ConfigError(
                "weights=True moves ordinary parameters; found a DTensor. FSDP2 keeps shards already: use its own "
                "CPUOffloadPolicy for weights, or leave weights out."
            )
        dense = param.numel() == param.untyped_storage().nbytes() // param.itemsize and param.is_contiguous()
        if param not in others and dense and param.nbytes >= int(config.min_bytes):
            found.append(param)
    return found


def _check_memory(chosen: dict[nn.Module, list[nn.Parameter]], config: ActivationConfig) -> None:
    need = sum(2 * param.nbytes for params in chosen.values() for param in params)  # the weight and its gradient
    if not need:
        raise ConfigError(
            f"weights=True: no parameter of {len(chosen)} layers can leave; expected some of at least min_bytes="
            f"{format_size(int(config.min_bytes))} that no other module uses. Lower min_bytes, or leave weights out."
        )
    budget = None if config.host_budget is None else int(config.host_budget)
    if budget is not None and need > budget:
        raise HostMemoryError(
            f"Weights and their gradients need {format_size(need)} of host memory; host_budget allows "
            f"{format_size(budget)}. Raise host_budget, or offload fewer layers."
        )
    check_host_memory(need, None)
