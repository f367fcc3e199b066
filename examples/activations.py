# SPDX-License-Identifier: Apache-2.0
"""Saved activations wait for backward in host memory, and training gets the same bits.

    python -m examples.activations

A small GPT, every block checkpointed, with its optimizer's state offloaded too. It is trained twice: activations stay,
then the inputs of its blocks leave in forward and return in backward. It says what was moved, and how many weights
differ. Uses the accelerator if there is one; without one the CPU plays the device.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage
from examples.gpt import GPT, Block, Shape, make_repeatable, stdlib_bytes

STEPS = 8
BATCH = 4
SHAPE = Shape(width=64, blocks=4, context=64)


class Checkpointed(nn.Module):
    """A block that saves its input only, and runs again in backward."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, hidden, use_reentrant=False)  # type: ignore[no-any-return]


def train(device: torch.device, data: torch.Tensor, *, leave: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(SHAPE, activations=torch.float32 if device.type == "cpu" else torch.bfloat16).to(device)
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = offstage.offload(optimizer, model, chunk_bytes="128KiB")

    # The one added line. Real tensors are larger than 1 MiB, which is where it would begin by itself.
    handle = offstage.offload_activations(model, min_bytes="16KiB") if leave else None

    for step in range(STEPS):
        starts = torch.randint(len(data) - SHAPE.context, (BATCH,)).tolist()
        batch = torch.stack([data[i : i + SHAPE.context + 1] for i in starts]).long().to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            print(f"step {step + 1}  loss {loss.item():.4f}")

    if handle is not None:
        print(handle.receipt())
        handle.remove()
    optimizer.close()
    return [param.detach() for param in model.parameters()]


def main() -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    make_repeatable(device)
    data = stdlib_bytes()
    stayed = train(device, data, leave=False)
    left = train(device, data, leave=True)
    # All parameters are bf16.
    pairs = zip(stayed, left, strict=True)
    different = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)
    print(f"weights that differ from those of the run in which activations stayed: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
