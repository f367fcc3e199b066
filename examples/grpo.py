# SPDX-License-Identifier: Apache-2.0
"""TRL's `GRPOTrainer` with the one added line: state is off the device, and sleeps while the trainer generates.

    python -m examples.grpo

A small Llama learns to say short words, twice: with resident state, and with state that leaves, sleeps during every
generation and is updated under backward. Nothing is downloaded. Needs `pip install 'offstage[hf]' trl`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

import offstage.integrations.transformers
from examples.gpt import make_repeatable

WORDS = ["<pad>", "</s>", *(f"{'a' * (1 + number % 6)}{number}" for number in range(62))]
FAST = {"overlap_forward": True, "update_in_backward": True, "chunk_bytes": "64KiB", "min_bytes": 0}


def make_tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def make_model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **tokens))


def short_words(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def train(folder: str, *, sleeps: bool, **settings: Any) -> Any:
    args = trl.GRPOConfig(
        output_dir=folder,
        max_steps=6,
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
    )
    prompts = Dataset.from_dict({"prompt": [" ".join(WORDS[2 + n : 6 + n]) for n in range(32)]})
    trainer = trl.GRPOTrainer(
        make_model(), reward_funcs=short_words, args=args, train_dataset=prompts, processing_class=make_tokenizer()
    )
    offstage.integrations.transformers.offload(trainer, sleep_while_generating=sleeps, **settings)  # the one added line
    trainer.train()
    return trainer


def main() -> int:
    make_repeatable(torch.accelerator.current_accelerator() or torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        resident = train(folder, sleeps=False, fraction=0.0)
        fast = train(folder, sleeps=True, **FAST)
    print(offstage.integrations.transformers.optimizer_of(fast).receipt())
    pairs = list(zip(fast.model.parameters(), resident.model.parameters(), strict=True))
    different = sum(int((ours.view(torch.int32) != theirs.view(torch.int32)).sum()) for ours, theirs in pairs)
    print(f"elements that differ from the run with resident state: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
