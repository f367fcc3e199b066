# SPDX-License-Identifier: Apache-2.0
"""Calls as a user with a type checker writes them. mypy reads this file, and nothing runs it.

A line with an error that mypy must find ignores it: an ignore that finds nothing to ignore is an error here.
"""

from __future__ import annotations

import torch
from torch import nn

import offstage


def right(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    made = offstage.offload(optimizer, model, fraction=0.5, min_bytes=None, state_dtype={"exp_avg": torch.bfloat16})
    made.replan(fraction=1.0, update_on="host", threads=2)
    with offstage.offload_activations(model, layers=list(model.children()), weights=True):
        offstage.checkpoint.save("folder", model, made)
    return offstage.OffloadConfig(state_dtype=torch.bfloat16, window="all").rule


def wrong(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    made = offstage.offload(optimizer, model, fractoin=0.5)  # type: ignore[call-arg]
    offstage.offload(optimizer, model, slots="4")  # type: ignore[arg-type]
    made.replan(update_on="cpu")  # type: ignore[arg-type]
    offstage.offload_activations(model, keep_lsat=2)  # type: ignore[call-arg]
    offstage.offload_activations(model, prefetch="1")  # type: ignore[arg-type]
    offstage.oflfoad(optimizer)  # type: ignore[attr-defined]
