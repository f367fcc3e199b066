# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values must not be used as they are: code that uses them asks a `Guard` first.

The tensor stays the same Python object, and so does everything that refers to it: only its class changes, to a subclass
of its own that torch asks before every operation (`__torch_function__`), and back again. What needs no values (shapes,
gradients, hooks, the identity) is answered without asking.

Operations that autograd begins by itself do not ask, nor does code that has the address or another tensor that shares
the memory, nor C++ that is not called through torch's own functions.
"""

from __future__ import annotations

import copy
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._pytree import tree_leaves

from offstage.tensors import GUARD


class Guard(ABC):
    """What stands before the values of tensors."""

    @abstractmethod
    def before_use(self, tensor: torch.Tensor, how: str) -> None:
        """`tensor`'s values are about to be used by `how`: it is an ordinary tensor afterwards, unless this raises."""

    @abstractmethod
    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """What offstage's own code reads in place of `tensor`."""


class GuardedTensor:
    """The part of a tensor's class that it has while it is guarded."""

    original: type[torch.Tensor]
    """The class that it has otherwise."""
    prefix = "Guarded"

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """`type(tensor)(...)` makes an ordinary one."""
        return cls.original(*arguments, **keywords)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with unguarded():
                return func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, GuardedTensor):
                _ask(tensor, _name_of(func))
        if func is torch.Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:
            return args[0].detach().as_subclass(type(args[0]))  # it takes what has not its class for another kind
        return func(*args, **kwargs)

    def __hash__(self) -> int:  # torch's own would ask, and offstage keeps parameters in dictionaries
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _ask(self, "deepcopy()")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ask(self, "pickle")  # before its attributes are looked at, of which the guard is one
        return self.__reduce_ex__(protocol)


@_disable_dynamo  # type: ignore[untyped-decorator]  # a compiled function that comes here runs as it is written
def _ask(tensor: Any, how: str) -> None:
    found: Guard | None = vars(tensor).get(GUARD)
    if found is None:  # other code has copied the class, or its attributes, to a tensor that nothing guards
        unguard(tensor)
    else:
        found.before_use(tensor, how)


_NEW_PARAMETER = nn.Parameter.__new__.__code__
_READ = (
    *("shape", "device", "dtype", "layout", "ndim", "nbytes", "itemsize", "is_leaf", "grad_fn", "grad_dtype", "names"),
    *("retains_grad", "output_nr", "name", "_base", "_version", "_grad_fn", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized"),
    *("is_nested", "is_mkldnn", "is_xla", "is_xpu", "is_mps", "is_vulkan", "is_mtia", "is_ipu", "is_maia"),
)
_WRITTEN = ("grad", "requires_grad", "grad_dtype")
_METHODS = (
    *("size", "stride", "dim", "numel", "nelement", "ndimension", "element_size", "storage_offset", "is_shared"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "get_device", "__len__", "__hash__"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "_is_view", "is_pinned"),
)
_FUNCTIONS = (
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.is_floating_point),
    *(torch.is_complex, torch.numel, torch.is_conj, torch.is_neg, torch.is_inference),
)


def _accessors(name: str, *kinds: str) -> list[Any]:
    found = getattr(torch.Tensor, name, None)
    return [getattr(found, kind) for kind in kinds] if isinstance(found, types.GetSetDescriptorType) else []


_HARMLESS = frozenset(
    [
        *(accessor for name in _READ for accessor in _accessors(name, "__get__")),
        *(accessor for name in _WRITTEN for accessor in _accessors(name, "__get__", "__set__", "__delete__")),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *_FUNCTIONS,
    ]
)
"""What needs no values. Functions, not their names: `torch.autograd.grad` is not `Tensor.grad`."""


def _name_of(func: Callable[..., Any]) -> str:
    prop = getattr(func, "__self__", None)
    return str(getattr(prop, "__name__", None) or getattr(func, "__name__", func))


_classes: dict[tuple[type, type], Any] = {}


def _class_for(cls: type, kind: type[GuardedTensor]) -> Any:
    if (found := _classes.get((cls, kind))) is None:
        made: Any = types.new_class(f"{kind.prefix}{cls.__name__}", (kind, cls))
        made.original = cls
        found = _classes[cls, kind] = made
        ForkingPickler.register(found, _reduce_for_process)
    return found


def _reduce_for_process(tensor: torch.Tensor) -> Any:
    """For another process, which gets the memory and not a copy, as of any tensor."""
    _ask(tensor, "pickle")
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def guard(tensor: torch.Tensor, by: Guard, kind: type[GuardedTensor] = GuardedTensor) -> None:
    """From now on, `by` is asked before `tensor` is used."""
    vars(tensor)[GUARD] = by
    cls = type(tensor)
    if not issubclass(cls, GuardedTensor):
        tensor.__class__ = _class_for(cls, kind)
    else:
        assert cls.__bases__[0] is kind, f"a {cls.__name__} cannot be a {kind.__name__} at the same time"


def unguard(tensor: torch.Tensor) -> None:
    """`tensor` is what it was."""
    if isinstance(tensor, GuardedTensor):
        vars(tensor).pop(GUARD, None)
        tensor.__class__ = type(tensor).original  # type: ignore[assignment]


def class_of(tensor: torch.Tensor) -> type:
    """The class that `tensor` has while it is not guarded."""
    cls = type(tensor)
    return cls.original if issubclass(cls, GuardedTensor) else cls


def guard_of(tensor: torch.Tensor) -> Guard | None:
    """What stands before the values of `tensor`."""
    return vars(tensor).get(GUARD)


def unguarded() -> AbstractContextManager[None]:
    """Within: tensors are used without asking, by code that knows what it does."""
    return torch._C.DisableTorchFunctionSubclass()
