# SPDX-License-Identifier: Apache-2.0
"""A tensor whose memory is away: any use of its values raises, or waits until it is back.

Without a guard, an operation on a tensor with an empty storage reads address 0. What autograd has saved asks no guard;
it is protected by its version counter, which is one higher as long as the memory is away. A gradient that autograd adds
to is protected by a hook (`sleepers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from offstage.memory.guarded import Guard, GuardedTensor, guard, guard_of, unguard, unguarded


class _AwayTensor(GuardedTensor):
    """The part of a tensor's class that it has while its memory is away."""

    prefix = "Away"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.untyped_storage:  # whose memory it is can be asked
            with unguarded():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach:  # how state dicts are made
            away = guard_of(args[0])
            assert away is not None
            return away.readable(args[0]).detach()
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        assert isinstance(self, torch.Tensor)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def send_away(tensor: torch.Tensor, away: Guard) -> None:
    """From now on, `away` is asked before `tensor` is used."""
    guard(tensor, away, _AwayTensor)


def bring_back(tensor: torch.Tensor) -> None:
    """`tensor` is what it was."""
    unguard(tensor)


def move_versions(tensors: Iterable[torch.Tensor], by: int) -> None:
    """Let the version counters of `tensors` go up or down: autograd refuses what it saved under another version."""
    seen: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if not tensor.is_inference():
            seen[id(tensor)] = tensor
    moved = tuple(seen.values())
    versions = tuple(tensor._version + by for tensor in moved)
    torch._C._autograd._unsafe_set_version_counter(moved, versions)  # type: ignore[attr-defined]
