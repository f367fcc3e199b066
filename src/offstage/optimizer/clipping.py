# SPDX-License-Identifier: Apache-2.0
"""`clip_grad_norm_`, in every mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offstage.errors import OffstageError
from offstage.lanes.lanes import ImmediateLanes
from offstage.optimizer.overlap.speculation import Norm
from offstage.optimizer.runtime import Runtime
from offstage.tensors import home_of, place_gradient


def clip_grad_norm_(
    runtime: Runtime,
    max_norm: float,
    norm_type: float,
    group: torch.distributed.ProcessGroup | None,
    order: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    """The norm of all gradients, and the gradients scaled by it, now or when it is known whether they must be."""
    runtime.check_awake("clip_grad_norm_()")
    iteration = runtime.iteration
    if iteration.early and not iteration.speculative:
        raise OffstageError(
            "clip_grad_norm_() was called for the first time after updates in backward had been made without it. "
            "Expected it in every iteration from the first on, so that update_in_backward can keep the old weights."
        )
    if iteration.norm is not None and iteration.speculative:  # a second call: the first may have to clip
        runtime.keep_or_revert(iteration.norm)
        iteration = runtime.iteration
    every_param = [p for one in runtime.groups for p in one["params"]]
    if order is not None:
        own = set(every_param)
        every_param = list(dict.fromkeys([*(p for p in order if p in own), *every_param]))
    params = [p for p in every_param if p.grad is not None]
    for param in params:
        place_gradient(param)
    gradients = {p: gradient for p in params if (gradient := iteration.gradients.get(p, p.grad)) is not None}
    device = next((home_of(param) for param in gradients), torch.device("cpu"))
    engine = runtime.places.engines.get(device)
    lanes = engine.transport.lanes if engine is not None else ImmediateLanes(device)
    if runtime.norm_on_host is None:
        runtime.norm_on_host = torch.zeros(2, dtype=torch.float64, device="cpu", pin_memory=device.type != "cpu")
    iteration.norm = Norm(
        every_param, gradients, max_norm, norm_type, group=group, seen=runtime.norm_on_host, lanes=lanes
    )
    if not iteration.speculative:
        iteration.norm.clip()
    return iteration.norm.total
