# SPDX-License-Identifier: Apache-2.0
"""Ask before training what a memory budget costs, let the planner choose who updates, and change the budget later.

    python -m examples.plan

The machine is measured once (a few seconds, then remembered) and the plan is predicted from it. In the middle of
training the budget shrinks, and the state moves without losing a bit: the weights are compared with those of a plain
run. Uses the accelerator if there is one; without one the CPU plays the device.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import offstage
from examples.gpt import make_repeatable

STEPS = 8
WIDTH, LAYERS, BATCH = 512, 8, 32
CONFIG = offstage.OffloadConfig(
    device_budget="12MiB",  # for all state on the device: what stays there, and the slots
    update_on="auto",  # of what leaves, the planner gives a share to the CPU
)
LATER = "6MiB"


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())]
    return nn.Sequential(*layers).to(device)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator).to(next(model.parameters()).device)
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    make_repeatable(device)
    model = build(device)

    machine = offstage.measure_machine()
    print(machine, "\n")
    plan = offstage.make_plan(model, machine, CONFIG)  # nothing is allocated
    print(plan, "\n")

    optimizer = offstage.offload(adamw(model), model, CONFIG)
    as_planned = optimizer.plan.placements == plan.placements
    print("at first,", optimizer.plan.summary())
    for step in range(STEPS):
        if step == STEPS // 2:  # someone else needs the memory
            print("then,    ", optimizer.replan(device_budget=LATER).summary())
        iterate(model, optimizer, step)
    print(f"\n{optimizer.receipt()}\n")

    plain = build(device)
    resident = offstage.offload(adamw(plain), plain, fraction=0.0)  # nothing moves
    for step in range(STEPS):
        iterate(plain, resident, step)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    different = sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs)
    print(f"as planned at first: {as_planned}; elements that differ from the plain run: {different}")
    return 0 if as_planned and not different else 1


if __name__ == "__main__":
    sys.exit(main())
