# SPDX-License-Identifier: Apache-2.0
"""A torchtitan config whose optimizers are offloaded by an override, saved and resumed by torchtitan's own checkpoints.

    python -m examples.torchtitan_config

With torchtitan's trainer the override is one flag of the job:
`--override.imports 'offstage.integrations.torchtitan.offload={"fraction": 0.5}'`. The trainer needs a GPU, so here a
loop stands in for it, around torchtitan's config, optimizers, schedulers, clipping and checkpoints (torchtitan 0.3).
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.utils import clip_grad_norm_

STEPS = 12
OFFLOAD = "offstage.integrations.torchtitan.offload"


@dataclass(kw_only=True, slots=True)
class Config(Configurable.Config):
    """The part of a job's config that this needs."""

    optimizer: OptimizersContainer.Config = field(default_factory=lambda: default_adamw(lr=1e-2))
    lr_scheduler: LRSchedulersContainer.Config = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=3)
    )
    checkpoint: CheckpointManager.Config = field(
        default_factory=lambda: CheckpointManager.Config(enable=True, interval=5)
    )
    override: OverrideConfig = field(default_factory=OverrideConfig)


class Progress:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train(folder: str, settings: dict[str, Any], until: int = STEPS) -> tuple[nn.Module, OptimizersContainer]:
    config = Config(override=OverrideConfig(imports=[(OFFLOAD, settings)]))
    apply_overrides(config.override, config)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizers = config.optimizer.build(model_parts=[model])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    progress = Progress()
    parts: dict[str, Any] = {"model_parts": [model], "optimizers": optimizers, "lr_schedulers": schedulers}
    states = {"train_state": progress}
    checkpoints = config.checkpoint.build(**parts, states=states, dataloader=None, sd_adapter=None, base_folder=folder)
    checkpoints.load()
    while progress.step < until:
        progress.step += 1
        inputs, target = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(progress.step))
        optimizers.zero_grad()
        nn.functional.mse_loss(model(inputs), target).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedulers.step()
        checkpoints.save(progress.step)
    checkpoints.close()
    return model, optimizers


def main() -> int:
    torch.backends.mkldnn.enabled = False  # as in examples/gpt.py
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun's part
    with tempfile.TemporaryDirectory() as folder:
        resident, _ = train(f"{folder}/resident", {"fraction": 0.0})
        train(f"{folder}/ours", {"fraction": 0.5, "min_bytes": 0, "chunk_bytes": "64KiB"}, until=8)  # and is killed
        resumed, optimizers = train(f"{folder}/ours", {"min_bytes": 0, "chunk_bytes": "64KiB"})  # from step 5
    for optimizer in optimizers:
        print(optimizer.plan.summary(), optimizer.receipt(), sep="\n")
    pairs = zip(resumed.parameters(), resident.parameters(), strict=True)
    different = sum(int((a.detach().view(torch.int32) != b.detach().view(torch.int32)).sum()) for a, b in pairs)
    print(f"weights that differ from those of the resident run: {different}")
    dist.destroy_process_group()
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
