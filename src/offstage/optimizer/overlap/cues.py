# SPDX-License-Identifier: Apache-2.0
"""Which models can give the cues that settings need."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from offstage.config import OffloadConfig
from offstage.errors import ConfigError
from offstage.modules import uses_ddp


def needs_model(config: OffloadConfig) -> bool:
    """Whether cues of a model's forward are needed."""
    return config.overlap_forward or config.window == "all"


def check_cues(config: OffloadConfig, model: nn.Module | None) -> None:
    """Raise if the cues that `config` needs cannot be had from `model`."""
    if config.overlap_forward and model is None:
        raise ConfigError(
            "overlap_forward=True needs the model, whose modules wait for their own weights; found no model. "
            "Call offload(optimizer, model, overlap_forward=True)."
        )
    if config.window == "all" and model is None:
        raise ConfigError(
            "window='all' leaves again during the next forward, whose modules give the cues; found no model. "
            "Call offload(optimizer, model, window='all'), or leave window out."
        )
    if config.update_in_backward and model is not None:
        refuse_ddp(uses_ddp(model))
    if config.overlap_forward and isinstance(model, nn.DataParallel):
        raise ConfigError(
            "overlap_forward=True lets modules wait for their own weights; nn.DataParallel copies all weights "
            "before any module runs. Expected a model without it. Use DistributedDataParallel."
        )


def is_fsdp(model: nn.Module) -> bool:
    """Whether FSDP2 gathers weights of `model`."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def refuse_ddp(found: bool) -> None:
    """Raise if DistributedDataParallel was `found` where gradients are used in backward."""
    if found:
        raise ConfigError(
            "update_in_backward=True uses gradients as autograd makes them; DistributedDataParallel reduces them "
            "later. Expected a model without it. Use overlap_forward=True instead."
        )
