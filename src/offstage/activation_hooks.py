# SPDX-License-Identifier: Apache-2.0
"""`Hook` and `Kept`: how a model knows of its offload, and its copies do not. Used by `activations.py`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from offstage.errors import ConfigError

if TYPE_CHECKING:
    from offstage.activations import ActivationOffload


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
