# SPDX-License-Identifier: Apache-2.0
"""The user's own class at work without its optimizer: its `step` on given groups and state, without hooks."""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_HOOKED = optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""Of what torch puts around the `step` of every class, to run hooks."""


def shell_of(optimizer: optim.Optimizer) -> optim.Optimizer:
    """An instance of the same class with the same settings, without parameters, state and hooks."""
    inner = type(optimizer).__new__(type(optimizer))
    settings = {name: one for name, one in vars(optimizer).items() if not name.startswith("_optimizer_")}
    settings.pop("step", None)  # schedulers wrap the instance's step
    for name, value in settings.items():
        if isinstance(value, types.MethodType) and value.__self__ is optimizer:
            settings[name] = types.MethodType(value.__func__, inner)
    vars(inner).update(settings)
    inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    inner.state, inner.param_groups = defaultdict(dict), []
    return inner


def run_step(
    shell: optim.Optimizer,
    groups: list[dict[str, Any]],
    state: dict[Any, Any],
    closure: Callable[[], Any] | None = None,
) -> optim.Optimizer:
    """What `shell`'s class does to the parameters of `groups` with `state`. Returns the instance that did it.

    Hooks do not run: they are the outer step's. Safe in several threads at once: each call has an instance of its own.
    """
    inner = shell_of(shell)
    inner.state, inner.param_groups = state, groups  # type: ignore[assignment]
    step = own_step(type(inner))
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        inner.__class__ = _without_hooks(type(inner))
    with _scalars_on_host(), torch.no_grad():
        step(inner) if closure is None else step(inner, closure)
    return inner


def on_host(options: dict[str, Any]) -> dict[str, Any]:
    """`options` without what only a device can do, for an update on the host."""
    changed: dict[str, Any] = {"capturable": False} if options.get("capturable") else {}
    if isinstance(options.get("lr"), torch.Tensor):
        changed["lr"] = options["lr"].to("cpu")
    return {**options, **changed}


def own_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The `step` of `kind` without the function around it that runs hooks."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step  # type: ignore[no-any-return]


def _without_hooks(kind: type[optim.Optimizer]) -> type[optim.Optimizer]:
    """`kind`, in which `super().step()` runs no hooks either: before each base that has them stands one without."""
    bases = [base for base in kind.__mro__[1:] if getattr(vars(base).get("step"), "__code__", None) is _HOOKED]
    if not bases:
        return kind
    unhooked = [types.new_class(base.__name__, (base,), {}, _with_step(own_step(base))) for base in bases]
    return types.new_class(kind.__name__, (kind, *unhooked))


def _with_step(step: Callable[..., Any]) -> Callable[[dict[str, Any]], None]:
    return lambda names: names.update(step=step)


def _scalars_on_host() -> contextlib.AbstractContextManager[Any]:
    """Most classes create `step` without a device: with `torch.set_default_device("cuda")` it would be on the GPU,
    where every step then waits for it."""
    is_set = torch.get_default_device().type != "cpu"
    return torch.device("cpu") if is_set else contextlib.nullcontext()
