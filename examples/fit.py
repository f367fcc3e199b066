# SPDX-License-Identifier: Apache-2.0
"""One number decides: a job is given a peak of device memory, measures itself, and goes over to the fastest plan.

    python -m examples.fit

A small GPT is trained in less device memory than it takes with everything there. The first two iterations are watched,
then the plan is made and printed. It is saved, and a second run begins with it. Both get the bits of a run with all
state on the device. Uses the accelerator if there is one; without one the CPU plays the device, whose memory is then
counted and not measured.
"""

from __future__ import annotations

import sys

import torch

import offstage
from examples.gpt import GPT, Shape, make_repeatable, stdlib_bytes

STEPS = 12
BATCH = 8
SHAPE = Shape(width=128, blocks=6)
PEAKS = {"cpu": "16MiB"}
ELSEWHERE = "96MiB"  # libraries have workspaces there
SMALL = {"chunk_bytes": "128KiB", "min_bytes": "16KiB"}  # real models do without


def build(device: torch.device) -> tuple[GPT, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = GPT(SHAPE, activations=torch.float32 if device.type == "cpu" else torch.bfloat16).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def train(model: GPT, optimizer: offstage.OffloadedOptimizer, data: torch.Tensor, device: torch.device) -> None:
    """A plain loop; it clips with the optimizer's own method, so that updates may be made in backward."""
    for step in range(STEPS):
        starts = torch.randint(len(data) - SHAPE.context, (BATCH,)).tolist()
        batch = torch.stack([data[i : i + SHAPE.context + 1] for i in starts]).long().to(device)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        plan = optimizer.fitted
        print(f"step {step + 1:>2}  loss {loss.item():.4f}  {plan.summary() if plan else '-'}")


def weights(model: GPT, optimizer: offstage.OffloadedOptimizer) -> list[torch.Tensor]:
    optimizer.synchronize()
    found = [value.clone() for value in model.state_dict().values()]
    optimizer.close()
    return found


def main() -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    make_repeatable(device)
    data = stdlib_bytes()
    device_peak = PEAKS.get(device.type, ELSEWHERE)

    print("all state on the device:")
    model, plain = build(device)
    optimizer = offstage.offload(plain, model, fraction=0.0)
    train(model, optimizer, data, device)
    expected = weights(model, optimizer)

    print(f"\nfitted into {device_peak}:")
    model, plain = build(device)
    optimizer = offstage.fit(model, plain, device_peak=device_peak, **SMALL)
    train(model, optimizer, data, device)
    plan = optimizer.fitted
    assert plan is not None
    print(f"\n{plan}\n")
    found = [weights(model, optimizer)]

    print("again, with the plan that was saved:")
    saved = plan.to_json()
    model, plain = build(device)
    optimizer = offstage.fit(model, plain, device_peak=device_peak, plan=saved, **SMALL)
    train(model, optimizer, data, device)
    found.append(weights(model, optimizer))

    pairs = [(a, b) for run in found for a, b in zip(expected, run, strict=True) if a.dtype == torch.bfloat16]
    different = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)
    print(f"weights that differ from those of the run with all state on the device: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
