# SPDX-License-Identifier: Apache-2.0
"""`FetchUnderReduction`: the window is filled while Megatron reduces gradients, and with `"auto"` before that.

Megatron's schedules end backward with `config.finalize_model_grads_func`, which waits for the reductions. Whatever is
bound there is called as before, behind a `prefetch()`. Where nothing is bound, which means that the loop reduces
gradients itself, nothing is bound, and the window is filled when the step begins.

`window="auto"` is filled as activations go, in the last micro-batch's backward, and given back in the next forward.
Autograd sees the model's parameters, not the views that the optimizer has of them: so the model gives these cues.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offstage import ConfigError, OffloadedOptimizer
from offstage.modules import Hook, layers_of, running_backward
from offstage.optimizer.optimizer import runtime_of
from offstage.optimizer.overlap.overlap import Overlap


class Finalize:
    """In the place of `finalize_model_grads_func`: fetches, then does what was bound."""

    def __init__(self, bound: Callable[..., Any]) -> None:
        self.__wrapped__ = bound
        self._fetching: weakref.WeakSet[FetchUnderReduction] = weakref.WeakSet()

    def add(self, fetching: FetchUnderReduction) -> None:
        self._fetching.add(fetching)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for fetching in list(self._fetching):
            fetching.fetch()
        return self.__wrapped__(*args, **kwargs)


class FetchUnderReduction:
    """When one optimizer's state comes to the device ahead of its step."""

    def __init__(self, optimizer: OffloadedOptimizer, chunks: Sequence[torch.nn.Module]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._configs: list[Any] = list(
            {id(chunk.config): chunk.config for chunk in chunks if hasattr(chunk, "config")}.values()
        )
        self._waits = False
        """Something was fetched, and no step has used it yet."""
        self._is_full = False
        """As much as the window has room for."""
        self._handles: list[Any] = []
        weakref.finalize(self, _remove_all, self._handles)  # a dropped optimizer leaves no hooks behind
        if optimizer.config.window == "auto":
            own = {param for group in optimizer.param_groups for param in group["params"]}
            for number, chunk in enumerate(chunks):
                self._follow(chunk, number, own)
        self.bind()

    def _follow(self, chunk: torch.nn.Module, number: int, own: set[torch.Tensor]) -> None:
        """Take the cues of one chunk of the model. `own`: the optimizer's parameters, which give it theirs."""
        groups: Any = getattr(chunk, "param_to_bucket_group", {})
        for param in chunk.parameters():
            if param.requires_grad and param not in own:
                hook = Hook(self._gradient_ready, groups.get(param))
                self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            layers = layers_of(chunk, None)
        except ConfigError:  # without a list of layers all is given back before the whole chunk runs
            layers = [chunk]
        for index, layer in enumerate(layers):
            hook = Hook(self._layer_runs, f"layer {index} of chunk {number}")
            self._handles.append(layer.register_forward_pre_hook(hook))

    @property
    def _overlap(self) -> Overlap | None:
        """Unless the optimizer is gone, or asleep."""
        optimizer = self._optimizer()
        runtime = None if optimizer is None else runtime_of(optimizer)
        return None if runtime is None or runtime.rest is not None else runtime.overlap

    def _gradient_ready(self, group: Any) -> None:
        """Of a parameter in `group`, the bucket group of Megatron's DDP."""
        overlap = self._overlap
        # Without `no_sync_func` every micro-batch counts as the last one; what the iteration takes then says when.
        if overlap is not None and getattr(group, "is_last_microbatch", True):
            self._waits |= overlap.view_ready()

    def _layer_runs(self, name: str) -> None:
        overlap, optimizer = self._overlap, self._optimizer()
        if overlap is None or optimizer is None or running_backward() is not None:  # recomputed
            return
        overlap.view_runs(name)
        runtime = runtime_of(optimizer)
        if not overlap.window_slots and any(engine.transport.pipeline.device_bytes for engine in runtime.engines):
            runtime.return_slots()
            self._waits = self._is_full = False

    def bind(self) -> None:
        """Stand before what is bound now: Megatron's training binds its own function after the optimizer is made."""
        for config in self._configs:
            bound = getattr(config, "finalize_model_grads_func", None)
            if bound is None:
                continue
            if not isinstance(bound, Finalize):
                bound = config.finalize_model_grads_func = Finalize(bound)
            bound.add(self)

    def fetch(self) -> None:
        """Once for a step: a forward and backward that are run again find what the first has fetched."""
        optimizer = self._optimizer()
        if optimizer is not None and not self._is_full:
            optimizer.prefetch()
            self._waits = self._is_full = True

    def stepped(self) -> None:
        self._waits = self._is_full = False

    @property
    def leaves_late(self) -> bool:
        """Whether the next forward gives the window back, and the slots with it."""
        overlap = self._overlap
        return overlap is not None and overlap.window_slots > 0

    def begin(self) -> None:
        """A new iteration: what was fetched for a step that was skipped gives its memory back."""
        optimizer = self._optimizer()
        if self._waits and optimizer is not None:
            optimizer.evict()
            runtime_of(optimizer).return_slots()
        self._waits = self._is_full = False
        if (overlap := self._overlap) is not None:
            overlap.begin_iteration()
        self.bind()


def _remove_all(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
