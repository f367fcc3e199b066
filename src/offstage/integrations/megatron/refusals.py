# SPDX-License-Identifier: Apache-2.0
"""What cannot be exact with state elsewhere, said by name before anything moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offstage import ConfigError, OffloadConfig, OffloadedOptimizer
from offstage.config import format_size

_FROM_MEGATRON = "get_megatron_optimizer(...)"

_SETTINGS = {
    "overlap_forward": (
        False,
        "Megatron copies and gathers the weights as soon as its inner step returns, so that every update must have "
        "ended there",
    ),
    "update_in_backward": (
        False,
        "Megatron reduces, unscales and clips the gradients after backward, so that none is final in it",
    ),
    "weights": ("device", "Megatron's DDP owns the memory of the weights and gathers into it"),
}
"""Fields of `OffloadConfig`: the only value that works here, and why."""

_FLAGS = {
    "use_precision_aware_optimizer": "Transformer Engine then owns the masters and reads `.decoupled_grad`",
    "optimizer_cpu_offload": "Megatron's HybridDeviceOptimizer then keeps state on the host already",
    "optimizer_cuda_graph": "a captured step replays fixed addresses, and offloaded state has none on the device",
    "reuse_grad_buf_for_mxfp8_param_ag": "quantized parameters are written through the gradient buffer",
}
"""Fields of Megatron's `OptimizerConfig` that must be off, and why."""


def check_settings(config: OffloadConfig, parts: int) -> None:
    """Raise if a setting of offstage cannot be had in Megatron. `parts`: optimizers with parameters in the chain."""
    for name, (only, why) in _SETTINGS.items():
        if (found := getattr(config, name)) != only:
            raise ConfigError(f"{name}={found!r} cannot be had in Megatron: {why}. Expected {name}={only!r}.")
    if config.master_weights == "none":
        raise ConfigError(
            "master_weights='none' cannot be had in Megatron, which trains fp32 masters of 16-bit weights; expected "
            "'auto', 'fp32' or 'split'."
        )
    if config.device_peak is not None and config.window != "auto":
        raise ConfigError(
            f"device_peak={format_size(int(config.device_peak))} cannot be had in Megatron: fit() decides for one "
            "device, between steps, and puts hooks on layers that Megatron's engine does not expect. Expected settings "
            "that are the same on every rank: use fraction or device_budget, or window='auto', which stays below "
            "device_peak."
        )
    for name in ("device_budget", "device_peak", "host_budget"):
        if parts > 1 and (found := getattr(config, name)) is not None:
            raise ConfigError(
                f"{name}={found} is one number, and this ChainedOptimizer has {parts} optimizers with parameters; "
                "expected a share that each can keep. Use fraction."
            )


def check_optimizer(optimizer: Any, known: Sequence[type]) -> None:
    """Raise if `optimizer`, one of a chain or alone, is not of `known` classes or is set up in a way that cannot be."""
    if type(optimizer) not in known:
        if isinstance(getattr(optimizer, "optimizer", None), OffloadedOptimizer):
            raise ConfigError(
                f"This {type(optimizer).__name__} is already offloaded; expected one that is not. Leave the call out."
            )
        names = ", ".join(kind.__name__ for kind in known)
        hint = "Build it first" if isinstance(optimizer, torch.optim.Optimizer) else "Use one of these"
        raise ConfigError(
            f"offload() expects a Megatron optimizer of exactly one of these classes: {names}, or a ChainedOptimizer "
            f"of them; found {type(optimizer).__module__}.{type(optimizer).__qualname__}. {hint}: {_FROM_MEGATRON}."
        )
    for name, why in _FLAGS.items():
        if getattr(optimizer.config, name, False):
            raise ConfigError(
                f"OptimizerConfig.{name}=True cannot be offloaded: {why}. Expected {name}=False: build the optimizer "
                f"without it."
            )


def check_models(chunks: Sequence[Any]) -> None:
    """Raise if a model has masters of its own, or writes to them between steps."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False):
            raise ConfigError(
                "DistributedDataParallelConfig.use_megatron_fsdp=True cannot be offloaded: Megatron-FSDP keeps masters "
                "and gradients in buffers of its own. Use DistributedDataParallel with use_distributed_optimizer=True."
            )
        if getattr(getattr(chunk, "config", None), "qk_clip", False):
            raise ConfigError(
                "TransformerConfig.qk_clip=True cannot be offloaded: Megatron scales the fp32 masters of attention "
                "weights on the device after each step, and they are not there. Use qk_clip=False."
            )


def check_window(config: OffloadConfig, chunks: Sequence[Any]) -> None:
    """Raise if there is nothing to fill a window under: it would take memory and hide nothing."""
    if config.window and not chunks:
        raise ConfigError(
            f"window={config.window!r} is filled while the model's gradients are reduced; expected the model, found "
            "none, as only a DistributedOptimizer knows its own. Call offload(optimizer, model=model, window=...)."
        )


def check_plain(param: Any, name: str) -> None:
    """Raise if a model's parameter is quantized."""
    if param is None or type(param) not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"Parameter {name!r} is quantized ({type(param).__name__}); expected fp32, bf16 or fp16 weights. Keep "
            "primary weights in bf16: leave out fp8_param_gather and its kind."
        )
