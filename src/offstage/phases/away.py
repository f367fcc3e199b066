# SPDX-License-Identifier: Apache-2.0
"""A tensor whose memory is away: any use of its values raises, or waits until it is back.

The tensor stays the same Python object, and so does everything that refers to it: only its class changes, to a subclass
of its own that torch asks before every operation (`__torch_function__`), and back again. Without it, an operation on a
tensor with an empty storage reads address 0.

Operations that autograd begins by itself do not ask. What it has saved is protected by its version counter, which is
one higher as long as the memory is away; a gradient that it adds to is protected by a hook (`sleepers.py`).
"""

from __future__ import annotations

import copy
import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from offstage.tensors import AWAY


class Away(ABC):
    """What stands in for a tensor's memory."""

    @abstractmethod
    def use(self, how: str) -> None:
        """The tensor's values are about to be used: wait until they are back, or raise."""

    @abstractmethod
    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of `tensor`: itself once it is back, or a host tensor."""


class _AwayTensor:
    """The part of a tensor's class that it has while its memory is away."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_harmless(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.detach:  # how state dicts are made
            away = vars(args[0])[AWAY]
            return away.readable(args[0]).detach()
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, _AwayTensor):
                vars(tensor)[AWAY].use(_name_of(func))
                bring_back(tensor)  # type: ignore[arg-type]
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        vars(self)[AWAY].use("deepcopy()")  # it has its own class again then
        return copy.deepcopy(self, memo)

    def __repr__(self) -> str:
        assert isinstance(self, torch.Tensor)
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


_PROPERTIES = frozenset(
    {
        *("shape", "device", "dtype", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "is_leaf", "grad"),
        *(
            "grad_fn",
            "grad_dtype",
            "retains_grad",
            "names",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
        ),
        *("is_nested", "is_mkldnn", "is_xla", "is_xpu", "is_mps", "is_vulkan", "output_nr", "_base", "_version"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_grad_fn", "name"),
    }
)
_METHODS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "storage_offset", "is_shared"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg"),
        *("untyped_storage", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__"),
        *("get_device", "__len__"),
    )
)
"""What needs no values. Functions, not their names: `torch.autograd.grad` is not `Tensor.grad`."""


def _is_harmless(func: Callable[..., Any]) -> bool:
    if func in _METHODS:
        return True
    prop = getattr(func, "__self__", None)
    if not isinstance(prop, types.GetSetDescriptorType) or prop.__name__ not in _PROPERTIES:
        return False
    return func.__name__ == "__get__" or prop.__name__ in ("grad", "requires_grad")


def _name_of(func: Callable[..., Any]) -> str:
    prop = getattr(func, "__self__", None)
    return str(getattr(prop, "__name__", None) or getattr(func, "__name__", func))


@functools.cache
def _away_class(cls: type) -> type:
    return types.new_class(f"Away{cls.__name__}", (_AwayTensor, cls))


def send_away(tensor: torch.Tensor, away: Away) -> None:
    """From now on, `away` is asked before `tensor` is used."""
    vars(tensor)[AWAY] = away
    if not isinstance(tensor, _AwayTensor):
        tensor.__class__ = _away_class(type(tensor))


def bring_back(tensor: torch.Tensor) -> None:
    """`tensor` is what it was."""
    vars(tensor).pop(AWAY, None)
    if isinstance(tensor, _AwayTensor):
        tensor.__class__ = type(tensor).__mro__[2]


def move_versions(tensors: Iterable[torch.Tensor], by: int) -> None:
    """Let the version counters of `tensors` go up or down: autograd refuses what it saved under another version."""
    seen: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if not tensor.is_inference():
            seen[id(tensor)] = tensor
    moved = tuple(seen.values())
    versions = tuple(tensor._version + by for tensor in moved)
    torch._C._autograd._unsafe_set_version_counter(moved, versions)  # type: ignore[attr-defined]
