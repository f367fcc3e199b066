# SPDX-License-Identifier: Apache-2.0
"""LoRA: `add_adapters` freezes a model and puts two trained factors beside its matrices.

    add_adapters(model, settings)       # on meta or with weights; names and bits of the model's own weights stay
    initialize_adapters(model, seed)    # once they are allocated
    merged(weight, a, b, scale)         # a plain weight again; `adapter_files.py` uses it for export

A layer with weight W [out, in] computes ``x Wᵀ + scale (x Aᵀ) Bᵀ`` with A [rank, in] and B [out, rank]. B begins as
zeros, so that training begins with the model as it was. The factors are parameters of the layer itself,
`….q_proj.lora_A` and `….q_proj.lora_B`: whatever knows the model's weights by their names, loads, shards or cuts them
as without adapters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from offstage import ConfigError
from offstage.train.language_model import LanguageModel, copy_shard, generator_for
from offstage.train.lora_settings import LoraSettings

A, B = "lora_A", "lora_B"


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        """Takes over the weight and bias of `linear`."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = scale
        factory: dict[str, Any] = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, **factory))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, **factory))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def is_adapter(name: str) -> bool:
    """Whether this is the name of a factor, and not of a weight of the model."""
    return name.rpartition(".")[2] in (A, B)


def add_adapters(model: LanguageModel, settings: LoraSettings) -> None:
    """Freeze `model`, and put adapters beside the linear layers that `settings` name."""
    if not settings.rank:
        return
    inside = {module for layer in model.layers() for module in layer.modules()}
    linears = {name: one for name, one in model.named_modules() if type(one) is nn.Linear}
    if settings.targets:
        chosen = {name: one for name, one in linears.items() if _is_named(name, settings.targets)}
        unknown = [target for target in settings.targets if not any(_is_named(name, [target]) for name in linears)]
    else:
        chosen, unknown = {name: one for name, one in linears.items() if one in inside}, []
    if unknown or not chosen:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linears})) or "none"
        raise ConfigError(
            f"lora.targets expects names of linear layers; found {', '.join(unknown) or 'none in the blocks'}. This "
            f"model has: {known}. Name some of these."
        )
    model.requires_grad_(False)
    for name, linear in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(linear, settings.rank, settings.scale))


def _is_named(name: str, targets: Iterable[str]) -> bool:
    """As peft compares them: whole components from the end."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


@torch.no_grad()
def initialize_adapters(module: nn.Module, seed: int, device: torch.device | None = None) -> None:
    """Fill in first factors in place, except on meta: as for other weights, they depend on seed and name alone.

    `device`: whose bits they have, if they are elsewhere.
    """
    for name, param in module.named_parameters():
        if not is_adapter(name) or param.is_meta:
            continue
        if name.endswith(B):
            nn.init.zeros_(param)
            continue
        local = param.to_local() if isinstance(param, DTensor) else param
        whole = torch.empty(param.shape, dtype=param.dtype, device=local.device if device is None else device)
        bound = 1 / math.sqrt(param.shape[1])  # that of nn.Linear
        whole.uniform_(-bound, bound, generator=generator_for(whole.device, seed, name))
        if isinstance(param, DTensor):
            copy_shard(param, whole)
        else:
            param.copy_(whole)


# Export #


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """A weight, or some rows and columns of it, with those of its adapter added; in its own dtype."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def name_for_peft(name: str) -> str:
    """What peft calls the factor `name` of a transformers model."""
    return f"base_model.model.{name}.weight"


def config_for_peft(names: Iterable[str], settings: LoraSettings, base: str) -> str:
    """`adapter_config.json` of peft. `names`: of the factors; `base`: the folder of the model's own weights."""
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.scale * settings.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[0] for name in names}),
        "inference_mode": True,
    }
    return json.dumps(values, indent=1) + "\n"
