# SPDX-License-Identifier: Apache-2.0
"""`ForeignGradient`: the gradient of a weight on the host, for optimizers that are not offstage's.

It leaves for host memory as autograd makes it, and is the parameter's, an ordinary host tensor, when backward is over.

| buffer | written by | read by | separated by |
|---|---|---|---|
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
from torch.autograd.graph import Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from offstage.errors import OffstageError
from offstage.lanes.lanes import Lane, Lanes, Mark, copy_work
from offstage.memory.arena import Arena
from offstage.modules import running_backward
from offstage.weights.host_layer import HostWeight


@dataclass
class _Coming:
    """A gradient on its way to the host."""

    grad: torch.Tensor | None
    host: torch.Tensor
    stored: Mark
    task: int
    """Which backward it is of."""


class ForeignGradient:
    """The gradient of one weight."""

    def __init__(self, weight: HostWeight, lanes: Lanes) -> None:
        self.name, self.param = weight.name, weight.param
        self._lanes = lanes
        self._coming: _Coming | None = None
        self._sum: torch.Tensor | None = None
        self._node: Node | None = None
        self._spare: list[tuple[Arena, StorageWeakRef]] = []
        """Memory for gradients, and whether the gradient that was handed out of it is still in use."""

    @property
    def host_bytes(self) -> int:
        return sum(arena.nbytes for arena, _ in self._spare)

    @property
    def task(self) -> int | None:
        """The backward whose gradient is on its way."""
        return None if self._coming is None else self._coming.task

    def watch(self, before: Callable[[ForeignGradient], None]) -> None:
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

    def take(self) -> int:
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

    def let_go(self) -> None:
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
            self.let_go()
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


def _expected(before: Callable[[ForeignGradient], None], gradient: weakref.ref[ForeignGradient], *_: Any) -> None:
    if (found := gradient()) is not None:
        before(found)
