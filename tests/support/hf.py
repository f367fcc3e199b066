# SPDX-License-Identifier: Apache-2.0
"""Tiny models, tokens and trainers of the Hugging Face packages, without a download."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the packages are imported: no test asks the network for anything

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from tokenizers import Tokenizer, models, pre_tokenizers

SMALL: dict[str, Any] = {"min_bytes": 0, "chunk_bytes": "16KiB"}
"""Everything leaves, in the smallest chunks there are."""
OFF: dict[str, Any] = {"fraction": 0.0}
F: dict[str, Any] = {**SMALL, "overlap_forward": True}
B: dict[str, Any] = {**SMALL, "update_in_backward": True}
FB: dict[str, Any] = {**F, "update_in_backward": True}

WORDS = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(61))]

LLAMA: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def make_model(seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    dtype = changes.pop("dtype", torch.float32)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**LLAMA, **changes}), dtype=dtype)


def make_tokenizer() -> Any:
    """A word is a token."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, the same in every run."""

    def __init__(self, rows: int = 64, length: int = 12) -> None:
        self._rows = torch.randint(3, len(WORDS), (rows, length), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[number], "labels": self._rows[number]}


def sentence(number: int, words: int = 5) -> str:
    return " ".join(f"w{(7 * number + 3 * word) % 61}" for word in range(words))


def reset() -> None:
    """Accelerators share their state with all of a process; a test begins without it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    "max_steps": 6,
    "seed": 3,
}
"""Options of `TrainingArguments` and of those of TRL."""


def make_trainer(folder: Path, *, model: Any = None, callbacks: Any = (), named: Any = None, **options: Any) -> Any:
    """`named`: further arguments of `Trainer`."""
    reset()
    return transformers.Trainer(
        model=make_model() if model is None else model,
        args=transformers.TrainingArguments(output_dir=str(folder), **{**QUIET, **options}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(4),
        callbacks=list(callbacks),
        **(named or {}),
    )


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def logged(trainer: Any) -> list[Mapping[str, float]]:
    """Losses and norms."""
    return [{key: row[key] for key in ("loss", "grad_norm") if key in row} for row in trainer.state.log_history]


def fsdp_on_the_cpu() -> None:
    """accelerate takes FSDP for accelerators only; for the rest of this process it takes it for gloo ranks too."""
    made = AcceleratorState.__init__

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = make
