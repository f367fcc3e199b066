# SPDX-License-Identifier: Apache-2.0
"""`CausalLM`: a causal language model of the transformers package, behind the trainer's interface.

The package is imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from offstage import ConfigError
from offstage.train.language_model import LanguageModel, copy_shard
from offstage.train.lora import is_adapter

OLDEST = (4, 56)
"""The first release whose `from_config` takes a `dtype`."""


class CausalLM(LanguageModel):
    """Wraps `lm`, which runs without a cache and computes all logits at once."""

    lm: Any

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.vocabulary = int(self.lm.config.vocab_size)

    @torch.no_grad()
    def materialize(self, device: torch.device | str, seed: int = 0) -> None:
        """Allocate and initialize. The package initializes whole models only.

        So the host holds all weights for a moment, and they are those of a model built on the CPU.
        """
        with torch.device("cpu"):
            first = _lm(self.lm.config, self.lm.dtype, seed)
        whole: dict[str, torch.Tensor] = {**dict(first.named_parameters()), **dict(first.named_buffers())}
        self.lm.to_empty(device=device)
        self.lm.tie_weights()  # to_empty makes two parameters of a tied one
        for name, tensor in [*self.lm.named_parameters(), *self.lm.named_buffers()]:
            if is_adapter(name):  # not of the package
                continue
            if isinstance(tensor, DTensor):
                copy_shard(tensor, whole[name].to(tensor.to_local().device))
            else:
                tensor.copy_(whole[name])

    def layers(self) -> list[nn.Module]:
        lists = [module for module in self.lm.modules() if isinstance(module, nn.ModuleList)]
        if not lists:
            raise ConfigError(
                f"{type(self.lm).__name__} has no ModuleList whose children could be its layers; expected one. Use "
                "another model."
            )
        return list(_largest(lists))

    def checkpoint_layers(self, numbers: Collection[int] | None = None) -> None:
        layers: list[Any] = self.layers()
        chosen = frozenset(range(len(layers)) if numbers is None else numbers)
        if not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
            raise ConfigError(
                f"{type(self.lm).__name__} cannot checkpoint its layers one by one; expected layers with a switch for "
                "it, as the package's own models have. Use activations.mode='offload' or 'keep'."
            )
        self.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number in chosen

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        found = self.lm(input_ids=tokens, use_cache=False)
        if targets is None:
            return found.logits  # type: ignore[no-any-return]
        loss = F.cross_entropy(found.logits.flatten(0, 1).float(), targets.flatten())
        balance = getattr(found, "aux_loss", None)  # of experts, if enabled in its configuration
        if balance is None or not self.training:
            return loss
        weighted: torch.Tensor = self.lm.config.router_aux_loss_coef * balance
        return loss + weighted


def build_causal_lm(
    named: str, *, device: torch.device | str, dtype: torch.dtype, vocabulary: int, sequence: int, seed: int = 0
) -> CausalLM:
    """The model that `named` describes, with fresh weights: a config.json, its folder, or a model type."""
    config = _config(_transformers(), named)
    if config.vocab_size < vocabulary:
        raise ConfigError(
            f"The data has {vocabulary} different tokens; expected a vocabulary of as many at least, found "
            f"vocab_size={config.vocab_size} in {named!r}. Raise vocab_size in its config.json."
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < sequence:
        raise ConfigError(
            f"Sequences have {sequence} tokens; expected at most max_position_embeddings={longest} of {named!r}. Lower "
            "data.sequence, or raise max_position_embeddings in its config.json."
        )
    with torch.device(device):
        return CausalLM(_lm(config, dtype, seed))


def _lm(config: Any, dtype: torch.dtype, seed: int) -> Any:
    """With fresh weights, on torch's current default device."""
    torch.manual_seed(seed)
    return _transformers().AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def _largest(lists: list[nn.ModuleList]) -> nn.ModuleList:
    """By parameters, not length: lists inside layers, of experts for example, may be longer."""
    sizes = [sum(param.numel() for param in one.parameters()) for one in lists]
    return lists[sizes.index(max(sizes))]


def _transformers() -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"model.transformers expects the package transformers; found: {error}. Run `pip install transformers`, or "
            "use model.size."
        ) from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"model.transformers expects transformers {OLDEST[0]}.{OLDEST[1]} or later; found "
            f"{transformers.__version__}. Run `pip install --upgrade transformers`, or use model.size."
        )
    return transformers


def _config(transformers: Any, named: str) -> Any:
    """A path if there is one, else a model type."""
    path = Path(named).expanduser()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        try:
            return transformers.AutoConfig.from_pretrained(file)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"model.transformers expects the config.json of a transformers model; could not use {file}: {error}. "
                "Give the path of one, or a model type such as llama."
            ) from error
    try:
        return transformers.AutoConfig.for_model(named)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model.transformers expects the path of a config.json, of its folder, or a model type such as llama; "
            f"found {named!r}, which is neither. Check the spelling."
        ) from error
