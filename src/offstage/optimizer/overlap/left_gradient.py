# SPDX-License-Identifier: Apache-2.0
"""`LeftGradient`: what `p.grad` is while the gradient is on the host. Other code can use it as the gradient itself.

Autograd adds the next micro-batch's gradient to it on the device, where it returns for that. Torch's clipping asks for
its norm, which is known, and scales it, which is done when it is used. Any other use waits for it: beside a weight that
lives on the host it is a host tensor; beside one on the device it returns there, and stays. Each use takes the
optimizer's turn: autograd's thread may add to it while another thread steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from offstage.engine.gradients import HostGradient
from offstage.errors import ConfigError
from offstage.modules import running_backward
from offstage.tensors import as_param, flat_like

_ACCUMULATES = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class GradientUses:
    """The uses of one optimizer's gradients that left: each takes the turn, and those of other code are counted."""

    def __init__(self, turn: AbstractContextManager[Any]) -> None:
        self.turn = turn
        self.count = 0
        self._own = 0

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Within, the uses are offstage's own. No other thread has the turn meanwhile."""
        with self.turn:
            self._own += 1
            try:
                yield
            finally:
                self._own -= 1

    @contextlib.contextmanager
    def other(self) -> Iterator[None]:
        """Within, other code uses a gradient, unless offstage has asked it to."""
        with self.turn:
            self.count += not self._own
            yield


class LeftGradient(torch.Tensor):
    """A tensor of the gradient's shape whose data are elsewhere."""

    gradient: HostGradient
    uses: GradientUses
    stays_on_host: bool
    like: torch.Tensor
    """In the parameter's shape and memory order, without data."""

    def __new__(
        cls, param: torch.Tensor, gradient: HostGradient, uses: GradientUses, *, stays_on_host: bool
    ) -> LeftGradient:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, param.shape, strides=param.stride(), dtype=gradient.dtype, device=param.device
        )
        made.gradient, made.uses, made.stays_on_host = gradient, uses, stays_on_host
        made.like = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
        torch._C._set_throw_on_mutable_data_ptr(made)  # type: ignore[attr-defined]  # a kernel would read address 0
        gradient.hand_out(weakref.ref(made))
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _data_for(self, *, on_device: bool) -> torch.Tensor:
        """The gradient itself, for any use; `on_device`: beside tensors that are there."""
        flat = self.gradient.on_device() if on_device or not self.stays_on_host else self.gradient.on_host()
        self.gradient.norm = None
        return as_param(flat, self.like)

    def plain(self) -> torch.Tensor:
        """The gradient as an ordinary tensor, where its weight lives."""
        with self.uses.turn:
            self.gradient.finish_updates()
            return self._data_for(on_device=False)

    def _for_other_code(self) -> torch.Tensor:
        with self.uses.other():
            return self.plain()

    # What torch does not send through __torch_dispatch__

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ConfigError(
                f"The gradient of {self.gradient.name!r} is {tuple(self.shape)} {self.dtype}; found "
                f"{tuple(value.shape)} {value.dtype} for its data. Assign to p.grad instead."
            )
        with self.uses.other():
            self.gradient.finish_updates()
            self.gradient.set(flat_like(value, self.like))

    def numpy(self, *, force: bool = False) -> Any:
        return self._for_other_code().numpy(force=force)

    def __array__(self, dtype: Any = None, *_: Any, **__: Any) -> Any:
        return self._for_other_code().__array__(dtype)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        return self._for_other_code().tolist()  # type: ignore[no-untyped-call]

    def cpu(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self._for_other_code().cpu(*arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self._for_other_code().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._for_other_code().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _add(self, other: torch.Tensor, alpha: Any) -> None:
        """Autograd accumulates: on the device, with the one rounding that an addition in place has."""
        as_param(self.gradient.on_device(), self.like).add_(other, alpha=alpha)
        self.gradient.norm = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        used = [one for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
        uses = used[0].uses
        accumulates = func in _ACCUMULATES and running_backward() is not None
        with uses.own() if accumulates else uses.other():
            for one in used:
                one.gradient.finish_updates()
            return cls._use(func, args, kwargs)

    @classmethod
    def _use(cls, func: Any, args: Any, kwargs: Any) -> Any:
        first, other = args[0], args[1] if len(args) > 1 else None
        if func is torch.ops.aten.linalg_vector_norm.default and len(args) == 2 and not kwargs:
            return first.gradient.norm_of_type(float(args[1])).to(first.device)
        if isinstance(first, cls) and type(other) is torch.Tensor:
            if func is torch.ops.aten.add_.Tensor and other.device == first.gradient.device:
                first._add(other, kwargs.get("alpha", 1))
                return first
            if func is torch.ops.aten.mul_.Tensor and other.dim() == 0:
                first.gradient.scale(other.detach().to(first.gradient.device, non_blocking=True, copy=True))
                return first
        leaves = tree_leaves((args, kwargs))
        devices = {one.device for one in leaves if type(one) is torch.Tensor and one.dim()}
        values: dict[int, tuple[torch.Tensor, LeftGradient]] = {}

        def unwrapped(one: LeftGradient) -> torch.Tensor:
            found = one._data_for(on_device=one.gradient.device in devices)
            values[id(found)] = found, one
            return found

        result = func(*tree_map_only(cls, unwrapped, args), **tree_map_only(cls, unwrapped, kwargs))
        # An operation in place returns its first argument.
        return tree_map_only(torch.Tensor, lambda one: values[id(one)][1] if id(one) in values else one, result)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LeftGradient({self.gradient.name!r})"
