# SPDX-License-Identifier: Apache-2.0
"""Who else has hooks on the tensors that autograd saves. Autograd calls the innermost only, so two offloads on the same
tensors would not know of each other: all but checkpointing are refused. Used by `activations.py`."""

from __future__ import annotations

import torch
from torch import nn

from offstage.errors import ConfigError


def _top_hooks(ours: object) -> str | None:
    """The name of the hook that autograd would call now, unless it is a method of `ours`."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if top is None else top[0]
    if pack is None or getattr(getattr(pack, "func", None), "__self__", None) is ours:
        return None
    pack = getattr(pack, "func", pack)
    return str(getattr(pack, "__qualname__", type(pack).__qualname__))


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


def _is_checkpoint(name: str) -> bool:
    return name.startswith(("_checkpoint_hook", "_recomputation_hook"))


def _other_hooks(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"Other saved-tensor hooks ({name.split('.')[0]}) are active {where}, and would take the same tensors as "
        "offload_activations(); expected one of the two. Take off save_on_cpu() or the other library's offload, or "
        "leave out offload_activations()."
    )
