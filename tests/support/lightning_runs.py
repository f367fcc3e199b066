# SPDX-License-Identifier: Apache-2.0
"""Runs of a small module in Lightning's Trainer and in Fabric, with any optimizer. For tests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offstage
from offstage.lanes.link import use_lanes
from offstage.lanes.testing.lazy import LazyLanes

for _name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)

WIDTH = 48
BATCHES = 6
SMALL: dict[str, Any] = {"min_bytes": 0, "chunk_bytes": "16KiB"}
FORWARD: dict[str, Any] = {**SMALL, "overlap_forward": True}
BOTH: dict[str, Any] = {**FORWARD, "update_in_backward": True}
PLANS: dict[str, dict[str, Any]] = {
    "all": SMALL,
    "half": {**SMALL, "fraction": 0.5},
    "by the host": {**SMALL, "update_on": "host"},
    "forward": FORWARD,
    "window": {**SMALL, "window": "all"},
    "forward, backward": BOTH,
}
"""Plans between which no bit may differ, nor from `fraction=0`."""

LAZY = range(3)
"""Seeds: of lanes that run nothing before it is forced, and of two that run some of it early."""

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def ours(**config: Any) -> Make:
    """What `configure_optimizers` does with offstage; without settings nothing leaves."""
    return lambda model: offstage.offload(adamw(model), model, **(config or {"fraction": 0.0}))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, WIDTH))


def batches(rank: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [(x, y) for x, y in torch.randn(BATCHES, 2, 8, WIDTH, generator=generator)]


def loader() -> DataLoader[Any]:
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)


def loss_of(output: torch.Tensor, target: torch.Tensor, number: int) -> torch.Tensor:
    """Every third is large: of norms on both sides of `MAX_NORM`."""
    return nn.functional.mse_loss(output, target) * (4.0 if number % 3 == 2 else 1.0)


MAX_NORM = 0.4


class Module(LightningModule):
    """Trains `network()` with what `make` gives."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.network, self.make = network(), make
        self.fails_at: int | None = None

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.fails_at == self.trainer.fit_loop.epoch_loop.total_batch_idx:
            raise Stopped
        return loss_of(self.network(batch[0]), batch[1], batch_idx)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Stopped(RuntimeError):
    """Training is killed here."""


def fit(
    make: Make,
    callbacks: Sequence[Callback] = (),
    *,
    kind: type[Module] = Module,
    validate: bool = False,
    lazy_seed: int | None = None,
    resume: str | None = None,
    fails_at: int | None = None,
    **options: Any,
) -> tuple[Module, Trainer]:
    """`lazy_seed`: on lanes that run work late and check every access."""
    module = kind(make)
    module.fails_at = fails_at
    options = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **options}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(callbacks=list(callbacks), **quiet, **options)
    lanes = use_lanes(lambda device: LazyLanes(device, seed=lazy_seed)) if lazy_seed is not None else None
    with lanes or contextlib.nullcontext(), contextlib.suppress(Stopped) if fails_at else contextlib.nullcontext():
        trainer.fit(module, loader(), loader() if validate else None, ckpt_path=resume)
    return module, trainer
