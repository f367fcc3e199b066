# SPDX-License-Identifier: Apache-2.0
"""What offstage asks of a model: its layers, hooks that keep nothing alive, and which backward runs.

Also what other code has put on the tensors that autograd saves. Of hooks on saved tensors autograd calls the innermost
only, so two offloads on the same tensors would not know of each other: all but checkpointing are refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offstage.errors import ConfigError, OffstageError


class Hook:
    """Calls a method of an object that it does not keep alive. A copy (of the module it hangs on) does nothing."""

    def __init__(self, method: Callable[..., None] | None = None, *arguments: Any) -> None:
        """`arguments`: given to the method in place of the hook's own."""
        self._method = None if method is None else weakref.WeakMethod(method)
        self._arguments = arguments

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            self._in_compiled_region()
            return
        method = self._method() if self._method is not None else None
        if method is not None:
            method(*(self._arguments or arguments))

    def _in_compiled_region(self) -> None:
        """Nothing of ours can run inside a region that was compiled with the hook in it."""

    def __reduce__(self) -> Any:
        return Hook, ()


class LayerHook(Hook):
    """One that refuses to be compiled."""

    def __init__(self, method: Callable[..., None]) -> None:
        super().__init__(method)
        # Made here: importing offstage must not import the compiler.
        self._refuse_compiled = torch.compiler.disable(_refuse_compiled)  # type: ignore[no-untyped-call]

    def _in_compiled_region(self) -> None:
        self._refuse_compiled()


def is_ours(hook: Any) -> bool:
    """Whether a hook is offstage's own."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("offstage.")


def running_backward() -> int | None:
    """Which backward runs in this thread: checkpointing runs forwards again in it."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def after_backward(act: Callable[[], None]) -> None:
    """Have `act` called when the backward that runs in this thread comes to its end; never, if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


def uses_ddp(model: nn.Module | None = None) -> bool:
    """Whether `model` has a part that DistributedDataParallel wraps; without one, whether such a forward is running."""
    if model is None:
        return DistributedDataParallel._active_ddp_module is not None
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _refuse_compiled() -> None:
    raise ConfigError(
        "A module was compiled together with the hooks that offload_activations() or offload(weights=...) has put on "
        "it, where they cannot work; expected layers to be compiled one by one, and before. Use model.layers[i] = "
        "torch.compile(model.layers[i]) for each, then offload_activations(model), or offload(optimizer, model)."
    )


class ModelAnchor:
    """Keeps the handle of `offload_activations()` alive as long as its model. Copies of the model have an empty one."""

    def __init__(self, offload: Any = None) -> None:
        self.offload = offload

    def __reduce__(self) -> Any:
        return ModelAnchor, ()


Around = Callable[[nn.Module], AbstractContextManager[Any]]


class Recomputing:
    """A layer's own forward, run again in backward where `is_wanted` says so. A copy of the layer runs it once."""

    def __init__(self, layer: nn.Module, is_wanted: Callable[[], bool], around: Around) -> None:
        """`around`: of the layer; what its forward runs within when it runs again, where no hook of the layer does."""
        self._layer, self._was_set = layer, "forward" in vars(layer)
        self._around: Around | None = around
        self._forward = layer.forward
        self._is_wanted: Callable[[], Callable[[], bool] | None] = weakref.WeakMethod(is_wanted)
        layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        is_wanted = self._is_wanted()
        if is_wanted is None or not is_wanted():
            return self._forward(*arguments, **keywords)
        return checkpoint(self._run, *arguments, use_reentrant=False, **keywords)

    def _run(self, *arguments: Any, **keywords: Any) -> Any:
        again = running_backward() is not None and self._around is not None
        with self._around(self._layer) if again else contextlib.nullcontext():  # type: ignore[misc]
            return self._forward(*arguments, **keywords)

    def remove(self) -> None:
        self._is_wanted = _unwanted
        if vars(self._layer).get("forward") != self.forward:
            return  # other code has wrapped it since, and still calls it
        if self._was_set:
            self._layer.forward = self._forward  # type: ignore[method-assign]
        else:
            del self._layer.forward

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_is_wanted": _unwanted, "_around": None}


def _unwanted() -> None:
    """In place of a reference to what wants a layer recomputed."""


def has_saved_tensor_hooks() -> bool:
    """Whether any code is told of the tensors that autograd saves now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_recomputing() -> bool:
    """Whether checkpointing that is not reentrant runs a forward again: autograd's graph is that of the first run."""
    name = _top_hooks(object())
    return name is not None and _is_checkpoint(name)


def is_recomputed(ours: object) -> bool:
    """Whether all of this forward is checkpointed: then it saves nothing now, and is run again in backward."""
    name = _top_hooks(ours)
    if name is None or _is_checkpoint(name):
        return name is not None
    raise _other_hooks(name, "around the model's forward")


def refuse_other_hooks(module: nn.Module, ours: object) -> None:
    """Before a layer runs."""
    name = _top_hooks(ours)
    if name is not None and not _is_checkpoint(name):
        raise _other_hooks(name, f"around a {type(module).__name__}")


def _top_hooks(ours: object) -> str | None:
    """The name of the hook that autograd would call now, unless it is a method of `ours`."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if top is None else top[0]
    if pack is None or getattr(getattr(pack, "func", None), "__self__", None) is ours:
        return None
    pack = getattr(pack, "func", pack)
    return str(getattr(pack, "__qualname__", type(pack).__qualname__))


def _is_checkpoint(name: str) -> bool:
    return name.startswith(("_checkpoint_hook", "_recomputation_hook"))


def _other_hooks(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"Other saved-tensor hooks ({name.split('.')[0]}) are active {where}, and would take the same tensors as "
        "offload_activations(); expected one of the two. Take off save_on_cpu() or the other library's offload, or "
        "leave out offload_activations()."
    )


# What autograd keeps #


class Stayed:
    """A tensor that autograd keeps on the device: a parameter, a small one, one of a kind that cannot be copied.

    Without its graph: an output that an operation saves would keep that operation, and so itself, alive.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version  # `detach` shares the version counter

    def tensor(self) -> torch.Tensor:
        """The tensor as it was saved. Autograd does not compare versions where there are hooks."""
        check_unchanged(self._tensor, self._version)
        return self._tensor


def check_unchanged(seen: torch.Tensor, version: int) -> None:
    if seen._version != version:
        raise OffstageError(
            f"A tensor of shape {tuple(seen.shape)} that backward needs was changed in place after it was saved "
            f"(version {seen._version}, expected {version}). Autograd alone would refuse it, too, in "
            "backward. Use an operation that makes a new tensor; call backward before the optimizer's step."
        )


# Layers #


def layers_of(model: nn.Module, layers: Any) -> list[nn.Module]:
    """The model's layers: those given, or the children of its longest `ModuleList` with most of the parameters."""
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        known = set(model.modules())
        for layer in layers:
            if layer not in known:
                raise ConfigError(
                    f"layers names a {type(layer).__name__} that is not part of the model; expected modules of the "
                    f"{type(model).__name__} given. Pass them as list(model.layers)."
                )
        return list(layers)
    lists = _module_lists(model)
    if not lists or not any(len(one) for one in lists):
        raise ConfigError(
            f"{type(model).__name__} has no ModuleList whose children could be its layers; expected one. Name them "
            "yourself, as in offload_activations(model, layers=[...])."
        )
    # Not the experts of one layer, though there may be more of them than layers; nor a list around all layers.
    most = max(size_of(one) for one in lists)
    return list(max((one for one in lists if 2 * size_of(one) >= most), key=len))


def size_of(module: nn.Module) -> int:
    """The number of its parameters' elements."""
    return sum(param.numel() for param in module.parameters())


def num_layers_of(model: nn.Module, layers: Sequence[nn.Module]) -> int:
    """How many layers the model has, where some of them may have been named."""
    return max([len(layers), *(len(one) for one in _module_lists(model) if set(one) & set(layers))])


def _module_lists(model: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    return [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
