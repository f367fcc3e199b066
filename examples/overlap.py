# SPDX-License-Identifier: Apache-2.0
"""Updates under backward and the next forward, with exact clipping, and the bits of a plain loop.

    python -m examples.overlap

Two micro-batches per step, clipping and an average of the weights (EMA). A small GPT is trained twice, with resident
state and torch's own clipping and then overlapped, and the bits that differ are counted. Uses the accelerator if there
is one; without one the CPU plays the device.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offstage
from examples.gpt import GPT, Shape, make_repeatable, stdlib_bytes

STEPS = 10
MICRO_BATCHES = 2
BATCH = 4
MAX_NORM = 1.0  # some of these steps are clipped and some are not
SHAPE = Shape(width=64, blocks=3, context=32)


def train(device: torch.device, data: torch.Tensor, *, overlap: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = GPT(SHAPE, activations=torch.float32 if device.type == "cpu" else torch.bfloat16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if overlap:
        optimizer = offstage.offload(
            optimizer, model, overlap_forward=True, update_in_backward=True, chunk_bytes="128KiB"
        )
    else:
        optimizer = offstage.offload(optimizer, model, fraction=0.0)  # resident: the same masters, and nothing moves
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            starts = torch.randint(len(data) - SHAPE.context, (BATCH,)).tolist()
            batch = torch.stack([data[i : i + SHAPE.context + 1] for i in starts]).long().to(device)
            loss = model(batch[:, :-1], batch[:, 1:]) / MICRO_BATCHES
            last = micro_batch == MICRO_BATCHES - 1
            # Only the last backward leaves gradients that nothing more is added to.
            with contextlib.nullcontext() if last else optimizer.accumulate():
                loss.backward()
        if overlap:
            norm = optimizer.clip_grad_norm_(MAX_NORM)  # most weights are updated already; step() decides if they stay
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()  # after step(): backward has used the learning rate

        optimizer.synchronize()  # an average reads weights outside any forward
        average.update_parameters(model)
        if overlap:
            clipped = ", clipped" if norm.item() > MAX_NORM else ""
            print(f"step {step + 1:2d}  loss {loss.item() * MICRO_BATCHES:.4f}  norm {norm.item():.2f}{clipped}")

    if overlap:
        print(optimizer.plan.summary(), optimizer.receipt(), sep="\n")
    optimizer.close()
    return model, average


def num_different(ours: torch.nn.Module, theirs: torch.nn.Module) -> int:
    """Elements whose bits differ; all parameters are bf16."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return sum(int((a.detach().view(torch.int16) != b.detach().view(torch.int16)).sum()) for a, b in pairs)


def main() -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    make_repeatable(device)
    data = stdlib_bytes()
    plain = train(device, data, overlap=False)
    overlapped = train(device, data, overlap=True)
    weights, average = (num_different(ours, theirs) for ours, theirs in zip(overlapped, plain, strict=True))
    print(f"elements that differ from the plain loop: weights {weights}, average {average}")
    return 1 if weights or average else 0


if __name__ == "__main__":
    sys.exit(main())
