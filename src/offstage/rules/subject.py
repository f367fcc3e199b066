# SPDX-License-Identifier: Apache-2.0
"""An optimizer class under watch: a shell that shares nothing with the user's optimizer, and what must not change.

A class whose `step()` writes to its own instance, to its class or to a random number generator gives other results when
it runs once for every piece of a parameter. The watch finds that, and leaves everything as it was.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn, optim

from offstage.errors import ConfigError
from offstage.rules.shell import shell_of

_REMEDY = "Use it without offstage, or an optimizer that treats each element alone, such as AdamW."
_NOT_WATCHED = (
    *("state", "param_groups", "step"),
    # What torch's own classes note: that they have looked at their options, or warned.
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured"),
)
_SHARED_TYPES = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    weakref.ref,
    logging.Logger,
    torch.device,
    torch.dtype,
)
"""What a copy of an instance may have in common with it."""
_DEPTH = 8


def refuse(title: str, saw: str, remedy: str = _REMEDY) -> NoReturn:
    """The one error of a class that cannot be offloaded. `saw`: what the probe saw."""
    raise ConfigError(f"{title} cannot be offloaded: {saw}. {remedy}")


class Subject:
    """A class as the user's optimizer has made it: its attributes, copied, and a shell with them."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.kind = type(optimizer)
        self.title = self.kind.__name__
        _check_methods(self.kind)
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, value in _watched(optimizer).items():
            _check_attribute(optimizer, name, value, params)
        try:
            self.shell = shell_of(optimizer)
        except Exception as error:  # a property in the place of `state`, slots
            refuse(self.title, f"no second instance with its settings can be made ({describe(error)})")
        self._pristine = {}
        for name, value in _watched(self.shell).items():
            try:
                setattr(self.shell, name, _copied(value))
                self._pristine[name] = _copied(value)
            except Exception as error:  # each class has its own way not to be copied
                refuse(
                    self.title,
                    f"the probe cannot watch self.{name}, a {type(value).__name__} that cannot be copied "
                    f"({type(error).__name__}: {_line(error)})",
                )
        self._of_classes = [(one, dict(vars(one))) for one in self.kind.__mro__ if not _is_torchs(one)]

    def check_instance(self, instance: optim.Optimizer) -> None:
        """Raise if `step()` has written to the instance that it was called on."""
        now = _watched(instance)
        different = [
            name
            for name in self._pristine.keys() | now.keys()
            if name not in self._pristine or name not in now or not same(self._pristine[name], now[name])
        ]
        if different:
            name = sorted(different)[0]
            refuse(
                self.title,
                f"its step() writes to self.{name}, which would be written once for every piece of every parameter "
                "and is in no state_dict()",
                f"Keep it in a group or in the state of each parameter, or use {self.title} without offstage.",
            )

    def check_classes(self) -> None:
        """Raise if `step()` has written to its class."""
        if written := self._written():
            refuse(self.title, f"its step() writes to the class: {written[0][0].__name__}.{written[0][1]}")

    def restore_classes(self) -> None:
        """Take back what it has written there."""
        for kind, name, before in self._written():
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)

    def _written(self) -> list[tuple[type, str, dict[str, Any]]]:
        return [
            (kind, name, before)
            for kind, before in self._of_classes
            for name, value in vars(kind).items()
            if name not in before or before[name] is not value
        ]


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("torch.optim")


def _check_methods(kind: type[optim.Optimizer]) -> None:
    """Raise if the class expects calls that an offloaded optimizer does not pass on."""
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        refuse(
            kind.__name__,
            "its train() and eval() change the weights between steps, and an offloaded optimizer does not have them",
        )
    overridden = [name for name in ("zero_grad", "state_dict") if not _is_torchs(_owner(kind, name))]
    if overridden:
        refuse(
            kind.__name__,
            f"it has a {overridden[0]}() of its own, which an offloaded optimizer would not call",
        )


def _owner(kind: type, name: str) -> type:
    return next(one for one in kind.__mro__ if name in vars(one))


def _watched(optimizer: optim.Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_WATCHED
        and not name.startswith("_optimizer_")
        # A method of the instance itself is bound to every shell anew.
        and not (isinstance(value, types.MethodType) and value.__self__ is optimizer)
    }


def _check_attribute(optimizer: optim.Optimizer, name: str, value: Any, params: set[int]) -> None:
    title = type(optimizer).__name__
    for one in _reachable(value):
        if one is optimizer:
            refuse(title, f"self.{name} refers to the optimizer itself, which a piece's update is not made by")
        if isinstance(one, optim.Optimizer):
            refuse(title, f"self.{name} is another optimizer, which it wraps", "Offload the inner optimizer instead.")
        if isinstance(one, nn.Module):
            refuse(title, f"self.{name} holds a module ({type(one).__name__}), so its step may look at whole weights")
        if isinstance(one, torch.Generator):
            refuse(title, f"self.{name} is a random number generator, and pieces would draw other numbers")
        if isinstance(one, torch.Tensor) and id(one) in params:
            refuse(title, f"self.{name} holds parameters beside its groups, where pieces of them cannot be put")


def _reachable(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """`value` and what it holds."""
    yield value
    if depth == 0 or isinstance(value, (*_SHARED_TYPES, str, bytes, int, float, torch.Tensor, nn.Module)):
        return
    if isinstance(value, Mapping):
        inner: Any = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif isinstance(value, types.MethodType):
        inner = (value.__self__,)
    elif isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    else:
        inner = vars(value).values() if hasattr(value, "__dict__") else ()
    for one in inner:
        yield from _reachable(one, depth - 1)


def _copied(value: Any) -> Any:
    return value if isinstance(value, _SHARED_TYPES) else copy.deepcopy(value)


def same(left: Any, right: Any) -> bool:
    """Whether two values, one of which may be a changed copy of the other, are the same, bit for bit."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return same_bits(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if not any("__eq__" in vars(kind) for kind in type(left).__mro__[:-1]):
        # What has no attributes either cannot be told from its copy.
        return not hasattr(left, "__dict__") or same(vars(left), vars(right))
    return bool(left == right) or (left != left and right != right)  # NaN is NaN


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """+0 and -0 differ, NaN equals NaN."""
    if left.dtype != right.dtype or left.shape != right.shape or left.device != right.device:
        return False
    return not len(different(left, right))


def different(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The places, in a flat line, at which two tensors of one kind differ in a bit."""
    left, right = left.detach().reshape(-1), right.detach().reshape(-1)
    if not left.is_floating_point():
        return (left != right).nonzero().view(-1)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    if torch.equal(left.view(integers), right.view(integers)):
        return torch.empty(0, dtype=torch.int64, device=left.device)
    equal = (left.view(integers) == right.view(integers)) | (left.isnan() & right.isnan())
    return (~equal).nonzero().view(-1)


@contextlib.contextmanager
def watched_randomness(title: str, device: torch.device) -> Iterator[Callable[[], None]]:
    """Gives a function that raises if random numbers were drawn. Afterwards the generators are as they were."""
    module = torch.get_device_module(device) if device.type != "cpu" else None

    def states() -> tuple[Any, ...]:
        on_device = module.get_rng_state(device) if module is not None else None
        return torch.get_rng_state(), on_device, random.getstate(), np.random.get_state()

    def check() -> None:
        if not same(before, states()):
            refuse(title, "its step() draws random numbers, and pieces of a parameter would draw others than the whole")

    before = states()
    try:
        yield check
    finally:
        torch.set_rng_state(before[0])
        if module is not None:
            module.set_rng_state(before[1], device)
        random.setstate(before[2])
        np.random.set_state(before[3])


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def describe(error: BaseException) -> str:
    """An exception of the user's class, in one line."""
    return f"{type(error).__name__}: {_line(error)}"
