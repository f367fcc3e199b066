# SPDX-License-Identifier: Apache-2.0
"""What `activations.py` leaves on a model: `Hook` and `Kept`, which its copies do not have, and `Recomputing`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offstage.activations.plan import Choice
from offstage.activations.saved_tensor_hooks import is_recomputed
from offstage.errors import ConfigError

if TYPE_CHECKING:
    from offstage.activations.offload import ActivationOffload


class Hook:
    """A hook on a module. A copy of the module, or one that is loaded from a file, has one that does nothing."""

    def __init__(self, owner: weakref.ref[ActivationOffload] | None = None, method: str = "") -> None:
        self._owner, self._method = owner, method
        # Made here: importing offstage must not import the compiler.
        self._refuse_compiled = torch.compiler.disable(_refuse_compiled) if owner is not None else _nothing  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            self._refuse_compiled()
        offload = self._owner() if self._owner is not None else None
        if offload is not None:
            getattr(offload, self._method)(*arguments)

    def __reduce__(self) -> Any:
        return Hook, ()


def _nothing() -> None:
    pass


def _refuse_compiled() -> None:
    raise ConfigError(
        "A module was compiled together with the hooks that offload_activations() has put on it, where they cannot "
        "work; expected layers to be compiled one by one, and before. Use model.layers[i] = torch.compile(model."
        "layers[i]) for each, then offload_activations(model)."
    )


class Kept:
    """How a model keeps its offload alive."""

    def __init__(self, offload: ActivationOffload | None = None) -> None:
        self.offload = offload

    def __reduce__(self) -> Any:
        return Kept, ()


class Recomputing:
    """A layer's own forward, run again in backward where that is its choice."""

    def __init__(self, layer: nn.Module, owner: weakref.ref[ActivationOffload]) -> None:
        self._layer, self._was_set = layer, "forward" in vars(layer)
        self._forward, self._owner = layer.forward, owner
        layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        offload = self._owner()
        visit = offload.visit if offload is not None else None
        if (
            visit is None
            or visit.choice is not Choice.RECOMPUTE
            or not torch.is_grad_enabled()
            or is_recomputed(offload)
        ):
            return self._forward(*arguments, **keywords)
        return checkpoint(self._forward, *arguments, use_reentrant=False, **keywords)

    def remove(self) -> None:
        if self._was_set:
            self._layer.forward = self._forward  # type: ignore[method-assign]
        else:
            del self._layer.forward
