# SPDX-License-Identifier: Apache-2.0
"""Stands in for the transformers package: as much of its interface as `causal_lm.py` uses, over a small model.

Like the package it checkpoints layer by layer, ties the head to the embedding, keeps a buffer that is in no state dict,
and draws first weights from torch's global generator.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offstage.train.tensor_files import Outgoing, write_tensors

__version__ = "5.0.0"

INSTALLED = ["installed"] if importlib.util.find_spec("transformers") else []

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


class AutoConfig:
    @staticmethod
    def from_pretrained(file: Path, trust_remote_code: bool) -> SimpleNamespace:
        assert not trust_remote_code
        try:
            return SimpleNamespace(**json.loads(file.read_text()))
        except json.JSONDecodeError as error:
            raise OSError(f"{file} is not a valid JSON file.") from error

    @staticmethod
    def for_model(name: str) -> SimpleNamespace:
        if name != "llama":
            raise ValueError(f"Unrecognized model identifier: {name}.")
        return SimpleNamespace(**{**LLAMA, "num_hidden_layers": 32, "max_position_embeddings": 2048})


class Layer(nn.Module):
    gradient_checkpointing = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(5))  # longer than the list of layers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        for part in self.parts:
            seen = torch.tanh(part(self.norm(seen)))
        return x + seen


class CausalLM(nn.Module):
    def __init__(self, config: SimpleNamespace, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.tie_weights()
        self.to(dtype)

    def tie_weights(self) -> None:
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        for module in self.modules():
            if isinstance(module, Layer):
                module._gradient_checkpointing_func = functools.partial(checkpoint, **gradient_checkpointing_kwargs)
                module.gradient_checkpointing = True

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.scale * self.head(x))


class AutoModelForCausalLM:
    @staticmethod
    def from_config(config: SimpleNamespace, dtype: torch.dtype) -> CausalLM:
        return CausalLM(config, dtype)


def save_weights(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **config: Any
) -> CausalLM:
    """A folder with the weights of a model, which is returned; `change` gets the tensors first."""
    folder.mkdir(parents=True)
    torch.manual_seed(2)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    lm = CausalLM(AutoConfig.from_pretrained(folder / "config.json", False), torch.float32)
    tensors = {name: tensor.detach() for name, tensor in lm.state_dict().items() if name != "head.weight"}
    if change is not None:
        change(tensors)
    outgoing = [Outgoing(name, one.dtype, tuple(one.shape), lambda one=one: [one]) for name, one in tensors.items()]
    write_tensors(folder, outgoing, 2**30)
    return lm
