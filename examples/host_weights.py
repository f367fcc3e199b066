# SPDX-License-Identifier: Apache-2.0
"""The weights of all layers live on the host, and training gets the same bits.

    python -m examples.host_weights

A small GPT is built on the CPU and trained twice, with exact clipping: on the device, and then with weights and state
of every block in host memory. A block's weights come to the device for its forward and its backward, its gradients
leave, and the next forward updates it. It says what was moved, and how many weights differ. Uses the accelerator if
there is one; without one the CPU plays the device.
"""

from __future__ import annotations

import sys

import torch

import offstage
from examples.gpt import GPT, Shape, make_repeatable, stdlib_bytes

STEPS = 8
BATCH = 4
MAX_NORM = 1.0
SHAPE = Shape(width=64, blocks=6, context=32)


def train(device: torch.device, data: torch.Tensor, *, on_host: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(SHAPE, activations=torch.float32 if device.type == "cpu" else torch.bfloat16)
    if not on_host:
        model = model.to(device)  # a model that is too large stays where it is: offload() moves what is left
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    where = "host" if on_host else "device"
    optimizer = offstage.offload(
        optimizer,
        model,
        weights=where,
        overlap_forward=True,
        master_weights="split",
        min_bytes="4KiB",  # real weights are larger than 64 KiB, which is where it would begin by itself
        chunk_bytes="128KiB",
    )

    for step in range(STEPS):
        starts = torch.randint(len(data) - SHAPE.context, (BATCH,)).tolist()
        batch = torch.stack([data[i : i + SHAPE.context + 1] for i in starts]).long().to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if on_host:
            print(f"step {step + 1}  loss {loss.item():.4f}")

    if on_host:
        print(optimizer.receipt())
    found = {name: tensor.clone().cpu() for name, tensor in model.state_dict().items()}  # waits for the last updates
    optimizer.close()
    return [found[name] for name, _ in model.named_parameters()]


def main() -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    make_repeatable(device)
    data = stdlib_bytes()
    there = train(device, data, on_host=False)
    here = train(device, data, on_host=True)
    # All parameters are bf16.
    different = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(there, here, strict=True))
    print(f"weights that differ from those of the run with all of them on the device: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
