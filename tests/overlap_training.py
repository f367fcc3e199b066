# SPDX-License-Identifier: Apache-2.0
"""The training loops that overlap is tested with: every setting must give the bits of the plain step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage

WIDTH = 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, one of them called twice; an output tied to the embedding; checkpointing of either kind or none."""

    def __init__(self, checkpointing: str = "none", blocks: int = 3) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, self.blocks[0]]:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x) * self.scale(x)


CLIPS = {"none": None, "never": 1e4, "always": 1e-3, "sometimes": 90.0}


def train(
    config: dict[str, Any] | None,
    *,
    clip: str = "none",
    micro_batches: int = 1,
    checkpointing: str = "none",
    steps: int = 6,
    dtype: torch.dtype = torch.float32,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> dict[str, Any]:
    """Weights, state and norms after `steps` steps. `config=None`: streamed in step(), clipped by torch's function."""
    torch.manual_seed(0)
    model = Net(checkpointing).to(dtype)
    options = {"lr": 3e-3, "weight_decay": 0.1} if optimizer_class is torch.optim.AdamW else {"lr": 3e-3}
    optimizer = optimizer_class(model.parameters(), **options)
    plain = {"min_bytes": 0, "chunk_bytes": "16KiB"}
    optimizer = offstage.offload(optimizer, model, **{**plain, **(config or {})})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(steps):
        for number in range(micro_batches):
            tokens = torch.randint(50, (3, 7), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            if number < micro_batches - 1:
                with optimizer.accumulate():
                    (loss / micro_batches).backward()
            else:
                (loss / micro_batches).backward()
        if clip != "none":
            max_norm = CLIPS[clip]
            if config is None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
            else:
                norms.append(optimizer.clip_grad_norm_(max_norm))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    state = {
        (index, name): torch.as_tensor(value).clone()
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    weights = [p.detach().clone() for p in model.parameters()]
    return {"weights": weights, "state": state, "norms": norms, "receipt": optimizer.receipt(), "optimizer": optimizer}
