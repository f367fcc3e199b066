# SPDX-License-Identifier: Apache-2.0
"""The names of parameters in checkpoints: those the model has without its wrappers. Used by `catalogue.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""torch.compile, activation checkpointing."""


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter once, under the name that `torch.distributed.checkpoint` gives it."""
    for name, param in model.named_parameters():
        yield clean_name(model, name), param


def clean_name(model: nn.Module, name: str) -> str:
    """`name` without the parts that wrappers add."""
    kept, module = [], model
    for part in name.split("."):
        wraps = part in _WRAPPERS or (part == "module" and isinstance(module, DistributedDataParallel))
        if not wraps:
            kept.append(part)
        inner = getattr(module, part, None)
        module = inner if isinstance(inner, nn.Module) else module
    return ".".join(kept)
