# SPDX-License-Identifier: Apache-2.0
"""`adamw_for`: the optimizer of a run, before it is offloaded."""

from __future__ import annotations

import torch
from torch import nn

from offstage.train.config import OptimizerSettings


def adamw_for(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW over what `model` trains; norms and other vectors have no weight decay."""
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps
    )
