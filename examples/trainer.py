# SPDX-License-Identifier: Apache-2.0
"""transformers' `Trainer` with the one added line, in the fast mode, and the bits of state that stays.

    python -m examples.trainer

A small Llama is trained twice on the bytes of the standard library: with resident state, and with state that leaves
and is updated under backward and the next forward, with exact clipping. Nothing is downloaded. Needs
`pip install 'offstage[hf]' accelerate`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import offstage.integrations.transformers
from examples.gpt import make_repeatable, stdlib_bytes

CONTEXT = 32
FAST = {"overlap_forward": True, "update_in_backward": True, "chunk_bytes": "128KiB"}


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._bytes = stdlib_bytes()[: 256 * CONTEXT].long().view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._bytes[row], "labels": self._bytes[row]}


def make_model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **shape))


def train(folder: str, **settings: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(make_model(), args=args, train_dataset=Text())
    offstage.integrations.transformers.offload(trainer, **settings)  # the one added line
    trainer.train()
    return trainer


def main() -> int:
    make_repeatable(torch.accelerator.current_accelerator() or torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        resident, fast = train(folder, fraction=0.0), train(folder, **FAST)
    print(offstage.integrations.transformers.optimizer_of(fast).receipt())
    pairs = list(zip(fast.model.parameters(), resident.model.parameters(), strict=True))
    different = sum(int((ours.view(torch.int32) != theirs.view(torch.int32)).sum()) for ours, theirs in pairs)
    print(f"elements that differ from the run with resident state: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
