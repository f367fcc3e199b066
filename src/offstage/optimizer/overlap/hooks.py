# SPDX-License-Identifier: Apache-2.0
"""`Hooks`: on parameters and modules, to tell a listener where training is.

- *gradient ready*: a parameter's gradient has been accumulated (`register_post_accumulate_grad_hook`);
- *forward*: a module is about to run, so its own parameters are about to be read. A compiled module is one region:
  nothing inside it runs Python, so its cue stands at the boundary and is for all parameters within. So is attention of
  torch, which reads the weights of a module inside;
- *read*: a module's state dict is about to be read or loaded.

Hooks know the listener weakly, and copies of a model (deepcopy, pickle) are not bound to anything.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from offstage.modules import Hook


class Listener(Protocol):
    """Acts on cues."""

    def gradient_ready(self, param: torch.Tensor) -> None:
        """`param.grad` has been accumulated; more may come."""

    def before_forward(self, params: Sequence[torch.Tensor], module: str) -> None:
        """`params` are about to be read by the forward of `module`."""

    def before_inference(self, params: Sequence[torch.Tensor]) -> None:
        """A forward begins that looks at `params` of modules inside, if it needs no gradients."""

    def before_read(self, params: Sequence[torch.Tensor]) -> None:
        """`params` are about to be read as a whole."""

    def before_load(self, params: Sequence[torch.Tensor]) -> None:
        """`params` are about to be written as a whole."""


class Hooks:
    """The hooks of one listener on one model. `remove()` takes all of them off again."""

    def __init__(self, listener: Listener, model: nn.Module | None) -> None:
        self._listener = weakref.ref(listener)
        self._handles: list[Any] = []
        self._bound: set[torch.Tensor] = set()
        self._hooked: set[torch.Tensor] = set()
        self._model = weakref.ref(model) if model is not None else None
        self.module_of: dict[torch.Tensor, str] = {}
        """The module whose forward reads each parameter, by name; for messages."""
        # An optimizer that is dropped without being closed leaves no hooks behind.
        weakref.finalize(listener, _remove_all, self._handles)

    @property
    def model(self) -> nn.Module | None:
        """While it is alive."""
        return self._model() if self._model is not None else None

    def bind(self, params: Sequence[torch.Tensor]) -> None:
        """Hook `params` and the modules that own them. Those bound before stay as they are, unless some are gone."""
        if not self._bound.issubset(params):
            self.remove()  # what is not trained any more is not held either
        new = [param for param in params if param not in self._bound]
        listener = self._listener()
        assert listener is not None
        for param in params:
            if param.requires_grad and param.is_leaf and param not in self._hooked:
                self._hooked.add(param)
                hook = Hook(listener.gradient_ready)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        model = self.model
        if model is not None and new:
            wanted = set(new)
            for name, module, owned in _regions(model):
                ours = [param for param in owned if param in wanted]
                if ours:
                    self._bind_module(listener, name, module, ours)
            for module in model.modules():
                ours = [param for param in module.parameters() if param in wanted] if _takes_short_cuts(module) else []
                if ours:
                    short_cut = Hook(listener.before_inference, ours)
                    self._handles.append(module.register_forward_pre_hook(short_cut, prepend=True))
        self._bound.update(new)

    def _bind_module(self, listener: Listener, name: str, module: nn.Module, params: list[torch.Tensor]) -> None:
        self.module_of.update((param, name) for param in params)
        forward = Hook(listener.before_forward, params, name)
        if module._compiled_call_impl is not None:
            # Compiled in place: a hook would be traced into the region, so the call itself is wrapped.
            self._handles.append(_WrappedCall(module, forward))
        else:
            # First of all hooks: others may read the weights.
            self._handles.append(module.register_forward_pre_hook(forward, prepend=True))
        read = Hook(listener.before_read, params)
        self._handles.append(module.register_state_dict_pre_hook(read))  # type: ignore[no-untyped-call]
        load = Hook(listener.before_load, params)
        self._handles.append(module.register_load_state_dict_pre_hook(load))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Leave no hook behind."""
        _remove_all(self._handles)
        self._bound.clear()
        self._hooked.clear()
        self.module_of.clear()


class _WrappedCall:
    """The call of a module compiled in place, with a cue in front; `remove` puts the call back."""

    def __init__(self, module: nn.Module, cue: Hook) -> None:
        self._module, self._cue = weakref.ref(module), cue
        self.inner, self.removed = module._compiled_call_impl, False
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.removed:
            self._cue()
        return self.inner(*args, **kwargs)  # type: ignore[misc]

    def remove(self) -> None:
        """Out of the way at once; unwrapped as soon as no other wrapper is around it."""
        self.removed = True
        module = self._module()
        while module is not None and isinstance(call := module._compiled_call_impl, _WrappedCall) and call.removed:
            module._compiled_call_impl = call.inner

    def __reduce__(self) -> Any:
        return copy.copy, (self.inner,)  # a copy of the model is not bound


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _is_compiled(module: nn.Module) -> bool:
    # `torch.compile(module)` is a module around `_orig_mod`; `module.compile()` sets the call.
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _takes_short_cuts(module: nn.Module) -> bool:
    """Whether its forward without gradients is another one, unless the classes of weights inside forbid that."""
    return isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) and not _is_compiled(module)


def _regions(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[torch.Tensor]]]:
    """Modules whose call is a cue, with the parameters they are a cue for."""
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        compiled = _is_compiled(module)
        # `MultiheadAttention` reads the weights of its `out_proj` without calling it.
        recurse = compiled or isinstance(module, nn.MultiheadAttention)
        params: list[torch.Tensor] = list(module.parameters(recurse=recurse))
        if params:
            yield name or type(module).__name__, module, params
        # Modules within a region have cues too, for calls of them alone; in the region those do nothing.
        children = ((f"{name}.{key}" if name else key, child) for key, child in module.named_children())
        stack.extend(reversed(list(children)))
