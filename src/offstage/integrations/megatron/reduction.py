# SPDX-License-Identifier: Apache-2.0
"""`FetchUnderReduction`: the window is filled while Megatron reduces gradients.

Megatron's schedules end backward with `config.finalize_model_grads_func`, which waits for the reductions. Whatever is
bound there is called as before, behind a `prefetch()`. Where nothing is bound, which means that the loop reduces
gradients itself, nothing is bound, and the window is filled when the step begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offstage import OffloadedOptimizer
from offstage.optimizer.optimizer import runtime_of


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
        """Fetched, and no step has used it yet."""
        self.bind()

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
        if optimizer is not None and not self._waits:
            optimizer.prefetch()
            self._waits = True

    def stepped(self) -> None:
        self._waits = False

    def begin(self) -> None:
        """A new iteration: what was fetched for a step that was skipped gives its memory back."""
        optimizer = self._optimizer()
        if self._waits and optimizer is not None:
            optimizer.evict()
            runtime_of(optimizer).return_slots()
        self._waits = False
        self.bind()
