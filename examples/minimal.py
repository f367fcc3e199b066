# SPDX-License-Identifier: Apache-2.0
"""A plain training loop with the one added line.

python -m examples.minimal
"""

from __future__ import annotations

import torch
from torch import nn

import offstage


def main() -> None:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = offstage.offload(optimizer, model)  # the one added line
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

    for step in range(20):
        x = torch.randn(64, 256, device=device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 5 == 4:
            print(f"step {step + 1:2d}  loss {loss.item():.4f}")

    print(optimizer.plan)
    print(optimizer.receipt())


if __name__ == "__main__":
    main()
