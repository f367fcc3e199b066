# SPDX-License-Identifier: Apache-2.0
"""`HostWeight`: a parameter that lives on the host, and comes to the device for its layer.

Between uses the parameter is a host tensor: that is what optimizers, clipping and state dicts see. While its layer runs
forward, `param.data` is a copy on the device. What autograd saves of that copy is kept as a reference to the
weight, which is fetched anew in backward. To all other code, the copy and its views are ordinary tensors.

| buffer | written by | read by | separated by |
|---|---|---|---|
| host weight | the optimizer, on the host | fetch | the host waits for fetches at the end of forward and backward |
| device weight | fetch | the caller | a mark when it is allocated, `fetched` |
| gradient | the caller | store | a mark when it has arrived; its memory is used again behind `stored` |
| host gradient | store, then the host | the host | the host waits for `stored` at the end of backward |
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.activations.hooks import running_backward
from offstage.errors import ConfigError, OffstageError
from offstage.lanes.lanes import Lane, Lanes, Mark, copy_work
from offstage.memory.arena import Arena


@dataclass
class _Coming:
    """A gradient on its way to the host."""

    grad: torch.Tensor | None
    host: torch.Tensor
    stored: Mark
    task: int
    """Which backward it is of."""


class HostWeight:
    """One parameter, its host memory, and its copy on the device while there is one."""

    def __init__(self, name: str, param: nn.Parameter, lanes: Lanes) -> None:
        self.name, self.param = name, param
        self._lanes = lanes
        self._home = param.device
        self._arena = Arena(param.numel(), param.dtype, param.device, pin=True)
        self._host = self._arena.tensor(0, param.numel()).view(param.shape)
        self._host.copy_(param.data)
        param.data = self._host
        self._device: torch.Tensor | None = None
        self._fetched: Mark = None
        self._is_waited_for = False
        self._read: Mark = None
        """Behind the last fetch, until the host has waited for it."""
        self._version = 0
        self._coming: _Coming | None = None
        self._sum: torch.Tensor | None = None
        self._node: Node | None = None
        self._spare: list[tuple[Arena, StorageWeakRef]] = []
        """Memory for gradients, and whether the gradient that was handed out of it is still in use."""

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def host_bytes(self) -> int:
        return self._arena.nbytes + sum(arena.nbytes for arena, _ in self._spare)

    @property
    def storage(self) -> int | None:
        """Which storage holds the copy on the device."""
        return None if self._device is None else self._device.untyped_storage()._cdata

    # The weight

    def fetch(self) -> bool:
        """AWAY → COMING. Returns whether anything had to move."""
        if self._device is not None:
            return False
        self._device = torch.empty(self.param.shape, dtype=self.param.dtype, device=self._home)
        target = self._device.view(-1)
        self._lanes.touch(writes=[target])
        self._read = self._fetched = self._lanes.submit(
            Lane.FETCH,
            copy_work([(target, self._arena.flat)]),
            after={"weights: the memory is free": self._lanes.mark()},
            reads=[self._arena.flat],
            writes=[target],
        )
        self._lanes.prioritise(self._fetched)
        self._is_waited_for = False
        return True

    def here(self) -> torch.Tensor:
        """COMING → HERE: the copy on the device, after the caller's stream has waited for it."""
        assert self._device is not None
        self._lanes.wait(self._fetched, "weights: the weight is here")
        self._lanes.touch(reads=[self._device.view(-1)])
        self._is_waited_for = True
        return self._device

    def drop(self) -> None:
        """HERE → AWAY. Views that autograd or the user holds stay what they are."""
        if self._device is None:
            return
        if not self._is_waited_for:  # fetched, and not used
            self._lanes.wait(self._fetched, "weights: the fetch is over")
            self._lanes.touch(writes=[self._device.view(-1)])
        self._device = None

    def swap_in(self) -> None:
        """The parameter is the copy on the device."""
        self.param.data = self.here()
        self._version = self.param._version

    def swap_out(self) -> None:
        """The parameter is the host's tensor."""
        if self._device is not None and self.param.data_ptr() == self._device.data_ptr():
            if self.param._version != self._version:  # written while it was there: a forward that writes weights
                self.let_write()
                self._host.copy_(self._device)
            self.param.data = self._host

    def adopt(self) -> None:
        """Data that user code has given the parameter between two uses wins."""
        self.swap_out()
        found = self.param.data
        if found.data_ptr() == self._host.data_ptr() or not found.numel():
            return
        if found.shape != self._host.shape or found.dtype != self._host.dtype:
            raise ConfigError(
                f"Parameter {self.name!r} lives on the host as {tuple(self._host.shape)} {self._host.dtype}, and was "
                f"replaced by {tuple(found.shape)} {found.dtype}; expected the same. Call remove() on the handle of "
                "offload_activations() before such a change, and offload_activations() again after it."
            )
        self.drop()
        self.let_write()
        self._host.copy_(found)
        self.param.data = self._host

    def let_write(self) -> None:
        """The host waits until no fetch reads the host's weight."""
        if self._read is not None:
            self._lanes.wait_on_host(self._read, "weights: the optimizer may write")
            self._lanes.touch_on_host(writes=[self._arena.flat])
            self._read = None

    # The gradient

    @property
    def task(self) -> int | None:
        """The backward whose gradient is on its way."""
        return None if self._coming is None else self._coming.task

    def watch(self, before: Callable[[HostWeight], None]) -> None:
        """Have `before` called when autograd is about to accumulate what the forward that begins now leads to.

        A hook of the node that accumulates, not of the parameter: that one is called for `torch.autograd.grad`, too.
        """
        if self.param.requires_grad and torch.is_grad_enabled():
            node = get_gradient_edge(self.param).node  # another one when the parameter was on the host in between
            if node is not self._node:
                self._node = node
                node.register_prehook(functools.partial(_expected, before, weakref.ref(self)))

    def before_gradient(self) -> None:
        """Autograd is about to accumulate: what is there already is on the host, and waits."""
        if self._coming is not None:
            # Reentrant checkpointing brings a gradient in parts. One of another backward is of one that failed.
            self.settle() if self._coming.task == running_backward() else self.forget()
        self._sum, self.param.grad = self.param.grad, None

    def take_gradient(self) -> int:
        """Autograd has set the gradient: it leaves, and is the parameter's when backward is over. Returns its bytes."""
        grad = self.param.grad
        assert grad is not None
        self.param.grad, self._sum = self._sum, None
        if grad.layout != torch.strided:
            raise OffstageError(
                f"The gradient of {self.name!r}, which lives on the host (weights=True), has layout {grad.layout}; "
                "expected a dense one. Use sparse=False, or leave that layer out of layers."
            )
        grad = grad.contiguous()
        host = self._memory_for(grad)
        source, target = grad.view(-1), host.view(-1)
        self._lanes.touch(writes=[source])
        stored = self._lanes.submit(
            Lane.STORE,
            copy_work([(target, source)]),
            after={"weights: the gradient is made": self._lanes.mark()},
            reads=[source],
            writes=[target],
        )
        task = running_backward()
        assert task is not None
        self._coming = _Coming(grad, host, stored, task)
        return grad.nbytes

    def let_gradient_go(self) -> None:
        """The gradient's device memory may be used for something else, behind its copy."""
        coming = self._coming
        if coming is not None and coming.grad is not None:
            self._lanes.wait(coming.stored, "weights: the gradient has left")
            self._lanes.touch(writes=[coming.grad.view(-1)])
            coming.grad = None

    def settle(self) -> None:
        """The gradient is the parameter's, on the host."""
        coming = self._coming
        if coming is None:
            return
        self.forget()
        if self.param.grad is None:
            self.param.grad = coming.host
        else:
            self.param.grad.add_(coming.host)  # one rounding, as on the device

    def forget(self) -> None:
        """Backward has failed: gradients are what they were before it. The memory may be used again."""
        coming = self._coming
        if coming is not None:
            self.let_gradient_go()
            self._lanes.wait_on_host(coming.stored, "weights: the gradient is on the host")
            self._lanes.touch_on_host(writes=[coming.host.view(-1)])
            self._coming = None

    def _memory_for(self, grad: torch.Tensor) -> torch.Tensor:
        """Host memory for a gradient: that of an earlier one that is not in use any more, if there is any."""
        for number, (arena, storage) in enumerate(self._spare):
            if storage.expired() and arena.dtype == grad.dtype:  # type: ignore[no-untyped-call]
                del self._spare[number]
                break
        else:
            arena = Arena(grad.numel(), grad.dtype, grad.device, pin=True)
        made = arena.tensor(0, grad.numel()).view(grad.shape)
        self._spare.append((arena, StorageWeakRef(made.untyped_storage())))  # type: ignore[no-untyped-call]
        return made

    def bring_home(self) -> None:
        """The parameter is a device tensor from now on."""
        self.adopt()
        grad = self.param.grad
        self.fetch()
        self.param.grad = None
        self.param.data = self.here()
        self.let_write()  # the memory that it came from may go
        if grad is not None:
            self.param.grad = grad.to(self._home)


def _expected(before: Callable[[HostWeight], None], weight: weakref.ref[HostWeight], *_: Any) -> None:
    if (found := weight()) is not None:
        before(found)
