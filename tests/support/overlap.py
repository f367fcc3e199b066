# SPDX-License-Identifier: Apache-2.0
"""The training loops that overlap is tested with: every setting must give the bits of the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offstage
from tests.support.runs import Run, keep, look
from tests.support.training import Block

WIDTH = 40


class Net(nn.Module):
    """Blocks, one of them called twice; an output tied to the embedding; checkpointing of either kind or none."""

    def __init__(self, checkpointing: str = "none", blocks: int = 2) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 2) for _ in range(blocks))
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


CLIPS = {"none": None, "never": 1e4, "always": 1e-4, "sometimes": 1.0}
"""`max_norm`. Losses of odd steps are a thousandth of the others, so that 1.0 is sometimes enough and sometimes not."""


def train(
    config: dict[str, Any] | None,
    *,
    clip: str = "none",
    micro_batches: int = 1,
    checkpointing: str = "none",
    steps: int = 6,
    dtype: torch.dtype = torch.float32,
    base: dict[str, Any] | None = None,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    make_model: Callable[[str], nn.Module] = Net,
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
) -> Run:
    """Weights, state and norms after `steps` steps. `config=None`: streamed in step(), clipped by torch's function.

    `base` holds for both: formats, placement. A model with an attribute `step` is told which one it is.
    """
    torch.manual_seed(0)
    model = make_model(checkpointing).to(dtype)
    inner = make(groups(model), **({"lr": 3e-3, "weight_decay": 0.1} if options is None else options))
    settings = {"min_bytes": 0, "chunk_bytes": "16KiB", **(base or {}), **(config or {})}
    optimizer = offstage.offload(inner, model, **settings)
    run = Run(optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        model.step = step
        for number in range(micro_batches):
            tokens = torch.randint(50, (3, 7), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss = loss * (1e-3 if step % 2 else 1.0) / micro_batches
            if number < micro_batches - 1:
                with optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
        max_norm = CLIPS[clip]
        if max_norm is not None and config is None:
            # In the order of the groups: norms are summed in it, and the last bits depend on it.
            everything = [param for group in optimizer.param_groups for param in group["params"]]
            run.norms.append(nn.utils.clip_grad_norm_(everything, max_norm))
        elif max_norm is not None:
            run.norms.append(optimizer.clip_grad_norm_(max_norm))
        look(run, [optimizer], before_step=True)
        optimizer.step()
        look(run, [optimizer], before_step=False)
        scheduler.step()
        optimizer.zero_grad()
    keep(run, model, [optimizer])
    return run
