# SPDX-License-Identifier: Apache-2.0
"""`LateWeights`: the parameters of one device whose last update the caller's stream has not waited for.

`step()` returns before their updates are done (`overlap_forward`). Until then each is guarded: code that uses its
values outside its module's forward waits for its update first. The engine, which knows when an update is settled, puts
the guards on and takes them off, here and nowhere else.

Of a weight that lives on the host the newest values may be on the device even when its update is settled, and the next
forward may use them there: it stays guarded until they are on the host and nowhere else (`HostedWeight.hold_back`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offstage.memory.guarded import Guard, guard, guard_of, unguard
from offstage.rules.rule import ParamState
from offstage.tensors import local_of


class LateWeights(Guard):
    """Those of one engine."""

    def __init__(self) -> None:
        self._held: dict[ParamState, None] = {}
        self._settle: weakref.WeakMethod[Callable[[torch.Tensor], None]] | None = None

    def hold(
        self,
        late: Iterable[ParamState],
        hosted: Iterable[ParamState],
        settle: weakref.WeakMethod[Callable[[torch.Tensor], None]],
    ) -> None:
        """The updates of `late` are: `settle` is called before one of these parameters, or its local tensor, is used.

        `hosted`: all that live on the host. Their newest values may be elsewhere, though settled.
        """
        self._settle = settle
        for state in hosted:
            if state.hosted is not None and (state.hosted.is_here or not state.hosted.layer.is_on_host):
                self._held[state] = None
                state.hosted.hold_back(self, late=False)
        for state in late:
            self._held[state] = None
            param = state.param
            if state.hosted is not None:
                state.hosted.hold_back(self, late=True)
                continue
            guard(param, self)
            if (local := local_of(param)) is not param:  # a DTensor's `to_local()` gives it away without an operation
                guard(local, self)

    def settled(self, states: Iterable[ParamState]) -> None:
        """The caller's stream has waited for the updates of `states`."""
        for state in states:
            if state not in self._held:
                continue
            if state.hosted is not None:
                state.hosted.was_settled()
            else:
                self._let_go(state)  # first: a caller that is interrupted here comes again
                self._held.pop(state, None)

    def let_go(self) -> None:
        """Nothing is late any more, or nothing can be done about it."""
        for state in list(self._held):
            self._let_go(state)
            self._held.pop(state, None)

    def _let_go(self, state: ParamState) -> None:
        if state.hosted is not None:
            state.hosted.let_go(self)
        for tensor in (state.param, local_of(state.param)):
            if guard_of(tensor) is self:  # otherwise another engine holds it by now, or it sleeps
                unguard(tensor)

    def before_use(self, tensor: torch.Tensor, how: str) -> None:
        settle = self._settle() if self._settle is not None else None
        if settle is not None:
            # The reader may count operations, trace them with fake tensors or differentiate them: not these.
            with torch._C._DisableFuncTorch(), _disable_current_modes():
                settle(tensor)
        if guard_of(tensor) is self:
            unguard(tensor)

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # code that uses its values asks
